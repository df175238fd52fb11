"""Virtual environments with a torch to test."""

from __future__ import annotations

from pathlib import Path

import run as launcher

from igb import pins, process
from igb.errors import Problem
from igb.log import logger


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
    process.run([*install, *again, wheel], explain="check the network and the disk, then rerun")
    process.run([python, "-m", "pip", "check"], explain=f"{wheel.name} and its dependencies do not fit together")
    stamp.write_text(digest)
    return python


def the_wheel(folder: Path) -> Path:
    wheels = sorted(folder.glob("torch-*.whl"))
    if len(wheels) != 1:
        found = ", ".join(wheel.name for wheel in wheels) or "none"
        raise Problem(f"one wheel of torch is wanted in {folder}, and there is {found}; run `make wheel`")
    return wheels[0]
