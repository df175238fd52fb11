"""A mark is right when each test it covers fails on the other release, and no other does."""

from __future__ import annotations

import pytest
from igb.commands.parity import contradictions
from igb.isolated import Result

MARKS = {"Errors.test_crash": "crashes", "Values.test_view_*": "gives a wrong gradient"}
AS_MARKED = [
    Result("Errors.test_crash", "failed", "ended by SIGSEGV"),
    Result("Values.test_view_slice", "failed"),
    Result("Values.test_view_whole", "failed"),
    Result("Values.test_sum", "passed"),
]


def test_nothing_to_say() -> None:
    assert contradictions(AS_MARKED, MARKS) == []


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (
            Result("Values.test_sum", "failed", "AssertionError"),
            "Values.test_sum fails and has no mark:\nAssertionError",
        ),
        (Result("Errors.test_crash", "passed"), "Errors.test_crash passes; its mark says: crashes"),
        (
            Result("Values.test_view_whole", "passed"),
            "Values.test_view_whole passes; its mark says: gives a wrong gradient",
        ),
    ],
)
def test_a_result_that_differs(result: Result, complaint: str) -> None:
    assert contradictions([*(other for other in AS_MARKED if other.test != result.test), result], MARKS) == [complaint]


def test_a_mark_without_a_test() -> None:
    assert contradictions(AS_MARKED[1:], MARKS) == ["Errors.test_crash marks no test"]


def test_skipped_there_says_nothing() -> None:
    skipped = [Result(result.test, "skipped", "no compiler") for result in AS_MARKED]
    assert contradictions(skipped, MARKS) == []
