"""Each way in which upstream's tests can differ from the record is found, by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from igb import upstream
from igb.errors import Problem

RECORD = {"T.passes": "passed", "T.skipped": "skipped: no GPU", "T.xfail": "expected failure"}


def outcomes(**changes: tuple[str, str]) -> upstream.Outcomes:
    result = {
        "T.passes": {"outcome": "passed", "detail": ""},
        "T.skipped": {"outcome": "skipped", "detail": "no GPU"},
        "T.xfail": {"outcome": "expected failure", "detail": ""},
    }
    for name, (outcome, detail) in changes.items():
        result[f"T.{name}"] = {"outcome": outcome, "detail": detail}
    return result


def test_the_same_as_the_record_is_no_contradiction() -> None:
    assert upstream.contradictions(outcomes(), RECORD) == []


@pytest.mark.parametrize(
    ("name", "outcome", "detail", "message"),
    [
        ("passes", "failed", "Traceback", "T.passes: failed; the record says passed\nTraceback"),
        ("passes", "skipped", "too slow", "T.passes: skipped: too slow; the record says passed"),
        ("skipped", "skipped", "other", "T.skipped: skipped: other; the record says skipped: no GPU"),
        ("skipped", "passed", "", "T.skipped: passed; the record says skipped: no GPU"),
        ("xfail", "failed", "passed, although", "T.xfail: failed; the record says expected failure\npassed, although"),
        ("new", "skipped", "why", "T.new: skipped: why; the record says passed"),
    ],
)
def test_a_changed_outcome_is_named(name: str, outcome: str, detail: str, message: str) -> None:
    assert upstream.contradictions(outcomes(**{name: (outcome, detail)}), RECORD) == [message]


def test_a_new_test_that_passes_is_welcome() -> None:
    assert upstream.contradictions(outcomes(new=("passed", "")), RECORD) == []


def test_a_test_that_is_gone_is_named() -> None:
    shrunk = outcomes()
    del shrunk["T.passes"]
    assert upstream.contradictions(shrunk, RECORD) == ["T.passes is no longer there"]


def test_without_a_record_everything_has_to_pass() -> None:
    assert len(upstream.contradictions(outcomes(), None)) == 2


FILE = """
import unittest

class TestAll(unittest.TestCase):
    def test_passes(self): pass
    def test_fails(self): self.fail("because")
    @unittest.skip("a reason")
    def test_skipped(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    @unittest.expectedFailure
    def test_unexpected(self): pass
    def test_part_fails(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertEqual(i, 1)

class TestOther(unittest.TestCase):
    def test_not_chosen(self): pass
"""


def test_the_recorder_tells_outcomes_apart(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text(FILE)
    result = upstream.run(Path(sys.executable), tmp_path, upstream.Suite("test_file.py", classes="TestAll"))
    assert {name.rpartition("test_")[2]: entry["outcome"] for name, entry in result.items()} == {
        "passes": "passed",
        "fails": "failed",
        "skipped": "skipped",
        "expected": "expected failure",
        "unexpected": "failed",
        "part_fails": "failed",
    }
    assert result["test_file.TestAll.test_skipped"]["detail"] == "a reason"
    assert upstream.closing_line(upstream.Suite("test_file.py"), result) == "test_file: 2 passed, 3 failed, 1 skipped"


def test_a_file_that_dies_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text("import os; print('last words'); os.abort()")
    with pytest.raises(Problem, match="did not come to its end"):
        upstream.run(Path(sys.executable), tmp_path, upstream.Suite("test_file.py"))
