"""Downloads from a server that behaves as badly as it is told to."""

from __future__ import annotations

import hashlib
import re
import resource
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from igb import download
from igb.errors import Problem
from igb.pins import Archive

CONTENT = bytes(range(256)) * 40


class Server(ThreadingHTTPServer):
    """Serves ``content``, at most ``limit`` bytes a request, and records where each request began."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.limit = CONTENT, len(CONTENT)
        self.ranges = self.lengths = True
        self.starts: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted and self.server.ranges else 0
        self.server.starts.append(start)
        if start >= len(self.server.content):
            self.send_error(416)
            return
        rest = self.server.content[start:]
        self.send_response(206 if start else 200)
        if self.server.lengths:
            self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: self.server.limit])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(params=[len(CONTENT), None], ids=["size pinned", "size unknown"])
def pin(request: pytest.FixtureRequest) -> Archive:
    return Archive("file", hashlib.sha256(CONTENT).hexdigest(), request.param)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "file"


def part(target: Path) -> Path:
    return target.with_name("file.part")


def test_a_download(server: Server, pin: Archive, target: Path) -> None:
    download.fetch(server.url, pin, target)
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]


def test_what_a_truncated_answer_lacks_is_asked_for(server: Server, pin: Archive, target: Path) -> None:
    server.limit = 4000
    download.fetch(server.url, pin, target)
    assert server.starts == [0, 4000, 8000]
    assert target.read_bytes() == CONTENT


def test_a_server_that_gives_no_more(server: Server, pin: Archive, target: Path) -> None:
    part(target).parent.mkdir()
    part(target).write_bytes(CONTENT[:5000])
    server.limit = 0
    with pytest.raises(Problem, match=r"could not be downloaded.*5000 bytes so far are kept, and a rerun goes on"):
        download.fetch(server.url, pin, target)
    assert not target.exists()
    server.limit = len(CONTENT)
    download.fetch(server.url, pin, target)
    assert server.starts == [5000, 5000]
    assert target.read_bytes() == CONTENT


def test_a_server_without_ranges_starts_again(server: Server, pin: Archive, target: Path) -> None:
    part(target).parent.mkdir()
    part(target).write_bytes(b"something else")
    server.ranges = False
    download.fetch(server.url, pin, target)
    assert target.read_bytes() == CONTENT


def test_a_server_without_ranges_that_truncates_is_given_up(server: Server, pin: Archive, target: Path) -> None:
    server.ranges, server.limit = False, 4000
    with pytest.raises(Problem, match="could not be downloaded"):
        download.fetch(server.url, pin, target)
    assert not target.exists()


def test_a_server_that_does_not_say_how_much_there_is(server: Server, pin: Archive, target: Path) -> None:
    server.lengths = False
    download.fetch(server.url, pin, target)
    assert target.read_bytes() == CONTENT


def test_killed_before_the_last_rename(server: Server, pin: Archive, target: Path) -> None:
    part(target).parent.mkdir()
    part(target).write_bytes(CONTENT)
    download.fetch(server.url, pin, target)
    assert target.read_bytes() == CONTENT
    assert not part(target).exists()


@pytest.mark.parametrize("other", [b"other", CONTENT[:-1] + b"x", CONTENT + b"x"], ids=["short", "same size", "long"])
def test_another_file(server: Server, pin: Archive, target: Path, other: bytes) -> None:
    server.content = other
    server.limit = len(other)
    with pytest.raises(Problem) as caught:
        download.fetch(server.url, pin, target)
    assert server.url in str(caught.value)
    assert pin.sha256 in str(caught.value)
    assert hashlib.sha256(other).hexdigest() in str(caught.value)
    assert not list(target.parent.iterdir())
    server.content = CONTENT
    server.limit = len(CONTENT)
    download.fetch(server.url, pin, target)


def test_no_such_file(server: Server, pin: Archive, target: Path) -> None:
    server.content = b""
    with pytest.raises(Problem, match=r"127.0.0.1:\d+/file could not be downloaded: HTTP Error 416"):
        download.fetch(server.url, pin, target)
    assert not list(target.parent.iterdir())


def test_a_full_disk(server: Server, pin: Archive, target: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(Problem, match=r"file.part: .*; free some space there and rerun"):
            download.fetch(server.url, pin, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not target.exists()
    download.fetch(server.url, pin, target)
    assert target.read_bytes() == CONTENT
