"""What the series changes in the wheel besides compiled code: Python files, stubs, headers, and the version."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection
from pathlib import Path

from igb import process
from igb.errors import Problem
from igb.release import Release
from igb.tree import BASE, DIFF, Tree
from igb.wheelfile import Wheel

STUB, STUB_TEMPLATE = "torch/_C/__init__.pyi", "torch/_C/__init__.pyi.in"
PACKAGES = ("torch/", "torchgen/", "functorch/")
PYTHON, HEADERS = (".py", ".pyi"), (".h", ".hpp", ".cuh")
# Where the headers of the wheel's include folder come from.
INCLUDES = ("torch/csrc/api/include/", "aten/src/", "")
# What a wheel is built from; the rest, such as documents, tests and lists of files, does not get into one.
BUILT = ("torch/", "torchgen/", "functorch/", "aten/", "c10/", "caffe2/", "third_party/", "tools/", "cmake/")


def touched(tree: Tree) -> list[str]:
    """The files that differ from the base, committed or not."""
    changed = tree.git("diff", "--name-only", "--no-renames", BASE).splitlines()
    return sorted({*changed, *tree.git("ls-files", "--others", "--exclude-standard").splitlines()})


def files(tree: Tree, release: Release, changed: Collection[str], compiled: Collection[str]) -> dict[str, bytes]:
    """The members of the wheel that the series replaces or adds, by name.

    Raises Problem when something changes that would get into a wheel built from source, and neither ships as it is
    nor is ``compiled``.
    """
    result = {}
    for path in changed:
        if not (tree.path / path).exists():
            raise Problem(f"the series removes {path}, and relinking takes nothing out of a wheel; keep the file")
        if name := shipped_as(path):
            result[name] = (tree.path / path).read_bytes()
        elif path == STUB_TEMPLATE:
            result[STUB] = patched_stub(tree, release)
        elif path.startswith(BUILT) and path not in compiled:
            raise Problem(
                f"the series changes {path}, and relinking cannot bring that into a wheel; list it in "
                "CMakeLists.txt if it is a translation unit, else build all of PyTorch from source"
            )
    return result


def shipped_as(path: str) -> str | None:
    """Where the wheel has a file of the source tree as it is, or None."""
    if path.startswith(PACKAGES) and path.endswith(PYTHON):
        return path
    header = include_name(path)
    return f"torch/include/{header}" if header else None


def include_name(path: str) -> str | None:
    """How a header of the source tree is included, or None for another file."""
    if not path.startswith(("torch/csrc/", "aten/src/", "c10/")) or not path.endswith(HEADERS):
        return None
    return next(path[len(root) :] for root in INCLUDES if path.startswith(root))


def patched_stub(tree: Tree, release: Release) -> bytes:
    """The release's generated stub with the series' change to the template it was generated from."""
    change = tree.git("diff", *DIFF, BASE, "--", STUB_TEMPLATE).replace(STUB_TEMPLATE, STUB)
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder, STUB)
        stub.parent.mkdir(parents=True)
        stub.write_bytes(release.read(STUB))
        process.run(
            ["git", "apply", "-"],
            cwd=Path(folder),
            stdin=change,
            explain=f"{STUB} of the wheel differs where the series changes its template; change another place",
        )
        return stub.read_bytes()


def renamed(release: Release, wheel: Wheel) -> dict[str, bytes]:
    """The members that tell the version and the tags, telling those of ``wheel``."""
    info = Wheel.named(release.wheel.name).info
    lines = {
        f"{info}METADATA": (rb"^Version: .*$", f"Version: {wheel.version}"),
        f"{info}WHEEL": (rb"^Tag: .*$", f"Tag: {wheel.tags}"),
        "torch/version.py": (rb"^__version__ = .*$", f"__version__ = '{wheel.version}'"),
    }
    result = {}
    for name, (pattern, line) in lines.items():
        result[name], count = re.subn(pattern, line.encode(), release.read(name), flags=re.MULTILINE)
        if count != 1:
            raise Problem(f"{name} of {release.wheel} has {count} lines to put `{line}` in, not one; use another wheel")
    return result
