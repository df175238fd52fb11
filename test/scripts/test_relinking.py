"""Rewiring and its audit, tried on a library of three files that gcc makes here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from igb import audit, elf, paths
from igb.compile import Replacement
from igb.errors import Problem

ENGINE = """
int version_of_engine = {version};
__attribute__((visibility("default"))) int engine() {{ return {version}; }}
int inner_engine() {{ return version_of_engine; }}
"""
CALLER = """
int engine(); int inner_engine();
__attribute__((visibility("default"))) int through_export() { return engine(); }
__attribute__((visibility("default"))) int through_hidden() { return inner_engine(); }
"""
PURE = "int twice(int x) { return x + x; }"
PURE_CALLER = 'int twice(int); __attribute__((visibility("default"))) int four(int x) { return twice(twice(x)); }'


def compile_library(folder: Path, name: str, sources: dict[str, str]) -> tuple[Path, tuple[Path, ...]]:
    objects = []
    for unit, text in sources.items():
        source = folder / "torch" / "csrc" / unit
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(text)
        objects.append(source.with_suffix(".cpp.o"))
        flags = ["-O2", "-fPIC", "-fvisibility=hidden", "-ffunction-sections", "-fno-inline"]
        subprocess.run(["g++", *flags, "-c", source, "-o", objects[-1]], check=True)
    library = folder / "release" / "torch" / "lib" / name
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["g++", "-shared", *objects, "-o", library, f"-Wl,-soname,{name}"], check=True)
    return library, tuple(objects)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")


def pair(tmp_path: Path, replaced: dict[str, str], kept: dict[str, str]) -> Replacement:
    old, _ = compile_library(tmp_path / "old", "libold.so", {**replaced, **kept})
    new, objects = compile_library(tmp_path / "new", "libnew.so", replaced)
    return Replacement(old, new, objects)


def test_calls_go_to_the_new_library(tmp_path: Path) -> None:
    old, _ = compile_library(
        tmp_path / "old", "libold.so", {"engine.cpp": ENGINE.format(version=1), "caller.cpp": CALLER}
    )
    new, _ = compile_library(tmp_path / "new", "libnew.so", {"engine.cpp": ENGINE.format(version=2)})
    output = tmp_path / "out" / "libold.so"
    assert elf.rewire(old, new, output) == ["_Z6enginev"]
    assert elf.exports(output) == {"_Z14through_exportv", "_Z14through_hiddenv"}
    assert "libnew.so" in elf.needed(output)
    (tmp_path / "out" / "libnew.so").write_bytes(new.read_bytes())
    script = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[2], ctypes.RTLD_GLOBAL); lib = ctypes.CDLL(sys.argv[1]);"
        "print(lib._Z14through_exportv(), lib._Z14through_hiddenv())"
    )
    done = subprocess.run(
        ["python3", "-c", script, output, tmp_path / "out" / "libnew.so"],
        env={"LD_LIBRARY_PATH": str(output.parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    # The second call shows why the audit is needed: it goes past the rewiring.
    assert done.stdout.split() == ["2", "1"]


def test_a_hidden_caller_is_named(tmp_path: Path) -> None:
    replacement = pair(tmp_path, {"engine.cpp": ENGINE.format(version=1)}, {"caller.cpp": CALLER})
    with pytest.raises(Problem, match=r"torch/csrc/caller\.cpp: through_hidden\(\)\n    uses inner_engine\(\)"):
        audit.audit(replacement, touched=["torch/csrc/engine.cpp"], source=tmp_path / "old")


def test_state_matters_though_the_unit_is_untouched(tmp_path: Path) -> None:
    replacement = pair(tmp_path, {"engine.cpp": ENGINE.format(version=1)}, {"caller.cpp": CALLER})
    with pytest.raises(Problem, match=r"uses inner_engine\(\)"):
        audit.audit(replacement, touched=[], source=tmp_path / "old")


def test_a_pure_function_of_an_untouched_unit_may_stay_in_use(tmp_path: Path) -> None:
    replacement = pair(tmp_path, {"pure.cpp": PURE}, {"caller.cpp": PURE_CALLER})
    audit.audit(replacement, touched=[], source=tmp_path / "old")
    with pytest.raises(Problem, match=r"four\(int\)\n    uses twice\(int\)"):
        audit.audit(replacement, touched=["torch/csrc/pure.cpp"], source=tmp_path / "old")


def test_replacing_the_caller_too_closes_the_set(tmp_path: Path) -> None:
    units = {"engine.cpp": ENGINE.format(version=1), "caller.cpp": CALLER}
    audit.audit(pair(tmp_path, units, {"other.cpp": PURE}), touched=["torch/csrc/engine.cpp"], source=tmp_path / "old")


def test_a_caller_behind_a_hidden_function_is_found(tmp_path: Path) -> None:
    kept = {
        "between.cpp": "int inner_engine(); int between() { return inner_engine() + 1; }",
        "outer.cpp": 'int between(); __attribute__((visibility("default"))) int outer() { return between() + 1; }',
    }
    replacement = pair(tmp_path, {"engine.cpp": ENGINE.format(version=1)}, kept)
    with pytest.raises(Problem, match=r"between\(\)\n    uses inner_engine\(\)"):
        audit.audit(replacement, touched=["torch/csrc/engine.cpp"], source=tmp_path / "old")


def test_a_pointer_counts_as_a_use(tmp_path: Path) -> None:
    table = '__attribute__((visibility("default"))) int (*table[])() = {inner_engine};'
    kept = {"table.cpp": f"int inner_engine(); {table}"}
    replacement = pair(tmp_path, {"engine.cpp": ENGINE.format(version=1)}, kept)
    with pytest.raises(Problem, match=r"uses inner_engine\(\)"):
        audit.audit(replacement, touched=["torch/csrc/engine.cpp"], source=tmp_path / "old")


def test_a_registration_is_refused(tmp_path: Path) -> None:
    text = """
    namespace c10 { struct RegisterOperators { RegisterOperators(); }; }
    static c10::RegisterOperators registration;
    """
    source = tmp_path / "torch" / "csrc" / "ops.cpp"
    source.parent.mkdir(parents=True)
    source.write_text(text)
    object_file = source.with_suffix(".cpp.o")
    subprocess.run(["g++", "-fPIC", "-c", source, "-o", object_file], check=True)
    with pytest.raises(Problem, match=r"torch/csrc/ops\.cpp registers something"):
        audit.check_registrations([object_file])


def test_a_thread_local_export_cannot_be_rewired(tmp_path: Path) -> None:
    text = {"tls.cpp": '__attribute__((visibility("default"))) thread_local int depth = 1;'}
    replacement = pair(tmp_path, text, {"other.cpp": PURE})
    with pytest.raises(Problem, match="thread-local"):
        elf.rewire(replacement.old, replacement.new, tmp_path / "out" / "libold.so")
    assert not list((tmp_path / "out").iterdir())
