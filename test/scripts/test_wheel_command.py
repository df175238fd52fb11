"""What `make wheel` decides before and around the build itself."""

from __future__ import annotations

import os
import threading
from collections import namedtuple
from pathlib import Path

import pytest
from igb import compile, elf, log, paths
from igb.commands import wheel
from igb.compile import Build, Replacement
from igb.errors import Problem
from igb.lock import locked
from igb.release import Release
from igb.stamp import Stamp

Usage = namedtuple("Usage", ["total", "used", "free"])
RELEASE = "torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl"


def program(folder: Path, *defined: str) -> Path:
    """A compiler that defines these macros."""
    path = folder / "g++"
    path.write_text("#!/bin/sh\n" + "".join(f"echo '#define {macro}'\n" for macro in defined))
    path.chmod(0o755)
    return path


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Problem, match=r"no C\+\+ compiler no-such-compiler; install g\+\+ 9 or newer"):
        compile.find_compiler()


@pytest.mark.parametrize(
    ("macros", "complaint"),
    [
        (["__GNUC__ 8"], "is GCC 8, too old"),
        (["__GNUC__ 4", "__clang__ 1"], "is not GCC"),
        ([], "is not GCC"),
    ],
)
def test_an_unfit_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, macros: list[str], complaint: str) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, *macros)))
    with pytest.raises(Problem, match=complaint):
        compile.find_compiler()


def test_the_oldest_compiler_is_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(tmp_path, "__GNUC__ 9")
    monkeypatch.setenv("CXX", str(path))
    assert compile.find_compiler() == path


def test_no_headers_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {tmp_path}\n")
    python.chmod(0o755)
    monkeypatch.setattr(paths, "PYTHON", python)
    with pytest.raises(Problem, match=r"has no Python\.h; install the headers"):
        compile.python_include()


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 17}.__getitem__)
    with pytest.raises(Problem, match=r"0\.5 GB of memory, and 2\.1 GB are needed"):
        compile.jobs()


def test_memory_limits_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 5 << 18}.__getitem__)
    assert compile.jobs() == 2


def test_too_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    monkeypatch.setattr(paths, "DIST", tmp_path / "dist")
    monkeypatch.setattr(wheel.shutil, "disk_usage", lambda _: Usage(1 << 40, 1 << 40, 1 << 30))
    with pytest.raises(Problem, match=r"1\.1 GB left"):
        wheel.check_machine()


@pytest.mark.parametrize(
    ("name", "needs", "wanted"),
    [
        (RELEASE, (2, 17), "torch-2.6.0+igb.1-cp311-cp311-manylinux1_x86_64.whl"),
        (RELEASE, (2, 34), "torch-2.6.0+igb.1-cp311-cp311-manylinux_2_36_x86_64.whl"),
        (RELEASE.replace("0-", "0+cu126-"), (2, 17), "torch-2.6.0+cu126.igb.1-cp311-cp311-manylinux1_x86_64.whl"),
        (
            "torch-2.6.0-cp311-cp311-manylinux_2_28_aarch64.whl",
            (2, 34),
            "torch-2.6.0+igb.1-cp311-cp311-manylinux_2_36_aarch64.whl",
        ),
    ],
)
def test_the_name_tells_the_version_and_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, needs: tuple[int, ...], wanted: str
) -> None:
    old, new = tmp_path / "torch" / "lib" / "libold.so", tmp_path / "libnew.so"
    old.parent.mkdir(parents=True)
    old.touch()
    monkeypatch.setattr(elf, "newest_versions", {old: {"GLIBC": (2, 17)}, new: {"GLIBC": needs}}.__getitem__)
    monkeypatch.setattr(os, "confstr", {"CS_GNU_LIBC_VERSION": "glibc 2.36"}.__getitem__)
    build = Build((Replacement(old, new, ()),), old, old)
    assert wheel.name_of(Release(Path(name), tmp_path, ""), build)[0].file_name == wanted


def test_a_second_run_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, order = threading.Event(), []
    monkeypatch.setattr(log.logger, "info", lambda *_: waits.set())

    def second() -> None:
        with locked(tmp_path / "lock"):
            order.append("second")

    thread = threading.Thread(target=second)
    with locked(tmp_path / "lock"):
        thread.start()
        assert waits.wait(60)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_step_is_due_when_an_input_changes(tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_text("one")
    stamp = Stamp(tmp_path / "new" / "stamp", "text", file)
    assert not stamp.holds()
    stamp.set()
    assert Stamp(stamp.path, "text", file).holds()
    assert not Stamp(stamp.path, "other", file).holds()
    file.write_text("two")
    assert not Stamp(stamp.path, "text", file).holds()
    stamp.clear()
    assert not stamp.path.exists()
