"""Check this project's own files: the scripts and tests with ruff and mypy, the patches by themselves."""

from __future__ import annotations

import argparse

from igb import linters, patch_lint, paths
from igb.errors import Problem

HELP = "check the scripts, the tests and the patches by themselves"


def add_arguments(_: argparse.ArgumentParser) -> None:
    pass


def run(_: argparse.Namespace) -> None:
    problems = patch_lint.check(paths.PATCHES)
    print(*problems, sep="\n", end="\n" if problems else "")
    complaining = linters.own() + (["the check of the patches"] if problems else [])
    if complaining:
        raise Problem(f"{', '.join(complaining)} found what is listed above; correct it and rerun")
