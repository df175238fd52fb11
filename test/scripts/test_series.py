"""Import, edit, export: `make source` and `make patches` around ordinary git."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import BODY, ENGINE, Project
from igb import footprint, paths, series
from igb.errors import Problem
from igb.tree import BASE, State, Status


def refill(project: Project) -> None:
    """Import into a tree made anew."""
    project.tree.path.rename(project.root / "old")
    project.source()


def test_an_empty_series(project: Project) -> None:
    project.source()
    project.export()
    assert project.exported() == {"series": b""}
    assert project.head() == project.tree.commit_of(BASE)


def test_export_of_an_import_is_byte_identical(project: Project) -> None:
    project.two_patches()
    odd = {"new.txt": "é\r\n \n\tno newline", "dos.bat": "rem\r\nrem 2\r\n"}
    project.commit("[area] Add files", odd, f"Überall.\n\n{BODY}")
    project.commit("Remove and empty", {"build.log": ""})
    project.export()
    before, head = project.exported(), project.head()
    assert list(before) != []
    refill(project)
    assert project.head() == head or project.tree.git("diff", head) == ""
    project.tree.git("commit", "--quiet", "--amend", "--no-edit")
    project.export()
    assert project.exported() == before


def test_names_are_slugs_and_the_order_is_in_the_list(project: Project) -> None:
    project.source()
    project.edit("[autograd] Zap: a `thing`", 10)
    project.edit("Add another", 20)
    project.export()
    assert project.exported()["series"] == b"autograd-zap-a-thing.patch\nadd-another.patch\n"
    assert sorted(project.exported()) == ["add-another.patch", "autograd-zap-a-thing.patch", "series"]


def test_a_renamed_subject_renames_the_file(project: Project) -> None:
    project.two_patches()
    project.tree.git("commit", "--quiet", "--amend", "--message", f"Alter twelve\n\n{BODY}")
    project.export()
    assert sorted(project.exported()) == ["alter-twelve.patch", "change-ten.patch", "series"]


def test_export_removes_stray_patches(project: Project) -> None:
    project.two_patches()
    before = project.exported()
    (project.patches / "stray.patch").touch()
    project.export()
    assert project.exported() == before


def test_export_has_the_same_bytes_whatever_the_user_has_set(project: Project) -> None:
    project.two_patches()
    before = project.exported()
    for name, value in {
        "diff.noprefix": "true",
        "diff.context": "9",
        "diff.algorithm": "patience",
        "diff.renames": "copies",
        "format.signature": "me",
        "format.numbered": "true",
        "format.subjectPrefix": "MINE",
        "format.attach": "true",
        "format.cc": "you",
        "format.from": "Me <me@localhost>",
        "format.headers": "X-Mine: yes",
        "format.thread": "deep",
        "format.useAutoBase": "true",
        "format.outputDirectory": "/nonexistent",
    }.items():
        project.tree.git("config", name, value)
    project.export()
    assert project.exported() == before
    assert re.search(rb"^index [0-9a-f]{40}\.\.[0-9a-f]{40} 100644$", before["change-ten.patch"], re.MULTILINE)


def test_the_same_series_gives_the_same_commits(project: Project) -> None:
    project.two_patches()
    refill(project)
    first = project.head()
    project.tree.path.rename(project.root / "older")
    project.source()
    assert project.head() == first


def test_a_newer_series_is_imported_and_touches_only_what_it_changes(project: Project) -> None:
    project.two_patches()
    newer = project.exported()
    project.tree.git("reset", "--quiet", "--hard", f"{BASE}~0")
    project.export()
    untouched = (project.tree.path / "dos.bat").stat().st_mtime_ns
    for name, content in newer.items():
        (project.patches / name).write_bytes(content)
    project.source()
    assert (project.tree.path / "engine.cpp").read_text().splitlines()[11] == "changed"
    assert (project.tree.path / "dos.bat").stat().st_mtime_ns == untouched
    assert project.tree.git("status", "--porcelain") == ""


# What exists only in the tree, or only in patches/, is not overwritten.


def change_patches(project: Project) -> None:
    path = project.patches / "change-twelve.patch"
    path.write_bytes(path.read_bytes().replace(b"+changed", b"+changed again"))


def test_import_keeps_commits_that_are_not_exported(project: Project) -> None:
    project.two_patches()
    project.edit("Change thirty", 30)
    kept = project.head()
    project.source()
    assert project.head() == kept
    change_patches(project)
    with pytest.raises(Problem, match="commits that are not exported; run `make patches`"):
        project.source()
    assert project.head() == kept
    with pytest.raises(Problem, match="patches was changed since third_party/pytorch was filled"):
        project.export()
    project.source(discard=True)
    assert "changed again" in (project.tree.path / "engine.cpp").read_text()
    assert project.tree.commit_of("discarded") == kept


@pytest.mark.parametrize("name", ["engine.cpp", "untracked.cpp"])
def test_import_keeps_changes_that_are_not_committed(project: Project, name: str) -> None:
    project.two_patches()
    change_patches(project)
    (project.tree.path / name).write_text("mine\n")
    for discard in (False, True):
        with pytest.raises(Problem, match=rf"not committed; commit or remove them, then rerun\n.* {name}"):
            project.source(discard)
    assert (project.tree.path / name).read_text() == "mine\n"


def test_import_keeps_a_rebase(project: Project) -> None:
    project.two_patches()
    change_patches(project)
    with pytest.raises(Problem):
        project.tree.git("rebase", "--exec", "false", BASE)
    for step in (project.source, project.export):
        with pytest.raises(Problem, match="`git rebase` waits in"):
            step()


def test_export_wants_everything_committed(project: Project) -> None:
    project.two_patches()
    before = project.exported()
    (project.tree.path / "forgotten.cpp").touch()
    with pytest.raises(Problem, match=r"forgotten\.cpp"):
        project.export()
    assert project.exported() == before


def test_export_needs_a_tree(project: Project) -> None:
    with pytest.raises(Problem, match="run `make source` first"):
        project.export()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.edit("fixup! Change ten", 20), r"`fixup! Change ten` is to be melted .* --autosquash base"),
        (lambda p: p.edit("change TEN", 20), "several commits would be exported as change-ten.patch"),
        (lambda p: p.tree.git("commit", "--allow-empty", "-m", "Nothing"), "commits that change nothing"),
        (lambda p: p.tree.git("merge", "--no-ff", "-m", "m", side_branch(p)), "no straight line of commits"),
        (lambda p: p.tree.git("checkout", "--orphan", "x") + p.tree.git("commit", "-m", "x"), "no straight line"),
    ],
    ids=["fixup", "same name", "empty", "merge", "not on the base"],
)
def test_export_refuses(project: Project, spoil: Callable[[Project], None], message: str) -> None:
    project.two_patches()
    before = project.exported()
    spoil(project)
    with pytest.raises(Problem, match=message):
        project.export()
    assert project.exported() == before


def side_branch(project: Project) -> str:
    head = project.head()
    project.edit("Aside", 30)
    side = project.head()
    project.tree.git("reset", "--quiet", "--hard", head)
    return side


# Patches that do not apply.


def spoil_context(project: Project) -> None:
    """What an application with fuzz would take: one line of context is wrong."""
    path = project.patches / "change-twelve.patch"
    path.write_bytes(path.read_bytes().replace(b" line 15\n", b" line fifteen\n"))


def spoil_order(project: Project) -> None:
    (project.patches / "series").write_text("change-twelve.patch\nchange-ten.patch\n")


@pytest.mark.parametrize("spoil", [spoil_context, spoil_order])
def test_a_conflict_names_the_patch_the_file_and_the_hunk(project: Project, spoil: Callable[[Project], None]) -> None:
    project.two_patches()
    spoil(project)
    with pytest.raises(Problem) as caught:
        project.source()
    lines = str(caught.value).splitlines()
    assert lines[0] == "change-twelve.patch does not apply with `git am`: this hunk does not fit engine.cpp at line 9"
    assert lines[1].startswith("@@ -9,7 +9,7 @@")
    assert "+changed" in lines
    assert any("am --continue" in line for line in lines)
    assert (project.tree.path / "engine.cpp.rej").exists()


def test_a_conflict_is_resolved_with_git_and_exported(project: Project) -> None:
    project.two_patches()
    project.edit("Change thirty", 30)
    project.export()
    spoil_context(project)
    with pytest.raises(Problem):
        project.source()
    with pytest.raises(Problem, match=r"resolve it, .*or give the resolution up with `make source ARGS=--discard`"):
        project.source()
    engine = project.tree.path / "engine.cpp"
    engine.write_text(engine.read_text().replace("line 12\n", "resolved\n"))
    project.tree.git("add", "--all")
    project.tree.git("am", "--continue")
    project.export()
    assert project.exported()["series"] == b"change-ten.patch\nchange-twelve.patch\nchange-thirty.patch\n"
    assert b"+resolved" in project.exported()["change-twelve.patch"]
    project.source()
    refill(project)
    assert "resolved\n" in engine.read_text()


def test_a_conflict_is_given_up(project: Project) -> None:
    project.two_patches()
    good = project.exported()
    spoil_context(project)
    for discard in (False, True):
        with pytest.raises(Problem, match="does not apply"):
            project.source(discard)
    project.tree.git("am", "--abort")
    with pytest.raises(Problem, match=r"stopped at a patch that does not apply; run `make source`"):
        project.export()
    for name, content in good.items():
        (project.patches / name).write_bytes(content)
    project.source()
    assert project.tree.state.status is Status.IN_STEP
    project.export()
    assert project.exported() == good


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda folder: (folder / "change-ten.patch").unlink(), "series:1: change-ten.patch is listed but missing"),
        (lambda folder: (folder / "stray.txt").touch(), r"patches/stray\.txt:1: not listed in patches/series"),
        (
            lambda folder: (folder / "series").write_text("change-ten.patch\n" * 2),
            "series:2: change-ten.patch is listed",
        ),
        (lambda folder: (folder / "series").write_text("../x.patch\n"), "series:1: `../x.patch` is not the name of"),
        (lambda folder: (folder / "series").unlink(), "series:1: there is no such file"),
    ],
    ids=["missing", "stray", "twice", "no name", "no list"],
)
def test_a_disordered_series_is_not_imported(project: Project, spoil: Callable[[Path], None], problem: str) -> None:
    project.two_patches()
    head = project.head()
    spoil(project.patches)
    with pytest.raises(Problem, match=problem):
        project.source()
    assert project.head() == head


# Killed at any point.


def test_a_killed_import_is_taken_up(project: Project, kills: Callable[..., Iterator[int]]) -> None:
    project.two_patches()
    first, second = project.exported(), project.head()
    project.tree.git("reset", "--quiet", "--hard", "HEAD~1")
    project.edit("Change twenty", 20)
    project.export()
    other, third = project.exported(), project.head()
    targets = []

    def put(files: dict[str, bytes]) -> None:
        for path in project.patches.iterdir():
            path.unlink()
        for name, content in files.items():
            (project.patches / name).write_bytes(content)

    put(first)
    for _ in kills(project.source):
        project.source()
        assert project.tree.git("status", "--porcelain") == ""
        assert project.tree.git("diff", second) == ""
        targets.append(second)
        put(other)
        project.source()
        assert project.tree.git("diff", third) == ""
        put(first)
    assert len(targets) > 10


def test_a_killed_move_of_the_tree_is_taken_up(project: Project) -> None:
    """As if git itself had been killed with half of the files written."""
    project.two_patches()
    head = project.head()
    change_patches(project)
    project.tree.state = State(Status.IMPORTING, head, "")
    (project.tree.path / ".git" / "index.lock").touch()
    (project.tree.path / "engine.cpp").write_text("half of")
    (project.tree.path / "new.cpp").touch()
    project.source()
    lines = (project.tree.path / "engine.cpp").read_text().splitlines()
    assert (lines[9], lines[11], len(lines)) == ("changed", "changed again", len(ENGINE.splitlines()))
    assert project.tree.git("status", "--porcelain") == ""


def test_a_killed_export_is_taken_up(project: Project, kills: Callable[..., Iterator[int]]) -> None:
    project.two_patches()
    old = project.exported()
    before = project.tree.state
    project.tree.git("reset", "--quiet", "--hard", BASE)
    for subject, line in {"Change twelve": 12, "Change ten": 10, "Change thirty": 30}.items():
        project.edit(subject, line, "otherwise")
    head, new = project.head(), project.tree.export("HEAD")
    rounds = 0
    for _ in kills(project.export):
        rounds += 1
        if project.tree.state.status is Status.EXPORTING:
            with pytest.raises(Problem, match="an export was cut short; run `make patches` again"):
                project.source()
        assert project.head() == head
        project.export()
        assert series.read(paths.PATCHES) == new
        assert sorted(path.name for path in project.root.glob("patches*")) == ["patches"]
        for path in project.patches.iterdir():
            path.unlink()
        for name, content in old.items():
            (project.patches / name).write_bytes(content)
        project.tree.state = before
    assert rounds > 10


# The counts in the README.


def test_the_counts_in_the_readme_are_refreshed(project: Project) -> None:
    readme = project.root / "README.md"
    readme.write_text(f"before\n{footprint.BEGIN}\nstale\n{footprint.END}\nafter\n")
    project.two_patches()
    project.commit("Add a file", {"new.py": "one\ntwo\n", "dos.bat": ""})
    project.export()
    lines = readme.read_text().splitlines()
    assert (lines[:2], lines[-2:]) == (["before", footprint.BEGIN], [footprint.END, "after"])
    assert lines[2:-2] == [
        "| the series | 3 patches |",
        "|---|---|",
        "| new files | 1, with 2 lines |",
        "| upstream's files touched | 2: 2 lines added, 3 removed in 2 hunks |",
        "| of these C++ | 2 lines added, 2 removed in 1 hunk |",
    ]


def test_a_readme_without_markers_is_left_alone(project: Project) -> None:
    readme = project.root / "README.md"
    readme.write_text("nothing to fill in\n")
    project.two_patches()
    assert readme.read_text() == "nothing to fill in\n"
