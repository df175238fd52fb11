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
from dataclasses import dataclass
from pathlib import Path

from igb import abi, paths, process
from igb.errors import Problem
from igb.log import Progress, logger
from igb.release import Release

OLDEST_GCC = 9
MEMORY_OF_A_JOB = 2 << 30  # bytes; the largest unit takes 1.6 GB


@dataclass(frozen=True)
class Replacement:
    """A new library, the release's library whose code it replaces, and the objects it was linked from."""

    old: Path
    new: Path
    objects: tuple[Path, ...]


def replacements(release: Release, source: Path, sanitize: str = "") -> list[Replacement]:
    """Compile and link what has changed since the last time."""
    compiler = find_compiler()
    include = python_include()
    flags = " ".join(abi.compile_flags(release.lib / "libtorch_cpu.so"))
    settings = {
        "CMAKE_CXX_COMPILER": str(compiler),
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "IGB_SOURCE": str(source),
        "IGB_RELEASE": str(release.folder),
        "IGB_FLAGS": flags,
        "IGB_PYTHON_INCLUDE": str(include),
        "IGB_SANITIZE": sanitize,
    }
    arguments = [f"-D{name}={value}" for name, value in settings.items()]
    key = hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:12]
    folder = paths.BUILD / "relink" / key
    if not (folder / "build.ninja").exists():
        logger.info("configuring for the release's flags: %s", flags)
        process.run([tool("cmake"), "-S", paths.ROOT, "-B", folder, "-G", "Ninja", *arguments])
    run_ninja(folder)
    commands = json.loads((folder / "compile_commands.json").read_text())
    return [
        Replacement(
            release.lib / f"lib{name}.so",
            folder / f"lib{name}_igb.so",
            # Objects of units that are no longer listed may lie there as well.
            tuple(folder / command["output"] for command in commands if f"/{name}_igb.dir/" in command["output"]),
        )
        for name in ("torch_cpu", "torch_python")
    ]


def tool(name: str) -> str:
    """A program of the tools environment."""
    return str(Path(sysconfig.get_path("scripts"), name))


def find_compiler() -> Path:
    """The C++ compiler: $CXX, or g++."""
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise Problem(f"there is no C++ compiler {name}; install g++ {OLDEST_GCC} or newer, or name one in CXX")
    macros = process.run([found, "-dM", "-E", "-x", "c++", "/dev/null"], explain=f"CXX={name} is not a C++ compiler")
    version = re.search(r"__GNUC__ (\d+)", macros)
    if version is None or ("__clang__" not in macros and int(version[1]) < OLDEST_GCC):
        raise Problem(f"{found} is too old to compile PyTorch 2.6.0; install g++ {OLDEST_GCC} or newer")
    return Path(found)


def python_include() -> Path:
    script = "import sysconfig; print(sysconfig.get_path('include'))"
    folder = Path(process.run([paths.PYTHON, "-c", script]).strip())
    if not (folder / "Python.h").exists():
        raise Problem(f"{folder} has no Python.h; install the headers of {paths.PYTHON} (python3-dev on Debian)")
    return folder


def jobs() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // MEMORY_OF_A_JOB))


def run_ninja(folder: Path) -> None:
    """Run Ninja with progress; the output of what failed becomes the Problem."""
    command = [tool("ninja"), "-C", str(folder), f"-j{jobs()}"]
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    tail: deque[str] = deque(maxlen=60)
    progress: Progress | None = None  # nothing is said when nothing has to be done
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True) as ninja:
        assert ninja.stdout
        for line in ninja.stdout:
            tail.append(line.rstrip())
            if step := re.match(r"\[(\d+)/(\d+)\] ", line):
                progress = progress or Progress("compiling", int(step[2]), "steps")
                progress.total = int(step[2])  # becomes known when CMake has run again
                progress.advance(int(step[1]) - progress.done)
    if ninja.returncode:
        errors = [line for line in tail if not line.startswith("ninja: ")]
        raise Problem("\n".join([f"compiling in {folder} failed; the compiler says:", *errors]))
    if progress:
        progress.__exit__(None)
