"""ELF shared libraries: their symbols, and the rewiring of an old library to a new one."""

from __future__ import annotations

import shutil
import struct
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from igb import process
from igb.errors import Problem

PATCHELF = "0.19"  # 0.15 to 0.18 misplace segments of large libraries
UNDEFINED = 0
LOCAL, GLOBAL, WEAK, UNIQUE = 0, 1, 2, 10
OBJECT, FUNCTION, TLS, INDIRECT = 1, 2, 6, 10
HIDDEN = 2
PAGE = 0x1000

# Elf64_Sym: st_name, st_info, st_other, st_shndx, st_value, st_size
SYMBOL = struct.Struct("<IBBHQQ")


@dataclass(frozen=True)
class Symbol:
    name: str
    binding: int
    kind: int
    section: int
    visibility: int
    value: int
    size: int

    @property
    def is_defined(self) -> bool:
        return self.section != UNDEFINED


def symbols(path: Path, table: str = ".dynsym") -> list[Symbol]:
    """The symbols of a library (``.dynsym`` or ``.symtab``) or an object file (``.symtab``)."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        section = elf.get_section_by_name(table)
        if section is None:
            raise Problem(f"{path} has no {table}; it was stripped, and cannot be checked or rewired")
        names: bytes = elf.get_section(section["sh_link"]).data()
        return [
            Symbol(names[name : names.index(b"\0", name)].decode(), info >> 4, info & 15, index, other & 3, value, size)
            for name, info, other, index, value, size in SYMBOL.iter_unpack(section.data())
        ]


def exports(path: Path) -> set[str]:
    """The names that other libraries can bind to."""
    return {symbol.name for symbol in symbols(path) if symbol.is_defined and symbol.binding != LOCAL}


def needed(path: Path) -> list[str]:
    with path.open("rb") as file:
        dynamic = ELFFile(file).get_section_by_name(".dynamic")
        assert isinstance(dynamic, DynamicSection)
        return [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]


def needed_versions(path: Path) -> set[str]:
    """The symbol versions that a library needs of others, e.g. GLIBCXX_3.4.29."""
    with path.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".gnu.version_r")
        if not isinstance(section, GNUVerNeedSection):
            return set()
        return {auxiliary.name for _, auxiliaries in section.iter_versions() for auxiliary in auxiliaries}


def rewire(old: Path, new: Path, output: Path) -> list[str]:
    """Write to ``output`` the library ``old``, bound to ``new`` for every symbol that both define.

    In the copy these symbols are undefined and ``new`` is needed, so that references through PLT, GOT, vtables and
    typeinfo bind to the new definitions whatever the load order. Returns their names.
    """
    stage = output.with_name(f"{output.name}.new")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        process.run(
            [patchelf(), "--add-needed", new.name, "--output", stage, old],
            explain="the library could not be rewritten; check the disk and rerun",
        )
        rewired = undefine(stage, exports(new))
        check(old, stage, new, rewired)
        shutil.copymode(old, stage)
        stage.replace(output)
    finally:
        stage.unlink(missing_ok=True)
    return rewired


def patchelf() -> Path:
    program = Path(sysconfig.get_path("scripts"), "patchelf")
    version = process.run([program, "--version"]).split()[-1]
    if not version.startswith(f"{PATCHELF}."):
        raise Problem(f"{program} is {version}, and only {PATCHELF} is known to keep large libraries whole")
    return program


def undefine(path: Path, names: set[str]) -> list[str]:
    """Make the dynamic symbols called ``names`` undefined, in place; glibc passes over such entries in hash chains."""
    with path.open("r+b") as file:
        offset = section_offset(file, ".dynsym")
        undefined = []
        for position, symbol in enumerate(symbols(path)):
            if symbol.name not in names or not symbol.is_defined or symbol.binding == LOCAL:
                continue
            if symbol.kind in {TLS, INDIRECT}:
                raise Problem(f"{symbol.name} of {path} is thread-local or resolved at run time; it cannot be rewired")
            file.seek(offset + position * SYMBOL.size + 6)
            file.write(struct.pack("<HQQ", UNDEFINED, 0, 0))
            undefined.append(symbol.name)
    return undefined


def section_offset(file: BinaryIO, name: str) -> int:
    offset: int = ELFFile(file).get_section_by_name(name)["sh_offset"]
    return offset


def check(old: Path, rewired: Path, new: Path, names: list[str]) -> None:
    """Raise Problem unless the rewired library is well formed and lost nothing but ``names``."""
    if lost := exports(old) - exports(rewired) - set(names):
        raise Problem(f"rewiring {old.name} lost {len(lost)} symbols, such as {min(lost)}; this is a fault of patchelf")
    if missing := set(names) - exports(new):
        raise Problem(f"{new.name} does not define {min(missing)}, which {old.name} is rewired to")
    if new.name not in needed(rewired):
        raise Problem(f"{rewired} does not need {new.name}; this is a fault of patchelf")
    size = rewired.stat().st_size
    with rewired.open("rb") as file:
        elf = ELFFile(file)
        segments = list(elf.iter_segments("PT_LOAD"))
        for segment in segments:
            if (segment["p_vaddr"] - segment["p_offset"]) % PAGE or segment["p_offset"] + segment["p_filesz"] > size:
                raise Problem(f"{rewired} has a segment that cannot be mapped; this is a fault of patchelf")
        dynamic = elf.get_section_by_name(".dynamic")
        assert isinstance(dynamic, DynamicSection)
        for tag in dynamic.iter_tags("DT_INIT"):
            if not any(
                segment["p_flags"] & 1 and segment["p_vaddr"] <= tag["d_val"] < segment["p_vaddr"] + segment["p_memsz"]
                for segment in segments
            ):
                raise Problem(f"{rewired} has its initialiser outside executable memory; this is a fault of patchelf")


def is_newer(path: Path, *inputs: Path) -> bool:
    """Whether ``path`` exists and was made after all of ``inputs``."""
    return path.exists() and all(path.stat().st_mtime_ns >= source.stat().st_mtime_ns for source in inputs)
