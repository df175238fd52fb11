"""Each way in which upstream's tests can differ from the record is found, by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from igb import testing, upstream
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
    assert upstream.contradictions(shrunk, RECORD) == ["T.passes did not run; the record says passed"]


def test_without_a_record_everything_has_to_pass() -> None:
    assert len(upstream.contradictions(outcomes(), {})) == 2


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


def run_file(folder: Path, text: str) -> list[str]:
    (folder / "test_file.py").write_text(text)
    suite = upstream.Suite("test_file.py", is_recorded=False)
    return upstream.contradictions(upstream.run(Path(sys.executable), folder, suite), {"test_file.T.test_z": "passed"})


def test_a_test_in_which_the_process_dies_is_named_and_so_are_those_after_it(tmp_path: Path) -> None:
    text = "import os, unittest\nclass T(unittest.TestCase):\n    def test_dies(self): os.abort()\n"
    text += "    def test_z(self): pass"
    died, last_words, not_run = run_file(tmp_path, text)
    assert died.startswith("test_file.T.test_dies: failed; the record says passed\nthe process ended during this test")
    assert "Fatal Python error: Aborted" in last_words
    assert not_run == "test_file.T.test_z did not run; the record says passed"


def test_a_file_that_cannot_be_imported_is_no_success(tmp_path: Path) -> None:
    last_words, _ = run_file(tmp_path, "import nothing_of_this_name")
    assert last_words.startswith("test_file.py: failed")
    assert "No module named 'nothing_of_this_name'" in last_words


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"has no test_autograd\.py"):
        upstream.run_all(Path(sys.executable), tmp_path)


def test_switches_of_the_surroundings_do_not_reach_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "PYTORCH_TEST_WITH_SLOW", "TORCH_LOGS", "DISABLED_TESTS_FILE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    checks = "assert not {'CI', 'PYTORCH_TEST_WITH_SLOW', 'TORCH_LOGS', 'DISABLED_TESTS_FILE'} & set(os.environ)"
    text = f"import os, unittest\n{checks}\nassert not os.environ['CUDA_VISIBLE_DEVICES']\n"
    text += "class T(unittest.TestCase):\n    def test_z(self): pass"
    assert run_file(tmp_path, text) == []


WHEELS = ["torch-2.6.0+igb.1-cp311-cp311-linux_x86_64.whl", "torch-2.6.0+igb.1-cp312-cp312-linux_x86_64.whl"]


def test_the_wheel_is_that_of_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "interpreter_tag", lambda _: "cp312")
    with pytest.raises(Problem, match="no wheel of torch for cp312"):
        testing.the_wheel(tmp_path)
    for name in WHEELS:
        (tmp_path / name).touch()
    assert testing.the_wheel(tmp_path).name == WHEELS[1]
    (tmp_path / WHEELS[1].replace("igb.1", "igb.2")).touch()
    with pytest.raises(Problem, match="several wheels"):
        testing.the_wheel(tmp_path)
