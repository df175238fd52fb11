"""ELF shared libraries: their symbols, and the rewiring of an old library to a new one."""

from __future__ import annotations

import shutil
import struct
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from igb import process
from igb.errors import Problem

PATCHELF = "0.19"  # 0.15 to 0.18 misplace segments of large libraries
UNDEFINED = 0
LOCAL, GLOBAL, WEAK, UNIQUE = 0, 1, 2, 10
OBJECT, FUNCTION, FILE, TLS, INDIRECT = 1, 2, 4, 6, 10
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
    file: str  # the last file named before it: for a static symbol, the base name of its translation unit

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
        content: bytes = section.data()
    result, unit = [], ""
    for name, info, other, index, value, size in SYMBOL.iter_unpack(content):
        text = names[name : names.index(b"\0", name)].decode()
        if info & 15 == FILE:
            unit = text
        result.append(Symbol(text, info >> 4, info & 15, index, other & 3, value, size, unit))
    return result


def exports(path: Path) -> set[str]:
    """The names that other libraries can bind to."""
    return {symbol.name for symbol in symbols(path) if symbol.is_defined and symbol.binding != LOCAL}


def unresolved(path: Path, providers: Iterable[Path]) -> set[str]:
    """The names that a library needs, in no certain version, and that none of ``providers`` exports."""
    wanted = {symbol.name for symbol in symbols(path) if not symbol.is_defined and symbol.binding == GLOBAL}
    return wanted.difference(versioned(path), *map(exports, providers))


def versioned(path: Path) -> set[str]:
    """The names that a library needs in a certain version."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        versions, table = elf.get_section_by_name(".gnu.version"), elf.get_section_by_name(".dynsym")
        if versions is None:
            return set()
        pairs = zip(table.iter_symbols(), versions.iter_symbols())
        return {symbol.name for symbol, version in pairs if isinstance(version["ndx"], int) and version["ndx"] > 1}


def needed(path: Path) -> list[str]:
    with path.open("rb") as file:
        dynamic = ELFFile(file).get_section_by_name(".dynamic")
        assert isinstance(dynamic, DynamicSection)
        return [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]


def newest_versions(path: Path) -> dict[str, tuple[int, ...]]:
    """What a library needs at least of versioned libraries, e.g. ``{"GLIBCXX": (3, 4, 29)}``."""
    with path.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".gnu.version_r")
        if not isinstance(section, GNUVerNeedSection):
            return {}
        names = [auxiliary.name for _, auxiliaries in section.iter_versions() for auxiliary in auxiliaries]
    newest: dict[str, tuple[int, ...]] = {}
    for name in names:
        family, _, number = name.rpartition("_")
        if number.replace(".", "").isdigit():
            newest[family] = max(newest.get(family, ()), tuple(map(int, number.split("."))))
    return newest


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
    undefined = []
    with path.open("r+b") as file:
        start: int = ELFFile(file).get_section_by_name(".dynsym")["sh_offset"]
        for position, symbol in enumerate(symbols(path)):
            if symbol.name not in names or not symbol.is_defined or symbol.binding == LOCAL:
                continue
            if symbol.kind in {TLS, INDIRECT}:
                raise Problem(
                    f"{symbol.name} of {path.name} is thread-local or chosen at run time and cannot be rewired; "
                    "keep its translation unit out of CMakeLists.txt"
                )
            file.seek(start + position * SYMBOL.size + 6)
            file.write(struct.pack("<HQQ", UNDEFINED, 0, 0))
            undefined.append(symbol.name)
    return undefined


def check(old: Path, rewired: Path, new: Path, names: list[str]) -> None:
    """Raise Problem unless the rewired library is well formed, needs ``new`` and lost nothing but ``names``."""
    fault = "; this is a fault of patchelf, so do not use the library"
    if exports(rewired) != exports(old) - set(names):
        raise Problem(f"{rewired} does not export what {old.name} does{fault}")
    if set(needed(rewired)) != {new.name, *needed(old)}:
        raise Problem(f"{rewired} does not need {new.name} and what {old.name} does{fault}")
    size = rewired.stat().st_size
    with rewired.open("rb") as file:
        elf = ELFFile(file)
        segments = [segment.header for segment in elf.iter_segments("PT_LOAD")]
        for segment in segments:
            congruent = (segment.p_vaddr - segment.p_offset) % max(PAGE, segment.p_align) == 0
            if not congruent or segment.p_offset + segment.p_filesz > size:
                raise Problem(f"{rewired} has a segment that cannot be mapped{fault}")
        ordered = sorted(segments, key=lambda segment: segment.p_vaddr)
        for lower, upper in zip(ordered, ordered[1:]):
            if lower.p_vaddr + lower.p_memsz > upper.p_vaddr:
                raise Problem(f"{rewired} has segments that overlap{fault}")
        dynamic = elf.get_section_by_name(".dynamic")
        assert isinstance(dynamic, DynamicSection)
        for tag in dynamic.iter_tags("DT_INIT"):
            if not any(s.p_flags & 1 and s.p_vaddr <= tag["d_val"] < s.p_vaddr + s.p_memsz for s in segments):
                raise Problem(f"{rewired} has its initialiser outside executable memory{fault}")
