"""Fill third_party/pytorch: the pinned sources as a base commit, then one commit a patch of patches/series."""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from igb import archive, download, paths, pins, process, series
from igb.errors import Problem
from igb.git import Repository
from igb.log import logger
from igb.tree import Conflict, State, Status, Tree

HELP = "fill third_party/pytorch from the pinned sources and the series"


@dataclass(frozen=True)
class Origin:
    """Where a base is made from: an archive, or a git checkout when it is not a pinned file."""

    path: Path
    pin: pins.Archive | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="named",
        type=Path,
        metavar="PATH",
        default=os.environ.get("PYTORCH_SOURCE") or None,
        help="a pinned archive, or a git checkout that has the release's commit (default: $PYTORCH_SOURCE)",
    )
    parser.add_argument(
        "--mirror",
        type=Path,
        metavar="DIR",
        default=os.environ.get("IGB_SOURCES") or None,
        help="a folder to look for the archives in before the network (default: $IGB_SOURCES)",
    )
    parser.add_argument(
        "--discard",
        action="store_true",
        help="import the patches over commits that were not exported; the branch `discarded` keeps those",
    )


def run(arguments: argparse.Namespace) -> None:
    fill(arguments.named, arguments.mirror, arguments.discard)


def fill(named: Path | None = None, mirror: Path | None = None, discard: bool = False) -> Tree:
    """Make the tree hold the series, or leave it as it is when there is nothing new to import."""
    source = pins.load().source
    tree = Tree(paths.PYTORCH)
    if tree.path.exists() and tree.state.status is Status.EXPORTING:
        raise Problem("an export was cut short; run `make patches` again first")
    patches = series.read(paths.PATCHES)
    origin = named_origin(source, named.absolute()) if named else None
    if not tree.path.exists():
        lay_base(tree, origin or find(source, mirror), source)
    check_base(tree, origin, source)
    state = tree.state
    if state.status is Status.IN_STEP and state.patches == series.digest(patches) and not discard:
        ahead = "" if tree.commit_of("HEAD") == state.commit else ", and commits that wait for `make patches`"
        logger.info("%s holds the %d patches of the series%s", tree, len(patches), ahead)
        return tree
    keep_unexported(tree, state, discard)
    import_series(tree, patches)
    return tree


def named_origin(source: pins.Source, path: Path) -> Origin:
    """The origin that the user names, which must be what the pins say."""
    if path.is_dir():
        try:
            Repository(path).commit_of(source.commit)
        except Problem as problem:
            raise Problem(
                f"{path} is not a git checkout that has commit {source.commit} of PyTorch {source.version}; "
                f"fetch the tag v{source.version} there, or name an archive of third_party/pins.toml"
            ) from problem
        return Origin(path, None)
    if not path.is_file():
        raise Problem(f"{path} does not exist; name an archive of the sources or a git checkout")
    found = pins.digest(path)
    for pin in source.archives:
        if pin.sha256 == found:
            return Origin(path, pin)
    lines = [f"{path} is none of the pinned archives; download one of them again"]
    lines += [f"  sha256 wanted  {pin.sha256}  {pin.name}" for pin in source.archives]
    raise Problem("\n".join([*lines, f"  sha256 found   {found}"]))


def find(source: pins.Source, mirror: Path | None) -> Origin:
    """The first pinned archive in the mirror folder, in the cache or on the network."""
    for folder in filter(None, (mirror, paths.CACHE)):
        for pin in source.archives:
            path = folder / pin.name
            if path.is_file():
                pins.verify(path, pin)
                logger.info("using %s", path)
                return Origin(path, pin)
    failures = []
    for pin in source.archives:
        for url in places(pin):
            try:
                download.fetch(url, pin, paths.CACHE / pin.name)
                return Origin(paths.CACHE / pin.name, pin)
            except download.Unavailable as failure:
                failures.append(f"  {failure}")
    message = (
        f"no place gives the sources of PyTorch {source.version}; check the network and rerun, or name a copy with"
    )
    raise Problem("\n".join([f"{message} `make source ARGS='--from PATH'`", *failures]))


def places(pin: pins.Archive) -> list[str]:
    """The URLs of an archive; Debian's come from the mirrors that the machine itself is set up with."""
    urls = [pin.url] if pin.url else []
    if pin.debian_path and shutil.which("apt-get"):
        mirrors = process.run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"])
        for mirror in dict.fromkeys(mirrors.split()):
            if mirror.startswith(("http://", "https://")):
                urls.append(f"{mirror.rstrip('/')}/{pin.debian_path}/{pin.name}")
    return urls


def lay_base(tree: Tree, origin: Origin, source: pins.Source) -> None:
    """Make the tree with its base commit, aside and then all at once."""
    stage = tree.path.with_name(f"{tree.path.name}.new")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    files = stage / "files"
    top = archive.unpack(origin.path, files) if origin.pin else take_commit(origin.path, source.commit, files)
    logger.info("committing %s as the base", top.name)
    Tree(top).lay_base(base_message(source, origin.pin), source.date)
    top.rename(tree.path)
    shutil.rmtree(stage)


def take_commit(checkout: Path, commit: str, files: Path, prefix: str = "pytorch") -> Path:
    """Unpack what a commit of a checkout holds, and its submodules as far as they are checked out."""
    repository = Repository(checkout)
    packed = files.with_name("commit.tar")
    repository.git("archive", f"--output={packed}", f"--prefix={prefix}/", commit)
    top = archive.unpack(packed, files)
    packed.unlink()
    for entry in repository.git("ls-tree", "-r", "-z", commit).split("\0"):
        if entry.startswith("160000 "):
            link, path = entry.split("\t")
            if (checkout / path / ".git").exists():
                take_commit(checkout / path, link.split()[2], files, f"{prefix}/{path}")
    return top


def base_message(source: pins.Source, pin: pins.Archive | None) -> str:
    made_from = f"{pin.name},\nsha256 {pin.sha256}" if pin else f"commit {source.commit}"
    return f"PyTorch {source.version}\n\nMade from {made_from}."


def check_base(tree: Tree, origin: Origin | None, source: pins.Source) -> None:
    """Refuse a tree on another base: what the user has in it cannot be carried over by a machine."""
    wanted = [origin.pin] if origin else [*source.archives, None]
    found = tree.base_message()
    if found not in [base_message(source, pin) for pin in wanted]:
        raise Problem(f"{tree} has another base ({' '.join(found.split())}); move it away and run `make source`")


def keep_unexported(tree: Tree, state: State, discard: bool) -> None:
    """Refuse to go on when importing would overwrite something that exists nowhere else."""
    if state.status is Status.IMPORTING:
        return
    resolving = state.status is Status.STOPPED and tree.operation_in_progress() == "am"
    if resolving and not discard:
        raise Problem(
            f"a patch that did not apply waits in {tree}; resolve it, `git -C {tree} am --continue` and run "
            "`make patches`, or give the resolution up with `make source ARGS=--discard`"
        )
    if not resolving:
        tree.check_settled()
    head = tree.commit_of("HEAD")
    if head == state.commit:
        return
    if not discard:
        raise Problem(
            f"{tree} has commits that are not exported; run `make patches` to keep them, or "
            "`make source ARGS=--discard` to put them aside on the branch `discarded`"
        )
    tree.git("branch", "--force", "discarded", head)


def import_series(tree: Tree, patches: series.Series) -> None:
    """Apply the patches aside, then move the tree to what came of it."""
    digest, head = series.digest(patches), tree.commit_of("HEAD")
    try:
        commit, status = tree.apply(patches), Status.IN_STEP
    except Conflict as found:
        conflict, commit, status = found, found.commit, Status.STOPPED
    tree.state = State(Status.IMPORTING, head, digest)
    if status is Status.STOPPED:
        tree.stop_at(conflict, patches)
    else:
        tree.move_to(commit)
    tree.state = State(status, commit, digest)
    if status is Status.STOPPED:
        raise Problem(explain(conflict, tree))
    logger.info("%s holds the %d patches of the series", tree, len(patches))


def explain(conflict: Conflict, tree: Tree) -> str:
    """Which hunk of which file does not apply, and what to do next."""
    return "\n".join(
        [
            f"{conflict.patch.name} does not apply with `git am`: {conflict.summary}",
            *(conflict.hunk.lines if conflict.hunk else []),
            f"`git am` waits in {tree} with the hunks that fit applied and the others in .rej files. Next:",
            f"  edit the files there, then `git -C {tree} add --all && git -C {tree} am --continue`",
            "  make patches",
        ]
    )
