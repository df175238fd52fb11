"""The release wheel: fetched, verified, and unpacked as far as relinking needs it."""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from igb import paths, pins, process
from igb.errors import Problem
from igb.log import Progress, logger

# What is compiled or linked against, rewired or patched. The rest of the wheel is copied without being unpacked.
LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")
HEADERS = "torch/include/"


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

    def names(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def read(self, name: str) -> bytes:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.read(name)


def obtain(version: str, wheels: tuple[pins.Wheel, ...], named: Path | None = None) -> Release:
    """Fetch and verify the wheel for the user's interpreter, or take the one that the user names, and unpack it."""
    if named is None:
        pin = pin_for_interpreter(wheels)
        wheel = fetch(version, pin)
        sha256 = pin.sha256
    else:
        wheel, sha256 = named, digest_of(named)
        if sha256 not in {pin.sha256 for pin in wheels}:
            logger.warning("%s is not a wheel that the pins know; it is used because you named it", named)
    return unpack(wheel, sha256)


def pin_for_interpreter(wheels: tuple[pins.Wheel, ...]) -> pins.Wheel:
    script = "import platform, sys; print('cp%d%d' % sys.version_info[:2], platform.machine())"
    tag, machine = process.run([paths.PYTHON, "-c", script]).split()
    for pin in wheels:
        if f"-{tag}-{tag}-" in pin.name and pin.name.endswith(f"{machine}.whl"):
            return pin
    raise Problem(f"the release has no pinned wheel for {tag} on {machine}; name one with --wheel PATH")


def digest_of(wheel: Path) -> str:
    if not wheel.is_file():
        raise Problem(f"{wheel} is not a file; --wheel takes the path of a torch wheel")
    return pins.digest(wheel)


def fetch(version: str, pin: pins.Wheel) -> Path:
    """The pinned wheel in the cache, downloaded by pip from wherever this machine's pip looks."""
    wheel = paths.CACHE / pin.name
    if wheel.exists():
        pins.verify(wheel, pin)
        return wheel
    stage = paths.CACHE / "incoming"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    logger.info("downloading %s (0.8 GB) with pip", pin.name)
    options = ["--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--only-binary=:all:"]
    process.run(
        [paths.PYTHON, "-m", "pip", "download", *options, "--dest", stage, f"torch=={version}"],
        explain="check the network and the disk, or fetch the wheel elsewhere and name it with --wheel PATH",
    )
    arrived = next(stage.glob("*.whl"))
    pins.verify(arrived, pin)
    arrived.replace(wheel)
    shutil.rmtree(stage)
    return wheel


def unpack(wheel: Path, sha256: str) -> Release:
    """Unpack headers and libraries into build/, once for each wheel."""
    folder = paths.BUILD / "release" / sha256[:16]
    if not folder.exists():
        stage = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(stage, ignore_errors=True)
        try:
            with zipfile.ZipFile(wheel) as archive:
                members = [
                    info
                    for info in archive.infolist()
                    if info.filename.startswith(HEADERS)
                    or info.filename in {f"torch/lib/{name}" for name in LIBRARIES}
                ]
                total = sum(info.file_size for info in members)
                with Progress(f"unpacking {wheel.name}", total, "B") as progress:
                    for info in members:
                        archive.extract(info, stage)
                        progress.advance(info.file_size)
        except (zipfile.BadZipFile, EOFError) as error:
            raise Problem(f"{wheel} cannot be unpacked ({error}); remove it and rerun to get a good copy") from error
        stage.rename(folder)
    release = Release(wheel, folder, sha256)
    if missing := [name for name in LIBRARIES if not (release.lib / name).exists()]:
        raise Problem(f"{wheel} has no torch/lib/{missing[0]}; it is not a wheel of PyTorch for Linux")
    return release
