"""Proof that replacing translation units of a release leaves nothing bound to the code they replace.

A function that the release does not export is called directly inside its library, past any rewiring. Where code that
is not replaced calls one of a replaced unit, the old copy would still run. That is harmless only if the series does not
touch the unit and the function keeps no state of its own; else the caller has to be replaced too.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy
import numpy.typing as npt
from elftools.elf.elffile import ELFFile

from igb import elf, paths
from igb.compile import Replacement
from igb.elf import Symbol
from igb.errors import Problem
from igb.log import Progress, logger

# Constructors of objects that register something when the library loads; twice would be once too often.
REGISTRATIONS = re.compile(
    r"^(torch::detail::TorchLibraryInit|torch::Library::Library|c10::RegisterOperators|torch::jit::RegisterOperators"
    r"|torch::detail::class_base|c10::Registerer<|c10::Registry<|c10::FunctionSchemaRegister)"
)

Numbers = npt.NDArray[numpy.int64]
Bytes = npt.NDArray[numpy.uint8]
Flags = npt.NDArray[numpy.bool_]

CHUNK, OVERLAP = 16 << 20, 32  # bytes


def audit(replacement: Replacement, touched: Collection[str], source: Path) -> None:
    """Raise Problem, with names, unless the replaced units are closed and register nothing.

    ``touched`` has the source files that the series changes, and ``source`` the patched tree, in which the units that
    are missing are looked up.
    """
    check_registrations(replacement.objects)
    check_references(replacement, touched, source)


def check_registrations(objects: Iterable[Path]) -> None:
    for path in objects:
        undefined = {symbol.name for symbol in elf.symbols(path, ".symtab") if not symbol.is_defined and symbol.name}
        for name in demangle(undefined):
            if REGISTRATIONS.match(name):
                raise Problem(
                    f"{unit(path)} registers something when it loads ({name.split('(')[0]}), and so does the release's "
                    "own copy; move the registration to a unit that is not replaced"
                )


def check_references(replacement: Replacement, touched: Collection[str], source: Path) -> None:
    found = outside_users(replacement, touched)
    if found:
        pairs = dict.fromkeys(zip(demangle(user for user, _ in found), demangle(used for _, used in found)))
        raise Problem(
            f"code of {replacement.old.name} that is not replaced uses functions of replaced units directly; replace "
            "the units that hold these users too (CMakeLists.txt):\n"
            + "\n".join(f"  {units_of(user, source)}: {user}\n    uses {used}" for user, used in pairs)
        )


def units_of(function: str, source: Path) -> str:
    """The source files that seem to define a function, found by its qualified name."""
    plain = function
    while (shorter := re.sub(r"<[^<>]*>", "", plain)) != plain:
        plain = shorter
    qualified = "::".join(plain.partition("(")[0].split(" ")[-1].split("::")[-2:])
    files = (source / "torch" / "csrc").rglob("*.cpp")
    found = [file for file in files if f"{qualified}(" in file.read_text(errors="replace")]
    return " or ".join(sorted(str(file.relative_to(source)) for file in found)) or "?"


def outside_users(replacement: Replacement, touched: Collection[str]) -> list[tuple[str, str]]:
    """The (user, used) pairs through which the old library would still run code whose replacement matters.

    Starts at what is replaced, not exported and not harmless, and follows direct references backwards. A path that
    comes to a replaced function ends well: that function is dead in the old library. One that comes to an exported
    function, or to code that is only pointed to, is alive.
    """
    table = [symbol for symbol in elf.symbols(replacement.old, ".symtab") if symbol.is_defined and symbol.size]
    exported = elf.exports(replacement.old)
    replaced, own = set(), set()
    for path in replacement.objects:
        for symbol in elf.symbols(path, ".symtab"):
            if symbol.is_defined and symbol.name and symbol.binding in {elf.GLOBAL, elf.LOCAL}:
                own.add(symbol.name)
                if symbol.binding == elf.GLOBAL:
                    replaced.add(symbol.name)
    graph = ReferenceGraph(replacement.old, table)
    found: list[tuple[str, str]] = []
    seen = replaced - exported - harmless(replacement.objects, touched)
    waiting = [(name, name, name) for name in seen]  # (to look at, first user on the way here, what that uses)
    while waiting:
        name, first, used = waiting.pop()
        users = graph.users(name)
        if not users and name not in replaced:
            found.append((first, used))
        for user in users:
            way = (user or name, used) if name in replaced else (first, used)
            if user in own:
                continue
            if user is None or user in exported:
                found.append(way)
            elif user not in seen:
                seen.add(user)
                waiting.append((user, *way))
    return found


def harmless(objects: Iterable[Path], touched: Collection[str]) -> set[str]:
    """The functions of untouched units that use no variable, so that an old copy beside the new one does the same."""
    units = [UnitCode(path) for path in objects if unit(path) not in touched]
    functions = {name: code.uses[section] for code in units for name, section in code.functions.items()}
    changing = {name for code in units for name, section in code.functions.items() if section in code.stateful}
    grown = True
    while grown:
        more = {name for name, uses in functions.items() if name not in changing and uses & changing}
        changing |= more
        grown = bool(more)
    return set(functions) - changing


class UnitCode:
    """The functions of an object file that was compiled with a section for each: what each uses, and who has state."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            elf_file = ELFFile(file)
            table = elf_file.get_section_by_name(".symtab")
            symbols = list(table.iter_symbols())
            sections = list(elf_file.iter_sections())
            code = {index for index, section in enumerate(sections) if section["sh_flags"] & 4}
            variable = {
                index
                for index, section in enumerate(sections)
                if section["sh_flags"] & 1 and not section.name.startswith(".data.rel.ro")
            }
            self.functions = {
                symbol.name: symbol["st_shndx"] for symbol in symbols if symbol.name and symbol["st_shndx"] in code
            }
            names: dict[int, set[str]] = {}
            for name, index in self.functions.items():
                names.setdefault(index, set()).add(name)
            self.uses: dict[int, set[str]] = {index: set() for index in code}
            self.stateful: set[int] = set()
            for section in sections:
                if section["sh_type"] != "SHT_RELA" or section["sh_info"] not in code:
                    continue
                for relocation in section.iter_relocations():
                    symbol = symbols[relocation["r_info_sym"]]
                    index = symbol["st_shndx"]
                    if symbol["st_info"]["type"] == "STT_TLS" or index in variable:
                        self.stateful.add(section["sh_info"])
                    self.uses[section["sh_info"]] |= {symbol.name} if symbol.name else names.get(index, set())


class ReferenceGraph:
    """Which function or object of a library refers directly to which."""

    def __init__(self, library: Path, table: Iterable[Symbol]) -> None:
        self.symbols = sorted((s for s in table if s.kind in {elf.FUNCTION, elf.OBJECT}), key=lambda s: s.value)
        self.starts = numpy.array([symbol.value for symbol in self.symbols], dtype=numpy.int64)
        self.addresses: dict[str, set[int]] = {}
        for symbol in self.symbols:
            self.addresses.setdefault(symbol.name, set()).add(symbol.value)
        rows = cached_references(library, numpy.unique(self.starts))
        self.places, self.targets = rows[0], rows[1]

    def users(self, name: str) -> set[str | None]:
        """The names of what refers to ``name``; None stands for a place without a name."""
        users: set[str | None] = set()
        for address in self.addresses.get(name, ()):
            first, last = numpy.searchsorted(self.targets, [address, address + 1])
            users.update(self.holder(int(place)) for place in self.places[first:last])
        return users - {name}

    def holder(self, address: int) -> str | None:
        index = int(numpy.searchsorted(self.starts, address, side="right")) - 1
        # Of aliases, which start at one address, any is as good.
        if index < 0 or address >= self.symbols[index].value + self.symbols[index].size:
            return None
        return self.symbols[index].name


def cached_references(library: Path, targets: Numbers) -> Numbers:
    """Two rows, places and the targets that they refer to, sorted by target; kept in build/ for each library."""
    cache = paths.BUILD / "audit" / f"{library.parents[2].name}-{library.name}.npy"
    if cache.exists():
        rows: Numbers = numpy.load(cache)
        return rows
    image = Image(library)
    places, reached = (numpy.concatenate(parts) for parts in zip(image.code(targets), image.pointers(targets)))
    order = numpy.argsort(reached, kind="stable")
    rows = numpy.stack([places[order], reached[order]])
    cache.parent.mkdir(parents=True, exist_ok=True)
    stage = cache.with_name(f"{cache.name}.new")
    with stage.open("wb") as file:
        numpy.save(file, rows)
    stage.replace(cache)
    return rows


class Image:
    """The code and the pointers of a library, searched for references to given addresses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            library = ELFFile(file)
            self.machine = library.get_machine_arch()
            if self.machine not in SEARCHES:
                raise Problem(f"{path} is for {self.machine}; code for x86_64 and aarch64 can be audited")
            text = library.get_section_by_name(".text")
            self.base: int = text["sh_addr"]
            self.offset: int = text["sh_offset"]
            self.size: int = text["sh_size"]

    def code(self, targets: Numbers) -> tuple[Numbers, Numbers]:
        """Places in the code and what they lead to."""
        search, _ = SEARCHES[self.machine]
        # Each chunk is searched with a little of what is before and after it.
        first = self.offset - OVERLAP
        code = numpy.memmap(self.path, dtype=numpy.uint8, mode="r", offset=first, shape=(self.size + OVERLAP,))
        found = []
        with Progress(f"searching {self.path.name} for direct references", self.size, "B") as progress:
            for start in range(0, self.size, CHUNK):
                chunk = numpy.array(code[start : start + CHUNK + 2 * OVERLAP])
                places, reached = search(chunk, self.base + start - OVERLAP)
                inside = (places >= self.base + start) & (places < self.base + start + CHUNK)
                known = inside & is_in(reached, targets)
                found.append((places[known], reached[known]))
                progress.advance(min(CHUNK, self.size - start))
        places, reached = (numpy.concatenate(parts) for parts in zip(*found))
        return places, reached

    def pointers(self, targets: Numbers) -> tuple[Numbers, Numbers]:
        """Places in the data that hold an address when the library is loaded, and the address."""
        _, relative = SEARCHES[self.machine]
        with self.path.open("rb") as file:
            section = ELFFile(file).get_section_by_name(".rela.dyn")
            rows = numpy.frombuffer(section.data() if section else b"", dtype="<i8").reshape(-1, 3)
        rows = rows[((rows[:, 1] & 0xFFFFFFFF) == relative) & is_in(rows[:, 2], targets)]
        return rows[:, 0], rows[:, 2]


def search_x86(code: Bytes, base: int) -> tuple[Numbers, Numbers]:
    """Calls, jumps and operands relative to the instruction pointer: (place of the displacement, address reached).

    Instructions are not decoded from a known start, so some of what is found is none; what is, is not missed.
    """
    length = len(code) - 4
    before = code[3:length]  # the byte before the displacement at position 4 and on: opcode or ModRM
    earlier = code[2 : length - 1]
    branch = (before == 0xE8) | (before == 0xE9) | ((earlier == 0x0F) & (before & 0xF0 == 0x80))
    operand = before & 0xC7 == 0x05
    positions = numpy.flatnonzero(branch | operand) + 4
    displacements = sum(code[positions + i].astype(numpy.int64) << 8 * i for i in range(4))
    displacements = (displacements ^ 0x80000000) - 0x80000000
    # The instruction pointer is past an immediate that follows the displacement.
    immediate = immediate_size(code, positions) * operand[positions - 4]
    return positions + base, positions + base + 4 + immediate + displacements


def immediate_size(code: Bytes, positions: Numbers) -> Numbers:
    """The size of the immediate behind an operand whose displacement is at one of ``positions``."""
    opcode, first = code[positions - 2], code[positions - 3]
    is_test = (code[positions - 1] >> 3 & 7) < 2
    wide = numpy.isin(opcode, (0x81, 0xC7, 0x69)) | ((opcode == 0xF7) & is_test)
    narrow = numpy.isin(opcode, (0x80, 0x83, 0xC6, 0x6B, 0xC0, 0xC1)) | ((opcode == 0xF6) & is_test)
    extended = numpy.isin(opcode, (0xBA, 0xA4, 0xAC, 0xC2, 0xC4, 0xC5, 0xC6, 0x70))
    half = wide & ((first == 0x66) | (code[positions - 4] == 0x66))
    plain = numpy.where(half, 2, numpy.where(wide, 4, narrow.astype(numpy.int64)))
    return numpy.where(first == 0x0F, extended, numpy.where(first == 0x3A, 1, plain)).astype(numpy.int64)


def search_arm(code: Bytes, base: int) -> tuple[Numbers, Numbers]:
    """Branches, and addresses put together by ADRP and an ADD within a few instructions: (place, address)."""
    words = code[: len(code) // 4 * 4].view("<u4").astype(numpy.int64)
    places = base + 4 * numpy.arange(len(words), dtype=numpy.int64)
    branch = (words & 0x7C000000) == 0x14000000
    found = [(places[branch], places[branch] + ((words[branch] & 0x3FFFFFF) << 38 >> 36))]
    adrp = numpy.flatnonzero((words & 0x9F000000) == 0x90000000)
    high, low = words[adrp] >> 5 & 0x7FFFF, words[adrp] >> 29 & 3
    pages = (places[adrp] & ~0xFFF) + ((high << 2 | low) << 43 >> 31)
    for distance in range(1, 8):
        near = adrp + distance < len(words)
        add = words[adrp[near] + distance]
        same = ((add & 0xFFC00000) == 0x91000000) & ((add >> 5 & 31) == (words[adrp[near]] & 31))
        found.append((places[adrp[near]][same], pages[near][same] + (add[same] >> 10 & 0xFFF)))
    at, reached = (numpy.concatenate(parts) for parts in zip(*found))
    return at, reached


# By machine: how to search its code, and the type of a relocation that adds the load address.
SEARCHES = {"x64": (search_x86, 8), "AArch64": (search_arm, 1027)}


def is_in(values: Numbers, wanted: Numbers) -> Flags:
    """As numpy.isin, for ``wanted`` in order."""
    index = numpy.searchsorted(wanted, values)
    index[index == len(wanted)] = 0
    result: Flags = wanted[index] == values
    return result


def demangle(names: Iterable[str]) -> list[str]:
    names = list(names)
    try:
        done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return names
    return done.stdout.splitlines()


def unit(path: Path) -> str:
    """The source file that an object was compiled from, as far as its path tells."""
    text = path.as_posix()
    return text[text.rindex("/torch/csrc/") + 1 : -len(".o")] if "/torch/csrc/" in text else path.name


def audit_once(replacement: Replacement, touched: Collection[str], source: Path) -> None:
    """Audit, unless the same release and objects have passed already."""
    digest = hashlib.sha256(f"{replacement.old} {sorted(touched)}".encode())
    for path in replacement.objects:
        digest.update(path.read_bytes())
    digest.update(Path(__file__).read_bytes())
    passed = paths.BUILD / "audit" / digest.hexdigest()[:20]
    if passed.exists():
        return
    audit(replacement, touched, source)
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()
    logger.info("%s: all direct users of replaced code are replaced with it", replacement.old.name)
