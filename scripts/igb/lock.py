"""Letting one process at a time do something; the lock ends with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from igb.log import logger


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the file ``path``, which stays behind empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another run, which holds %s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
