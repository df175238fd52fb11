"""Rewiring, tried on libraries of a few lines that g++ makes here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from igb import elf
from igb.errors import Problem
from libraries import EXPORTED, compile_library

ENGINE = f"""
int inner_engine() {{{{ return {{version}}; }}}}
{EXPORTED} int engine() {{{{ return {{version}}; }}}}
"""
CALLER = f"""
int engine(); int inner_engine();
{EXPORTED} int through_export() {{ return engine(); }}
{EXPORTED} int (*through_pointer)() = engine;
{EXPORTED} int through_hidden() {{ return inner_engine(); }}
"""
REPORT = """
import ctypes, sys
old = ctypes.CDLL(sys.argv[1])
pointer = ctypes.CFUNCTYPE(ctypes.c_int).in_dll(old, "through_pointer")
print(old._Z14through_exportv(), pointer(), old._Z14through_hiddenv())
"""


def rewired(folder: Path) -> tuple[Path, list[str]]:
    """A library of version 1 bound to an engine of version 2, in a folder with both."""
    before = {"engine.cpp": ENGINE.format(version=1), "caller.cpp": CALLER}
    old, _ = compile_library(folder / "old", "libold.so", before)
    new, _ = compile_library(folder / "new", "libnew.so", {"engine.cpp": ENGINE.format(version=2)})
    output = folder / "out" / "libold.so"
    names = elf.rewire(old, new, output)
    shutil.copy(new, output.parent)
    return output, names


def test_every_reference_goes_to_the_new_library(tmp_path: Path) -> None:
    output, names = rewired(tmp_path)
    assert names == ["_Z6enginev"]
    done = subprocess.run(
        [sys.executable, "-c", REPORT, output],
        env={"LD_LIBRARY_PATH": str(output.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    # The last shows why the audit is needed: a call of a hidden function goes past the rewiring.
    assert done.stdout.split() == ["2", "2", "1"]


def test_nothing_but_the_rewired_is_lost(tmp_path: Path) -> None:
    output, _ = rewired(tmp_path)
    assert elf.exports(output) == {"_Z14through_exportv", "_Z14through_hiddenv", "through_pointer"}
    assert elf.needed(output)[0] == "libnew.so"


def test_a_lost_symbol_is_found(tmp_path: Path) -> None:
    output, names = rewired(tmp_path)
    elf.undefine(output, {"_Z14through_exportv"})
    with pytest.raises(Problem, match=r"does not export what libold\.so does"):
        elf.check(tmp_path / "old/torch/lib/libold.so", output, output.with_name("libnew.so"), names)


@pytest.mark.parametrize(
    ("field", "change", "complaint"),
    [
        ("p_offset", 8, "a segment that cannot be mapped"),
        ("p_filesz", 1 << 40, "a segment that cannot be mapped"),
        ("p_memsz", 1 << 40, "segments that overlap"),
        ("p_flags", -1, "initialiser outside executable memory"),
    ],
)
def test_a_malformed_segment_is_found(tmp_path: Path, field: str, change: int, complaint: str) -> None:
    output, names = rewired(tmp_path)
    with output.open("r+b") as file:
        library = ELFFile(file)
        number, segment = next(
            (number, segment.header)
            for number, segment in enumerate(library.iter_segments())
            if segment["p_type"] == "PT_LOAD" and segment["p_flags"] & 1
        )
        segment[field] += change
        file.seek(library["e_phoff"] + number * library["e_phentsize"])
        file.write(library.structs.Elf_Phdr.build(segment))
    with pytest.raises(Problem, match=complaint):
        elf.check(tmp_path / "old/torch/lib/libold.so", output, output.with_name("libnew.so"), names)


def test_a_thread_local_export_cannot_be_rewired(tmp_path: Path) -> None:
    text = f"{EXPORTED} thread_local int depth = 1;"
    old, _ = compile_library(tmp_path / "old", "libold.so", {"tls.cpp": text})
    new, _ = compile_library(tmp_path / "new", "libnew.so", {"tls.cpp": text})
    with pytest.raises(Problem, match="thread-local"):
        elf.rewire(old, new, tmp_path / "out" / "libold.so")
    assert not list((tmp_path / "out").iterdir())


def test_what_no_library_provides_is_found(tmp_path: Path) -> None:
    text = f'#include <cstdio>\nint absent(); {EXPORTED} int present() {{ std::puts(""); return absent(); }}'
    user, _ = compile_library(tmp_path, "libuser.so", {"user.cpp": text})
    assert elf.unresolved(user, []) == {"_Z6absentv"}
    text = f"{EXPORTED} int absent() {{ return 1; }}"
    provider, _ = compile_library(tmp_path / "provider", "libprovider.so", {"provider.cpp": text})
    assert elf.unresolved(user, [provider]) == set()


def test_versions_needed(tmp_path: Path) -> None:
    text = f'#include <cstdio>\n{EXPORTED} int print() {{ return std::puts(""); }}'
    library, _ = compile_library(tmp_path, "libprint.so", {"print.cpp": text})
    assert elf.newest_versions(library)["GLIBC"] >= (2, 2)
