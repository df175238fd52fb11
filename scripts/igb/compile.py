"""Compiling the replaced translation units with CMake and Ninja."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from igb import abi, paths, process
from igb.errors import Problem
from igb.log import Progress, logger
from igb.release import Release

OLDEST_GCC = 9
MEMORY_OF_A_JOB = 2 << 30  # bytes; the largest unit takes 1.6 GB


@dataclass(frozen=True)
class Unit:
    """A translation unit: its source, relative to the tree, and what became of it."""

    source: str
    object: Path


@dataclass(frozen=True)
class Replacement:
    """A new library, the release's library whose code it replaces, and what the new one was linked from."""

    old: Path
    new: Path
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class Build:
    """What a build gives: the replacements, and two libraries that describe the types of the touched headers."""

    replacements: tuple[Replacement, ...]
    types_before: Path
    types_after: Path

    @property
    def sources(self) -> set[str]:
        return {unit.source for replacement in self.replacements for unit in replacement.units}


def build(release: Release, tree: Path, headers: Iterable[str]) -> Build:
    """Compile and link what has changed since the last time. ``headers`` are the release's that the series touches."""
    flags = " ".join(abi.compile_flags(release.lib / "libtorch_cpu.so"))
    settings = {
        "CMAKE_CXX_COMPILER": find_compiler(),
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "IGB_SOURCE": tree,
        "IGB_RELEASE": release.folder,
        "IGB_FLAGS": flags,
        "IGB_PYTHON_INCLUDE": python_include(),
    }
    arguments = [f"-D{name}={value}" for name, value in settings.items()]
    folder = paths.BUILD / "relink" / hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:12]
    # Without a variable or function GCC describes no types.
    includes = "".join(f"#include <{header}>\n" for header in sorted(headers))
    write_if_changed(folder / "types.cpp", f"{includes}int anchor;\n")
    if not (folder / "build.ninja").exists():
        logger.info("configuring for the release's flags: %s", flags)
        process.run([tool("cmake"), "-S", paths.ROOT, "-B", folder, "-G", "Ninja", *arguments])
    run_ninja(folder)
    commands = json.loads((folder / "compile_commands.json").read_text())
    replacements = []
    for name in ("torch_cpu", "torch_python"):
        units = [
            Unit(Path(command["file"]).relative_to(tree).as_posix(), folder / command["output"])
            for command in commands
            if f"/{name}_igb.dir/" in command["output"]
        ]
        replacements.append(Replacement(release.lib / f"lib{name}.so", folder / f"lib{name}_igb.so", tuple(units)))
    return Build(tuple(replacements), folder / "libtypes_before.so", folder / "libtypes_after.so")


def write_if_changed(path: Path, text: str) -> None:
    """Keep the file's time when the text is the same, for Ninja."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def tool(name: str) -> Path:
    """A program of the tools environment."""
    return Path(sysconfig.get_path("scripts"), name)


def find_compiler() -> Path:
    """The C++ compiler: $CXX, or g++."""
    name = os.environ.get("CXX", "g++")
    remedy = f"install g++ {OLDEST_GCC} or newer, or name one in CXX"
    found = shutil.which(name)
    if found is None:
        raise Problem(f"there is no C++ compiler {name}; {remedy}")
    macros = process.run([found, "-dM", "-E", "-x", "c++", os.devnull], explain=remedy)
    version = re.search(r"__GNUC__ (\d+)", macros)
    if version is None or "__clang__" in macros:
        raise Problem(f"{found} is not GCC, which the release was built with and whose ABI flags are needed; {remedy}")
    if int(version[1]) < OLDEST_GCC:
        raise Problem(f"{found} is GCC {version[1]}, too old for PyTorch's C++17; {remedy}")
    return Path(found)


def python_include() -> Path:
    script = "import sysconfig; print(sysconfig.get_path('include'))"
    folder = Path(process.run([paths.PYTHON, "-c", script]).strip())
    if not (folder / "Python.h").exists():
        raise Problem(f"{folder} has no Python.h; install the headers of {paths.PYTHON} (python3-dev on Debian)")
    return folder


def jobs() -> int:
    """How many compilers fit into the processors and the memory of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory < MEMORY_OF_A_JOB:
        wanted = MEMORY_OF_A_JOB / 1e9
        raise Problem(f"this machine has {memory / 1e9:.1f} GB of memory, and {wanted:.1f} GB are needed; use a larger")
    return min(len(os.sched_getaffinity(0)), memory // MEMORY_OF_A_JOB)


def run_ninja(folder: Path) -> None:
    """Run Ninja with progress; the output of what failed becomes the Problem."""
    command: list[str | Path] = [tool("ninja"), "-C", folder, f"-j{jobs()}"]
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    tail: deque[str] = deque(maxlen=60)
    with ExitStack() as stack:
        progress: Progress | None = None  # nothing is said when nothing has to be done
        ninja = stack.enter_context(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        assert ninja.stdout is not None
        for line in ninja.stdout:
            tail.append(line.rstrip())
            if step := re.match(r"\[(\d+)/(\d+)\] ", line):
                progress = progress or stack.enter_context(Progress("compiling"))
                progress.total = int(step[2])
                progress.advance(int(step[1]) - progress.done)
        if ninja.wait():
            errors = "\n".join(line for line in tail if not line.startswith("ninja: "))
            raise Problem(f"compiling in {folder} failed; correct what the compiler names and rerun\n{errors}")
