"""Proof that replacing translation units of a release leaves nothing bound to the code they replace.

A function that the release does not export is called directly inside its library, past any rewiring. Where code that
is not replaced calls one of a replaced unit, the old copy would still run. That is harmless only if the series touches
neither the function nor anything it goes on to use, and if none of them keeps a state; else the caller has to be
replaced too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile

from igb import elf, paths, process
from igb.compile import Replacement, Unit
from igb.elf import Symbol
from igb.errors import Problem
from igb.log import logger
from igb.references import References

WRITABLE = 1  # a section flag

# Constructors of objects that register something when the library loads; twice would be once too often.
REGISTRATIONS = re.compile(
    r"(torch::detail::TorchLibraryInit|torch::Library|c10::RegisterOperators|torch::jit::RegisterOperators"
    r"|torch::detail::class_base|torch::class_<|c10::Registerer<|c10::Registry<|c10::Dispatcher)::"
)

# State that inline functions keep, of which each library has its own already, or which each may have.
SEPARATE = re.compile(
    r"(guard variable for )?("
    r"pybind11::.*"  # all libraries find one state through the interpreter; nothing is registered for a module alone
    r"|torch::jit::as_module\(.*"  # looks a class up once
    r"|c10::AbortHandlerHelper::getInstance\(\)::instance"
    r")"
)


def audit(replacement: Replacement, touched: Collection[str], tree: Path, providers: Iterable[Path]) -> None:
    """Raise Problem, with names, unless the replaced units are closed, whole and register nothing.

    ``touched`` has the source files that the series changes, ``tree`` all sources; ``providers`` are the libraries
    that the new one may use.
    """
    objects = [ObjectFile(unit) for unit in replacement.units]
    check_resolved(replacement, providers, tree)
    check_registrations(objects)
    check_states(replacement, objects)
    check_references(replacement, objects, touched, tree)
    logger.info("%s: nothing that stays uses code that is replaced directly", replacement.old.name)


@dataclass
class Section:
    """A piece of code or data of an object file: the names in it, those it refers to, and whether it has state."""

    names: set[str]
    uses: set[str]
    has_state: bool


class ObjectFile:
    """A compiled unit, as its symbols and relocations tell; it was compiled with a section for each function."""

    def __init__(self, unit: Unit) -> None:
        self.source = unit.source
        self.symbols = elf.symbols(unit.object, ".symtab")
        with unit.object.open("rb") as file:
            sections = list(ELFFile(file).iter_sections())
            self.writable = {
                index
                for index, section in enumerate(sections)
                if section["sh_flags"] & WRITABLE and not section.name.startswith(".data.rel.ro")
            }
            self.sections = [Section(set(), set(), index in self.writable) for index in range(len(sections))]
            for symbol in self.defined:
                if symbol.section < len(sections):
                    self.sections[symbol.section].names.add(symbol.name)
            self.initialisers: set[str] = set()
            for table in sections:
                if table["sh_type"] != "SHT_RELA":
                    continue
                section = self.sections[table["sh_info"]]
                for relocation in table.iter_relocations():
                    symbol = self.symbols[relocation["r_info_sym"]]
                    section.has_state |= symbol.kind == elf.TLS or symbol.section in self.writable
                    section.uses |= {symbol.name} if symbol.name else self.sections[symbol.section].names
                if sections[table["sh_info"]].name.startswith((".init_array", ".ctors")):
                    self.initialisers |= section.uses

    @property
    def defined(self) -> list[Symbol]:
        # On aarch64, names with a dollar mark where code and data begin.
        return [symbol for symbol in self.symbols if symbol.is_defined and symbol.name[:1] not in {"", "$"}]


def check_resolved(replacement: Replacement, providers: Iterable[Path], tree: Path) -> None:
    """The linker leaves open what it does not find, for Python's own functions are in the interpreter."""
    missing = {name for name in elf.unresolved(replacement.new, providers) if not name.startswith(("Py", "_Py"))}
    if missing:
        raise Problem(
            f"{replacement.new.name} uses what the release has but does not export; replace the units that define it "
            "too (CMakeLists.txt), or, for what is new, declare it TORCH_API:\n"
            + "\n".join(f"  {name}\n    in {home(name, tree)}" for name in sorted(demangle(missing).values()))
        )


def check_registrations(objects: Iterable[ObjectFile]) -> None:
    """What runs when the library loads must not register anything."""
    for code in objects:
        uses = {name: section.uses for section in code.sections for name in section.names}
        reached = set(code.initialisers)
        waiting = list(reached)
        while waiting:
            new = uses.get(waiting.pop(), set()) - reached
            reached |= new
            waiting += new
        if found := [name for name in demangle(reached).values() if REGISTRATIONS.match(name)]:
            raise Problem(
                f"{code.source} registers something when it is loaded, as the release's own copy does; move this to a "
                f"unit that is not replaced:\n" + listed(found)
            )


def check_states(replacement: Replacement, objects: Iterable[ObjectFile]) -> None:
    """A variable of an inline function that is not exported exists once in each library."""
    kept = {symbol.name for symbol in elf.symbols(replacement.old, ".symtab") if symbol.binding == elf.LOCAL}
    for code in objects:
        names = {
            symbol.name
            for symbol in code.defined
            if symbol.binding in {elf.WEAK, elf.UNIQUE}
            and symbol.visibility == elf.HIDDEN
            and (symbol.kind == elf.TLS or symbol.section in code.writable)
            and not symbol.name.startswith("DW.ref.")  # the compiler's pointers to typeinfo
        }
        if found := [name for name in demangle(names & kept).values() if not SEPARATE.fullmatch(name)]:
            raise Problem(
                f"{code.source} and the units of {replacement.old.name} that stay would each have their own copy of "
                f"this; replace the units that use it too (CMakeLists.txt), or export it:\n" + listed(found)
            )


def check_references(
    replacement: Replacement, objects: Collection[ObjectFile], touched: Collection[str], tree: Path
) -> None:
    found = outside_users(replacement, objects, touched)
    if found:
        plain = demangle({name for pair in found for name in pair})
        lines = []
        for user, used in sorted({(plain[user], plain[used]) for user, used in found}):
            lines.append(f"  {user}\n    in {home(user, tree)}\n    uses {used}")
        raise Problem(
            f"code of {replacement.old.name} that is not replaced uses functions of replaced units directly; replace "
            "the units that hold these users too (CMakeLists.txt):\n" + "\n".join(lines)
        )


def outside_users(
    replacement: Replacement, objects: Collection[ObjectFile], touched: Collection[str]
) -> list[tuple[str, str]]:
    """The (user, used) pairs through which the old library would still run code whose replacement matters.

    Starts at what is replaced and not harmless, and follows direct references backwards. A path that comes to a
    replaced function ends well: that function is dead in the old library. One that comes to an exported function, or
    to code that nothing refers to by name, is alive.
    """
    table = [symbol for symbol in elf.symbols(replacement.old, ".symtab") if symbol.is_defined]
    exported = elf.exports(replacement.old)
    replaced = {symbol.name for code in objects for symbol in code.defined if symbol.binding == elf.GLOBAL}
    static = {(s.name, s.file) for code in objects for s in code.defined if s.binding == elf.LOCAL}
    references = References(replacement.old, table, paths.BUILD / "audit")
    found: list[tuple[str, str]] = []
    seen = replaced - harmless(objects, touched, exported)
    waiting = [(name, name, name) for name in seen]  # (to look at, first user on the way here, what that uses)
    while waiting:
        name, first, used = waiting.pop()
        users = references.users(name)
        if not users and name not in replaced:
            found.append((first, used))
        for user in users:
            way = (first, used) if name not in replaced else (user.name if user else name, used)
            if user is None or user.name in exported - replaced:
                found.append(way)
            elif user.name not in seen | replaced and (user.name, user.file) not in static:
                seen.add(user.name)
                waiting.append((user.name, *way))
    return found


def harmless(objects: Iterable[ObjectFile], touched: Collection[str], exported: Collection[str]) -> set[str]:
    """The functions whose old copies beside the new ones do the same: untouched, without state, using only such.

    What is exported may be used: the old copy comes to the new one, too.
    """
    objects = list(objects)
    untouched = [section for code in objects if code.source not in touched for section in code.sections]
    functions = {name for section in untouched for name in section.names}
    # An inline function of a touched unit has the same code in others.
    strong = {s.name for code in objects if code.source in touched for s in code.defined if s.binding == elf.GLOBAL}
    changing = strong.difference(exported)
    grown = True
    while grown:
        more = {
            name
            for section in untouched
            if section.has_state or not changing.isdisjoint(section.uses)
            for name in section.names
        }
        grown = not more <= changing
        changing |= more
    return functions - changing


def home(function: str, tree: Path) -> str:
    """The source files that seem to define a function, by its demangled name."""
    words = re.findall(r"(?:\w+::)?~?\w+(?=\()", re.sub(r"\[.*?\]|\(anonymous namespace\)::", "", function))
    definition = re.compile(rf"\b{re.escape(words[0])}\s*\([^;{{]*\)[^;{{}}]*{{".encode() if words else b"$^")
    files = sorted((tree / "torch" / "csrc").rglob("*.cpp"))
    found = [file.relative_to(tree).as_posix() for file in files if definition.search(file.read_bytes())]
    return " or ".join(found) or "a unit that is not known"


def demangle(names: Iterable[str]) -> dict[str, str]:
    """The readable form of each name."""
    names = list(names)
    text = process.run(["c++filt"], stdin="\n".join(names), explain="install binutils, which GCC needs anyway")
    return dict(zip(names, text.splitlines()))


def listed(names: Iterable[str]) -> str:
    return "\n".join(f"  {name}" for name in sorted(names))
