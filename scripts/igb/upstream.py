"""Upstream's own tests, run on an installed torch and held against what the unpatched release does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from igb import paths
from igb.errors import Problem
from igb.log import heartbeat, logger

Outcomes = dict[str, dict[str, str]]
RECORDS = paths.TESTS / "expectations"


@dataclass(frozen=True)
class Suite:
    """One of upstream's files below test/, or those of its classes whose names match. Longest first."""

    file: str
    classes: str = ".*"
    # A file that the series adds is not in the release: each of its tests has to pass.
    is_recorded: bool = True

    @property
    def name(self) -> str:
        return Path(self.file).stem


SUITES = (
    Suite("test_autograd.py"),
    Suite("autograd/test_input_grad_buffers.py", is_recorded=False),
    Suite("functorch/test_eager_transforms.py", classes="TestAutogradFunction.*"),
    Suite("dynamo/test_autograd_function.py"),
    Suite("autograd/test_functional.py"),
    Suite("autograd/test_complex.py"),
    Suite("autograd/test_logging.py"),
    Suite("test_autograd_fallback.py"),
)


def run_all(python: Path, tests: Path, suites: Sequence[Suite] = SUITES) -> dict[Suite, Outcomes]:
    """Run ``suites`` of upstream's folder ``tests`` on the torch of ``python``, as many at once as there are cores."""
    if missing := [suite.file for suite in suites if not (tests / suite.file).exists()]:
        raise Problem(f"{tests} has no {missing[0]}; restore it, or take it out of {Path(__file__).name}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        # The tests write beside themselves, and the source tree is to stay as it is.
        copy = Path(folder, "test")
        shutil.copytree(tests, copy)
        return dict(zip(suites, pool.map(lambda suite: run(python, copy, suite), suites)))


def run(python: Path, tests: Path, suite: Suite) -> Outcomes:
    """What became of each test; a process that did not come to its end is one more failed test, with its last words."""
    file = tests / suite.file
    report = file.with_suffix(".outcomes")
    report.touch()
    command: list[str | Path] = [python, "-X", "faulthandler", "-m", "igb.recorder", file, suite.classes, report]
    pipe = subprocess.PIPE
    with heartbeat(f"upstream's {suite.file}"):
        done = subprocess.run(
            command, cwd=file.parent, env=variables(), stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False
        )
    outcomes: Outcomes = {}
    for line in report.read_text().splitlines():
        name, outcome, detail = json.loads(line)
        outcomes[name] = {"outcome": outcome, "detail": detail}
    logger.info("%s: %d tests run", suite.name, len(outcomes))
    if done.returncode:
        tail = [f"exit status {done.returncode}", *done.stdout.splitlines()[-25:]]
        outcomes[suite.file] = {"outcome": "failed", "detail": "\n".join(tail)}
    return outcomes


def variables() -> dict[str, str]:
    """What the tests run in: this environment, without what makes them skip or do other things than elsewhere."""
    switches = re.compile(r"CI|SANDCASTLE|.*TORCH.*|.*_TESTS_FILE|BACKEND|WORLD_SIZE|EXPECTTEST_ACCEPT")
    result = {name: value for name, value in os.environ.items() if not switches.fullmatch(name)}
    # The records are made without a GPU and with one thread.
    return {**result, "PYTHONPATH": str(paths.ROOT / "scripts"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def closing_line(suite: Suite, outcomes: Outcomes) -> str:
    count = Counter(entry["outcome"] for entry in outcomes.values())
    passed = count["passed"] + count["expected failure"]
    return f"{suite.name}: {passed} passed, {count['failed']} failed, {count['skipped']} skipped"


def record_of(suite: Suite, tag: str) -> Path:
    return RECORDS / tag / f"{suite.name}.json"


def save(suite: Suite, tag: str, outcomes: Outcomes) -> None:
    """Write what the release does: for each test, ``passed``, ``expected failure`` or ``skipped: REASON``."""
    path = record_of(suite, tag)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    record = {name: summary(entry) for name, entry in sorted(outcomes.items())}
    new.write_text(json.dumps(record, indent=0) + "\n")
    new.replace(path)


def load(suite: Suite, tag: str) -> dict[str, str]:
    """What the release does, by test; nothing about a suite that it lacks."""
    if not suite.is_recorded:
        return {}
    path = record_of(suite, tag)
    if not path.exists():
        raise Problem(
            f"{path.relative_to(paths.ROOT)} does not exist: nobody has recorded yet what the release does under this "
            "interpreter; run `make expectations` with it first"
        )
    record: dict[str, str] = json.loads(path.read_text())
    return record


def summary(entry: Mapping[str, str]) -> str:
    return f"skipped: {entry['detail']}" if entry["outcome"] == "skipped" else entry["outcome"]


def contradictions(outcomes: Outcomes, record: Mapping[str, str]) -> list[str]:
    """By name, each test that does not do what the release does; tests that the release lacks have to pass."""
    found = []
    for name, entry in outcomes.items():
        expected = record.get(name, "passed")
        if summary(entry) != expected:
            text = f"{name}: {summary(entry)}; the record says {expected}"
            if entry["outcome"] == "failed":
                text += f"\n{entry['detail']}"
            found.append(text)
    found += [f"{name} did not run; the record says {record[name]}" for name in sorted(set(record) - set(outcomes))]
    return found
