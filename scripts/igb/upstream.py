"""Upstream's own tests, run on an installed torch and held against what the unpatched release does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from igb import paths, process
from igb.errors import Problem
from igb.log import logger

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


def run_all(python: Path, tests: Path, suites: Iterable[Suite] = SUITES) -> dict[Suite, Outcomes]:
    """Run ``suites`` of upstream's folder ``tests`` on the torch of ``python``, as many at once as there are cores."""
    suites = [suite for suite in suites if (tests / suite.file).exists()]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        # The tests write beside themselves, and the source tree is to stay as it is.
        copy = Path(folder, "test")
        shutil.copytree(tests, copy)
        return dict(zip(suites, pool.map(lambda suite: run(python, copy, suite), suites)))


def run(python: Path, tests: Path, suite: Suite) -> Outcomes:
    file = tests / suite.file
    report = file.with_suffix(".json")
    command: list[str | Path] = [python, "-m", "igb.recorder", file, suite.classes, report]
    variables = {**os.environ, "PYTHONPATH": str(paths.ROOT / "scripts"), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    done = subprocess.run(
        command, cwd=file.parent, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False
    )
    if not report.exists():
        tail = "\n".join(done.stdout.splitlines()[-25:])
        raise Problem(f"upstream's {suite.file} did not come to its end (exit status {done.returncode})\n{tail}")
    outcomes: Outcomes = json.loads(report.read_text())
    logger.info("%s: %d tests run", suite.name, len(outcomes))
    return outcomes


def closing_line(suite: Suite, outcomes: Outcomes) -> str:
    count = Counter(entry["outcome"] for entry in outcomes.values())
    passed = count["passed"] + count["expected failure"]
    return f"{suite.name}: {passed} passed, {count['failed']} failed, {count['skipped']} skipped"


def interpreter_tag(python: Path) -> str:
    return process.run([python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"]).strip()


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


def contradictions(outcomes: Outcomes, record: Mapping[str, str] | None) -> list[str]:
    """By name, each test that does not do what the release does; tests that the release lacks have to pass."""
    found = []
    for name, entry in outcomes.items():
        expected = "passed" if record is None else record.get(name, "passed")
        if summary(entry) != expected:
            text = f"{name}: {summary(entry)}; the record says {expected}"
            if entry["outcome"] == "failed":
                text += f"\n{entry['detail']}"
            found.append(text)
    found += [f"{name} is no longer there" for name in sorted(set(record or ()) - set(outcomes))]
    return found
