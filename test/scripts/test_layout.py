"""The comparison of types, tried on headers of a few lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from igb import layout
from igb.errors import Problem

TASK = """
int anchor;  // without a variable or function g++ describes nothing
namespace torch {{
struct Buffer {{ void *data; }};
struct Base {{ virtual int run(); {base} int depth; }};
struct Task : Base {{ {first} {id}; Buffer *buffer; bool flags; {last} }};
}}
"""
PLAIN = {"base": "", "first": "", "id": "int id", "last": ""}


def types(folder: Path, name: str, **changes: str) -> Path:
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(TASK.format(**{**PLAIN, **changes}))
    flags = ["-g", "-fno-eliminate-unused-debug-types", "-femit-class-debug-always", "-fPIC", "-shared"]
    subprocess.run(["g++", *flags, source, "-o", library], check=True)
    return library


def check(folder: Path, source: str = "", replaced: tuple[str, ...] = (), **changes: str) -> None:
    """Compare the types with changed ones; ``source`` is a translation unit of the tree."""
    unit = folder / "torch" / "csrc" / "user.cpp"
    unit.parent.mkdir(parents=True, exist_ok=True)
    unit.write_text(source)
    layout.check(types(folder, "before"), types(folder, "after", **changes), folder, replaced)


def test_no_change_is_fine(tmp_path: Path) -> None:
    check(tmp_path, "Task task;")


def test_a_member_at_the_end_is_fine(tmp_path: Path) -> None:
    check(tmp_path, "int f(Task *task, const Task& other, std::shared_ptr<torch::Task> t);", last="int more;")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"first": "int more;"}, "torch::Task of the patched headers has moved, changed or lost"),
        ({"id": "float id"}, "torch::Task of the patched headers has moved, changed or lost id"),
        ({"base": "long more;"}, "torch::Base of the patched headers has moved, changed or lost depth"),
        ({"base": "virtual int walk();"}, "torch::Base of the patched headers has other virtual functions"),
    ],
)
def test_what_breaks_users_is_refused(tmp_path: Path, changes: dict[str, str], complaint: str) -> None:
    with pytest.raises(Problem, match=complaint):
        check(tmp_path, **changes)


@pytest.mark.parametrize(
    "source",
    ["Task task;", "auto task = std::make_shared<torch::Task>();", "auto size = sizeof(Task);", "std::list<Task> all;"],
)
def test_a_user_of_the_size_has_to_be_replaced(tmp_path: Path, source: str) -> None:
    text = f"// a Task in a comment\n{source}\n"
    check(tmp_path / "replaced", text, ("torch/csrc/user.cpp",), last="int more;")
    with pytest.raises(Problem, match=r"torch::Task grows.*\n  torch/csrc/user\.cpp:2"):
        check(tmp_path / "kept", text, last="int more;")


def test_a_type_that_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torch" / "csrc").mkdir(parents=True)
    before = types(tmp_path, "before", last="}; struct Extra { int x;")
    with pytest.raises(Problem, match="torch::Extra is gone"):
        layout.check(before, types(tmp_path, "after"), tmp_path, ())
