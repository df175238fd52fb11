"""Remembering what a step was last done with, so that it is done again only when something of that has changed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from igb import pins


class Stamp:
    """A file that holds one hash of all inputs of a step: texts, and files by their content."""

    def __init__(self, path: Path, *inputs: str | Path) -> None:
        self.path = path
        lines = [pins.digest(item) if isinstance(item, Path) else item for item in inputs]
        self.key = hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def holds(self) -> bool:
        return self.path.exists() and self.path.read_text() == self.key

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def set(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.key)
