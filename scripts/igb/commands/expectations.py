"""Record what the unpatched release does in upstream's tests, into test/expectations.

The release goes into an environment of its own, build/release-venv, and its tests are those of the base commit of
third_party/pytorch. Check in what changes.
"""

from __future__ import annotations

import argparse

from igb import paths, pins, release, testing, upstream
from igb.errors import Problem
from igb.log import logger
from igb.tree import BASE, Tree

HELP = "record what the unpatched release does in upstream's tests"


def add_arguments(_: argparse.ArgumentParser) -> None:
    pass


def run(_: argparse.Namespace) -> None:
    if not paths.PYTORCH.exists():
        raise Problem(f"{paths.PYTORCH} does not exist; run `make source` first")
    pinned = pins.load()
    wheel = release.fetch(pinned.source.version, release.pin_for_interpreter(pinned.wheels))
    python = testing.environment("release-venv", wheel)
    tag = testing.interpreter_tag(python)
    with Tree(paths.PYTORCH).scratch(BASE) as base:
        base.git("checkout", "HEAD", "--", "test")
        recorded = [suite for suite in upstream.SUITES if suite.is_recorded]
        results = upstream.run_all(python, base.path / "test", recorded)
    for suite, outcomes in results.items():
        failures = [name for name, entry in outcomes.items() if entry["outcome"] == "failed"]
        if failures:
            raise Problem(f"the release itself fails {failures[0]}, {len(failures)} in all; it was not recorded")
        upstream.save(suite, tag, outcomes)
        print(upstream.closing_line(suite, outcomes))
    logger.info("%s is written; check it in", upstream.RECORDS / tag)

