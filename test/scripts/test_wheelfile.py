"""Repacking a wheel, tried on a miniature one."""

from __future__ import annotations

import csv
import io
import zipfile
from pathlib import Path

import pytest
from igb import wheelfile
from igb.errors import Problem
from igb.wheelfile import Wheel

INFO = "toy-1.0.dist-info/"
MEMBERS = {
    "toy/__init__.py": b"version = 1\n",
    "toy/lib/big.so": bytes(range(256)) * 4096,
    "toy/lib/kept.bin": b"kept" * 1000,
    f"{INFO}METADATA": b"Name: toy\nVersion: 1.0\n",
}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy-1.0-cp311-cp311-manylinux1_x86_64.whl"
    rows = []
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in MEMBERS.items():
            rows.append(wheelfile.write(archive, name, content, None))
        rows.append((f"{INFO}RECORD", "", ""))
        archive.writestr(f"{INFO}RECORD", wheelfile.to_csv(rows))
    wheelfile.verify(path)
    return path


def repack(toy: Path, folder: str = "dist") -> Path:
    changes: dict[str, bytes | Path] = {
        "toy/lib/big.so": b"smaller",
        "toy/lib/new.so": b"new",
        f"{INFO}METADATA": b"Name: toy\nVersion: 1.0+igb.1\n",
    }
    new = Wheel("toy", "1.0+igb.1", "cp311-cp311-manylinux_2_36_x86_64")
    return wheelfile.repack(toy, changes, new, toy.parent / folder)


def test_members_are_replaced_added_and_kept(toy: Path) -> None:
    result = repack(toy)
    assert result.name == "toy-1.0+igb.1-cp311-cp311-manylinux_2_36_x86_64.whl"
    with zipfile.ZipFile(result) as archive:
        assert archive.testzip() is None
        assert archive.read("toy/lib/big.so") == b"smaller"
        assert archive.read("toy/lib/new.so") == b"new"
        assert archive.read("toy/lib/kept.bin") == MEMBERS["toy/lib/kept.bin"]
        assert archive.read("toy-1.0+igb.1.dist-info/METADATA").endswith(b"1.0+igb.1\n")
        assert not [name for name in archive.namelist() if name.startswith(INFO)]


def test_record_comes_last_and_lists_every_file(toy: Path) -> None:
    with zipfile.ZipFile(repack(toy)) as archive:
        record = archive.namelist()[-1]
        assert record == "toy-1.0+igb.1.dist-info/RECORD"
        rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
        assert sorted(row[0] for row in rows) == sorted(archive.namelist())
        assert rows[-1] == [record, "", ""]


def test_the_same_input_gives_the_same_bytes(toy: Path) -> None:
    assert repack(toy, "one").read_bytes() == repack(toy, "two").read_bytes()


def test_a_failure_leaves_nothing_behind(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wheelfile, "copy_member", full)
    with pytest.raises(OSError, match="No space"):
        repack(toy)
    assert list((toy.parent / "dist").iterdir()) == []


def test_a_truncated_wheel_is_refused(toy: Path) -> None:
    toy.write_bytes(toy.read_bytes()[:-100])
    with pytest.raises(Problem, match="not a sound wheel"):
        repack(toy)


def test_a_wrong_row_is_found(toy: Path) -> None:
    broken = toy.with_name("broken.whl")
    with zipfile.ZipFile(toy) as old, zipfile.ZipFile(broken, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"other" if name == "toy/__init__.py" else old.read(name))
    with pytest.raises(Problem, match=r"toy/__init__\.py .* is not what RECORD says"):
        wheelfile.verify(broken)


def test_an_unlisted_file_is_found(toy: Path) -> None:
    with zipfile.ZipFile(toy, "a") as archive:
        archive.writestr("toy/stray.py", b"")
    with pytest.raises(Problem, match="do not list the same files"):
        wheelfile.verify(toy)
