"""Check the series: by itself, against the pinned base, with upstream's linters, and back to the same bytes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from igb import footprint, linters, patch_lint, paths, pins, series
from igb.commands import source
from igb.errors import Problem
from igb.log import logger
from igb.tree import Conflict, Tree

HELP = "check the series against the pinned sources"


def add_arguments(_: argparse.ArgumentParser) -> None:
    pass


def run(_: argparse.Namespace) -> None:
    # The cheap checks come first: what they find would only confuse the others.
    for check in (check_alone, check_on_base):
        if problems := list(check()):
            print(*problems, sep="\n")
            raise Problem(f"the series has the problems listed above ({len(problems)}); correct them and rerun")
    logger.info("the series is in order")


def check_alone() -> Iterator[str]:
    yield from patch_lint.check(paths.PATCHES)


def check_on_base() -> Iterator[str]:
    """What shows only when the series is applied, which is done aside, whatever the tree itself holds."""
    tree = Tree(paths.PYTORCH)
    if not tree.path.exists():
        raise Problem(f"{tree} does not exist; run `make source` first")
    source.check_base(tree, None, pins.load().source)
    patches = series.read(paths.PATCHES)
    folder = paths.PATCHES.name
    try:
        commit = tree.apply(patches)
    except Conflict as conflict:
        yield f"{folder}/{conflict.patch.name}:{conflict.hunk.place if conflict.hunk else 1}: {conflict.summary}"
        return
    exported = tree.export(commit)
    if len(exported) != len(patches):
        yield f"{folder}/{series.ORDER_FILE}:1: the {len(patches)} patches make {len(exported)} commits"
    for patch, again in zip(patches, exported):
        if place := first_difference(patch, again):
            yield f"{folder}/{patch.name}:{place}: not as `make patches` writes it; import and export the series again"
    changes = tree.changes(commit)
    with tree.scratch(commit) as scratch:
        scratch.git("reset", "--quiet", "--hard")
        yield from linters.upstream(scratch, changes)
    yield from check_readme(footprint.describe(len(patches), changes))


def first_difference(patch: series.Patch, again: series.Patch) -> int | None:
    """The first line in which two patches differ."""
    if patch == again:
        return None
    lines = zip(patch.content.split(b"\n"), again.content.split(b"\n"))
    return next((number for number, (one, other) in enumerate(lines, 1) if one != other), 1)


def check_readme(counts: str) -> Iterator[str]:
    readme = paths.ROOT / "README.md"
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        if footprint.replaced(text, counts) != text:
            line = text[: text.index(footprint.BEGIN)].count("\n") + 1
            yield f"{readme.name}:{line}: the counts of the series are stale; run `make patches`"
