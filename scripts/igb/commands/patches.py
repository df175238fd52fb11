"""Export the commits of third_party/pytorch to patches/, the same bytes each time."""

from __future__ import annotations

import argparse
import os

from igb import footprint, paths, series
from igb.errors import Problem
from igb.log import logger
from igb.tree import State, Status, Tree

HELP = "export the commits of third_party/pytorch to patches/"


def add_arguments(_: argparse.ArgumentParser) -> None:
    pass


def run(_: argparse.Namespace) -> None:
    tree = Tree(paths.PYTORCH)
    if not tree.path.exists():
        raise Problem(f"{tree} does not exist; run `make source` first")
    state = tree.state
    check_finished(tree, state)
    old, new = series.listed(paths.PATCHES), tree.export("HEAD")
    if new != old:
        check_not_newer(tree, state, old)
    head, digest = tree.commit_of("HEAD"), series.digest(new)
    if new != old or series.disorder(paths.PATCHES) or state.status is Status.EXPORTING:
        tree.state = State(Status.EXPORTING, head, digest)
        series.write(paths.PATCHES, new)
    tree.state = State(Status.IN_STEP, head, digest)
    report(old, new, tree)
    footprint.refresh(paths.ROOT / "README.md", footprint.describe(len(new), tree.changes("HEAD")))


def check_finished(tree: Tree, state: State) -> None:
    if state.status is Status.IMPORTING:
        raise Problem("an import was cut short; run `make source` again first")
    tree.check_settled()


def check_not_newer(tree: Tree, state: State, old: series.Series) -> None:
    """Refuse to replace patches that the tree has not seen."""
    if state.status is Status.EXPORTING:
        return
    if series.digest(old) != state.patches:
        raise Problem(
            f"{os.path.relpath(paths.PATCHES)} was changed since {tree} was filled; import it with `make source` "
            "(ARGS=--discard puts commits that are not exported on the branch `discarded`, to be picked from there)"
        )
    if state.status is Status.STOPPED and tree.commit_of("HEAD") == state.commit:
        raise Problem("the last import stopped at a patch that does not apply; run `make source` and resolve it first")


def report(old: series.Series, new: series.Series, tree: Tree) -> None:
    before, after = ({patch.name: patch.content for patch in patches} for patches in (old, new))
    for name in [*before, *(name for name in after if name not in before)]:
        if before.get(name) != after.get(name):
            logger.info("%s %s", "removed" if name not in after else "changed" if name in before else "added", name)
    logger.info("%s holds the %d patches of %s", os.path.relpath(paths.PATCHES), len(new), tree)
