"""What the series puts into the wheel besides compiled code: Python files, stubs, headers, and the version."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from igb import process
from igb.errors import Problem
from igb.release import Release
from igb.tree import BASE, DIFF, Tree
from igb.wheelfile import Wheel

STUB, STUB_TEMPLATE = "torch/_C/__init__.pyi", "torch/_C/__init__.pyi.in"
PACKAGES = ("torch/", "torchgen/", "functorch/")
PYTHON, HEADERS = (".py", ".pyi"), (".h", ".hpp", ".cuh")


def files(tree: Tree, release: Release, version: str) -> dict[str, bytes]:
    """The members of the wheel that differ from the release's, by name."""
    changed = changed_paths(tree)
    result = {
        name: (tree.path / path).read_bytes()
        for path in changed
        if (name := shipped_as(path)) is not None and (tree.path / path).exists()
    }
    if STUB_TEMPLATE in changed:
        result[STUB] = patched_stub(tree, release)
    return result | versioned(release, version)


def changed_paths(tree: Tree) -> list[str]:
    """The files that differ from the base, whether or not their changes are committed."""
    return tree.git("diff", "--name-only", "--no-renames", BASE).splitlines()


def shipped_as(path: str) -> str | None:
    """Where the wheel has a file of the source tree, or None for a file that it lacks."""
    if path.startswith(PACKAGES) and path.endswith(PYTHON):
        return path
    if path.startswith("torch/csrc/") and path.endswith(HEADERS):
        return f"torch/include/{path}"
    if path.startswith("torch/csrc/api/include/"):
        return f"torch/include/{path}"
    for root in ("c10/", "aten/src/"):
        if path.startswith(root) and path.endswith(HEADERS):
            return f"torch/include/{path.replace('aten/src/', '')}"
    return None


def patched_stub(tree: Tree, release: Release) -> bytes:
    """The release's generated stub with the series' change to the template it was generated from."""
    change = tree.git("diff", *DIFF, BASE, "--", STUB_TEMPLATE).replace(STUB_TEMPLATE, STUB)
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder, STUB)
        stub.parent.mkdir(parents=True)
        stub.write_bytes(release.read(STUB))
        process.run(
            ["git", "apply", "--unsafe-paths", f"--directory={folder}", "-"],
            cwd=Path(folder),
            stdin=change,
            explain=f"{STUB} of the wheel differs from {STUB_TEMPLATE} where the series changes it",
        )
        return stub.read_bytes()


def versioned(release: Release, version: str) -> dict[str, bytes]:
    """The files that tell the version, telling the new one."""
    wheel = Wheel.named(release.wheel)
    metadata, module = wheel.info + "METADATA", "torch/version.py"
    return {
        metadata: substitute(release, metadata, rb"(?m)^Version: .*$", b"Version: " + version.encode()),
        module: substitute(release, module, rb"(?m)^__version__ = .*$", f"__version__ = '{version}'".encode()),
    }


def substitute(release: Release, name: str, pattern: bytes, line: bytes) -> bytes:
    content, count = re.subn(pattern, line, release.read(name))
    if count != 1:
        raise Problem(f"{name} of {release.wheel} does not tell its version in one line; the wheel cannot be renamed")
    return content
