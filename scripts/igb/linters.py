"""The linters of ``requirements/lint.txt``: upstream's, for what the series touches, and those of this project."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import run as launcher

from igb import diff, paths
from igb.errors import Problem
from igb.git import Repository

# Upstream's linters that need more than the sources.
LEFT_OUT = {
    "CLANGTIDY": "reads the compiler's commands from a build",
    "LINTRUNNER_VERSION": "is about the machine, not the sources",
    "MYPY": "reads stubs that a build generates",
    "MYPYSTRICT": "reads stubs that a build generates",
    "TESTOWNERS": "downloads the list of labels; igb.patch_lint looks at the form",
}


def upstream(tree: Repository, changes: list[diff.File]) -> list[str]:
    """What upstream's linters say about the lines that the series adds; ``tree`` has every file checked out."""
    if not changes:
        return []
    tools = launcher.environment("lint").parent
    own = tree.path / ".lintbin"
    own.mkdir()
    (own / "clang-format").symlink_to(tools / "clang-format")
    options = ["--output=json", f"--data-path={own}", f"--skip={','.join(LEFT_OUT)}"]
    done = subprocess.run(
        [tools / "lintrunner", *options, *(file.path for file in changes)],
        cwd=tree.path,
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode and not messages:
        raise Problem(f"upstream's linters could not be run: {done.stderr.strip()}")
    touched = {file.path: {line.number for line in file.added} for file in changes}
    return sorted(finding for message in messages for finding in findings(message, tree.path, touched))


def findings(message: dict[str, Any], root: Path, touched: dict[str, set[int]]) -> Iterator[str]:
    """A message of lintrunner as ``file:line: problem``, if it is about a touched line or a file as a whole."""
    if not message.get("path"):
        # A linter that failed has looked at nothing.
        yield f".lintrunner.toml:1: {message['code']}: {message['name']}: {message['description']}"
        return
    path = Path(root, message["path"]).relative_to(root.resolve()).as_posix()
    line, lines = message.get("line"), touched.get(path, set())
    where = f"{os.path.relpath(paths.PYTORCH)}/{path}"
    if message.get("replacement") is not None:
        old, new = message["original"].splitlines(), message["replacement"].splitlines()
        for tag, start, end, new_start, new_end in difflib.SequenceMatcher(None, old, new).get_opcodes():
            # An insertion is about the lines around it.
            place = range(start + 1, end + 1) if end > start else range(start, start + 2)
            if tag != "equal" and (hit := sorted(lines.intersection(place))):
                wanted = " | ".join(new[new_start:new_end]) or "nothing"
                yield f"{where}:{hit[0]}: {message['code']}: should be `{wanted}`"
    elif line is None or line in lines:
        text = " ".join(message["description"].split())
        yield f"{where}:{line or 1}: {message['code']}: {message['name']}: {text}"


def own() -> list[str]:
    """Run this project's linters on its own files; the names of those that complain, having printed what."""
    tools = launcher.environment("lint").parent
    commands = {"ruff": ["check", "--quiet", "--output-format=concise"], "mypy": ["--no-error-summary"]}
    return [
        name
        for name, options in commands.items()
        if subprocess.run([tools / name, *options], cwd=paths.ROOT, check=False).returncode
    ]
