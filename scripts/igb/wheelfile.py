"""Writing a wheel that is another wheel with some members replaced.

Members that stay are copied compressed as they are, with their rows of RECORD, so that a wheel of several gigabytes
costs a pass over its archive and no more memory than a block.
"""

from __future__ import annotations

import base64
import copy
import csv
import hashlib
import io
import os
import struct
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from igb.errors import Problem
from igb.log import Progress

BLOCK = 1 << 20
LEVEL = 6  # of deflate: a seventh smaller than 1 for libraries, and twice the time
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
EARLIEST = 315532800  # 1980-01-01, the first moment that a zip archive can express

Row = tuple[str, str, str]


@dataclass(frozen=True)
class Wheel:
    """What names a wheel: ``torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl`` is torch, 2.6.0 and the tags."""

    distribution: str
    version: str
    tags: str

    @classmethod
    def named(cls, file_name: str) -> Wheel:
        parts = file_name[: -len(".whl")].split("-")
        if not file_name.endswith(".whl") or len(parts) != 5:
            raise Problem(f"{file_name} is not the name of a wheel; it must be NAME-VERSION-PYTHON-ABI-PLATFORM.whl")
        return cls(parts[0], parts[1], "-".join(parts[2:]))

    @property
    def file_name(self) -> str:
        return f"{self.distribution}-{self.version}-{self.tags}.whl"

    @property
    def info(self) -> str:
        return f"{self.distribution}-{self.version}.dist-info/"


def repack(source: Path, replaced: Mapping[str, bytes | Path], new: Wheel, folder: Path) -> Path:
    """Write the wheel ``source`` with the members of ``replaced`` (new ones too) as ``new`` into ``folder``.

    Values are contents, or files that hold them; keys in the metadata folder use its name in ``source``. The same
    input gives the same bytes. The wheel appears under its name only when it is complete and verified.
    """
    old = Wheel.named(source.name)
    target = folder / new.file_name
    stage = target.with_name(f"{target.name}.new")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(source) as archive, zipfile.ZipFile(stage, "w", allowZip64=True) as output:
            members = {info.filename: info for info in archive.infolist() if not info.is_dir()}
            rows = {row[0]: row for row in csv.reader(io.StringIO(archive.read(old.info + "RECORD").decode()))}
            record = old.info + "RECORD"
            names = sorted((set(members) | set(replaced)) - {record})
            written: list[Row] = []
            total = sum(info.compress_size for info in members.values())
            with Progress(f"packing {target.name}", total, "B") as progress:
                for name in names:
                    renamed = new.info + name[len(old.info) :] if name.startswith(old.info) else name
                    if name in replaced:
                        template = members.get(name)
                        written.append(write(output, renamed, replaced[name], template))
                    else:
                        copy_member(archive, members[name], output, renamed)
                        written.append((renamed, rows[name][1], rows[name][2]))
                    progress.advance(members[name].compress_size if name in members else 0)
            written.append((new.info + "RECORD", "", ""))
            write(output, new.info + "RECORD", to_csv(written), None)
        verify(stage)
        stage.replace(target)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise Problem(f"{source} is not a sound wheel ({error}); remove it and rerun to get a good copy") from error
    finally:
        stage.unlink(missing_ok=True)
    return target


def write(output: zipfile.ZipFile, name: str, content: bytes | Path, template: zipfile.ZipInfo | None) -> Row:
    """Add a member, with the permissions of the one it replaces; return its row of RECORD."""
    info = zipfile.ZipInfo(name, date_time=moment())
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = template.external_attr if template else 0o100644 << 16
    if template is None and name.endswith(".so"):
        info.external_attr = 0o100755 << 16
    info._compresslevel = LEVEL  # type: ignore[attr-defined]
    digest, size = hashlib.sha256(), 0
    info.file_size = len(content) if isinstance(content, bytes) else content.stat().st_size
    with output.open(info, "w") as member, open_content(content) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
            member.write(block)
    return name, encode(digest.digest()), str(size)


def open_content(content: bytes | Path) -> BinaryIO:
    return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")


def copy_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, output: zipfile.ZipFile, name: str) -> None:
    """Copy a member without unpacking it."""
    assert archive.fp is not None
    assert output.fp is not None
    archive.fp.seek(info.header_offset)
    header = LOCAL_HEADER.unpack(archive.fp.read(LOCAL_HEADER.size))
    archive.fp.seek(header[-2] + header[-1], os.SEEK_CUR)
    new = copy.copy(info)
    new.filename = new.orig_filename = name
    new.flag_bits &= ~0x08  # the sizes stand in the header, not behind the data
    new.extra = b""
    new.header_offset = output.fp.tell()
    output.fp.write(new.FileHeader(zip64=None))
    left = info.compress_size
    while left:
        block = archive.fp.read(min(BLOCK, left))
        if not block:
            raise EOFError(f"{info.filename} ends early")
        output.fp.write(block)
        left -= len(block)
    output.filelist.append(new)
    output.NameToInfo[name] = new
    output.start_dir = output.fp.tell()


def verify(path: Path) -> None:
    """Raise Problem unless RECORD lists exactly what the wheel holds, with its sizes and hashes."""
    with zipfile.ZipFile(path) as archive:
        record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
        if sorted(name for name, _, _ in rows) != sorted(archive.namelist()):
            raise Problem(f"{path} and its RECORD do not list the same files; remove build/ and dist/ and rerun")
        with Progress(f"verifying {path.name}", sum(info.file_size for info in archive.infolist()), "B") as progress:
            for name, digest, size in rows:
                if name == record:
                    continue
                found = hashlib.sha256()
                with archive.open(name) as member:
                    while block := member.read(BLOCK):
                        found.update(block)
                        progress.advance(len(block))
                if encode(found.digest()) != digest or str(archive.getinfo(name).file_size) != size:
                    raise Problem(f"{name} in {path} is not what RECORD says; remove build/ and dist/ and rerun")


def encode(digest: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def to_csv(rows: list[Row]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def moment() -> tuple[int, int, int, int, int, int]:
    """SOURCE_DATE_EPOCH, or the earliest time there is: the same input gives the same bytes."""
    text = os.environ.get("SOURCE_DATE_EPOCH") or str(EARLIEST)
    if not text.isdigit():
        raise Problem(f"SOURCE_DATE_EPOCH is {text!r}; give a number of seconds, or unset it")
    return time.gmtime(max(EARLIEST, int(text)))[:6]
