"""Buffers on loan while other engine threads, devices and streams contribute to the same slots.

Each order of events is forced: by the engine's own order (of the nodes ready on a thread, the
most recently created first), by tensors that tell that a thread has delivered (`delivered`),
and by events that bodies wait for. Time matters only to the watchdog.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import fake_accelerator
import pytest
import torch
from fake_accelerator import current, races
from torch.autograd.graph import get_gradient_edge

WATCHDOG_SECONDS = 300
RANDOM_GRAPHS = 2000
FIRST, SECOND = fake_accelerator.DEVICES


@pytest.fixture(scope="session")
def uncaptured_stderr(request):
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        return os.dup(2)


@pytest.fixture(autouse=True)
def accelerator(uncaptured_stderr):
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True, file=uncaptured_stderr)
    fake_accelerator.load()
    fake_accelerator.reset()
    yield
    gc.collect()
    fake_accelerator.synchronize()
    found = races()
    fake_accelerator.reset()
    faulthandler.cancel_dump_traceback_later()
    assert found == []


def wait_for(event):
    assert event.wait(WATCHDOG_SECONDS)


@contextlib.contextmanager
def on(stream):
    """Run forward code on a stream, after everything so far and before everything later."""
    fake_accelerator.synchronize()
    with current(stream):
        yield
    fake_accelerator.synchronize()


def stream_of(device, kind="default"):
    if device == "cpu":
        device = FIRST
    return torch.Stream(device=device) if kind == "side" else torch.accelerator.current_stream(device)


class Step(torch.autograd.Function):
    """The sum of tensors, on `device`; its backward is `body`, which runs on that device's thread."""

    @staticmethod
    def forward(ctx, body, device, *tensors):
        ctx.body = body
        ctx.homes = [tensor.device for tensor in tensors]
        return sum(tensor.to(device, copy=True) for tensor in tensors)

    @staticmethod
    def backward(ctx, grad):
        return (None, None, *ctx.body(ctx, grad))


def step(body, *tensors, device=None):
    return Step.apply(body, device or tensors[0].device, *tensors)


def nothing():
    pass


def give(factor, before=nothing):
    """A body that returns its gradients, times `factor`."""

    def body(ctx, grad):
        before()
        return [(grad * factor).to(home) for home in ctx.homes]

    return body


def add(factor, seen, during=nothing, before=nothing):
    """A body that adds to its first tensor's buffer if it gets it, and returns the other gradients.

    What it got goes into the list `seen`; `during` runs while the buffer is on loan.
    """

    def body(ctx, grad):
        gradients = give(factor, before)(ctx, grad)
        buffer = ctx.input_grad_buffers[2]
        seen.append(None if buffer is None else buffer.tolist())
        during()
        if buffer is not None:
            assert buffer.tolist() == seen[-1]
            buffer.add_(gradients[0])
            gradients[0] = None
        return gradients

    return body


def delivered(event, device="cpu", source=None):
    """A tensor that, as an argument of a step on `device`, has `event` set when that has delivered."""

    def body(ctx, grad):
        event.set()
        return [None]

    return step(body, leaf() if source is None else source, device=device)


def leaf(device="cpu"):
    return torch.ones(3, device=device, requires_grad=True)


def differentiate(*branches):
    """Sum the branches on the CPU and run backward, which starts those that are named last first."""
    with on(stream_of(FIRST)):
        total = sum(branch.cpu() for branch in branches)
    total.backward(torch.ones(3))
    fake_accelerator.synchronize()


# Another thread delivers to the slot, at each moment of a loan.


@pytest.mark.parametrize("moment", ["before", "during", "after"])
@pytest.mark.parametrize("stream", ["default", "side"])
@pytest.mark.parametrize(
    ("borrower", "producer"), [("cpu", FIRST), ("cpu", SECOND), (FIRST, "cpu"), (FIRST, SECOND), (SECOND, FIRST)]
)
def test_another_thread_contributes(borrower, producer, stream, moment):
    x = leaf(borrower)
    inside, contributed, returned = threading.Event(), threading.Event(), threading.Event()
    seen = []

    def during():
        inside.set()
        if moment == "during":
            wait_for(contributed)
            assert x.grad is None

    with on(stream_of(borrower, stream)):
        fused = step(add(2, seen, during), x, delivered(returned, borrower))
        # The built-in branch is newer, and both are ready at once.
        own = step(give(1, lambda: wait_for(contributed) if moment == "before" else None), fused + x * 3)
    with on(stream_of(producer, stream)):
        awaited = {"before": None, "during": inside, "after": returned}[moment]
        before = nothing if awaited is None else lambda: wait_for(awaited)
        other = step(give(5, before), x, delivered(contributed, producer), device=producer)
    # What waits for the other is started last.
    differentiate(*([own, other] if borrower == "cpu" else [other, own]))
    assert x.grad.tolist() == [10, 10, 10]
    assert seen == [[8, 8, 8] if moment == "before" else [3, 3, 3]]
    assert contributed.is_set()
    assert returned.is_set()


@pytest.mark.parametrize("kind", ["dense", "expanded", "sparse", "undefined"])
@pytest.mark.parametrize("target", ["leaf", "captured leaf", "intermediate"])
def test_several_gradients_of_any_kind_are_set_aside(kind, target):
    x, y = leaf(), leaf()
    consumer = x * 1 if target == "intermediate" else x
    inside, contributed = threading.Event(), threading.Event()
    seen = []
    gradient = {
        "dense": torch.full((3,), 5.0),
        "expanded": torch.tensor(5.0).expand(3),
        "sparse": torch.full((3,), 5.0).to_sparse(),
        "undefined": None,
    }[kind]

    def during():
        inside.set()
        wait_for(contributed)

    def give_kind(ctx, grad):
        wait_for(inside)
        return [gradient]

    fused = step(add(2, seen, during), consumer)
    own = consumer * 3
    # The oldest on its thread is the last to run there.
    last = step(give(7), consumer, delivered(contributed, FIRST, y), device=FIRST)
    others = [step(give_kind, consumer, device=FIRST) for _ in range(3)]
    total = sum(branch.cpu() for branch in [fused, own, last, *others])
    if target == "captured leaf":
        grad, _ = torch.autograd.grad(total, (x, y), torch.ones(3), allow_unused=True)
        assert x.grad is None
    else:
        total.backward(torch.ones(3))
        grad = x.grad
    assert grad.tolist() == [3 + 2 + 7 + (0 if kind == "undefined" else 15)] * 3
    assert seen == [[3, 3, 3]]


def test_a_loan_stays_where_it_is_while_other_slots_fill():
    x = torch.ones(2, 3, requires_grad=True)
    lent, free = x.unbind()
    # So many consumers become known during the loan that the engine's table of them moves.
    others = [leaf() for _ in range(2000)]
    inside, contributed = threading.Event(), threading.Event()
    seen = []

    def during():
        inside.set()
        wait_for(contributed)

    late = sum(other * 2 for other in others)
    fused = step(add(2, seen, during), lent)
    own = lent * 3 + free * 3
    wide = step(give(5, lambda: wait_for(inside)), lent, free, *others, delivered(contributed, FIRST), device=FIRST)
    differentiate(late, fused, own, wide)
    assert x.grad.tolist() == [[10] * 3, [8] * 3]
    assert all(other.grad.tolist() == [7, 7, 7] for other in others)
    assert seen == [[3, 3, 3]]


def test_two_threads_borrow_two_slots_of_one_consumer():
    x = torch.ones(2, 3, requires_grad=True)
    a, b = x.unbind()
    both_have_it, ready = threading.Barrier(2, timeout=WATCHDOG_SECONDS), threading.Event()
    seen_a, seen_b = [], []

    def have_it():
        ready.set()
        both_have_it.wait()

    on_cpu = step(add(2, seen_a, have_it), a)
    own = a * 3 + b * 4
    on_device = step(add(5, seen_b, both_have_it.wait, before=lambda: wait_for(ready)), b, device=FIRST)
    differentiate(on_cpu, own, on_device)
    assert x.grad.tolist() == [[5] * 3, [9] * 3]
    assert (seen_a, seen_b) == ([[3, 3, 3]], [[4, 4, 4]])


def test_a_slot_on_loan_is_not_lent_again():
    x = leaf()
    inside, contributed = threading.Event(), threading.Event()
    seen_by_second = []

    def body(ctx, grad):
        # Nobody but the engine holds the buffer meanwhile; even so it is this body's.
        assert ctx.input_grad_buffers[2].tolist() == [3, 3, 3]
        inside.set()
        wait_for(contributed)
        assert ctx.input_grad_buffers[2].tolist() == [3, 3, 3]
        ctx.input_grad_buffers[2].add_(grad * 2)
        return [None]

    fused = step(body, x)
    own = x * 3
    second = step(
        add(5, seen_by_second, before=lambda: wait_for(inside)), x, delivered(contributed, FIRST), device=FIRST
    )
    differentiate(fused, own, second)
    assert x.grad.tolist() == [10, 10, 10]
    assert seen_by_second == [None]


def test_only_the_thread_of_the_body_may_read():
    x = leaf(FIRST)
    errors = []

    def body(ctx, grad):
        def read():
            try:
                ctx.input_grad_buffers  # noqa: B018
            except RuntimeError as error:
                errors.append(str(error))

        for _ in range(2):
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
            assert ctx.input_grad_buffers[2] is not None
        return [grad]

    with on(stream_of(FIRST)):
        total = step(body, x) + x * 3
    differentiate(total)
    assert x.grad.tolist() == [4, 4, 4]
    assert len(errors) == 2


# Streams and devices.


@pytest.mark.parametrize("multithreading", [True, False])
@pytest.mark.parametrize("target", ["leaf", "intermediate"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_producer_on_another_stream(multithreading, target, order):
    x = leaf(FIRST)
    main, side = stream_of(FIRST, "side"), stream_of(FIRST, "side")
    seen = []
    with on(main):
        node = get_gradient_edge(x)
        consumer = x * 1 if target == "intermediate" else x
    steps = [(main, add(2, seen)), (side, give(5))]
    branches = []
    # The newest runs first.
    for stream, body in steps if order == "before" else reversed(steps):
        with on(stream):
            branches.append(step(body, consumer))
    with on(main):
        branches.append(consumer * 3)
        total = sum(branches)
    with torch.autograd.set_multithreading_enabled(multithreading):
        differentiate(total)
    assert x.grad.tolist() == [10, 10, 10]
    assert seen == [[8, 8, 8] if order == "before" else [3, 3, 3]]
    del node


@pytest.mark.parametrize("multithreading", [True, False])
@pytest.mark.parametrize("stray", ["node on another stream", "body on another stream", "node on another device"])
def test_nothing_is_lent_off_the_consumers_stream(multithreading, stray):
    x = leaf(FIRST)
    node = get_gradient_edge(x)
    side = stream_of(FIRST, "side")
    contributed = threading.Event()
    seen = []
    read = add(2, seen, before=lambda: wait_for(contributed))

    def read_on_side(ctx, grad):
        wait_for(contributed)
        with current(side):
            seen.append(ctx.input_grad_buffers[2])
        return [grad * 2]

    with on(side if stray == "node on another stream" else stream_of(FIRST)):
        body = read_on_side if stray == "body on another stream" else read
        fused = step(body, x, device=SECOND if stray == "node on another device" else FIRST)
    own = step(give(3), x, delivered(contributed, FIRST))
    with torch.autograd.set_multithreading_enabled(multithreading):
        differentiate(fused, own)
    assert x.grad.tolist() == [5, 5, 5]
    assert seen == [None]
    del node


def test_a_body_may_go_to_the_consumers_device_and_stream():
    x = leaf(FIRST)
    home = stream_of(FIRST, "side")
    contributed = threading.Event()
    seen = []
    read = add(2, seen, before=lambda: wait_for(contributed))

    def go_home(ctx, grad):
        with current(home):
            return read(ctx, grad)

    with on(home):
        node = get_gradient_edge(x)
        own = step(give(3), x, delivered(contributed, FIRST))
    fused = step(go_home, x, device=SECOND)
    differentiate(fused, own)
    assert x.grad.tolist() == [5, 5, 5]
    assert seen == [[3, 3, 3]]
    del node


def test_a_node_on_the_cpu_may_borrow_from_a_device():
    x = leaf(FIRST)
    node = get_gradient_edge(x)
    inside, contributed = threading.Event(), threading.Event()
    seen = []

    def during():
        inside.set()
        wait_for(contributed)

    fused = step(add(2, seen, during), x, device="cpu")
    with on(stream_of(FIRST, "side")):
        # On the consumer's device, but its thread is not the borrower's, nor its stream the consumer's.
        other = step(give(5, lambda: wait_for(inside)), x, delivered(contributed, FIRST))
    own = step(give(3), x, device="cpu")
    differentiate(fused, own, other)
    assert x.grad.tolist() == [10, 10, 10]
    assert seen == [[3, 3, 3]]
    del node


class Fan(torch.autograd.Function):
    """A copy of a tensor on each device."""

    @staticmethod
    def forward(ctx, x):
        return x.to(FIRST), x.to(SECOND)

    @staticmethod
    def backward(ctx, first, second):
        return first.cpu() + second.cpu()


def test_slots_of_one_consumer_on_two_devices():
    x = leaf()
    first, second = Fan.apply(x)
    seen_first, seen_second = [], []
    with on(stream_of(FIRST)):
        on_first = step(add(2, seen_first), first) + first * 3
    with on(stream_of(SECOND)):
        on_second = step(add(5, seen_second), second) + second * 7
    differentiate(on_first, on_second)
    assert x.grad.tolist() == [17, 17, 17]
    assert seen_first == [[3, 3, 3]]
    # The consumer runs on one stream, of its first device.
    assert seen_second == [None]


def test_a_buffer_that_somebody_keeps_is_copied_on_the_consumers_stream():
    x = leaf(FIRST)
    kept = []

    def keep(ctx, grad):
        kept.extend(ctx.input_grad_buffers[2:])
        kept[0].add_(grad * 2)
        return [None]

    with on(stream_of(FIRST, "side")):
        consumer = x * 1
        total = step(keep, consumer) + consumer * 3
    (grad,) = torch.autograd.grad(total, consumer, torch.ones_like(total))
    fake_accelerator.synchronize()
    kept[0].zero_()
    assert grad.tolist() == [5, 5, 5]


# Failures.


class Deliberate(Exception):
    pass


@pytest.mark.parametrize("borrower", ["cpu", FIRST])
@pytest.mark.parametrize("failure", ["raise", "return the buffer", "reshape the buffer"])
def test_a_body_fails_while_gradients_are_set_aside(borrower, failure):
    x = leaf(borrower)
    inside, contributed = threading.Event(), threading.Event()
    gradients = []

    def fail(ctx, grad):
        buffer = ctx.input_grad_buffers[2]
        assert buffer.tolist() == [3, 3, 3]
        inside.set()
        wait_for(contributed)
        if failure == "raise":
            raise Deliberate
        if failure == "reshape the buffer":
            buffer.unsqueeze_(0)
            return [None]
        return [buffer]

    def give_watched(ctx, grad):
        wait_for(inside)
        gradient = (grad * 5).to(borrower)
        gradients.append(weakref.ref(gradient))
        return [gradient, None]

    with on(stream_of(borrower)):
        fused = step(fail, x) + x * 3
    other = step(give_watched, x, delivered(contributed, SECOND), device=SECOND)
    with pytest.raises(Deliberate if failure == "raise" else RuntimeError) as caught:
        differentiate(*([fused, other] if borrower == "cpu" else [other, fused]))
    if failure != "raise":
        assert "StepBackward" in str(caught.value)
        assert "argument 2" in str(caught.value)
    assert x.grad is None
    del caught, fused, other
    fake_accelerator.synchronize()
    gc.collect()
    assert [gradient() for gradient in gradients] == [None]

    seen = []
    with on(stream_of(borrower)):
        total = step(add(2, seen), x) + x * 3
    differentiate(total)
    assert x.grad.tolist() == [5, 5, 5]
    assert seen == [[3, 3, 3]]


@pytest.mark.parametrize("borrower", ["cpu", FIRST])
@pytest.mark.parametrize("read", ["before the failure", "after the failure"])
def test_another_thread_fails_during_a_loan(borrower, read):
    x = leaf(borrower)
    inside, failing, failed, finished = (threading.Event() for _ in range(4))
    seen = []

    def body(ctx, grad):
        if read == "before the failure":
            seen.append(ctx.input_grad_buffers[2].tolist())
        inside.set()
        wait_for(failing if borrower == "cpu" else failed)
        ctx.input_grad_buffers[2].add_(grad)
        finished.set()
        return [None]

    def fail(ctx, grad):
        wait_for(inside)
        failing.set()
        raise Deliberate

    with on(stream_of(borrower)):
        fused = step(body, x) + x * 3
    other = step(fail, x, device=SECOND if borrower == "cpu" else "cpu")
    with pytest.raises(Deliberate):
        # The calling thread leaves although a device's thread is in the body.
        differentiate(*([fused, other] if borrower == "cpu" else [other, fused]))
    failed.set()
    wait_for(finished)
    assert x.grad is None

    seen = []
    with on(stream_of(borrower)):
        total = step(add(2, seen), x) + x * 3
    differentiate(total)
    assert x.grad.tolist() == [5, 5, 5]
    assert seen == [[3, 3, 3]]


# A backward within a body.


@pytest.mark.parametrize("device", ["cpu", FIRST])
@pytest.mark.parametrize("multithreading", [True, False])
def test_a_nested_backward_runs_other_bodies_before_its_own_reads(device, multithreading):
    x, y = leaf(device), leaf(device)
    seen, seen_outside, seen_inside, refused = [], [], [], []
    outer_ran = threading.Event()

    def nest(ctx, grad):
        def read_in_hook(inner_grad):
            with pytest.raises(RuntimeError):
                ctx.input_grad_buffers  # noqa: B018
            refused.append(True)

        with torch.enable_grad(), on(stream_of(device)):
            inner = step(add(2, seen_inside), y) + y * 3
            # Keeps the nested backward waiting, so that this thread turns to what is left of the outer one.
            if multithreading:
                inner = inner + step(give(1, lambda: wait_for(outer_ran)), y, device=SECOND).to(device)
        inner.register_hook(read_in_hook)
        inner.backward(torch.ones_like(inner))
        return add(2, seen)(ctx, grad)

    with on(stream_of(device)):
        outer = step(add(5, seen_outside), x, delivered(outer_ran, device))
        total = step(nest, x) + x * 3 + outer
    with torch.autograd.set_multithreading_enabled(multithreading):
        differentiate(total)
    assert x.grad.tolist() == [10, 10, 10]
    assert y.grad.tolist() == [6 if multithreading else 5] * 3
    assert seen_inside == [[3, 3, 3]]
    assert refused == [True]
    # With threads, the outer step began and ended within the body of the nested one.
    assert (seen_outside, seen) == ([[3] * 3], [[8] * 3]) if multithreading else ([[5] * 3], [[3] * 3])


@pytest.mark.parametrize("device", ["cpu", FIRST])
def test_a_nested_backward_is_refused_during_a_loan(device):
    x, y = leaf(device), leaf(device)

    def nest(ctx, grad):
        assert ctx.input_grad_buffers[2] is not None
        with torch.enable_grad():
            inner = (y * 3).sum()
        with pytest.raises(RuntimeError, match="StepBackward"):
            inner.backward()
        return [grad]

    with on(stream_of(device)):
        total = step(nest, x) + x * 3
    differentiate(total)
    assert x.grad.tolist() == [4, 4, 4]
    assert y.grad is None


@pytest.mark.parametrize("device", ["cpu", FIRST])
def test_bodies_nested_deeper_than_a_thread_goes(device):
    # From 60 levels on the engine moves a nested backward to another thread.
    depth = 70
    leaves = [leaf(device) for _ in range(depth)]
    seen = []

    def nest(level):
        def body(ctx, grad):
            if level + 1 < depth:
                differentiate_level(level + 1)
            return add(2, seen)(ctx, grad)

        return body

    def differentiate_level(level):
        x = leaves[level]
        with torch.enable_grad():
            total = step(nest(level), x) + x * 3
        total.backward(torch.ones_like(total))

    differentiate_level(0)
    fake_accelerator.synchronize()
    assert all(x.grad.tolist() == [5, 5, 5] for x in leaves)
    assert seen == [[3, 3, 3]] * depth


# Backwards that the user runs on several threads.


def run_threads(*functions):
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("multithreading", [True, False])
@pytest.mark.parametrize("shared", ["leaf", "graph"])
def test_two_threads_inside_bodies_over_one_leaf(shared, multithreading):
    x = leaf()
    inside = threading.Barrier(2, timeout=WATCHDOG_SECONDS)
    seen = []

    def build():
        return step(add(2, seen, inside.wait), x) + x * 3

    totals = [build()] * 2 if shared == "graph" else [build(), build()]

    def run(total):
        with torch.autograd.set_multithreading_enabled(multithreading):
            total.backward(torch.ones(3), retain_graph=True)

    run_threads(*(lambda total=total: run(total) for total in totals))
    assert x.grad.tolist() == [10, 10, 10]
    assert seen == [[3, 3, 3]] * 2


@pytest.mark.parametrize("multithreading", [True, False])
def test_many_threads_over_one_graph_of_devices(multithreading):
    threads, rounds = 4, 25
    x, y = leaf(FIRST), leaf()
    seen_x, seen_y = [], []
    with on(stream_of(FIRST)):
        on_first = step(add(2, seen_x), x) + x * 3
        total = on_first.cpu() + step(add(2, seen_y), y) + step(give(5), y, device=SECOND).cpu() + y * 3

    def run():
        with torch.autograd.set_multithreading_enabled(multithreading):
            for _ in range(rounds):
                total.backward(torch.ones(3), retain_graph=True)

    run_threads(*[run] * threads)
    fake_accelerator.synchronize()
    assert x.grad.tolist() == [5 * threads * rounds] * 3
    assert y.grad.tolist() == [10 * threads * rounds] * 3
    assert seen_x == [[3, 3, 3]] * threads * rounds
    assert all(values in ([3] * 3, [8] * 3) for values in seen_y)
    assert len(seen_y) == threads * rounds


# Random graphs, whose threads run as they like.


class RandomGraph:
    """A graph over three engine threads and six streams; the same for the same seed, whether it borrows or not."""

    STREAMS = 3

    def __init__(self, seed, streams, borrows):
        self.random = random.Random(seed)
        self.borrows = borrows
        self.borrowed = 0
        self.leaves = [
            torch.ones(3, dtype=torch.float64, device=self.random.choice(["cpu", FIRST, SECOND]), requires_grad=True)
            for _ in range(self.random.randint(1, 3))
        ]
        tensors = list(self.leaves)
        for _ in range(self.random.randint(3, 12)):
            sources = [self.random.choice(tensors) for _ in range(self.random.randint(1, 3))]
            device = self.random.choice([str(sources[0].device), "cpu", FIRST, SECOND])
            with on(self.random.choice(streams[FIRST if device == "cpu" else device])):
                if self.random.random() < 0.6:
                    uses = [self.random.choice(["buffer", "gradient", "both"]) for _ in sources]
                    tensors.append(step(self.body(uses, self.random.randint(1, 3)), *sources, device=device))
                else:
                    tensors.append(sum(source.to(device) * self.random.randint(1, 3) for source in sources))
        with on(streams[FIRST][0]):
            self.total = sum(tensor.cpu() for tensor in tensors)
        self.multithreading = self.random.random() < 0.8

    def body(self, uses, factor):
        def backward(ctx, grad):
            gradients = give(factor)(ctx, grad)
            buffers = ctx.input_grad_buffers[2:] if self.borrows else [None] * len(uses)
            for i, (use, buffer) in enumerate(zip(uses, buffers)):
                if use != "gradient" and buffer is not None:
                    self.borrowed += 1
                    buffer.add_(gradients[i])
                    gradients[i] = gradients[i] if use == "both" else None
                elif use == "both":
                    gradients[i] = gradients[i] * 2
            return gradients

        return backward

    def gradients(self):
        with torch.autograd.set_multithreading_enabled(self.multithreading):
            self.total.backward(torch.ones_like(self.total))
        fake_accelerator.synchronize()
        return [leaf.grad.tolist() for leaf in self.leaves]


def test_random_graphs():
    streams = {
        device: [stream_of(device), *(stream_of(device, "side") for _ in range(RandomGraph.STREAMS - 1))]
        for device in fake_accelerator.DEVICES
    }
    borrowed = 0
    for seed in range(RANDOM_GRAPHS):
        graph = RandomGraph(seed, streams, borrows=True)
        assert graph.gradients() == RandomGraph(seed, streams, borrows=False).gradients(), f"seed {seed}"
        assert races() == [], f"seed {seed}"
        borrowed += graph.borrowed
    assert borrowed > RANDOM_GRAPHS


# The GIL and the graph task's mutex.

ROUNDS = 1000


class Python:
    """Python code that an engine thread reaches with the graph task's mutex held.

    There it waits until the body on the other thread, which holds the GIL, is about to take the mutex.
    """

    def __init__(self):
        self.rewind()

    def rewind(self):
        self.may_start, self.reached, self.body_goes_on = (threading.Event() for _ in range(3))

    def run(self):
        self.reached.set()
        wait_for(self.body_goes_on)

    def meet(self):
        self.may_start.set()
        wait_for(self.reached)
        self.body_goes_on.set()


class Dispatching(torch.Tensor):
    """A tensor whose addition is Python code."""

    @staticmethod
    def __new__(cls, values, python):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, device=values.device, dtype=values.dtype)

    def __init__(self, values, python):
        self.values, self.python = values, python

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        (python,) = (arg.python for arg in args if isinstance(arg, cls))
        if op is torch.ops.aten.add.Tensor:
            python.run()
        return op(*[arg.values if isinstance(arg, cls) else arg for arg in args], **kwargs or {})


class RunsWhenFreed:
    def __init__(self, python):
        self.python = python

    def __del__(self):
        self.python.run()


def take_mutex_and_gil(how, borrower, producer):
    """One thread accumulates, holding the mutex and wanting the GIL; another, holding the GIL, wants the mutex."""
    # A thread that has the GIL keeps it until it waits.
    sys.setswitchinterval(WATCHDOG_SECONDS)
    fake_accelerator.load()
    python = Python()
    if how == "a kernel":
        kernels = torch.library.Library("aten", "IMPL")

        def add_(self, other, *, alpha=1):
            python.run()
            return self.copy_(torch.add(self, other, alpha=alpha))

        kernels.impl("add_.Tensor", add_, "PrivateUse1")
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS / 2, exit=True)
    for when in ["read", "return", "raise"]:
        for _ in range(ROUNDS):
            python.rewind()
            meet_once(python, how, when, borrower, producer)
    faulthandler.cancel_dump_traceback_later()
    assert races() == []


def meet_once(python, how, when, borrower, producer):
    x = leaf(borrower)
    y = leaf(producer if how == "a kernel" else "cpu")

    def body(ctx, grad):
        if when == "read":
            python.meet()
        buffer = ctx.input_grad_buffers[2]
        # Not by the kernel of ours.
        buffer.copy_(buffer + grad * 2)
        if when != "read":
            python.meet()
        if when == "raise":
            raise Deliberate
        return [None]

    def contribute(ctx, grad):
        wait_for(python.may_start)
        gradient = (grad * 5).to(y.device)
        if how == "a tensor subclass":
            gradient = Dispatching(gradient, python)
        elif how == "the end of a tensor":
            gradient.freed = RunsWhenFreed(python)
        return [gradient]

    with on(stream_of(borrower)):
        fused = step(body, x) + x * 3
    other = step(contribute, y, device=producer) + step(give(7), y, device=producer)
    with pytest.raises(Deliberate) if when == "raise" else contextlib.nullcontext():
        differentiate(*([fused, other] if borrower == "cpu" else [other, fused]))
    if when != "raise":
        assert x.grad.tolist() == [5, 5, 5]
        assert y.grad.tolist() == [12, 12, 12]


@pytest.mark.parametrize(
    ("how", "borrower", "producer"),
    [
        ("a kernel", "cpu", FIRST),
        ("a tensor subclass", "cpu", FIRST),
        ("a tensor subclass", FIRST, "cpu"),
        ("the end of a tensor", "cpu", FIRST),
        ("the end of a tensor", FIRST, "cpu"),
    ],
)
def test_the_gil_and_the_mutex_are_never_waited_for_crosswise(how, borrower, producer):
    script = f"import test_threads_and_streams as tests; tests.take_mutex_and_gil({how!r}, {borrower!r}, {producer!r})"
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
