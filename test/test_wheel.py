"""The relinked wheel: complete, bound to the new code, and otherwise the release."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from igb import elf, paths

LIB = Path(torch.__file__).parent / "lib"
SIDES = ("torch_cpu", "torch_python")
ENGINE = {
    "torch_cpu": "_ZN5torch8autograd6Engine7executeERKSt6vectorINS0_4EdgeESaIS3_EERKS2_IN2at6TensorESaIS9_EEbbbS7_",
    "torch_python": "_ZN5torch8autograd6PyNode5applyEOSt6vectorIN2at6TensorESaIS4_EE",
}


def release_library(side: str) -> Path:
    """The release's own library, which the build has unpacked."""
    found = sorted((paths.BUILD / "release").glob(f"*/torch/lib/lib{side}.so"))
    assert found, "build/release is filled by `make wheel`"
    return found[0]


def test_version_is_told_everywhere() -> None:
    assert re.fullmatch(r"2\.6\.0\+igb\.\d+", torch.__version__)
    assert metadata.version("torch") == torch.__version__


def test_every_installed_file_is_what_record_says() -> None:
    distribution = metadata.distribution("torch")
    rows = list(csv.reader((distribution.read_text("RECORD") or "").splitlines()))
    checked = 0
    for name, digest, _ in rows:
        path = Path(str(distribution.locate_file(name)))
        if not digest or path.stat().st_size > 200_000_000:  # `make wheel` has verified the largest
            continue
        found = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
        assert digest == f"sha256={found}", name
        checked += 1
    assert checked > 10_000


@pytest.mark.parametrize("side", SIDES)
def test_no_symbol_is_lost(side: str) -> None:
    before = elf.exports(release_library(side))
    rewired, new = elf.exports(LIB / f"lib{side}.so"), elf.exports(LIB / f"lib{side}_igb.so")
    assert before - rewired == before & new
    assert rewired <= before
    assert ENGINE[side] in before - rewired


@pytest.mark.parametrize("side", SIDES)
def test_engine_is_bound_to_the_new_library(side: str, tmp_path: Path) -> None:
    script = "import torch; x = torch.ones(2, requires_grad=True); x.mul(2).sum().backward()"
    log = tmp_path / "bindings"
    subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(log), "LD_BIND_NOW": "1"},
        check=True,
    )
    bindings = re.compile(r"binding file \S*?([^/\s]+) \[\d+\] to \S*?([^/\s]+) \[\d+\]: normal symbol `([^']+)'")
    # Of inline functions and typeinfo any library's copy will do; they are weak.
    new = {symbol.name for symbol in elf.symbols(LIB / f"lib{side}_igb.so") if symbol.binding == elf.GLOBAL}
    moved = elf.exports(release_library(side)) & elf.exports(LIB / f"lib{side}_igb.so") & new
    seen = set()
    for part in tmp_path.iterdir():
        with part.open(errors="replace") as lines:
            for line in lines:
                if (match := bindings.search(line)) and match[3] in moved and match[2].startswith("libtorch"):
                    assert match[2] == f"lib{side}_igb.so", line
                    seen.add(match[3])
    assert ENGINE[side] in seen
