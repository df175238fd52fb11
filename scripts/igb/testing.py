"""Virtual environments with a torch to test."""

from __future__ import annotations

from pathlib import Path

import run as launcher

from igb import paths, pins, process
from igb.errors import Problem
from igb.log import heartbeat, logger


def environment(name: str, wheel: Path) -> Path:
    """The interpreter of build/NAME: the packages of requirements/test.txt, and torch from ``wheel``."""
    python = launcher.environment(name, "test")
    stamp = python.parents[1] / "torch.sha256"
    digest = pins.digest(wheel)
    if stamp.exists() and stamp.read_text() == digest:
        return python
    logger.info("installing %s into %s, with what it depends on", wheel.name, python.parents[1])
    options = ["--quiet", "--disable-pip-version-check", "--no-compile"]
    install: list[str | Path] = [python, "-m", "pip", "install", *options]
    # A wheel of the same version replaces the one before; the dependencies are there already.
    again = ["--force-reinstall", "--no-deps"] if stamp.exists() else []
    stamp.unlink(missing_ok=True) if not again else stamp.write_text("")
    with heartbeat("installing"):
        process.run([*install, *again, wheel], explain="check the network and the disk, then rerun")
    process.run([python, "-m", "pip", "check"], explain=f"{wheel.name} and its dependencies do not fit together")
    stamp.write_text(digest)
    return python


def the_wheel(folder: Path) -> Path:
    """The wheel in ``folder`` for the user's interpreter."""
    tag = interpreter_tag(paths.PYTHON)
    wheels = sorted(folder.glob(f"torch-*-{tag}-{tag}-*.whl"))
    if not wheels:
        raise Problem(f"{folder} has no wheel of torch for {tag}, which is what {paths.PYTHON} takes; run `make wheel`")
    if len(wheels) > 1:
        found = ", ".join(wheel.name for wheel in wheels)
        raise Problem(f"{folder} has several wheels of torch for {tag} ({found}); remove all but one")
    return wheels[0]


def interpreter_tag(python: Path) -> str:
    return process.run([python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"]).strip()
