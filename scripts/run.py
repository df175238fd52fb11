#!/usr/bin/env python3
"""Run one of the project's commands: ``python3 scripts/run.py COMMAND [--help]``.

This file runs under any Python that starts it, with nothing installed. It checks
that the interpreter and the platform are supported, keeps a virtual environment with
the pinned tools of ``requirements/tools.txt``, and runs ``igb.cli`` inside it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 9), (3, 13)


def fail(message: str) -> None:
    sys.exit(f"error: {message}")


def check_platform() -> None:
    version = sys.version_info[:2]
    if platform.python_implementation() != "CPython" or not OLDEST <= version <= NEWEST:
        fail(
            f"{sys.executable} is {platform.python_implementation()} {platform.python_version()}, and PyTorch 2.6.0 "
            "has wheels for CPython 3.9 to 3.13 only; name one of those, e.g. `make wheel PYTHON=python3.11`"
        )
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"}:
        fail(
            f"this is {platform.system()} on {platform.machine()}; the release's libraries are ELF files for "
            "x86_64 and aarch64 Linux, so build there (a container or WSL does)"
        )


def environment(name: str, packages: str = "") -> Path:
    """The interpreter of build/NAME, made or renewed when requirements/PACKAGES.txt (or NAME.txt) changes."""
    requirements, home = ROOT / "requirements" / f"{packages or name}.txt", ROOT / "build" / name
    pinned = requirements.read_text()
    for included in re.findall(r"^-r (.+)", pinned, re.MULTILINE):
        pinned += (requirements.parent / included).read_text()
    digest = hashlib.sha256((pinned + sys.version).encode()).hexdigest()
    python, stamp = home / "bin" / "python", home / "complete"
    if python.exists() and stamp.exists() and stamp.read_text() == digest:
        return python
    print(f"installing {requirements.relative_to(ROOT)} into {home.relative_to(ROOT)} ...", flush=True)
    try:
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements], check=True
        )
        stamp.write_text(digest)
    except (OSError, subprocess.CalledProcessError) as error:
        fail(
            f"{requirements.name} could not be installed into {home}: {error}; pip says why above: the network, the "
            "disk, or a constraint of this machine, which PIP_CONSTRAINT=/dev/null lifts; then rerun"
        )
    return python


def main() -> None:
    check_platform()
    python = environment("tools")
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "IGB_PYTHON": sys.executable}
    os.execve(python, [str(python), "-m", "igb.cli", *sys.argv[1:]], variables)


if __name__ == "__main__":
    main()
