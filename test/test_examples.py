"""The Functions of examples/functions.py against the built-ins that they stand for, in each situation they claim."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

import functions
import pytest
import torch
import torch.nn.functional as F
from functions import Embedding, Linear, ResidualAdd, RMSNorm
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

INDICES = torch.tensor([[0, 3, 3], [4, 0, 0]])


class Example(NamedTuple):
    fused: Callable[..., Tensor]
    builtin: Callable[..., Tensor]
    shapes: list[tuple[int, ...]]


EXAMPLES = {
    "Linear": Example(Linear.apply, F.linear, [(2, 3, 4), (5, 4), (5,)]),
    "Linear without bias": Example(lambda x, w: Linear.apply(x, w, None), F.linear, [(3, 4), (5, 4)]),
    "Linear on a vector": Example(Linear.apply, F.linear, [(4,), (5, 4), (5,)]),
    "Linear on nothing": Example(Linear.apply, F.linear, [(0, 4), (5, 4), (5,)]),
    "Embedding": Example(lambda w: Embedding.apply(INDICES, w), lambda w: F.embedding(INDICES, w), [(5, 4)]),
    "RMSNorm": Example(
        lambda x, w: RMSNorm.apply(x, w, 1e-3), lambda x, w: F.rms_norm(x, w.shape, w, 1e-3), [(2, 3, 4), (4,)]
    ),
    "ResidualAdd": Example(lambda x, y: ResidualAdd.apply(x, y, 0.5), lambda x, y: x + 0.5 * y, [(2, 3, 4), (2, 3, 4)]),
}


@pytest.fixture(params=EXAMPLES.values(), ids=EXAMPLES.keys())
def example(request: pytest.FixtureRequest) -> Example:
    return request.param


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """For each backward of an example, which arguments it got a buffer for."""
    reads = []

    def read(ctx: Any, original: Callable[..., Any] = functions.input_grad_buffers) -> Any:
        buffers = original(ctx)
        reads.append(tuple(buffer is not None for buffer in buffers))
        return buffers

    monkeypatch.setattr(functions, "input_grad_buffers", read)
    return reads


def inputs_for(example: Example, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in example.shapes]


def used_twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Each use has its own factor and curvature, so that no gradient can stand for another."""
    return lambda *inputs: function(*inputs).sin() + 2 * function(*inputs).cos()


def transposed(tensor: Tensor) -> Tensor:
    return tensor.mT if tensor.dim() > 1 else tensor


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(used_twice(function)(*inputs).sum(), inputs)


def test_each_argument_is_accumulated_into_its_buffer(example, received):
    inputs = inputs_for(example)
    assert_close(gradients(example.fused, inputs), gradients(example.builtin, inputs))
    assert not any(received[0])
    assert sum(received[1]) == len(inputs)


def test_derivatives_are_those_of_forward(example):
    assert gradcheck(used_twice(example.fused), inputs_for(example))
    assert gradgradcheck(used_twice(example.fused), inputs_for(example))


def test_complex_linear(received):
    example = EXAMPLES["Linear"]
    assert gradcheck(used_twice(example.fused), inputs_for(example, torch.complex128))
    assert any(map(any, received))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision(example, dtype, received):
    inputs = inputs_for(example, dtype)
    actual = gradients(example.fused, inputs)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    for gradient, tensor, wanted in zip(actual, inputs, gradients(example.builtin, wide)):
        assert gradient.dtype == tensor.dtype
        assert_close(gradient.double(), wanted, **tolerance)
    assert sum(received[1]) == len(inputs)


def test_rms_norm_whose_squares_exceed_the_range_of_its_dtype():
    x, weight = inputs_for(EXAMPLES["RMSNorm"])
    results = []
    for dtype in (torch.float16, torch.float64):
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (1000 * x, weight)]
        output = RMSNorm.apply(*inputs, 1e-3) + 2 * RMSNorm.apply(*inputs, 1e-3)
        results.append(torch.autograd.grad((output * x.detach()).sum(), inputs))
    assert_close(*results, rtol=0.01, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_autocast(example, first):
    inputs = inputs_for(example, torch.float32)
    inputs[0] = inputs[0].detach().to(first).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, wanted = gradients(example.fused, inputs), gradients(example.builtin, inputs)
    assert [gradient.dtype for gradient in actual] == [tensor.dtype for tensor in inputs]
    assert_close(actual, wanted, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("situation", ["create_graph", "anomaly mode", "post-hook"])
def test_gradients_are_returned_where_reading_raises(example, situation, received):
    inputs = inputs_for(example)
    wanted = gradients(example.builtin, inputs)
    total = used_twice(example.fused)(*inputs).sum()
    if situation == "post-hook":
        nodes = [total.grad_fn]
        for node in nodes:
            nodes += [after for after, _ in node.next_functions if after and after not in nodes]
            if node.name() in {f"{name}Backward" for name in ("Linear", "Embedding", "RMSNorm", "ResidualAdd")}:
                node.register_hook(lambda *_: None)
    with torch.autograd.set_detect_anomaly(situation == "anomaly mode"):
        assert_close(torch.autograd.grad(total, inputs, create_graph=situation == "create_graph"), wanted)
    assert len(received) == 2
    assert not any(map(any, received))


def test_a_pytorch_without_the_property():
    assert functions.input_grad_buffers(SimpleNamespace(needs_input_grad=(True, False))) == (None, None)


def test_each_subset_of_arguments(example):
    inputs = inputs_for(example)
    for chosen in range(1, 2 ** len(inputs) - 1):
        some = [tensor.detach().requires_grad_(bool(chosen >> i & 1)) for i, tensor in enumerate(inputs)]
        for function in (example.fused, example.builtin):
            used_twice(function)(*some).sum().backward()
            if function is example.fused:
                actual = [tensor.grad for tensor in some]
                for tensor in some:
                    tensor.grad = None
        assert_close(actual, [tensor.grad for tensor in some])


@pytest.mark.parametrize("swap", ["inputs", "outputs", "both"])
def test_any_layout(example, swap, received):
    """Inputs, and so their buffers, or incoming gradients, or both, are transposed in memory."""
    results = []
    for function in (example.fused, example.builtin):
        inputs = inputs_for(example)
        if swap != "outputs":
            inputs = [transposed(transposed(tensor.detach()).contiguous()).requires_grad_() for tensor in inputs]
        output = function(*inputs)
        factors = torch.arange(1.0, output.numel() + 1, dtype=output.dtype).view(output.shape)
        if swap != "inputs":
            output, factors = transposed(output), transposed(factors)
        # Made last, and so run first.
        total = (output * factors).sum() + sum(tensor.sin().sum() for tensor in inputs)
        results.append(torch.autograd.grad(total, inputs))
    assert_close(*results)
    assert sum(received[0]) == len(inputs)


def test_one_tensor_as_both_arguments(received):
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(used_twice(lambda x: ResidualAdd.apply(x, x, 0.5)), x)
    assert any(map(any, received))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(example, reentrant):
    inputs = inputs_for(example)
    wanted = gradients(example.builtin, inputs)
    checkpoint(used_twice(example.fused), *inputs, use_reentrant=reentrant).sum().backward()
    assert_close(tuple(tensor.grad for tensor in inputs), wanted)


def test_batched_gradients(example):
    inputs = inputs_for(example)
    results = []
    for function in (example.fused, example.builtin):
        output = used_twice(function)(*inputs)
        basis = torch.stack([torch.ones_like(output), torch.full_like(output, 2)])
        results.append(torch.autograd.grad(output, inputs, basis, is_grads_batched=True))
    assert_close(*results)


def test_function_transforms(example):
    inputs = [tensor.detach() for tensor in inputs_for(example)]
    everything = tuple(range(len(inputs)))

    def transformed(function: Callable[..., Tensor]) -> list[Any]:
        def total(*inputs: Tensor) -> Tensor:
            return used_twice(function)(*inputs).sum()

        per_sample = torch.func.vmap(torch.func.grad(total, everything), (0, *[None] * (len(inputs) - 1)))
        return [
            torch.func.grad(total, everything)(*inputs),
            torch.func.jacrev(torch.func.jacrev(total, everything), everything)(*inputs),
            per_sample(torch.stack([inputs[0], inputs[0] * 2]), *inputs[1:]),
        ]

    assert_close(transformed(example.fused), transformed(example.builtin))


def test_compiled(example):
    inputs = inputs_for(example)
    torch._dynamo.reset()
    compiled = torch.compile(used_twice(example.fused), fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(*inputs).sum(), inputs)
    assert_close(actual, gradients(example.builtin, inputs))


def test_residual_add_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"one shape, and got \[2, 3\] and \[3\]"):
        ResidualAdd.apply(torch.ones(2, 3), torch.ones(3), 1.0)
