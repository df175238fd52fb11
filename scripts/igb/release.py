"""The release wheel: fetched, verified, and unpacked as far as relinking needs it."""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from igb import paths, pins, process
from igb.errors import Problem
from igb.lock import locked
from igb.log import Progress, heartbeat, logger
from igb.wheelfile import Wheel

# What is compiled or linked against, rewired or patched. The rest of the wheel is copied without being unpacked.
LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")
HEADERS = "torch/include/"

PIP_OPTIONS = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]


@dataclass(frozen=True)
class Release:
    """A release wheel and the folder that holds the unpacked part of it."""

    wheel: Path
    folder: Path
    sha256: str

    @property
    def lib(self) -> Path:
        return self.folder / "torch" / "lib"

    @property
    def include(self) -> Path:
        return self.folder / "torch" / "include"

    def read(self, name: str) -> bytes:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.read(name)


def obtain(version: str, wheels: tuple[pins.Wheel, ...], named: Path | None = None) -> Release:
    """Fetch and verify the wheel for the user's interpreter, or take the one that the user names, and unpack it."""
    if named:
        return unpack(named, check_named(named, version, wheels))
    pin = pin_for_interpreter(wheels)
    return unpack(fetch(version, pin), pin.sha256)


def pin_for_interpreter(wheels: tuple[pins.Wheel, ...]) -> pins.Wheel:
    for pin in wheels:
        if fits(Wheel.named(pin.name)):
            return pin
    raise Problem(f"the pins have no wheel of the release for {paths.PYTHON}; name one with --wheel PATH")


def fits(wheel: Wheel) -> bool:
    """Whether a wheel is for the user's interpreter, on this machine."""
    interpreter, machine = interpreter_tags()
    python, _, platform = wheel.tags.split("-")
    return python == interpreter and platform.endswith(machine)


@cache
def interpreter_tags() -> list[str]:
    script = "import platform, sys; print('cp%d%d' % sys.version_info[:2], platform.machine())"
    return process.run([paths.PYTHON, "-c", script]).split()


def check_named(path: Path, version: str, wheels: tuple[pins.Wheel, ...]) -> str:
    """The hash of a wheel that the user names; it may be any build of the right version for the right interpreter."""
    if not path.is_file():
        raise Problem(f"{path} is not a file; --wheel takes the path of a wheel of torch {version}")
    wheel = Wheel.named(path.name)
    if wheel.distribution != "torch" or wheel.version.partition("+")[0] != version:
        raise Problem(f"{path} is {wheel.distribution} {wheel.version}, and the series is for torch {version}")
    if not fits(wheel):
        raise Problem(f"{path} is not for {paths.PYTHON}; run `make wheel PYTHON=...` with the interpreter it is for")
    sha256 = pins.digest(path)
    if sha256 not in {pin.sha256 for pin in wheels}:
        logger.warning("%s is not a wheel that the pins know; it is used because you named it", path)
    return sha256


def fetch(version: str, pin: pins.Wheel) -> Path:
    """The pinned wheel in the cache, downloaded by pip from wherever this machine's pip looks."""
    wheel = paths.CACHE / pin.name
    with locked(paths.CACHE / "lock"):
        if wheel.exists():
            pins.verify(wheel, pin)
            return wheel
        stage = paths.CACHE / "incoming"
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        logger.info("downloading %s with pip", pin.name)
        with heartbeat("downloading"):
            process.run(
                [paths.PYTHON, "-m", "pip", "download", *PIP_OPTIONS, "--dest", stage, f"torch=={version}"],
                explain="check the network and the disk and rerun, or name a copy of the wheel with --wheel PATH",
            )
        (arrived,) = stage.glob("*.whl")
        pins.verify(arrived, pin, "pip found another build; use another index, or name a wheel with --wheel PATH")
        arrived.replace(wheel)
        shutil.rmtree(stage)
    return wheel


def unpack(wheel: Path, sha256: str) -> Release:
    """Unpack headers and libraries into build/, once for each wheel."""
    release = Release(wheel, paths.BUILD / "release" / sha256[:16], sha256)
    if release.folder.exists():
        return release
    stage = release.folder.with_name(f"{release.folder.name}.new")
    shutil.rmtree(stage, ignore_errors=True)
    wanted = {f"torch/lib/{name}" for name in LIBRARIES}
    try:
        with zipfile.ZipFile(wheel) as archive:
            if missing := wanted.difference(archive.namelist()):
                raise Problem(f"{wheel} has no {min(missing)}; it is not a wheel of PyTorch for Linux")
            members = [info for info in archive.infolist() if info.filename.startswith(HEADERS)]
            members += [archive.getinfo(name) for name in sorted(wanted)]
            with Progress(f"unpacking {wheel.name}", sum(info.file_size for info in members), "B") as progress:
                for info in members:
                    archive.extract(info, stage)
                    progress.advance(info.file_size)
    except (zipfile.BadZipFile, EOFError) as error:
        raise Problem(f"{wheel} cannot be unpacked ({error}); remove it and rerun to get a good copy") from error
    stage.rename(release.folder)
    return release
