"""`make source`: from an archive, a checkout or the network to the base commit."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import FILES, Project, packed
from igb import download, paths, pins
from igb.commands import source
from igb.errors import Problem
from igb.git import Repository


def files_of(tree: Path) -> dict[str, str]:
    found = (path for path in tree.rglob("*") if path.is_file() and ".git" not in path.relative_to(tree).parts)
    return {path.relative_to(tree).as_posix(): path.read_bytes().decode() for path in found}


def test_the_base_holds_every_file(project: Project) -> None:
    project.source()
    assert files_of(project.tree.path) == FILES
    assert project.tree.git("status", "--porcelain", "--ignored") == ""
    assert sorted(project.tree.git("ls-files").split()) == sorted(FILES)


def test_the_base_has_one_hash_whatever_the_user_has_set(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.source()
    plain = project.head()
    home = tmp_path / "home"
    (home / ".config" / "git").mkdir(parents=True)
    (home / ".config" / "git" / "ignore").write_text("*.log\n")
    (home / ".config" / "git" / "attributes").write_text("* text=auto eol=lf\n")
    (home / "attributes").write_text("*.bat text\n")
    (home / ".gitconfig").write_text(
        "[core]\nautocrlf = input\nattributesFile = ~/attributes\n[commit]\ngpgSign = true\n[user]\nname = Me\n"
    )
    for name, value in {"HOME": home, "GIT_DIR": tmp_path / "elsewhere", "GIT_AUTHOR_NAME": "Me"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(paths, "PYTORCH", tmp_path / "other")
    source.fill(mirror=project.mirror)
    assert Repository(paths.PYTORCH).commit_of("HEAD") == plain


def test_nothing_is_done_when_all_is_right(project: Project) -> None:
    project.two_patches()
    project.archive.unlink()
    (project.tree.path / "engine.cpp").write_text("an edit that is not committed\n")
    before = project.head(), files_of(project.tree.path)
    project.source()
    assert (project.head(), files_of(project.tree.path)) == before


def test_a_wrong_archive_is_not_unpacked(project: Project) -> None:
    good = project.archive.read_bytes()
    project.archive.write_bytes(packed({"engine.cpp": "other\n"}))
    with pytest.raises(Problem) as caught:
        project.source()
    assert str(project.archive) in str(caught.value)
    assert str(caught.value).count("sha256") == 2
    assert not project.tree.path.exists()
    project.archive.write_bytes(good)
    project.source()


def test_a_truncated_archive_is_not_unpacked(project: Project) -> None:
    project.archive.write_bytes(project.archive.read_bytes()[:-20])
    with pytest.raises(Problem, match="sha256 found"):
        project.source()
    assert not project.tree.path.exists()


def test_an_archive_may_be_named(project: Project, tmp_path: Path) -> None:
    moved = project.archive.rename(tmp_path / "under-another-name")
    source.fill(named=moved)
    assert files_of(project.tree.path) == FILES


@pytest.mark.parametrize(("content", "message"), [(None, "does not exist"), (b"other", "none of the pinned archives")])
def test_a_named_file_must_be_pinned(project: Project, tmp_path: Path, content: bytes | None, message: str) -> None:
    named = tmp_path / "named"
    if content:
        named.write_bytes(content)
    with pytest.raises(Problem, match=message):
        source.fill(named=named, mirror=project.mirror)


def make_repository(path: Path, files: dict[str, str]) -> Repository:
    path.mkdir()
    repository = Repository(path)
    repository.git("init", "--quiet")
    for name, text in files.items():
        (path / name).write_text(text)
    repository.git("add", "--all")
    repository.git("commit", "--quiet", "--message", "release")
    return repository


def test_a_checkout_may_be_named(project: Project, tmp_path: Path) -> None:
    inner = make_repository(tmp_path / "inner", {"part.h": "part\n"})
    outer = make_repository(tmp_path / "outer", {"engine.cpp": "release\n"})
    outer.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner.path), "third_party/part")
    outer.git("commit", "--quiet", "--message", "add a part")
    project.pin(commit=outer.commit_of("HEAD"))
    (outer.path / "engine.cpp").write_text("newer\n")
    outer.git("commit", "--quiet", "--all", "--message", "after the release")
    (outer.path / "third_party/part/part.h").write_text("edited\n")
    source.fill(named=outer.path)
    found = files_of(project.tree.path)
    assert found["engine.cpp"] == "release\n"
    assert found["third_party/part/part.h"] == "part\n"
    assert project.tree.git("status", "--porcelain") == ""


def test_a_checkout_without_the_release_is_refused(project: Project, tmp_path: Path) -> None:
    other = make_repository(tmp_path / "other", {"engine.cpp": "other\n"})
    with pytest.raises(Problem, match="not a git checkout that has commit 0000"):
        source.fill(named=other.path)


def test_a_part_of_a_checkout_is_refused(project: Project, tmp_path: Path) -> None:
    whole = make_repository(tmp_path / "whole", {"engine.cpp": "release\n"})
    project.pin(commit=whole.commit_of("HEAD"))
    (whole.path / "part").mkdir()
    with pytest.raises(Problem, match="part is not a git checkout"):
        source.fill(named=whole.path / "part")


def test_a_tree_on_another_base_is_left_alone(project: Project) -> None:
    project.source()
    project.archive.write_bytes(packed({"engine.cpp": "other\n"}))
    project.pin()
    with pytest.raises(Problem, match="has another base"):
        project.source()
    assert files_of(project.tree.path) == FILES


def test_a_folder_that_make_source_did_not_make_is_left_alone(project: Project) -> None:
    make_repository(project.tree.path, {"mine": ""})
    with pytest.raises(Problem, match="was not made by `make source`"):
        project.source()
    assert files_of(project.tree.path) == {"mine": ""}


def test_no_source_anywhere(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.archive.unlink()
    monkeypatch.setattr(source, "places", lambda pin: ["http://127.0.0.1:1/pytorch.tar.gz"])
    with pytest.raises(
        Problem, match=r"no place gives the sources of PyTorch 1.0; check the network(?s:.*)127.0.0.1:1"
    ):
        project.source()
    assert not project.tree.path.exists()


def test_the_next_place_is_tried_but_not_for_want_of_space(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    content = project.archive.read_bytes()
    project.archive.unlink()
    asked = []

    def fetch(url: str, pin: pins.Archive, target: Path) -> None:
        asked.append(url)
        if url == "full":
            raise Problem("no space")
        if url == "bad":
            raise download.Unavailable("it is not there")
        target.parent.mkdir()
        target.write_bytes(content)

    monkeypatch.setattr(download, "fetch", fetch)
    monkeypatch.setattr(source, "places", lambda pin: ["bad", "full", "good"])
    with pytest.raises(Problem, match="^no space$"):
        project.source()
    monkeypatch.setattr(source, "places", lambda pin: ["bad", "good"])
    project.source()
    assert asked == ["bad", "full", "bad", "good"]
    assert files_of(project.tree.path) == FILES


def test_debian_comes_from_the_mirrors_of_apt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apt = tmp_path / "bin" / "apt-get"
    apt.parent.mkdir()
    apt.write_text("#!/bin/sh\nprintf 'http://mirror.test/debian/\\nhttp://mirror.test/debian/\\ncdrom:[x]/\\n'\n")
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{apt.parent}:{os.environ['PATH']}")
    pin = pins.Archive("x.tar.xz", "0" * 64, debian_path="pool/x")
    assert source.places(pin) == ["http://mirror.test/debian/pool/x/x.tar.xz"]


@pytest.fixture
def small_disk() -> Iterator[Callable[[], None]]:
    """No file may grow beyond 4 KiB, which fails as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(project: Project, small_disk: Callable[[], None]) -> None:
    project.archive.write_bytes(packed({**FILES, "large": "x" * 10000}))
    project.pin()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    small_disk()
    with pytest.raises(Problem, match=r"pytorch.tar.gz could not be unpacked into .*pytorch.new.*; check the space"):
        project.source()
    assert not project.tree.path.exists()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    project.source()
    assert files_of(project.tree.path)["large"] == "x" * 10000


def test_a_folder_that_cannot_be_written(project: Project, tmp_path: Path) -> None:
    """Through the command line, which turns what the system says into one line."""
    scripts = Path(source.__file__).parents[2]
    code = (
        "import sys; from pathlib import Path; from igb import cli, paths, commands\n"
        "commands.__path__ = [sys.argv.pop(1)]\n"
        "paths.PINS = Path(sys.argv.pop(1)); paths.PATCHES = Path(sys.argv.pop(1))\n"
        "paths.PYTORCH = Path('/sys/pytorch')\n"
        "sys.exit(cli.main())"
    )
    only = tmp_path / "commands"
    only.mkdir()
    (only / "source.py").symlink_to(source.__file__)
    command = [sys.executable, "-c", code, only, paths.PINS, project.patches, "source", "--mirror", project.mirror]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(scripts)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    error = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and "/sys/pytorch.new" in error[0]


def test_killed_anywhere_and_run_again(project: Project, kills: Callable[..., Iterator[int]]) -> None:
    project.two_patches()
    wanted = project.head()
    rounds = 0

    def from_nothing() -> None:
        subprocess.run(["rm", "-rf", project.tree.path], check=True)
        project.source()

    for _ in kills(from_nothing):
        rounds += 1
        project.source()
        assert project.head() == wanted
        assert project.tree.git("status", "--porcelain") == ""
        assert sorted(path.name for path in project.tree.path.parent.iterdir()) == ["pins.toml", "pytorch"]
    assert rounds > 15
