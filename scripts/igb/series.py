"""The series on disk: ``patches/series`` gives the order of the ``.patch`` files that lie beside it."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from igb.errors import Problem

ORDER_FILE = "series"


@dataclass(frozen=True)
class Patch:
    name: str
    content: bytes


Series = tuple[Patch, ...]


def slug(subject: str) -> str:
    """The file name of the patch with this subject."""
    return re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-") + ".patch"


def disorder(folder: Path) -> list[str]:
    """Where the order file and the files beside it disagree, as ``file:line: problem``."""
    order, problems, listed = folder / ORDER_FILE, [], set()
    if not order.is_file():
        return [f"{folder.name}/{ORDER_FILE}:1: there is no such file; restore it with `git checkout`"]
    for number, name in enumerate(order.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{folder.name}/{ORDER_FILE}:{number}"
        if not re.fullmatch(r"[a-z0-9-]+\.patch", name):
            problems.append(f"{where}: `{name}` is not the name of a patch")
        elif name in listed:
            problems.append(f"{where}: {name} is listed twice")
        elif not (folder / name).is_file():
            problems.append(f"{where}: {name} is listed but missing")
        listed.add(name)
    for path in sorted(folder.iterdir()):
        if path.name not in listed | {ORDER_FILE}:
            problems.append(f"{folder.name}/{path.name}:1: not listed in {folder.name}/{ORDER_FILE}")
    return problems


def read(folder: Path) -> Series:
    """The patches in their order; Problem when the order file and the files disagree."""
    if problems := disorder(folder):
        raise Problem("\n".join(["the series is not in order; correct the list or the files, then rerun", *problems]))
    return listed(folder)


def listed(folder: Path) -> Series:
    """The patches that are both listed and there."""
    order = folder / ORDER_FILE
    names = order.read_text(encoding="utf-8").splitlines() if order.is_file() else []
    return tuple(Patch(name, (folder / name).read_bytes()) for name in names if (folder / name).is_file())


def write(folder: Path, series: Series) -> None:
    """Make ``folder`` hold exactly ``series``; each file is replaced whole, the order file last."""
    stage = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    folder.mkdir(exist_ok=True)
    order = Patch(ORDER_FILE, "".join(f"{patch.name}\n" for patch in series).encode())
    for patch in (*series, order):
        (stage / patch.name).write_bytes(patch.content)
    for patch in (*series, order):
        (stage / patch.name).replace(folder / patch.name)
    stage.rmdir()
    for path in folder.glob("*.patch"):
        if path.name not in {patch.name for patch in series}:
            path.unlink()


def digest(series: Series) -> str:
    """One hash for the patches and their order."""
    result = hashlib.sha256()
    for patch in series:
        result.update(f"{patch.name} {len(patch.content)}\n".encode())
        result.update(patch.content)
    return result.hexdigest()
