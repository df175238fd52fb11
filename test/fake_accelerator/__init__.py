"""Two pretend devices in host memory, for tests of threads and streams where there is no GPU.

`load()` registers the devices `pretend:0` and `pretend:1`, and on first use compiles what they
need into build/. They have streams and events, and the autograd engine gives each a thread. The
engine counts devices once, at the first backward of a process, so call `load()` before it.
`races()` names the accesses that no wait orders; see Note [A race without a delay] in timeline.h.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "fake_accelerator"
DEVICES = ("pretend:0", "pretend:1")


@functools.cache
def load() -> None:
    """Register the devices."""
    torch.utils.rename_privateuse1_backend("pretend")
    module = types.ModuleType("torch.pretend")
    # Without it, each tensor made on a device would take the GIL to look for it.
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    torch._register_device_module("pretend", module)
    torch.ops.load_library(library())
    for device in DEVICES:
        try:
            torch.ones((), device=device, requires_grad=True).backward()
        except RuntimeError as error:
            raise RuntimeError(
                f"the autograd engine has no thread for {device}, because a backward ran in this process before "
                "fake_accelerator.load(); run these tests in a process of their own"
            ) from error


def library() -> Path:
    """The compiled library; build/ keeps one for each torch, compiler, set of flags and state of the sources."""
    sources = sorted(HERE.glob("*.cpp"))
    # CXXFLAGS and LDFLAGS are how a sanitizer's build of the project asks for its flags.
    cflags = ["-g1", "-O1", *os.environ.get("CXXFLAGS", "").split()]
    ldflags = os.environ.get("LDFLAGS", "").split()
    digest = hashlib.sha256(repr((torch.__version__, os.environ.get("CXX"), cflags, ldflags)).encode())
    for path in [*sources, *HERE.glob("*.h")]:
        digest.update(path.read_bytes())
    finished = BUILD / digest.hexdigest()[:16]
    name = "fake_accelerator"
    if not finished.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        # In a directory of its own, because the lock of cpp_extension outlives a process that is killed.
        unfinished = Path(tempfile.mkdtemp(dir=BUILD))
        cpp_extension.load(
            name,
            [str(source) for source in sources],
            extra_cflags=cflags,
            extra_ldflags=ldflags,
            build_directory=str(unfinished),
            is_python_module=False,
        )
        try:
            unfinished.rename(finished)
        except OSError:
            # Another process was faster; this one has already loaded its own.
            return unfinished / f"{name}.so"
    return finished / f"{name}.so"


@contextlib.contextmanager
def current(stream: torch.Stream) -> Iterator[None]:
    """Make `stream` and its device current on this thread."""
    device = torch.accelerator.current_device_index()
    previous = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(previous)
        torch.accelerator.set_device_index(device)


def synchronize() -> None:
    for device in DEVICES:
        torch.accelerator.synchronize(device)


def races() -> list[str]:
    return list(torch.ops.fake_accelerator.races())


def waits() -> list[str]:
    return list(torch.ops.fake_accelerator.waits())


def reset() -> None:
    """Forget races and waits so far, and let every later kernel come after all earlier ones."""
    synchronize()
    torch.ops.fake_accelerator.reset()


@contextlib.contextmanager
def waits_ignored() -> Iterator[None]:
    """Let every wait do nothing, so that a test can show what it is there for."""
    torch.ops.fake_accelerator.ignore_waits(True)
    try:
        yield
    finally:
        torch.ops.fake_accelerator.ignore_waits(False)
