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
from igb.log import heartbeat, logger

HELP = "run the project's tests and upstream's on the wheel in dist/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wheel", type=Path, metavar="PATH", help="test this wheel instead of the one in dist/")
    parser.add_argument("--only", choices=("project", "upstream"), help="run one half of the tests")
    parser.add_argument("pytest", nargs="*", metavar="ARGUMENT", help="for pytest, after `--`: files, -k, -x, ...")


def run(arguments: argparse.Namespace) -> None:
    # What is missing shows before the long steps.
    wheel = arguments.wheel or testing.the_wheel(paths.DIST)
    records = load_records() if arguments.only != "project" else {}
    python = testing.environment("venv", wheel)
    failed = []
    if arguments.only != "upstream":
        logger.info("running the project's tests")
        failed += run_project_tests(python, arguments.pytest)
    if arguments.only != "project":
        logger.info("running upstream's tests")
        failed += run_upstream_tests(python, records)
    if failed:
        raise Problem(f"tests failed: {', '.join(failed)}; their output is above")


def load_records() -> dict[upstream.Suite, dict[str, str]]:
    if not paths.PYTORCH.exists():
        raise Problem(f"{paths.PYTORCH} does not exist; run `make source` first")
    tag = testing.interpreter_tag(paths.PYTHON)
    return {suite: upstream.load(suite, tag) for suite in upstream.SUITES}


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
    pipe = subprocess.PIPE
    with heartbeat(" ".join(options)):
        done = subprocess.run(
            command, cwd=paths.ROOT, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False
        )
    print(f"{' '.join(options)}\n{done.stdout}", flush=True)
    return " ".join(options) if done.returncode else ""


def run_upstream_tests(python: Path, records: dict[upstream.Suite, dict[str, str]]) -> list[str]:
    results = upstream.run_all(python, paths.PYTORCH / "test")
    failed = []
    for suite, outcomes in results.items():
        found = upstream.contradictions(outcomes, records[suite])
        failed += [suite.name] * bool(found)
        print(*found, sep="\n", end="\n" if found else "")
    for suite, outcomes in results.items():
        print(upstream.closing_line(suite, outcomes))
    return failed
