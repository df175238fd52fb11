"""Reading unified diffs as git writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """A line that a hunk adds: its text, its number in the new file and in the diff itself."""

    text: str
    number: int
    place: int


@dataclass
class Hunk:
    place: int
    old_start: int
    lines: list[str]
    added: list[Line] = field(default_factory=list)
    removed: int = 0


@dataclass
class File:
    """What a diff does to one file; ``place`` is the line of the diff where that begins."""

    path: str
    place: int
    is_new: bool = False
    is_binary: bool = False
    hunks: list[Hunk] = field(default_factory=list)

    @property
    def added(self) -> Iterator[Line]:
        return (line for hunk in self.hunks for line in hunk.added)

    @property
    def removed(self) -> int:
        return sum(hunk.removed for hunk in self.hunks)


def parse(lines: list[str], first: int = 1) -> list[File]:
    """The files of a diff whose first line has the number ``first``."""
    files: list[File] = []
    old = new = number = 0
    for place, line in enumerate(lines, first):
        if old > 0 or new > 0:
            hunk = files[-1].hunks[-1]
            hunk.lines.append(line)
            if line.startswith("+"):
                hunk.added.append(Line(line[1:], number, place))
            elif line.startswith("-"):
                hunk.removed += 1
            if not line.startswith("\\"):
                old -= not line.startswith("+")
                new -= not line.startswith("-")
                number += not line.startswith("-")
        elif match := re.match(r"diff --git a/.* b/(.*)", line):
            files.append(File(match[1], place))
        elif not files:
            continue
        elif match := re.match(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line):
            old, number, new = int(match[2] or 1), int(match[3]), int(match[4] or 1)
            files[-1].hunks.append(Hunk(place, int(match[1]), [line]))
        elif line.startswith("new file mode"):
            files[-1].is_new = True
        elif line.startswith("GIT binary patch"):
            files[-1].is_binary = True
        elif line.startswith("\\"):
            files[-1].hunks[-1].lines.append(line)
    return files
