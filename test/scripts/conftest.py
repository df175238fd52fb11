"""A miniature of the project in a temporary folder: a small archive as PyTorch, pins for it, and an empty series."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import sys
import tarfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from igb import paths
from igb.commands import patches, source
from igb.git import Repository
from igb.tree import Tree

ARCHIVE = "pytorch.tar.gz"
ENGINE = "".join(f"line {number}\n" for number in range(1, 41))
FILES = {
    "engine.cpp": ENGINE,
    "build_variables.bzl": 'sources = [\n    "engine.cpp",\n]\n',
    "dos.bat": "rem\r\n",
    "build.log": "a file that people often ignore\n",
    ".gitignore": "*.log\n",
}
BODY = "It is needed.\n\nUpstream-Status: Pending, a test\nDrop-When: the test is over"


class Project:
    """The miniature; its methods do what a maintainer does."""

    def __init__(self, root: Path) -> None:
        self.root, self.mirror = root, root / "mirror"
        self.tree = Tree(root / "third_party" / "pytorch")
        self.patches = root / "patches"
        for folder in (self.mirror, self.tree.path.parent, self.patches):
            folder.mkdir()
        (self.patches / "series").touch()
        self.archive = self.mirror / ARCHIVE
        self.archive.write_bytes(packed(FILES))
        self.pin()

    def pin(self, url: str = "", commit: str = "0" * 40) -> None:
        content = self.archive.read_bytes()
        lines = [
            "[source]",
            'version = "1.0"',
            f'commit = "{commit}"',
            'date = "2025-01-29T00:00:00Z"',
            "[[source.archive]]",
            f'name = "{ARCHIVE}"',
            f'sha256 = "{hashlib.sha256(content).hexdigest()}"',
            f"size = {len(content)}",
            f'url = "{url}"',
            "[[wheel]]",
            'name = "torch.whl"',
            f'sha256 = "{"0" * 64}"',
        ]
        paths.PINS.write_text("\n".join(lines))

    def source(self, discard: bool = False) -> None:
        source.fill(mirror=self.mirror, discard=discard)

    def export(self) -> None:
        patches.run(None)

    def commit(self, subject: str, files: dict[str, str], body: str = BODY) -> None:
        for name, text in files.items():
            (self.tree.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.tree.path / name).write_bytes(text.encode())
        self.tree.git("add", "--all")
        self.tree.git("commit", "--quiet", "--message", f"{subject}\n\n{body}", date="2026-01-01T00:00:00Z")

    def edit(self, subject: str, line: int, text: str = "changed", body: str = BODY) -> None:
        lines = (self.tree.path / "engine.cpp").read_text().splitlines(keepends=True)
        lines[line - 1] = f"{text}\n"
        self.commit(subject, {"engine.cpp": "".join(lines)}, body)

    def two_patches(self) -> None:
        """A series of two patches, of which the second needs the first."""
        self.source()
        self.edit("Change ten", 10)
        self.edit("Change twelve", 12)
        self.export()

    def head(self) -> str:
        return self.tree.commit_of("HEAD")

    def exported(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.patches.iterdir()}


def packed(files: dict[str, str]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"pytorch-v1.0/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return content.getvalue()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    for name in ("PATCHES", "PINS", "PYTORCH"):
        path = tmp_path / getattr(paths, name).relative_to(paths.ROOT)
        monkeypatch.setattr(paths, name, path)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    return Project(tmp_path)


WRITERS = ("mkdir", "rename", "replace", "rmdir", "unlink", "write_bytes", "write_text")
KILLED = 9


def run_and_kill(step: Callable[[], None], calls: int) -> bool:
    """Run ``step`` in a process that ends without a word after so many calls that may change a file."""
    child = os.fork()
    if child == 0:
        left = itertools.count(calls, -1)

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if next(left) == 0:
                    os._exit(KILLED)
                return function(*arguments, **options)

            return call

        Repository.git = counted(Repository.git)
        for name in WRITERS:
            setattr(Path, name, counted(getattr(Path, name)))
        try:
            step()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


@pytest.fixture
def kills() -> Callable[[Callable[[], None]], Iterator[int]]:
    """Kills a step after 0, 1, 2, ... calls, yielding each time, until it comes to its end."""

    def each(step: Callable[[], None]) -> Iterator[int]:
        return itertools.takewhile(lambda calls: run_and_kill(step, calls), itertools.count())

    return each
