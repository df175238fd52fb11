"""The audit, tried on libraries of a few lines that g++ makes here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from igb import audit, paths
from igb.compile import Replacement
from igb.errors import Problem
from libraries import EXPORTED, compile_library

ENGINE = f"""
int version_of_engine = 1;
{EXPORTED} int engine() {{ return 1; }}
int inner_engine() {{ return version_of_engine; }}
"""
CALLER = f"""
int engine(); int inner_engine();
{EXPORTED} int through_export() {{ return engine(); }}
{EXPORTED} int through_hidden() {{ return inner_engine(); }}
"""
PURE = "int twice(int x) { return x + x; }"
PURE_CALLER = f"int twice(int); {EXPORTED} int four(int x) {{ return twice(twice(x)); }}"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")


def check(folder: Path, replaced: dict[str, str], kept: dict[str, str], touched: Sequence[str] = ()) -> None:
    """Audit the replacement of some files of a library of more."""
    old, _ = compile_library(folder / "old", "libold.so", {**replaced, **kept})
    new, units = compile_library(folder / "new", "libnew.so", replaced)
    audit.audit(Replacement(old, new, units), touched, folder / "old", [old, new])


def test_a_hidden_caller_is_named(tmp_path: Path) -> None:
    message = r"  through_hidden\(\)\n    in torch/csrc/caller\.cpp\n    uses inner_engine\(\)"
    with pytest.raises(Problem, match=message):
        check(tmp_path, {"engine.cpp": ENGINE}, {"caller.cpp": CALLER}, touched=["torch/csrc/engine.cpp"])


def test_state_matters_though_the_unit_is_untouched(tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"uses inner_engine\(\)"):
        check(tmp_path, {"engine.cpp": ENGINE}, {"caller.cpp": CALLER})


def test_a_pure_function_of_an_untouched_unit_may_stay_in_use(tmp_path: Path) -> None:
    check(tmp_path / "untouched", {"pure.cpp": PURE}, {"caller.cpp": PURE_CALLER})
    with pytest.raises(Problem, match=r"four\(int\)\n.*\n    uses twice\(int\)"):
        check(tmp_path / "touched", {"pure.cpp": PURE}, {"caller.cpp": PURE_CALLER}, touched=["torch/csrc/pure.cpp"])


def test_a_function_that_uses_a_touched_one_is_not_harmless(tmp_path: Path) -> None:
    replaced = {"pure.cpp": PURE, "indirect.cpp": "int twice(int); int indirect(int x) { return twice(x) + 1; }"}
    kept = {"caller.cpp": PURE_CALLER.replace("twice", "indirect")}
    check(tmp_path / "untouched", replaced, kept)
    with pytest.raises(Problem, match=r"four\(int\)\n.*\n    uses indirect\(int\)"):
        check(tmp_path / "touched", replaced, kept, touched=["torch/csrc/pure.cpp"])


def test_replacing_the_caller_too_closes_the_set(tmp_path: Path) -> None:
    units = {"engine.cpp": ENGINE, "caller.cpp": CALLER}
    check(tmp_path, units, {"other.cpp": PURE}, touched=["torch/csrc/engine.cpp"])


def test_a_caller_behind_a_hidden_function_is_found(tmp_path: Path) -> None:
    kept = {
        "between.cpp": "int inner_engine(); int between() { return inner_engine() + 1; }",
        "outer.cpp": f"int between(); {EXPORTED} int outer() {{ return between() + 1; }}",
    }
    with pytest.raises(Problem, match=r"between\(\)\n.*\n    uses inner_engine\(\)"):
        check(tmp_path, {"engine.cpp": ENGINE}, kept, touched=["torch/csrc/engine.cpp"])


def test_a_pointer_counts_as_a_use(tmp_path: Path) -> None:
    kept = {"table.cpp": f"int inner_engine(); {EXPORTED} int (*table[])() = {{inner_engine}};"}
    with pytest.raises(Problem, match=r"uses inner_engine\(\)"):
        check(tmp_path, {"engine.cpp": ENGINE}, kept, touched=["torch/csrc/engine.cpp"])


def test_a_virtual_function_counts_as_a_use_where_an_object_is_made(tmp_path: Path) -> None:
    replaced = {
        "handler.cpp": "int calls; struct Handler { virtual int handle(); }; int Handler::handle() { return ++calls; }"
    }
    kept = {
        "maker.cpp": f"""
        struct Handler {{ virtual int handle(); }};
        {EXPORTED} Handler *make() {{ return new Handler; }}
        """
    }
    with pytest.raises(Problem, match=r"make\(\)\n.*\n    uses vtable for Handler|uses Handler::handle\(\)"):
        check(tmp_path, replaced, kept)


def test_dead_code_is_no_user(tmp_path: Path) -> None:
    caller = f"""
    int inner_engine();
    static int low() {{ return inner_engine(); }}
    int middle() {{ return low(); }}
    {EXPORTED} int top() {{ return middle(); }}
    """
    replaced = {"engine.cpp": ENGINE, "caller.cpp": caller}
    check(tmp_path, replaced, {"other.cpp": PURE}, touched=["torch/csrc/engine.cpp"])


def test_what_nobody_exports_is_named(tmp_path: Path) -> None:
    kept = {"helper.cpp": "int helper() { return 1; }"}
    replaced = {"engine.cpp": ENGINE + "int helper(); int more() { return helper(); }"}
    with pytest.raises(Problem, match=r"  helper\(\)\n    in torch/csrc/helper\.cpp"):
        check(tmp_path, replaced, kept)


OPERATORS = f"namespace c10 {{ struct {EXPORTED} RegisterOperators {{ RegisterOperators(); }}; }}\n"
REGISTRY = OPERATORS + "c10::RegisterOperators::RegisterOperators() {}"


def test_a_registration_is_refused(tmp_path: Path) -> None:
    replaced = {"ops.cpp": OPERATORS + "static c10::RegisterOperators registration;"}
    with pytest.raises(Problem, match=r"torch/csrc/ops\.cpp registers something"):
        check(tmp_path, replaced, {"registry.cpp": REGISTRY})


def test_a_registration_on_demand_is_none_at_loading(tmp_path: Path) -> None:
    replaced = {"ops.cpp": OPERATORS + "void on_demand() { c10::RegisterOperators registration; }"}
    check(tmp_path, replaced, {"registry.cpp": REGISTRY})


def test_a_variable_of_an_inline_function_must_not_be_split(tmp_path: Path) -> None:
    counter = "inline int &counter() { static int count = 0; return count; }\n"
    replaced = {"engine.cpp": counter + "int count_up() { return ++counter(); }"}
    kept = {"reader.cpp": counter + f"{EXPORTED} int count() {{ return counter(); }}"}
    with pytest.raises(Problem, match=r"(?s)would each have their own copy.*counter\(\)::count"):
        check(tmp_path, replaced, kept)
