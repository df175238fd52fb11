"""Downloads that continue where an earlier run stopped, and that get their name only when verified."""

from __future__ import annotations

import fcntl
import http
import http.client
import urllib.error
import urllib.request
from pathlib import Path
from typing import BinaryIO

from igb import pins
from igb.errors import Problem
from igb.log import Progress

TIMEOUT = 60
BLOCK = 1 << 18


class Unavailable(Problem):
    """This place does not give the file; another may."""


def fetch(url: str, pin: pins.Archive, target: Path) -> None:
    """Download ``url`` to ``target``; what has arrived of it waits in a ``.part`` file beside it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    with part.open("ab") as file:
        # Another clone may be filling the same cache.
        fcntl.flock(file, fcntl.LOCK_EX)
        if target.exists():
            part.unlink(missing_ok=True)
            return
        try:
            _receive_all(url, pin, file)
        finally:
            if not file.tell():
                part.unlink()
    try:
        pins.verify(part, pin, f"{url} gave it; it was removed, and a rerun starts anew")
    except Problem as problem:
        part.unlink()
        raise Unavailable(str(problem)) from problem
    part.replace(target)


def _receive_all(url: str, pin: pins.Archive, file: BinaryIO) -> None:
    """Ask for the rest again as long as each answer brings some of it."""
    size = pin.size
    with Progress(f"downloading {pin.name}", size, "B") as progress:
        while size is None or file.tell() < size:
            before, failure = file.tell(), "the connection was closed early"
            try:
                size = _receive(url, file, progress)
            except (OSError, http.client.HTTPException) as error:
                failure = str(error)
            complete = size is not None and file.tell() >= size
            if file.tell() <= before and not complete:
                kept = f"; the {before} bytes so far are kept, and a rerun goes on from there" if before else ""
                raise Unavailable(f"{url} could not be downloaded: {failure}{kept}")


def _receive(url: str, file: BinaryIO, progress: Progress) -> int:
    """Append what one request brings, and return the size that the whole file has by the server's account."""
    start = file.tell()
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if start and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return start
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            file.seek(0)
            file.truncate()
        progress.done = file.tell()
        rest = response.headers.get("Content-Length")
        size = file.tell() + int(rest) if rest else None
        while block := response.read(BLOCK):
            try:
                file.write(block)
                file.flush()
            except OSError as error:
                raise Problem(f"{file.name}: {error.strerror}; free some space there and rerun") from error
            progress.advance(len(block))
        return file.tell() if size is None else size
