"""The pins of ``third_party/pins.toml``: which sources and wheels the project is built from, by hash."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from igb import paths
from igb.errors import Problem


class PinnedFile(Protocol):
    """A file known by its name and its hash."""

    @property
    def name(self) -> str: ...

    @property
    def sha256(self) -> str: ...


@dataclass(frozen=True)
class Archive:
    """An archive of the sources, and where the network has it: a URL, or a folder of any Debian mirror."""

    name: str
    sha256: str
    size: int | None = None
    debian_path: str | None = None
    url: str | None = None


@dataclass(frozen=True)
class Source:
    version: str
    commit: str
    date: str
    archives: tuple[Archive, ...]


@dataclass(frozen=True)
class Wheel:
    """A wheel of the release; its name holds the interpreter and the platform it is for."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Pins:
    source: Source
    wheels: tuple[Wheel, ...]


def load() -> Pins:
    """Read the pins; Problem says what is not as it should be."""
    path = paths.PINS
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        source = dict(table["source"])
        archives = tuple(Archive(**entry) for entry in source.pop("archive"))
        return Pins(Source(archives=archives, **source), tuple(Wheel(**entry) for entry in table["wheel"]))
    except OSError as error:
        raise Problem(f"{path} cannot be read: {error.strerror}; restore it with `git checkout`") from error
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise Problem(f"{path} is not a valid file of pins: {error}; compare it with its last commit") from error


def digest(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    result = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            result.update(block)
    return result.hexdigest()


def verify(path: Path, pin: PinnedFile, remedy: str = "remove it and rerun to get a good copy") -> None:
    """Raise Problem unless the file at ``path`` is the pinned one."""
    found = digest(path)
    if found != pin.sha256:
        raise Problem(
            f"{path} is not the pinned {pin.name}; {remedy}\n"
            f"  sha256 wanted  {pin.sha256}\n"
            f"  sha256 found   {found}"
        )
