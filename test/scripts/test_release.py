"""Obtaining the release wheel: pip and the wheels are miniatures here."""

from __future__ import annotations

import hashlib
import logging
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest
from igb import paths, pins, release
from igb.errors import Problem

NAME = "torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl"
MEMBERS = [*(f"torch/lib/{name}" for name in release.LIBRARIES), "torch/include/ATen/ATen.h", "torch/__init__.py"]

# Stands for the user's interpreter: tells its tags, and for `-m pip download` copies a wheel and counts.
INTERPRETER = """#!/bin/sh
if [ "$1" = -c ]; then echo cp311 x86_64; exit; fi
echo pip >> {folder}/calls
while [ "$1" != --dest ]; do shift; done
cp {folder}/index/*.whl "$2"
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder from which pip takes its wheel; it has the pinned one."""
    folder = tmp_path / "index"
    folder.mkdir()
    make_wheel(folder / NAME)
    python = tmp_path / "python"
    python.write_text(INTERPRETER.format(folder=tmp_path))
    python.chmod(0o755)
    monkeypatch.setattr(paths, "PYTHON", python)
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    release.interpreter_tags.cache_clear()
    return folder


def make_wheel(path: Path, members: list[str] = MEMBERS) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in members:
            archive.writestr(name, f"content of {name}")


def pinned(index: Path) -> tuple[pins.Wheel, ...]:
    digest = hashlib.sha256((index / NAME).read_bytes()).hexdigest()
    other = pins.Wheel("torch-2.6.0-cp39-cp39-manylinux1_x86_64.whl", "0" * 64)
    return (other, pins.Wheel(NAME, digest))


def downloads(index: Path) -> int:
    calls = index.with_name("calls")
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_it_is_downloaded_once(index: Path) -> None:
    for _ in range(2):
        obtained = release.obtain("2.6.0", pinned(index))
        assert obtained.wheel == paths.CACHE / NAME
    assert downloads(index) == 1


def test_libraries_and_headers_are_unpacked(index: Path) -> None:
    folder = release.obtain("2.6.0", pinned(index)).folder
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert found == sorted(set(MEMBERS) - {"torch/__init__.py"})


def test_another_wheel_than_the_pinned_is_refused(index: Path) -> None:
    wheels = pinned(index)
    make_wheel(index / NAME, MEMBERS[:1])
    with pytest.raises(Problem, match=r"(?s)is not the pinned .*--wheel PATH.*sha256 wanted.*sha256 found"):
        release.obtain("2.6.0", wheels)
    assert not (paths.CACHE / NAME).exists()


def test_a_spoilt_copy_in_the_cache_is_refused(index: Path) -> None:
    wheels = pinned(index)
    release.obtain("2.6.0", wheels)
    (paths.CACHE / NAME).write_bytes(b"spoilt")
    with pytest.raises(Problem, match="remove it and rerun"):
        release.obtain("2.6.0", wheels)


def test_a_failing_pip_is_one_problem(index: Path) -> None:
    wheels = pinned(index)
    (index / NAME).unlink()
    with pytest.raises(Problem, match=r"pip download .* failed .*check the network"):
        release.obtain("2.6.0", wheels)


def test_a_named_wheel_is_used_though_unknown(index: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = index / NAME.replace("2.6.0", "2.6.0+cu126")
    make_wheel(named, [*MEMBERS, "torch/extra.py"])
    with caplog.at_level(logging.WARNING, logger="igb"):
        assert release.obtain("2.6.0", pinned(index), named).wheel == named
    assert "not a wheel that the pins know" in caplog.text
    assert downloads(index) == 0


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("torch-2.5.1-cp311-cp311-manylinux1_x86_64.whl", "the series is for torch 2.6.0"),
        ("torch-2.6.0-cp312-cp312-manylinux1_x86_64.whl", "with the interpreter it is for"),
        ("torch-2.6.0-cp311-cp311-manylinux_2_28_aarch64.whl", "with the interpreter it is for"),
        ("torch.whl", "is not the name of a wheel"),
    ],
)
def test_a_named_wheel_that_does_not_fit_is_refused(index: Path, name: str, complaint: str) -> None:
    make_wheel(index / name)
    with pytest.raises(Problem, match=complaint):
        release.obtain("2.6.0", pinned(index), index / name)


def test_a_named_wheel_that_is_not_there(index: Path) -> None:
    with pytest.raises(Problem, match="is not a file"):
        release.obtain("2.6.0", pinned(index), index / "absent.whl")


def test_an_unpinned_interpreter(index: Path) -> None:
    with pytest.raises(Problem, match="name one with --wheel"):
        release.obtain("2.6.0", pinned(index)[:1])


def test_a_wheel_without_the_libraries_is_refused(index: Path) -> None:
    named = index / "torch-2.6.0+cpu-cp311-cp311-manylinux1_x86_64.whl"
    make_wheel(named, MEMBERS[3:])
    with pytest.raises(Problem, match=r"has no torch/lib/libc10\.so"):
        release.obtain("2.6.0", pinned(index), named)


def test_killed_anywhere_and_run_again(index: Path, kills: Callable[[Callable[[], None]], Iterator[int]]) -> None:
    wheels = pinned(index)

    def step() -> None:
        release.obtain("2.6.0", wheels)

    for calls in kills(step):
        assert calls < 100
    step()
    test_libraries_and_headers_are_unpacked(index)
