"""Run one unittest file and write what becomes of each test; started by ``upstream`` under the interpreter to test.

Needs nothing but the standard library. Usage: ``python -m igb.recorder FILE CLASSES REPORT``, in FILE's folder; CLASSES
is a regular expression that names the classes to run, REPORT the file to write: a JSON list of name, outcome and detail
a line. A later line about a test replaces an earlier one, so that a process that dies has named the test it died in.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


class Recorder(unittest.TestResult):
    """Writes outcomes: passed, failed, skipped or expected failure. A test of which any part failed has failed."""

    def __init__(self, report: TextIO) -> None:
        super().__init__()
        self.report = report
        self.failed: set[str] = set()

    def write(self, test: unittest.TestCase, outcome: str, detail: str = "") -> None:
        print(json.dumps([test.id(), outcome, detail]), file=self.report, flush=True)

    def record(self, test: unittest.TestCase, outcome: str, detail: str = "") -> None:
        if test.id() not in self.failed:
            self.write(test, outcome, detail)
        if outcome == "failed":
            self.failed.add(test.id())

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.write(test, "failed", "the process ended during this test")

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.record(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.record(test, "skipped", reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.record(test, "expected failure")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self.record(test, "failed", "passed, although it is expected to fail")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.record(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addFailure(test, err)


def tests_of(file: Path) -> Iterator[unittest.TestCase]:
    """The tests of a file, imported as if it were run from its folder."""
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suites: list[unittest.TestSuite | unittest.TestCase] = [unittest.defaultTestLoader.loadTestsFromModule(module)]
    while suites:
        test = suites.pop(0)
        if isinstance(test, unittest.TestSuite):
            suites[:0] = list(test)
        else:
            yield test


def main() -> None:
    file, classes, report = Path(sys.argv[1]).resolve(), re.compile(sys.argv[2]), Path(sys.argv[3])
    sys.argv = [str(file)]
    suite = unittest.TestSuite(test for test in tests_of(file) if classes.fullmatch(type(test).__name__))
    with report.open("w") as lines:
        suite.run(Recorder(lines))


if __name__ == "__main__":
    main()
