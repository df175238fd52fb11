"""What the property costs in memory: nothing that stays, and one temporary less at the peak."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Body = Callable[[Any, Tensor], object]
libc = ctypes.CDLL(None)
libc.malloc.argtypes = [ctypes.c_size_t]
libc.malloc.restype = ctypes.c_void_p


class Mallinfo(ctypes.Structure):
    """What glibc's mallinfo() returns; its numbers wrap around at 4 GiB."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_int) for name in _names.split())


libc.mallinfo.restype = Mallinfo


class Scale(torch.autograd.Function):
    """Doubles its argument; the backward is whatever ``body`` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, body: Body) -> Tensor:
        ctx.body = body
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.body(ctx, gradient), None


def accumulate(ctx: Any, gradient: Tensor) -> Tensor | None:
    buffer = ctx.input_grad_buffers[0]
    if buffer is None:
        return gradient * 2
    buffer.add_(gradient, alpha=2)
    return None


def read_twice(ctx: Any, gradient: Tensor) -> Tensor | None:
    assert ctx.input_grad_buffers[0] is ctx.input_grad_buffers[0]
    return accumulate(ctx, gradient)


def hold(ctx: Any, gradient: Tensor) -> Tensor | None:
    ctx.held = ctx.input_grad_buffers[0]
    return accumulate(ctx, gradient)


def hold_an_alias(ctx: Any, gradient: Tensor) -> Tensor | None:
    ctx.held = None if (buffer := ctx.input_grad_buffers[0]) is None else buffer.detach()
    return accumulate(ctx, gradient)


def record_gradients(ctx: Any, gradient: Tensor) -> Tensor | None:
    buffer = ctx.input_grad_buffers[0]
    if buffer is None:
        return gradient * 2
    with torch.enable_grad():
        buffer.add_(gradient * torch.full_like(gradient, 2, requires_grad=True))
    return None


def call_grad(ctx: Any, gradient: Tensor) -> Tensor | None:
    if ctx.input_grad_buffers[0] is not None:
        leaf = torch.ones(1, requires_grad=True)
        with torch.enable_grad(), suppress(RuntimeError):
            torch.autograd.grad(leaf * 2, leaf)
    return accumulate(ctx, gradient)


def fail(ctx: Any, gradient: Tensor) -> Tensor | None:
    if ctx.input_grad_buffers[0] is not None:
        raise ValueError
    return gradient * 2


def return_the_buffer(ctx: Any, gradient: Tensor) -> Tensor | None:
    buffer = ctx.input_grad_buffers[0]
    return gradient * 2 if buffer is None else buffer.add_(gradient, alpha=2)


def resize(ctx: Any, gradient: Tensor) -> Tensor | None:
    buffer = ctx.input_grad_buffers[0]
    if buffer is None:
        return gradient * 2
    buffer.resize_(0)
    return None


BODIES = [
    *[accumulate, read_twice, hold, hold_an_alias, record_gradients],
    *[call_grad, fail, return_the_buffer, resize],
]


def usage(x: Tensor, body: Body) -> dict[str, int]:
    """Counts that grow with the number of backwards if one of them leaves something behind."""
    gc.collect()
    counts = {"objects": len(gc.get_objects())}
    shared = {"x": x, "body": body, "None": None, "Tensor": Tensor, "Scale": Scale, "ctx": Scale._backward_cls}
    counts.update((f"references to {name}", sys.getrefcount(thing)) for name, thing in shared.items())
    counts["bytes"] = libc.mallinfo().uordblks
    return counts


def growth(body: Body, times: int = 10_000) -> list[str]:
    """What grew by at least one, or by eight bytes, in each of so many backwards."""
    x = torch.ones(3, requires_grad=True)

    def backward() -> None:
        loss = Scale.apply(x, body).sum() + Scale.apply(x, body).sum() + (x * 3).sum()
        with suppress(RuntimeError, ValueError):
            loss.backward()
        x.grad = None

    for _ in range(100):
        backward()
    before = usage(x, body)
    for _ in range(times):
        backward()
    after = usage(x, body)
    difference = {name: (after[name] - number) % 2**32 for name, number in before.items()}
    limits = {name: times * 8 if name == "bytes" else times for name in difference}
    return [name for name, number in difference.items() if limits[name] <= number < 2**31]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_backwards_leave_nothing_behind(body: Body) -> None:
    assert growth(body) == []


def leak_an_object(ctx: Any, gradient: Tensor, kept: list[object] = []) -> Tensor | None:  # noqa: B006
    kept.append([ctx.input_grad_buffers[0]])
    return gradient * 2


def leak_a_reference(ctx: Any, gradient: Tensor) -> Tensor | None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(Scale))
    return accumulate(ctx, gradient)


def leak_memory(ctx: Any, gradient: Tensor) -> Tensor | None:
    libc.malloc(8)
    return accumulate(ctx, gradient)


@pytest.mark.parametrize(
    ("body", "grown"),
    [(leak_an_object, "objects"), (leak_a_reference, "references to Scale"), (leak_memory, "bytes")],
)
def test_a_leak_would_be_noticed(body: Body, grown: str) -> None:
    assert grown in growth(body)


class Watch:
    """A body that accumulates, and notes whether the buffers that it got are still alive."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.buffers: list[Any] = []

    def __call__(self, ctx: Any, gradient: Tensor) -> object:
        self.buffers += [torch._C._WeakTensorRef(b) for b in ctx.input_grad_buffers if b is not None]
        return self.body(ctx, gradient)

    def alive(self) -> list[bool]:
        return [not buffer.expired() for buffer in self.buffers]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What dies in spite of this is in no cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
class TestTheBufferDies:
    def graph(self, body: Body) -> tuple[Watch, Tensor, Tensor]:
        watch = Watch(body)
        x = torch.ones(3, requires_grad=True)
        y = x * 1
        return watch, x, Scale.apply(y, watch).sum() + (y * 3).sum()

    def test_when_its_consumer_has_run_though_the_graph_lives_on(self) -> None:
        watch, x, loss = self.graph(accumulate)
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert gradient.tolist() == [5, 5, 5]
        assert watch.alive() == [False]

    def test_with_the_gradient_that_it_has_become(self) -> None:
        watch = Watch(accumulate)
        x = torch.ones(3, requires_grad=True)
        (gradient,) = torch.autograd.grad(Scale.apply(x, watch).sum() + (x * 3).sum(), x)
        assert watch.alive() == [True]
        assert gradient.tolist() == [5, 5, 5]
        del gradient
        assert watch.alive() == [False]

    @pytest.mark.parametrize("body", [hold, hold_an_alias])
    def test_with_the_graph_whose_context_holds_it(self, body: Body) -> None:
        watch, x, loss = self.graph(body)
        loss.backward(retain_graph=True)
        assert x.grad is not None and x.grad.tolist() == [5, 5, 5]
        assert watch.alive() == [body is hold]
        del loss
        assert watch.alive() == [False]

    @pytest.mark.parametrize("body", [fail, return_the_buffer, resize])
    def test_with_a_backward_that_fails(self, body: Body) -> None:
        watch, _, loss = self.graph(body)
        with suppress(RuntimeError, ValueError):
            loss.backward(retain_graph=True)
        # The engine drops what is left in a thread's queue when it next runs there.
        torch.ones(1, requires_grad=True).sum().backward()
        assert watch.alive() == [False]


def peak(fused: bool, call: Callable[[Tensor, Tensor], object], uses: int) -> tuple[int, int]:
    """The bytes at the peak of a backward, and the number of buffers that it lent."""
    lent = 0

    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
            nonlocal lent
            (x,) = ctx.saved_tensors
            buffer = ctx.input_grad_buffers[1] if fused else None
            if buffer is None:
                return None, x.t() @ gradient
            lent += 1
            buffer.addmm_(x.t(), gradient)
            return None, None

    weight = torch.ones(32, 32, requires_grad=True)
    outputs = [Multiply.apply(torch.ones(2, 32), weight).sum() for _ in range(uses)]
    loss = torch.stack(outputs).sum()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call(loss, weight)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes)), lent


@pytest.mark.parametrize("call", [lambda loss, weight: loss.backward(), torch.autograd.grad], ids=["backward", "grad"])
@pytest.mark.parametrize("uses", [2, 5])
def test_the_peak_is_lower_by_one_gradient(call: Callable[[Tensor, Tensor], object], uses: int) -> None:
    returning, nothing_lent = peak(False, call, uses)
    fused, lent = peak(True, call, uses)
    assert (nothing_lent, lent) == (0, uses - 1)
    assert returning - fused == 32 * 32 * 4
