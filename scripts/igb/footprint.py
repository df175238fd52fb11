"""How much the series touches, counted and kept in the README."""

from __future__ import annotations

from pathlib import Path

from igb import diff

BEGIN, END = "<!-- series:begin -->", "<!-- series:end -->"
CPP = {".cpp", ".cc", ".cu", ".h", ".hpp", ".cuh"}


def describe(patches: int, files: list[diff.File]) -> str:
    """The counts of a series of so many patches that change these files in all."""
    new = [file for file in files if file.is_new]
    old = [file for file in files if not file.is_new]
    return "\n".join(
        [
            f"| the series | {_count(patches, 'patch', 'patches')} |",
            "|---|---|",
            f"| new files | {len(new)}, with {_count(_added(new), 'line')} |",
            f"| upstream's files touched | {len(old)}: {_changes(old)} |",
            f"| of these C++ | {_changes([file for file in old if Path(file.path).suffix in CPP])} |",
        ]
    )


def refresh(readme: Path, text: str) -> None:
    """Put ``text`` between the markers, when there are any."""
    if readme.exists():
        old = readme.read_text(encoding="utf-8")
        new = replaced(old, text)
        if new != old:
            readme.write_text(new, encoding="utf-8")


def replaced(readme: str, text: str) -> str:
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    return f"{head}{begin}\n{text}\n{end}{tail}" if end else readme


def _added(files: list[diff.File]) -> int:
    return sum(len(hunk.added) for file in files for hunk in file.hunks)


def _changes(files: list[diff.File]) -> str:
    removed, hunks = sum(file.removed for file in files), sum(len(file.hunks) for file in files)
    return f"{_count(_added(files), 'line')} added, {removed} removed in {_count(hunks, 'hunk')}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
