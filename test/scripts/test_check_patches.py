"""`make check-patches`: each way in which a series can be bad is refused by a message that names the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Project
from igb import diff, footprint, linters, patch_lint
from igb.commands import check_patches
from igb.errors import Problem

TRAILERS = """\
Upstream-Status: Submitted, as a pull request
Drop-When: it is merged
"""
PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A Writer <writer@localhost>
Date: Thu, 1 Jan 2026 00:00:00 +0000
Subject: [PATCH] [autograd] Lend the buffer

It is needed.

{trailers}
diff --git a/engine.cpp b/engine.cpp
index {zeros}..{zeros} 100644
--- a/engine.cpp
+++ b/engine.cpp
@@ -1 +1,2 @@
 one
+two
diff --git a/new.py b/new.py
new file mode 100644
index {zeros}..{zeros}
--- /dev/null
+++ b/new.py
@@ -0,0 +1 @@
+three
""".format(trailers=TRAILERS, zeros="0" * 40)
NAME = "autograd-lend-the-buffer.patch"


def lint(folder: Path, patch: str) -> list[str]:
    (folder / "series").write_text(f"{NAME}\n")
    (folder / NAME).write_bytes(patch.encode())
    return patch_lint.check(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "patches").mkdir()
    return tmp_path / "patches"


def test_a_good_patch(folder: Path) -> None:
    assert lint(folder, PATCH) == []


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("Lend the buffer", "Lend " + "the buffer " * 7, "4: the subject has "),
        ("] Lend", "] lend", "4: the subject does not begin with a capital letter"),
        ("the buffer\n", "the buffer.\n", "4: the subject ends with a period"),
        ("Lend the", "Return the", "4: the subject belongs to a file named autograd-return-the-buffer.patch"),
        ("Lend the buffer", "Lend the buffer 2/3", "4: `2/3` counts patches"),
        ("It is needed.", "It is needed by patch 3.", "6: `patch 3` counts patches"),
        ("It is needed.", "word " * 16, "6: the line has 80 characters"),
        ("It is needed.\n\n", "", "8: there is no body; say why the patch exists"),
        (f"It is needed.\n\n{TRAILERS}", "", "6: there is no body; say why the patch exists"),
        ("Upstream-Status: Submitted, as a pull request\n", "", "9: the trailer `Upstream-Status:` is missing"),
        ("Drop-When: it is merged\n", "", "9: the trailer `Drop-When:` is missing"),
        ("it is merged\n", "\n", "10: the trailer `Drop-When:` is missing"),
        ("Submitted, as a pull request", "Soon, I hope", "8: `Upstream-Status:` does not begin with one of"),
        ("Submitted, as a pull request", "Submitted", "8: `Upstream-Status:` does not begin with one of"),
        ("+two", "+two ", "17: engine.cpp gets a line with trailing whitespace"),
        ("+two", "+two\r", "17: engine.cpp gets a line with a carriage return"),
        ("+two", "+  \ttwo", "17: engine.cpp gets a line with a space before a tab"),
        ("+two", "+<<<<<<< ours", "17: engine.cpp gets a conflict marker"),
        ("+three\n", "+three\n\\ No newline at end of file\n", "24: new.py gets a last line without a newline"),
        ("new.py", "torch/csrc/new.cpp", "18: torch/csrc/new.cpp is new and not listed in build_variables.bzl"),
        ("new.py", "test/x/test_new.py", '18: test/x/test_new.py does not begin with `# Owner(s): ["..."]`'),
        ("Lend the", "L\udcffnd the", "4: not UTF-8"),
    ],
)
def test_a_bad_patch(folder: Path, old: str, new: str, finding: str) -> None:
    assert old in PATCH
    (folder / "series").write_text(f"{NAME}\n")
    (folder / NAME).write_bytes(PATCH.replace(old, new).encode(errors="surrogateescape"))
    findings = patch_lint.check(folder)
    assert any(text.startswith(f"patches/{NAME}:{finding}") for text in findings), findings


def test_trailers_may_be_continued_and_subjects_folded(folder: Path) -> None:
    folded = PATCH.replace("[autograd] Lend the", "[autograd] Lend\n the").replace("as a pull", "as\n a pull")
    assert lint(folder, folded) == []


def test_a_listed_source_and_an_owned_test_are_fine(folder: Path) -> None:
    added = "".join(
        f"diff --git a/{path} b/{path}\n{mode}--- a/{path}\n+++ b/{path}\n@@ -0,0 +1 @@\n+{line}\n"
        for path, mode, line in [
            ("build_variables.bzl", "", '    "torch/csrc/new.cpp",'),
            ("torch/csrc/new.cpp", "new file mode 100644\n", "int x;"),
            ("test/test_new.py", "new file mode 100644\n", '# Owner(s): ["module: autograd"]'),
        ]
    )
    assert lint(folder, PATCH + added) == []


# On the base.


def finding(project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is printed, with upstream's linters replaced by one that finds nothing."""
    monkeypatch.setattr(linters, "upstream", lambda tree, changes: [])
    capsys.readouterr()
    try:
        check_patches.run(None)
    except Problem as problem:
        return capsys.readouterr().out.splitlines() or [str(problem)]
    return []


@pytest.fixture
def findings(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[], list[str]]:
    return lambda: finding(project, monkeypatch, capsys)


def replace(path: Path, old: bytes, new: bytes) -> None:
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


def test_a_good_series(project: Project, findings: Callable[[], list[str]]) -> None:
    project.two_patches()
    assert findings() == []


def test_an_empty_series(project: Project, findings: Callable[[], list[str]]) -> None:
    project.source()
    assert findings() == []


def test_what_is_in_the_tree_does_not_matter(project: Project, findings: Callable[[], list[str]]) -> None:
    project.two_patches()
    project.edit("Change thirty", 30)
    (project.tree.path / "engine.cpp").write_text("mine\n")
    assert findings() == []
    assert (project.tree.path / "engine.cpp").read_text() == "mine\n"


def test_it_needs_the_base(project: Project, findings: Callable[[], list[str]]) -> None:
    assert findings() == ["third_party/pytorch does not exist; run `make source` first"]


def test_fuzz(project: Project, findings: Callable[[], list[str]]) -> None:
    project.two_patches()
    replace(project.patches / "change-twelve.patch", b" line 15\n", b" line fifteen\n")
    assert findings() == ["patches/change-twelve.patch:15: this hunk does not fit engine.cpp at line 9"]


def test_an_offset(project: Project, findings: Callable[[], list[str]]) -> None:
    project.two_patches()
    replace(project.patches / "change-twelve.patch", b"@@ -9,7 +9,7 @@", b"@@ -8,7 +8,7 @@")
    assert findings() == [
        "patches/change-twelve.patch:15: not as `make patches` writes it; import and export the series again"
    ]


def test_a_wrong_order(project: Project, findings: Callable[[], list[str]]) -> None:
    project.two_patches()
    (project.patches / "series").write_text("change-twelve.patch\nchange-ten.patch\n")
    assert findings() == ["patches/change-twelve.patch:15: this hunk does not fit engine.cpp at line 9"]


def test_a_missing_file(project: Project, findings: Callable[[], list[str]]) -> None:
    project.two_patches()
    (project.patches / "change-ten.patch").unlink()
    assert findings() == ["patches/series:1: change-ten.patch is listed but missing"]


def test_a_stray_file(project: Project, findings: Callable[[], list[str]]) -> None:
    project.two_patches()
    (project.patches / "change-ten.patch.orig").touch()
    assert findings() == ["patches/change-ten.patch.orig:1: not listed in patches/series"]


def test_a_reordered_export(project: Project, findings: Callable[[], list[str]]) -> None:
    """The files of one patch in another order apply as well, but are not what would be written."""
    project.source()
    project.commit("Add files", {"a.txt": "a\n", "b.txt": "b\n"})
    project.export()
    path = project.patches / "add-files.patch"
    message, first, second = path.read_text().split("diff --git ")
    path.write_text(f"{message}diff --git {second.rstrip()}\ndiff --git {first.rstrip()}\n\n")
    assert findings() == [
        "patches/add-files.patch:11: not as `make patches` writes it; import and export the series again"
    ]


def test_a_changed_header(project: Project, findings: Callable[[], list[str]]) -> None:
    project.two_patches()
    replace(project.patches / "change-ten.patch", b"[PATCH] ", b"[PATCH 1/2] ")
    assert "patches/change-ten.patch:4: the subject does not begin with a capital letter" in findings()


def test_two_patches_in_one_file(project: Project, findings: Callable[[], list[str]]) -> None:
    project.two_patches()
    first, second = project.patches / "change-ten.patch", project.patches / "change-twelve.patch"
    first.write_bytes(first.read_bytes() + second.read_bytes())
    second.unlink()
    (project.patches / "series").write_text("change-ten.patch\n")
    assert "patches/series:1: the 1 patches make 2 commits" in findings()


def test_trailing_whitespace(project: Project, findings: Callable[[], list[str]]) -> None:
    project.source()
    project.edit("Change ten", 10, "changed ")
    project.export()
    assert findings() == ["patches/change-ten.patch:20: engine.cpp gets a line with trailing whitespace"]


def test_an_undeclared_new_file(project: Project, findings: Callable[[], list[str]]) -> None:
    project.source()
    project.commit("Add a source", {"torch/csrc/new.cpp": "int x;\n"})
    project.export()
    assert findings() == [
        "patches/add-a-source.patch:11: torch/csrc/new.cpp is new and not listed in build_variables.bzl"
    ]
    listed = 'sources = [\n    "engine.cpp",\n    "torch/csrc/new.cpp",\n]\n'
    project.commit("Declare the source", {"build_variables.bzl": listed})
    project.export()
    assert findings() == []


def test_a_message_without_reasons(project: Project, findings: Callable[[], list[str]]) -> None:
    project.source()
    project.edit("Change ten", 10, body="")
    project.export()
    assert findings() == [
        "patches/change-ten.patch:6: the trailer `Drop-When:` is missing",
        "patches/change-ten.patch:6: the trailer `Upstream-Status:` is missing",
        "patches/change-ten.patch:6: there is no body; say why the patch exists",
    ]


def test_stale_counts_in_the_readme(project: Project, findings: Callable[[], list[str]]) -> None:
    project.two_patches()
    readme = project.root / "README.md"
    readme.write_text(f"text\n{footprint.BEGIN}\n{footprint.END}\n")
    assert findings() == ["README.md:2: the counts of the series are stale; run `make patches`"]
    project.export()
    assert findings() == []


# Upstream's linters.


@pytest.fixture
def lintrunner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a lintrunner in place that gives these messages and this exit status."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setattr(linters.launcher, "environment", lambda name: tools / "python")

    def install(messages: list[dict[str, object]], status: int = 1, error: str = "") -> None:
        (tools / "messages").write_text("".join(f"{json.dumps(message)}\n" for message in messages))
        lines = [
            f'printf "%s\\n" "$@" > {tools}/arguments',
            f"cat {tools}/messages",
            f'echo "{error}" >&2',
            f"exit {status}",
        ]
        (tools / "lintrunner").write_text("\n".join(["#!/bin/sh", *lines, ""]))
        (tools / "lintrunner").chmod(0o755)

    return install


def message(**entries: object) -> dict[str, object]:
    return {"path": "engine.cpp", "line": None, "code": "CODE", "name": "name", "description": "it is\nbad", **entries}


def upstream(project: Project) -> list[str]:
    with project.tree.scratch("HEAD") as scratch:
        return linters.upstream(scratch, project.tree.changes("HEAD"))


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        (message(line=10), ["third_party/pytorch/engine.cpp:10: CODE: name: it is bad"]),
        (message(line=11), []),
        (message(), ["third_party/pytorch/engine.cpp:1: CODE: name: it is bad"]),
        (
            message(original="a\n" * 9 + "b\n" + "c\n", replacement="a\n" * 9 + "B\n" + "c\n"),
            ["third_party/pytorch/engine.cpp:10: CODE: should be `B`"],
        ),
        (message(original="a\n" * 30, replacement="a\n" * 29 + "b\n"), []),
        (
            message(original="a\n" * 9 + "c\n", replacement="a\n" * 9 + "b\nc\n"),
            ["third_party/pytorch/engine.cpp:10: CODE: should be `b`"],
        ),
        (message(original="a\nb\n", replacement="a\nB\n"), []),
        (message(path=None), [".lintrunner.toml:1: CODE: name: it is\nbad"]),
    ],
)
def test_findings_are_about_what_the_series_adds(
    project: Project, lintrunner: Callable[..., None], sent: dict[str, object], found: list[str]
) -> None:
    project.two_patches()
    lintrunner([sent])
    assert upstream(project) == found


def test_a_path_may_be_absolute(project: Project, lintrunner: Callable[..., None]) -> None:
    project.two_patches()
    lintrunner([message(path=str(project.tree.path.resolve().with_name("pytorch.scratch") / "engine.cpp"), line=10)])
    assert upstream(project) == ["third_party/pytorch/engine.cpp:10: CODE: name: it is bad"]


def test_linters_that_cannot_run_are_no_success(project: Project, lintrunner: Callable[..., None]) -> None:
    project.two_patches()
    lintrunner([], 2, "no config")
    with pytest.raises(Problem, match="upstream's linters could not be run: no config"):
        upstream(project)


def test_all_touched_files_are_given_to_the_linters(
    project: Project, tmp_path: Path, lintrunner: Callable[..., None]
) -> None:
    project.two_patches()
    project.commit("Add a file", {"new.py": "x = 1\n"})
    lintrunner([], 0)
    assert upstream(project) == []
    arguments = (tmp_path / "tools" / "arguments").read_text().splitlines()
    assert arguments[-2:] == ["engine.cpp", "new.py"]
    assert "--skip=" + ",".join(linters.LEFT_OUT) in arguments


def test_the_linters_see_every_file(
    project: Project, monkeypatch: pytest.MonkeyPatch, lintrunner: Callable[..., None]
) -> None:
    project.two_patches()
    seen: list[str] = []

    def look(tree: linters.Repository, changes: list[diff.File]) -> list[str]:
        seen.extend([(tree.path / "engine.cpp").read_text(), (tree.path / "dos.bat").read_text()])
        return ["found"]

    monkeypatch.setattr(linters, "upstream", look)
    assert list(check_patches.check_on_base()) == ["found"]
    assert "changed" in seen[0]
