"""Run the property's tests on the release torch 2.15.0, which ships a property of the same name.

Code that is right there must be right here, so each test must pass there as well, but for those that test/parity.toml
marks: on these that release loses a gradient, gives a wrong one or fails, and they must fail, or the mark is stale.

The release goes into an environment of its own, build/parity: some gigabytes. Where pip has a constraint on torch, lift
it for this command with PIP_CONSTRAINT=/dev/null.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import run as launcher

from igb import isolated, paths
from igb.errors import Problem
from igb.log import Progress, logger

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HELP = "run the property's tests on torch 2.15.0 as well"
MARKS = paths.TESTS / "parity.toml"
TESTS = paths.PYTORCH / "test" / "autograd" / "test_input_grad_buffers.py"


def add_arguments(_: argparse.ArgumentParser) -> None:
    pass


def run(_: argparse.Namespace) -> None:
    if not TESTS.exists():
        raise Problem(f"{TESTS} does not exist; run `make source` first")
    marks: dict[str, str] = tomllib.loads(MARKS.read_text())["expected"]
    python = launcher.environment("parity")
    results = []
    with Progress("tests of the property on torch 2.15.0", unit="tests") as progress:
        for result in isolated.run(python, TESTS):
            results.append(result)
            progress.advance()
    found = contradictions(results, marks)
    print(*found, sep="\n\n", end="\n" if found else "")
    if found:
        raise Problem(
            f"the {len(found)} above contradict {MARKS.relative_to(paths.ROOT)}; correct the test or the mark"
        )
    count = Counter(result.outcome for result in results)
    logger.info(
        "%d pass there, %d fail as marked, %d are skipped there", count["passed"], count["failed"], count["skipped"]
    )


def contradictions(results: Sequence[isolated.Result], marks: Mapping[str, str]) -> list[str]:
    """What is not as ``marks`` says: tests without a mark that fail, tests with one that pass, marks of no test."""
    found = []
    unused = set(marks)
    for result in results:
        patterns = [pattern for pattern in marks if fnmatchcase(result.test, pattern)]
        unused.difference_update(patterns)
        if result.outcome == "failed" and not patterns:
            found.append(f"{result.test} fails and has no mark:\n{result.detail}")
        if result.outcome == "passed" and patterns:
            found.append(f"{result.test} passes; its mark says: {marks[patterns[0]]}")
    found += [f"{pattern} marks no test" for pattern in sorted(unused)]
    return found
