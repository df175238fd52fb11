"""Proof that code compiled against the release's headers can go on using the objects of the patched ones.

Two libraries hold nothing but a description of the types in the touched headers, as the release and as the series have
them. A type may grow at its end, provided that whoever makes or embeds one is compiled anew.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from elftools.dwarf.die import DIE
from elftools.elf.elffile import ELFFile

from igb.errors import Problem
from igb.log import logger

CLASSES = ("DW_TAG_class_type", "DW_TAG_structure_type", "DW_TAG_union_type")
FOREIGN = ("std", "__gnu_cxx", "__cxxabiv1", "pybind11")  # namespaces that the series cannot change
SOURCES = ("torch/csrc", "aten/src/ATen", "c10")
SUFFIXES = {".h", ".hpp", ".cpp", ".cc", ".cu", ".cuh"}

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)


@dataclass(frozen=True)
class Layout:
    """The size of a class, its bases and members as (bit offset, type, name), and its virtual functions by slot."""

    size: int
    parts: frozenset[tuple[int, str, str]]
    virtual: frozenset[tuple[int, str]]


def check(before: Path, after: Path, tree: Path, replaced: Collection[str]) -> None:
    """Raise Problem, with names, unless the types in ``after`` can stand for those in ``before``."""
    old, new = layouts(before), layouts(after)
    grown = []
    for name, layout in sorted(old.items()):
        if name not in new:
            raise Problem(f"{name} is gone from the patched headers, and extensions may use it; keep it")
        if new[name] == layout:
            continue
        if broken := difference(layout, new[name]):
            raise Problem(f"{name} of the patched headers {broken}, which breaks older code; only append fields")
        grown.append(name)
    for name in grown:
        if uses := uses_by_value(name, tree, replaced):
            raise Problem(
                f"{name} grows, and code that is not compiled anew makes or embeds one; replace these units too "
                "(CMakeLists.txt):\n" + "\n".join(f"  {use}" for use in uses)
            )
    logger.info("%d types compared with the release's; grown: %s", len(old), ", ".join(grown) or "none")


def difference(old: Layout, new: Layout) -> str:
    """What in ``new`` breaks users of ``old``; empty if it only adds members behind."""
    if lost := sorted(old.parts - new.parts):
        return f"has moved, changed or lost {lost[0][2]}"
    end = max((offset for offset, _, _ in old.parts), default=-1)
    if early := sorted(part for part in new.parts - old.parts if part[0] <= end):
        return f"has {early[0][2]} before members of the release"
    if old.virtual != new.virtual:
        return "has other virtual functions"
    return ""


def layouts(path: Path) -> dict[str, Layout]:
    with path.open("rb") as file:
        info = ELFFile(file).get_dwarf_info()
        return {
            name: Layout(die.attributes["DW_AT_byte_size"].value, frozenset(parts(die)), frozenset(virtual(die)))
            for unit in info.iter_CUs()
            for name, die in classes(unit.get_top_DIE(), "")
        }


def classes(die: DIE, scope: str) -> Iterator[tuple[str, DIE]]:
    for child in die.iter_children():
        name = f"{scope}{text(child)}"
        if child.tag == "DW_TAG_namespace" and text(child) and text(child) not in FOREIGN:
            yield from classes(child, f"{name}::")
        elif child.tag in CLASSES and text(child) and "DW_AT_byte_size" in child.attributes:
            yield name, child
            yield from classes(child, f"{name}::")


def parts(die: DIE) -> Iterator[tuple[int, str, str]]:
    for child in die.iter_children():
        if child.tag not in {"DW_TAG_member", "DW_TAG_inheritance"} or "DW_AT_external" in child.attributes:
            continue
        place = child.attributes.get("DW_AT_data_member_location")
        bits = child.attributes.get("DW_AT_data_bit_offset")
        # A virtual base has a program in place of a number.
        offset = bits.value if bits else 8 * place.value if place and isinstance(place.value, int) else 0
        yield offset, type_name(child), text(child) or f"base {type_name(child)}"


def virtual(die: DIE) -> Iterator[tuple[int, str]]:
    for child in die.iter_children():
        if slot := child.attributes.get("DW_AT_vtable_elem_location"):
            program = slot.value
            yield int.from_bytes(bytes(program[1:]), "little"), text(child)


def type_name(die: DIE) -> str:
    """A type as text, deep enough to tell two of the same size apart."""
    if "DW_AT_type" not in die.attributes:
        return "void"
    target = die.get_DIE_from_attribute("DW_AT_type")
    if name := text(target):
        return name
    kind = target.tag.replace("DW_TAG_", "").replace("_type", "")
    return kind if target.tag in CLASSES else f"{kind} {type_name(target)}"


def text(die: DIE) -> str:
    name = die.attributes.get("DW_AT_name")
    return name.value.decode() if name else ""


def uses_by_value(name: str, tree: Path, replaced: Collection[str]) -> list[str]:
    """The lines, outside the replaced sources, that use a class other than through pointers and references."""
    short = name.rpartition("::")[2]
    word = re.compile(rf"\b{re.escape(short)}\b")
    found = []
    for root in SOURCES:
        for file in sorted((tree / root).rglob("*")):
            path = file.relative_to(tree).as_posix()
            if file.suffix not in SUFFIXES or path in replaced:
                continue
            content = file.read_text(encoding="utf-8", errors="replace")
            if short not in content:
                continue
            content = COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), content)
            found += [
                f"{path}:{content.count(chr(10), 0, match.start()) + 1}"
                for match in word.finditer(content)
                if is_by_value(content[: match.start()], content[match.end() :])
            ]
    return found


def is_by_value(before: str, after: str) -> bool:
    """Whether the name of a class between the two texts needs the size of the class."""
    if re.match(r"\s*(const\s*)?([*&]|::)", after):
        return False
    if re.search(r"\b(struct|class)\s+(\w+\s+)*$", before):
        return False
    if re.match(r"\s*\(", after) and re.search(r"[;:{}~]\s*(explicit\s+)?$", before):  # the constructor's declaration
        return False
    pointer = r"(shared_ptr|weak_ptr|enable_shared_from_this)\s*<\s*(const\s+)?(\w+::)*$"
    return not (re.match(r"\s*(const\s*)?>", after) and re.search(pointer, before))
