"""What of the series gets into the wheel besides compiled code."""

from __future__ import annotations

import zipfile
from pathlib import Path

import conftest
import pytest
from igb import payload
from igb.errors import Problem
from igb.release import Release
from igb.wheelfile import Wheel

TEMPLATE = "class Base:\n    first: int\n    second: int\n    third: int\n"
SOURCES = {
    "torch/autograd/function.py": "old\n",
    "torch/_C/__init__.pyi.in": f"# ${{generated}}\n{TEMPLATE}",
    "torch/csrc/autograd/engine.cpp": "old\n",
    "torch/csrc/autograd/engine.h": "old\n",
    "torch/csrc/api/include/torch/all.h": "old\n",
    "aten/src/ATen/Tensor.h": "old\n",
    "aten/src/ATen/native/native_functions.yaml": "old\n",
    "test/test_autograd.py": "old\n",
}
INFO = "torch-2.6.0.dist-info/"
MEMBERS = {
    "torch/_C/__init__.pyi": f"# all that\n# was generated\n{TEMPLATE}",
    "torch/version.py": "__version__ = '2.6.0+cu124'\ndebug = False\n",
    f"{INFO}METADATA": "Name: torch\nVersion: 2.6.0\nSummary: Version: of things\n",
    f"{INFO}WHEEL": "Wheel-Version: 1.0\nTag: cp311-cp311-linux_x86_64\n",
}


@pytest.fixture
def patched(project: conftest.Project) -> conftest.Project:
    project.archive.write_bytes(conftest.packed({**conftest.FILES, **SOURCES}))
    project.pin()
    project.source()
    return project


@pytest.fixture
def release(tmp_path: Path) -> Release:
    wheel = tmp_path / "torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in MEMBERS.items():
            archive.writestr(name, text)
    return Release(wheel, tmp_path / "unpacked", "")


def files(project: conftest.Project, release: Release, compiled: tuple[str, ...] = ()) -> dict[str, bytes]:
    return payload.files(project.tree, release, payload.touched(project.tree), compiled)


def test_python_files_and_headers_ship_where_the_wheel_has_them(patched: conftest.Project, release: Release) -> None:
    names = {
        "torch/autograd/function.py": "torch/autograd/function.py",
        "torch/csrc/autograd/engine.h": "torch/include/torch/csrc/autograd/engine.h",
        "torch/csrc/autograd/new.h": "torch/include/torch/csrc/autograd/new.h",
        "torch/csrc/api/include/torch/all.h": "torch/include/torch/all.h",
        "aten/src/ATen/Tensor.h": "torch/include/ATen/Tensor.h",
    }
    patched.commit("Change files", {name: f"new {name}\n" for name in names})
    assert files(patched, release) == {member: f"new {name}\n".encode() for name, member in names.items()}


def test_tests_and_compiled_units_stay_out(patched: conftest.Project, release: Release) -> None:
    unit = "torch/csrc/autograd/engine.cpp"
    patched.commit("Change files", {unit: "new\n", "test/test_autograd.py": "new\n"})
    assert files(patched, release, (unit,)) == {}


@pytest.mark.parametrize("path", ["torch/csrc/autograd/engine.cpp", "aten/src/ATen/native/native_functions.yaml"])
def test_what_needs_a_full_build_is_refused(patched: conftest.Project, release: Release, path: str) -> None:
    patched.commit("Change a file", {path: "new\n"})
    with pytest.raises(Problem, match=f"changes {path}, and relinking cannot"):
        files(patched, release)


def test_a_removed_file_is_refused(patched: conftest.Project, release: Release) -> None:
    patched.tree.git("rm", "--quiet", "torch/autograd/function.py")
    with pytest.raises(Problem, match=r"removes torch/autograd/function\.py"):
        files(patched, release)


def test_what_is_not_committed_yet_counts(patched: conftest.Project, release: Release) -> None:
    (patched.tree.path / "torch/autograd/function.py").write_text("edited\n")
    (patched.tree.path / "torch/autograd/new.py").write_text("added\n")
    assert files(patched, release) == {
        "torch/autograd/function.py": b"edited\n",
        "torch/autograd/new.py": b"added\n",
    }


def test_the_generated_stub_gets_the_change_of_its_template(patched: conftest.Project, release: Release) -> None:
    template = SOURCES["torch/_C/__init__.pyi.in"].replace("third", "new: int\n    third")
    patched.commit("Change the stub", {"torch/_C/__init__.pyi.in": template})
    wanted = MEMBERS["torch/_C/__init__.pyi"].replace("third", "new: int\n    third")
    assert files(patched, release) == {"torch/_C/__init__.pyi": wanted.encode()}


def test_a_change_of_generated_text_is_refused(patched: conftest.Project, release: Release) -> None:
    template = SOURCES["torch/_C/__init__.pyi.in"].replace("${generated}", "${other}")
    patched.commit("Change the stub", {"torch/_C/__init__.pyi.in": template})
    with pytest.raises(Problem, match="of the wheel differs where the series changes its template"):
        files(patched, release)


def test_version_and_tags_are_told_everywhere(release: Release) -> None:
    members = payload.renamed(release, Wheel("torch", "2.6.0+igb.1", "cp311-cp311-manylinux_2_36_x86_64"))
    assert {name: text.decode() for name, text in members.items()} == {
        f"{INFO}METADATA": "Name: torch\nVersion: 2.6.0+igb.1\nSummary: Version: of things\n",
        f"{INFO}WHEEL": "Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_36_x86_64\n",
        "torch/version.py": "__version__ = '2.6.0+igb.1'\ndebug = False\n",
    }


def test_a_wheel_that_does_not_tell_its_version_is_refused(release: Release) -> None:
    with zipfile.ZipFile(release.wheel, "w") as archive:
        for name, text in MEMBERS.items():
            archive.writestr(name, text.replace("__version__", "version"))
    with pytest.raises(Problem, match=r"torch/version\.py of .* has 0 lines"):
        payload.renamed(release, Wheel("torch", "2.6.0+igb.1", "cp311-cp311-manylinux1_x86_64"))
