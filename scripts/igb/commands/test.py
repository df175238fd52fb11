"""Run the project's tests, and upstream's, on the wheel in dist/.

The wheel goes into an environment of its own, build/venv. Upstream's tests are held against test/expectations, which
records what the unpatched release does: a test that newly fails or is skipped, or is gone, fails the run by name.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from igb import paths, testing, upstream
from igb.errors import Problem
from igb.log import logger

HELP = "run the project's tests and upstream's on the wheel in dist/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wheel", type=Path, metavar="PATH", help="test this wheel instead of the one in dist/")
    parser.add_argument("--only", choices=("project", "upstream"), help="run one half of the tests")
    parser.add_argument("pytest", nargs="*", metavar="ARGUMENT", help="for pytest, after `--`: files, -k, -x, ...")


def run(arguments: argparse.Namespace) -> None:
    python = testing.environment("venv", arguments.wheel or testing.the_wheel(paths.DIST))
    failed = []
    if arguments.only != "upstream":
        logger.info("running the project's tests")
        failed += run_project_tests(python, arguments.pytest)
    if arguments.only != "project":
        failed += run_upstream_tests(python)
    if failed:
        raise Problem(f"tests failed: {', '.join(failed)}; their output is above")


def run_project_tests(python: Path, options: list[str]) -> list[str]:
    """Run each file in a process of its own, as some need one in which no backward has run, and several at once."""
    files = [paths.TESTS / "scripts", *sorted(paths.TESTS.glob("test_*.py"))]
    runs = [options] if options else [[str(file.relative_to(paths.ROOT))] for file in files]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return [name for name in pool.map(functools.partial(run_pytest, python), runs) if name]


def run_pytest(python: Path, options: list[str]) -> str:
    """Run pytest and print what it says; return what it ran if that failed."""
    # Extensions are built with the environment's own Ninja.
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    variables = {**os.environ, "PYTHONPATH": str(paths.ROOT / "scripts"), "PATH": path}
    command = [str(python), "-m", "pytest", "-q", *options]
    done = subprocess.run(
        command, cwd=paths.ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(f"{' '.join(options)}\n{done.stdout}", flush=True)
    return " ".join(options) if done.returncode else ""


def run_upstream_tests(python: Path) -> list[str]:
    tests = paths.PYTORCH / "test"
    if not tests.exists():
        raise Problem(f"{tests} does not exist; run `make source` first")
    tag = upstream.interpreter_tag(python)
    records = {suite: upstream.load(suite, tag) if suite.is_recorded else None for suite in upstream.SUITES}
    logger.info("running upstream's tests")
    results = upstream.run_all(python, tests)
    failed = []
    for suite, outcomes in results.items():
        found = upstream.contradictions(outcomes, records[suite])
        failed += [suite.name] * bool(found)
        print(*found, sep="\n", end="\n" if found else "")
    for suite, outcomes in results.items():
        print(upstream.closing_line(suite, outcomes))
    return failed
