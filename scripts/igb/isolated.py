"""Run each test of a file in a process of its own, so that one that crashes or hangs takes no other with it.

``run`` starts this module under the interpreter that the tests need, where nothing but the standard library has to be
installed for it. There it imports the file once and forks for each test, which takes milliseconds instead of an import
of torch, and writes one JSON object a test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from igb.errors import Problem

SECONDS_PER_TEST = 300


@dataclass(frozen=True)
class Result:
    """``outcome`` is passed, failed or skipped; ``detail`` the traceback or the reason."""

    test: str
    outcome: str
    detail: str = ""


def run(python: Path, file: Path) -> Iterator[Result]:
    """The results of the tests in ``file`` under ``python``, as they come."""
    command: list[str | Path] = [python, "-m", "igb.isolated", file.name, str(SECONDS_PER_TEST)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with (
        tempfile.TemporaryFile("w+") as noise,
        subprocess.Popen(
            command, cwd=file.parent, env=environment, stdout=subprocess.PIPE, stderr=noise, text=True
        ) as process,
    ):
        assert process.stdout
        for line in process.stdout:
            yield Result(**json.loads(line))
        if process.wait():
            noise.seek(0)
            tail = "\n".join(noise.read().splitlines()[-25:])
            raise Problem(f"{file} could not be run with {python}; see why below, correct it and rerun\n{tail}")


def tests_of(file: Path) -> Iterator[unittest.TestCase]:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suites: list[unittest.TestSuite | unittest.TestCase] = [unittest.defaultTestLoader.loadTestsFromModule(module)]
    while suites:
        test = suites.pop(0)
        if isinstance(test, unittest.TestSuite):
            suites[:0] = test
        else:
            yield test


def run_here(test: unittest.TestCase) -> tuple[str, str]:
    result = unittest.TestResult()
    test.run(result)
    if not result.wasSuccessful():
        return "failed", "\n".join(text for _, text in result.errors + result.failures) or "passed unexpectedly"
    return ("skipped", result.skipped[0][1]) if result.skipped else ("passed", "")


def run_in_child(test: unittest.TestCase, seconds: int) -> tuple[str, str]:
    # A file rather than a pipe: processes that outlive the test may hold on to its open descriptors.
    with tempfile.TemporaryFile("w+") as report:
        child = os.fork()
        if not child:
            signal.alarm(seconds)
            json.dump(run_here(test), report)
            report.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            return "failed", f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
        report.seek(0)
        text = report.read()
    if not text:
        return "failed", f"left the process with exit status {os.WEXITSTATUS(status)}"
    outcome, detail = json.loads(text)
    return outcome, detail


def main() -> None:
    file, seconds = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    sys.argv = [str(file)]
    # What tests print is not a result.
    with os.fdopen(os.dup(1), "w", buffering=1) as results:
        os.dup2(2, 1)
        for test in tests_of(file):
            outcome, detail = run_in_child(test, seconds)
            name = test.id().removeprefix(f"{file.stem}.")
            print(json.dumps(asdict(Result(name, outcome, detail))), file=results)


if __name__ == "__main__":
    main()
