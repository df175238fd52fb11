"""The project's logger, and progress of long steps on it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("igb")


def configure(verbose: bool = False) -> None:
    """Send the log to standard output as plain lines; warnings and errors carry their level."""

    class Formatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            text = super().format(record)
            return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"

    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)


class Progress:
    """Counts towards a total; a line each few seconds (or a rewritten one on a terminal), and one at the end.

    Usable as a context manager. ``advance`` takes the same unit as ``total``: bytes, steps or files.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "", every: float = 5.0) -> None:
        self.what, self.total, self.unit, self.every = what, total, unit, every
        self.done = 0
        self.started = self.shown = time.monotonic()
        self.terminal = sys.stdout.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.terminal:
            print("\r\033[K", end="", flush=True)
        if kind is None:
            logger.info("%s: %s in %.1f s", self.what, self._count(), time.monotonic() - self.started)

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        now = time.monotonic()
        if now - self.shown < (0.2 if self.terminal else self.every):
            return
        self.shown = now
        line = f"{self.what}: {self._count()}"
        if self.total and self.done:
            line += f", about {(now - self.started) * (self.total - self.done) / self.done:.0f} s left"
        if self.terminal:
            print(f"\r\033[K{line}", end="", flush=True)
        else:
            logger.info("%s", line)

    def _count(self) -> str:
        amount, total = self._amount(self.done), self.total
        return f"{amount} of {self._amount(total)}" if total and self.done < total else amount

    def _amount(self, value: int) -> str:
        return f"{value / 1e6:.1f} MB" if self.unit == "B" else f"{value} {self.unit}".rstrip()


@contextmanager
def heartbeat(what: str, every: float = 15.0) -> Iterator[None]:
    """Say each few seconds that ``what`` goes on, for a step that cannot tell how far it has come."""
    started, ended = time.monotonic(), threading.Event()

    def beat() -> None:
        while not ended.wait(every):
            logger.info("%s: %.0f s so far", what, time.monotonic() - started)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
