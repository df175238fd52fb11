"""Running other programs, with their failures told in one sentence."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from igb.errors import Problem
from igb.log import logger


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    explain: str = "",
) -> str:
    """Run ``command`` and return its standard output.

    Raises Problem when it cannot start or exits non-zero; the message holds the command, the end of its output and
    ``explain``, which says what the user can do.
    """
    words = [str(word) for word in command]
    logger.debug("running %s", shlex.join(words))
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=env,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        remedy = explain or "install it and rerun"
        raise Problem(f"{words[0]} could not be started: {error.strerror}; {remedy}") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        message = f"`{shlex.join(words)}` failed with exit status {done.returncode}"
        raise Problem("\n".join(part for part in (f"{message}; {explain}" if explain else message, tail) if part))
    return done.stdout
