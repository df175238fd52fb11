"""Each test of a file runs alone, whatever it does to its process."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from igb import isolated
from igb.errors import Problem


def results(folder: Path, body: str) -> dict[str, isolated.Result]:
    file = folder / "test_sample.py"
    file.write_text(
        "import os, signal, sys, unittest\n\nclass Sample(unittest.TestCase):\n" + textwrap.indent(body, "    ")
    )
    return {result.test: result for result in isolated.run(Path(sys.executable), file)}


def test_outcomes(tmp_path: Path) -> None:
    body = """
def test_passes(self): print("not a result")
def test_fails(self): self.fail("for this reason")
def test_raises(self): raise SystemError("for that reason")
def test_skips(self): self.skipTest("for no reason")
@unittest.expectedFailure
def test_passes_unexpectedly(self): pass
"""
    found = results(tmp_path, body)
    assert {name: result.outcome for name, result in found.items()} == {
        "Sample.test_passes": "passed",
        "Sample.test_fails": "failed",
        "Sample.test_raises": "failed",
        "Sample.test_skips": "skipped",
        "Sample.test_passes_unexpectedly": "failed",
    }
    assert "for this reason" in found["Sample.test_fails"].detail
    assert "for that reason" in found["Sample.test_raises"].detail
    assert found["Sample.test_skips"].detail == "for no reason"


def test_what_ends_a_process_ends_one_test(tmp_path: Path) -> None:
    body = """
def test_a_crashes(self): os.kill(os.getpid(), signal.SIGSEGV)
def test_b_leaves(self): os._exit(7)
def test_c_changes_the_module(self): sys.modules[__name__].changed = True
def test_d_is_not_affected(self): self.assertFalse(hasattr(sys.modules[__name__], "changed"))
"""
    found = results(tmp_path, body)
    assert [result.outcome for result in found.values()] == ["failed", "failed", "passed", "passed"]
    assert found["Sample.test_a_crashes"].detail == "ended by SIGSEGV"
    assert found["Sample.test_b_leaves"].detail == "left the process with exit status 7"


def test_a_test_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "SECONDS_PER_TEST", 1)
    found = results(tmp_path, "def test_hangs(self): signal.pause()")
    assert found["Sample.test_hangs"].detail == "ended by SIGALRM"


def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="No module named 'no_such_module'"):
        results(tmp_path, "import no_such_module")
