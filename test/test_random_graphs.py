"""Random autograd graphs: with the property and without, a user sees the same. See random_graphs.py."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Callable, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, Verbosity, find, given, seed, settings
from hypothesis import strategies as st
from random_graphs import (
    BINARY,
    EFFECTS,
    GRADIENT_LAYOUTS,
    GROWING,
    LEAF_LAYOUTS,
    MISUSES,
    STYLES,
    UNARY,
    WRITERS,
    Argument,
    Broken,
    Builtin,
    Checkpoint,
    Custom,
    FusedRun,
    Graph,
    Hook,
    InPlace,
    Leaf,
    Pass,
    Step,
    arguments_of,
    compare,
)
from torch import Tensor

Draw = Callable[[st.SearchStrategy[Any]], Any]


# Few choices a graph keep Hypothesis fast: what is out of the ordinary comes as sets of fields, the usual ones first.


def sometimes(share: int, *unusual: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """One of the sets of fields once in ``share`` times, else none."""
    return st.sampled_from([*[{}] * len(unusual) * (share - 1), *unusual])


def each(field: str, values: Iterable[Any]) -> list[dict[str, Any]]:
    return [{field: value} for value in values]


LEAVES = st.sampled_from(
    [
        *[Leaf(grad=grad) for grad in (None, "dense")] * 4,
        *[Leaf(layout, grad=grad) for layout in LEAF_LAYOUTS for grad in (None, "transposed", "sparse")],
        Leaf(requires_grad=False),
    ]
)
USES = st.sampled_from(["return", *WRITERS])
TERMS = sometimes(2, *each("scale", [2, -1, 3] * 4), *each("layout", GRADIENT_LAYOUTS))
OTHER_ARGUMENTS = st.sampled_from([(), (), (), (), (None,), (2.0, "s"), ("s", None)])
TWISTS = sometimes(
    2,
    *each("outputs", [2, 3] * 8),
    *each("style", ["setup", "once"] * 8),
    *each("reads", [0, 2] * 8),
    *each("grad_mode", [False, True] * 8),
    *each("nested", ["before", "after"] * 8),
    *each("materialize", [False] * 8),
    *each("product", [True] * 32),
    *each("fails", ["raise", *MISUSES]),
)
PASSES = sometimes(
    2,
    *each("grad", [True] * 4),
    *each("gradient", ["dense", "transposed", "expanded"]),
    *each("clear", [True] * 2),
    *each("create_graph", [True]),
    *each("anomaly", [True]),
)
HOOKS = st.sampled_from(
    [
        *[("tensor", {}), ("retain", {}), ("accumulated", {}), ("node_pre", {}), ("node_post", {})],
        *[(kind, {"effect": effect}) for kind in ("tensor", "node_pre") for effect in EFFECTS],
        *[(kind, {"removed": True}) for kind in ("tensor", "node_pre", "node_post")],
    ]
)
SECOND_ORDER = st.sampled_from([False] * 7 + [True])
SIZES = st.sampled_from([2, 2, 2, 2, 3, 3, 1, 0])
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.complex64])


# Strategies of their own, so that Hypothesis can take a part away as a whole when it shrinks a failure.


@st.composite
def arguments(draw: Draw, count: int) -> Argument:
    return Argument(draw(st.integers(0, count - 1)), draw(USES), **draw(TERMS))


@st.composite
def customs(draw: Draw, count: int) -> Custom:
    tensors = draw(st.lists(arguments(count), min_size=1, max_size=3))
    others = draw(OTHER_ARGUMENTS)
    twists = {**draw(TWISTS), **draw(TWISTS)}
    return Custom((*others[:1], *tensors, *others[1:]), worker=draw(st.booleans()), **twists)


@st.composite
def builtins(draw: Draw, count: int, given: int) -> Builtin:
    op = draw(st.sampled_from([*UNARY, *BINARY]))
    values = [draw(st.integers(0, count - 1))]
    if op in BINARY:
        values.append(draw(st.integers(0, (given if op in GROWING else count) - 1)))
    return Builtin(op, tuple(values))


@st.composite
def checkpoints(draw: Draw, count: int) -> Checkpoint:
    values = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2))
    steps, _ = draw(step_lists(len(values), 4, ["custom", "custom", "builtin", "in_place"]))
    return Checkpoint(tuple(values), steps, reentrant=draw(st.booleans()))


@st.composite
def next_steps(draw: Draw, count: int, given: int, kinds: list[str]) -> Step | None:
    if not draw(st.integers(0, 9)):
        return None
    kind = draw(st.sampled_from(kinds))
    if kind == "custom":
        return draw(customs(count))
    if kind == "builtin":
        return draw(builtins(count, given))
    if kind == "in_place":
        return InPlace(draw(arguments(count)), row=draw(st.booleans()), worker=draw(st.booleans()))
    return draw(checkpoints(count))


@st.composite
def step_lists(draw: Draw, given: int, most: int, kinds: list[str]) -> tuple[tuple[Step, ...], int]:
    """Some steps, starting from ``given`` values, and how many values there are in the end."""
    steps: list[Step] = []
    count = given
    while len(steps) < most and (step := draw(next_steps(count, given, kinds))):
        steps.append(step)
        count += step.outputs if isinstance(step, Custom) else 2 if isinstance(step, InPlace) else 1
    return tuple(steps), count


def unused(steps: Iterable[Step], count: int) -> tuple[int, ...]:
    """The values that no step takes."""
    used: set[int] = set()
    for step in steps:
        values = step.values if isinstance(step, (Builtin, Checkpoint)) else (a.value for a in arguments_of([step]))
        used.update(values)
    return tuple(sorted(set(range(count)) - used))


@st.composite
def passes(draw: Draw, ends: tuple[int, ...], count: int, reentrant: bool) -> Pass:
    some = st.lists(st.integers(0, count - 1), min_size=1, max_size=3).map(tuple)
    roots = draw(st.just(ends) | some)
    fields = {**draw(PASSES), **draw(PASSES)}
    if reentrant:  # A reentrant checkpoint refuses grad(), and backward() with inputs.
        return Pass(roots, **{**fields, "grad": False})
    return Pass(roots, inputs=draw(st.none() | st.none() | some), **fields)


@st.composite
def hooks(draw: Draw, count: int) -> Hook:
    kind, fields = draw(HOOKS)
    return Hook(draw(st.integers(0, count - 1)), kind, **fields)


@st.composite
def graphs(draw: Draw) -> Graph:
    leaves = draw(st.lists(LEAVES, min_size=1, max_size=3))
    steps, count = draw(step_lists(len(leaves), 8, ["custom", "custom", "builtin", "in_place", "checkpoint"]))
    ends = unused(steps, count)
    reentrant = any(isinstance(step, Checkpoint) and step.reentrant for step in steps)
    calls = draw(st.lists(passes(ends, count, reentrant), min_size=1, max_size=2))
    if draw(SECOND_ORDER) and not reentrant:
        calls = [dataclasses.replace(calls[0], create_graph=True, grad=True), Pass(())]
    return Graph(
        tuple(leaves),
        steps,
        tuple(calls),
        tuple(draw(st.lists(hooks(count), max_size=3))),
        size=draw(SIZES),
        dtype=draw(DTYPES),
        integers=draw(st.booleans()),
    )


SETTINGS = settings(
    max_examples=500,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
)


def check_round(number: int, done: set[int], tally: Counter[str]) -> None:
    """Compare the graphs that Hypothesis makes from seed ``number``, and note their hashes."""

    @seed(number)
    @SETTINGS
    @given(graphs())
    def check(graph: Graph) -> None:
        if hash(graph) in done:
            return
        try:
            compare(graph, tally)
        except Exception as error:
            raise AssertionError(f"with seed {number}: {error}\n{graph}") from error
        done.add(hash(graph))

    check()


# What has to come up in a run of the default length, each with a buffer that was lent.
EXPECTED = [
    *[f"use {use}" for use in ("return", *WRITERS)],
    *[f"contribution {layout}" for layout in GRADIENT_LAYOUTS],
    *[f"style {style}" for style in STYLES],
    *[f"grad mode {mode}" for mode in (None, False, True)],
    *[f"dtype {dtype}" for dtype in (torch.float32, torch.float64, torch.complex64)],
    *[f"size {size}" for size in range(4)],
    *["buffer dense", "buffer transposed", "pass backward", "pass grad", "roots values"],
    *["inputs all", "inputs some", "place graph", "place checkpoint", "thread main", "thread worker"],
    *["effect in place", "effect new tensor"],
]


def test_random_graphs() -> None:
    wanted = int(os.environ.get("IGB_GRAPHS", "2000"))
    done: set[int] = set()
    tally: Counter[str] = Counter()
    # Rounds, because Hypothesis remembers all that it did in one.
    for number in itertools.count(int(os.environ.get("IGB_SEED", "0"))):
        if len(done) >= wanted:
            break
        print(f"{len(done)} graphs are right; seed {number}", flush=True)
        check_round(number, done, tally)
    print(*(f"{count:9} {key}" for key, count in sorted(tally.items())), sep="\n")
    assert [key for key in EXPECTED if not tally[key]] == []
    # Which misuse comes up is chance in a run of the default length; test_graph has each.
    assert any(tally[f"misuse {misuse}"] for misuse in MISUSES)
    assert tally["lent"] > tally["entries"] / 10
    assert tally["graphs with an error"] < tally["graphs"] / 5


ADD = Custom((Argument(0, use="add"),))
DOUBLE = Builtin("double", (0,))
# Graphs worth keeping, with the number of buffers that are lent. The engine runs the youngest node first.
EXAMPLES = [
    (Graph((Leaf(),), (ADD, DOUBLE), (Pass((1, 2)),)), 1),
    (Graph((Leaf(),), (DOUBLE, ADD), (Pass((1, 2)),)), 0),
    (Graph((Leaf(grad="dense"),), (ADD,) * 5, (Pass((1, 2, 3, 4, 5)),) * 2), 8),
    # An argument that is repeated, and one that an operation passed its gradient on to unchanged, beside another.
    (Graph((Leaf(),), (Custom((Argument(0, use="add"),) * 2), DOUBLE), (Pass((1, 2)),)), 1),
    (Graph((Leaf(), Leaf()), (Custom((Argument(0, use="add"),)), Builtin("add", (0, 1))), (Pass((2, 3)),)), 0),
    # A post-hook makes the read fail, after which the body falls back.
    (Graph((Leaf(),), (ADD, DOUBLE), (Pass((1, 2)),), (Hook(1, "node_post"),)), 0),
    (Graph((Leaf(),), (ADD, DOUBLE), (Pass((1, 2)),), (Hook(1, "node_post", removed=True),)), 1),
    # A body that fails leaves the thread fit for another pass.
    *[
        (Graph((Leaf(),), (Custom((Argument(0, use="add"),), fails=how), DOUBLE), (Pass((1, 2)),) * 2), 2)
        for how in ("raise", *MISUSES)
    ],
    # Nothing is lent while a backward is recorded; a backward of what it gave is one like any other.
    (
        Graph(
            (Leaf(),),
            (Custom((Argument(0, use="add"),), product=True), Builtin("multiply", (1, 0))),
            (Pass((2,), grad=True, create_graph=True), Pass(())),
        ),
        1,
    ),
    # The second thread's nodes are the oldest: here both steps inside, and the one outside, find something.
    (Graph((Leaf(),), (Checkpoint((0,), (ADD, ADD, Builtin("add", (1, 2)))), ADD, DOUBLE), (Pass((1, 2, 3)),)), 3),
    (Graph((Leaf(),), (InPlace(Argument(0, use="add"), worker=True),), (Pass((1, 2)),)), 1),
    (Graph((Leaf(),), (InPlace(Argument(0, use="add"), row=True, worker=True),), (Pass((1, 2)),)), 0),
]


@pytest.mark.parametrize(("graph", "lent"), EXAMPLES, ids=str)
def test_graph(graph: Graph, lent: int) -> None:
    tally: Counter[str] = Counter()
    compare(graph, tally)
    assert tally["lent"] == lent


class AddsTwice(FusedRun):
    def deliver(self, argument: Argument, contribution: Tensor | None, buffer: Tensor | None) -> Tensor | None:
        super().deliver(argument, contribution, buffer)
        return super().deliver(argument, contribution, buffer)


class Forgets(FusedRun):
    def deliver(self, argument: Argument, contribution: Tensor | None, buffer: Tensor | None) -> Tensor | None:
        return None if buffer is not None else super().deliver(argument, contribution, buffer)


class IgnoresNone(FusedRun):
    def deliver(self, argument: Argument, contribution: Tensor | None, buffer: Tensor | None) -> Tensor | None:
        result = super().deliver(argument, contribution, buffer)
        return result if argument.use == "return" else None


class ReturnsToo(FusedRun):
    def deliver(self, argument: Argument, contribution: Tensor | None, buffer: Tensor | None) -> Tensor | None:
        super().deliver(argument, contribution, buffer)
        return contribution


class LendsCopies(FusedRun):
    def buffers(self, ctx: Any, task: Any, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [None if b is None else b.clone() for b in super().buffers(ctx, task, gradients)]


class LendsTheIncoming(FusedRun):
    def buffers(self, ctx: Any, task: Any, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [b if b is None else gradients[0] for b in super().buffers(ctx, task, gradients)]


class Leaks(FusedRun):
    leaked: ClassVar[list[Tensor]] = []

    def deliver(self, argument: Argument, contribution: Tensor | None, buffer: Tensor | None) -> Tensor | None:
        if buffer is not None:
            self.leaked.append(buffer)
        return super().deliver(argument, contribution, buffer)


@pytest.mark.parametrize(
    "fault",
    [AddsTwice, Forgets, IgnoresNone, ReturnsToo, LendsCopies, LendsTheIncoming, Leaks],
    ids=lambda f: f.__name__,
)
def test_a_fault_is_found_and_shrunk(fault: type[FusedRun]) -> None:
    def differs(graph: Graph) -> bool:
        try:
            compare(graph, Counter(), fault)
        except (AssertionError, Broken):
            return True
        return False

    graph = find(graphs(), differs, settings=SETTINGS, random=random.Random(0))
    print(graph)
    assert len(graph.leaves) + len(graph.steps) + len(graph.passes) + len(graph.hooks) <= 4
