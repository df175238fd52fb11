"""Which function or object of a library refers to which directly, past the symbols that can be rewired.

Code is searched, not disassembled: every place that can be a reference to the start of a function, or into an object,
counts. So some of what is found is none, by chance, and what is one is not missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy
import numpy.typing as npt
from elftools.elf.elffile import ELFFile

from igb import elf
from igb.elf import Symbol
from igb.errors import Problem
from igb.log import Progress
from igb.stamp import Stamp

Numbers = npt.NDArray[numpy.int64]
Bytes = npt.NDArray[numpy.uint8]

CHUNK, OVERLAP = 16 << 20, 256  # bytes
ARM_DISTANCE = 32  # instructions between an ADRP and what completes the address


class References:
    """The direct references of one library, found once and kept in ``folder``."""

    def __init__(self, library: Path, table: Iterable[Symbol], folder: Path) -> None:
        kinds = {elf.FUNCTION, elf.OBJECT}
        self.symbols = sorted((s for s in table if s.kind in kinds and s.size), key=lambda symbol: symbol.value)
        self.starts = numpy.array([symbol.value for symbol in self.symbols], dtype=numpy.int64)
        self.addresses: dict[str, set[int]] = {}
        for symbol in self.symbols:
            self.addresses.setdefault(symbol.name, set()).add(symbol.value)
        cache, stamp = folder / f"{library.name}.npy", Stamp(folder / f"{library.name}.stamp", Path(__file__), library)
        if not stamp.holds():
            folder.mkdir(parents=True, exist_ok=True)
            numpy.save(cache, find(library, Targets(self.symbols)))
            stamp.set()
        self.places, self.targets = numpy.load(cache)

    def users(self, name: str) -> set[Symbol | None]:
        """What refers to a symbol called ``name``; None stands for a place outside all symbols."""
        users: set[Symbol | None] = set()
        for address in self.addresses.get(name, ()):
            first, last = numpy.searchsorted(self.targets, [address, address + 1])
            users.update(self.holder(int(place)) for place in self.places[first:last])
        return {user for user in users if user is None or user.name != name}

    def holder(self, address: int) -> Symbol | None:
        index = int(numpy.searchsorted(self.starts, address, side="right")) - 1
        # Of aliases, which start at one address, any is as good.
        if index < 0 or address >= self.symbols[index].value + self.symbols[index].size:
            return None
        return self.symbols[index]


class Targets:
    """The addresses that count as a use of a symbol: its start, and all of an object that is not exported."""

    def __init__(self, symbols: Iterable[Symbol]) -> None:
        ends: dict[int, int] = {}
        for symbol in symbols:
            entire = symbol.kind == elf.OBJECT and symbol.binding == elf.LOCAL
            end = symbol.value + (symbol.size if entire else 1)
            ends[symbol.value] = max(end, ends.get(symbol.value, 0))
        self.starts, self.ends = numpy.array(sorted(ends.items()), dtype=numpy.int64).T

    def hit(self, places: Numbers, reached: Numbers) -> tuple[Numbers, Numbers]:
        """Those places from which a target is reached, and where the symbol reached starts."""
        index = numpy.maximum(numpy.searchsorted(self.starts, reached, side="right") - 1, 0)
        inside = (reached >= self.starts[index]) & (reached < self.ends[index])
        return places[inside], self.starts[index[inside]]


def find(library: Path, targets: Targets) -> Numbers:
    """Two rows, places and the symbols that they refer to, in the order of the second."""
    image = Image(library)
    places, reached = (numpy.concatenate(parts) for parts in zip(image.code(targets), image.pointers(targets)))
    order = numpy.argsort(reached, kind="stable")
    return numpy.stack([places[order], reached[order]])


class Image:
    """The code and the pointers of a library, searched for references to given addresses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            library = ELFFile(file)
            machine = library.get_machine_arch()
            if machine not in SEARCHES:
                raise Problem(f"{path} is for {machine}; only code for x86_64 and aarch64 can be audited")
            self.search, self.relative = SEARCHES[machine]
            text = library.get_section_by_name(".text")
            self.base: int = text["sh_addr"]
            self.offset: int = text["sh_offset"]
            self.size: int = text["sh_size"]

    def code(self, targets: Targets) -> tuple[Numbers, Numbers]:
        """Places in the code and the symbols that they lead to."""
        # Each chunk is searched with a little of what is before and after it.
        first = self.offset - OVERLAP
        code = numpy.memmap(self.path, dtype=numpy.uint8, mode="r", offset=first, shape=(self.size + OVERLAP,))
        found = []
        with Progress(f"searching {self.path.name} for direct references", self.size, "B") as progress:
            for start in range(0, self.size, CHUNK):
                chunk = numpy.array(code[start : start + CHUNK + 2 * OVERLAP])
                places, reached = self.search(chunk, self.base + start - OVERLAP)
                inside = (places >= self.base + start) & (places < self.base + start + CHUNK)
                found.append(targets.hit(places[inside], reached[inside]))
                progress.advance(min(CHUNK, self.size - start))
        places, reached = (numpy.concatenate(parts) for parts in zip(*found))
        return places, reached

    def pointers(self, targets: Targets) -> tuple[Numbers, Numbers]:
        """Places in the data that hold the address of a symbol when the library is loaded, and the symbol."""
        with self.path.open("rb") as file:
            section = ELFFile(file).get_section_by_name(".rela.dyn")
            rows = numpy.frombuffer(section.data() if section else b"", dtype="<i8").reshape(-1, 3)
        rows = rows[(rows[:, 1] & 0xFFFFFFFF) == self.relative]
        return targets.hit(rows[:, 0], rows[:, 2])


def search_x86(code: Bytes, base: int) -> tuple[Numbers, Numbers]:
    """Calls, jumps and operands relative to the instruction pointer: (place of the displacement, address reached)."""
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
    """Branches, and addresses put together by an ADRP and an ADD not far from it: (place, address)."""
    words = code[: len(code) // 4 * 4].view("<u4").astype(numpy.int64)
    places = base + 4 * numpy.arange(len(words), dtype=numpy.int64)
    branch = (words & 0x7C000000) == 0x14000000
    found = [(places[branch], places[branch] + ((words[branch] & 0x3FFFFFF) << 38 >> 36))]
    adrp = numpy.flatnonzero((words & 0x9F000000) == 0x90000000)
    high, low = words[adrp] >> 5 & 0x7FFFF, words[adrp] >> 29 & 3
    pages = (places[adrp] & ~0xFFF) + ((high << 2 | low) << 43 >> 31)
    for distance in range(1, ARM_DISTANCE + 1):
        near = adrp + distance < len(words)
        add = words[adrp[near] + distance]
        same = ((add & 0xFFC00000) == 0x91000000) & ((add >> 5 & 31) == (words[adrp[near]] & 31))
        found.append((places[adrp[near]][same], pages[near][same] + (add[same] >> 10 & 0xFFF)))
    at, reached = (numpy.concatenate(parts) for parts in zip(*found))
    return at, reached


# By machine: how to search its code, and the type of a relocation that adds the load address.
SEARCHES = {"x64": (search_x86, 8), "AArch64": (search_arm, 1027)}
