"""Custom Functions that add their gradients to ``ctx.input_grad_buffers``, to be copied into your own code.

Each stands for a built-in operation and is right wherever that is: with and without a buffer, for second derivatives,
in anomaly mode, under autocast, `torch.compile`, `vmap` and reverse-mode `torch.func`, and on a PyTorch that lacks the
property. Take the two helpers and the Functions that you need.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd import Function


def input_grad_buffers(ctx):
    """The buffers; all ``None`` where the property does not exist, or must not be used and raises."""
    try:
        return ctx.input_grad_buffers
    except (AttributeError, RuntimeError):
        return (None,) * len(ctx.needs_input_grad)


def product(buffer, a, b):
    """The gradient ``a @ b``, or ``None`` once it is added to the buffer. ``b`` is a matrix or a vector."""
    if buffer is None or buffer.dtype != a.dtype:
        return a @ b
    add = buffer.addmm_ if b.dim() == 2 else buffer.addmv_
    add(a, b)
    return None


class Linear(Function):
    """``Linear.apply(x, weight, bias)`` is ``F.linear(x, weight, bias)``; ``bias`` may be ``None``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias):
        # Detached, since autocast keeps its casts of leaves for others to use, and those made in here have no graph.
        return F.linear(x.detach(), weight.detach(), bias if bias is None else bias.detach())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, grad):
        x, weight = (tensor.to(grad.dtype).conj() for tensor in ctx.saved_tensors)
        x_buffer, weight_buffer, bias_buffer = input_grad_buffers(ctx)
        grad_x = grad_weight = grad_bias = None
        rows = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])
        if ctx.needs_input_grad[0]:
            if x_buffer is not None and x_buffer.is_contiguous() and x_buffer.dtype == grad.dtype:
                x_buffer.view(len(rows), x.shape[-1]).addmm_(rows, weight)
            else:
                grad_x = grad @ weight
        if ctx.needs_input_grad[1]:
            grad_weight = product(weight_buffer, rows.t(), x.reshape(len(rows), x.shape[-1]))
        if ctx.needs_input_grad[2]:
            grad_bias = product(bias_buffer, rows.t(), rows.new_ones(len(rows)))
        return grad_x, grad_weight, grad_bias


class Embedding(Function):
    """``Embedding.apply(indices, weight)`` is ``F.embedding(indices, weight)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(indices, weight):
        return F.embedding(indices, weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.shape = inputs[1].shape

    @staticmethod
    def backward(ctx, grad):
        _, buffer = input_grad_buffers(ctx)
        indices = ctx.saved_tensors[0].flatten()
        rows = grad.reshape(len(indices), ctx.shape[1])
        if buffer is None:
            return None, grad.new_zeros(ctx.shape).index_add(0, indices, rows)
        buffer.index_add_(0, indices, rows)
        return None, None


class RMSNorm(Function):
    """``RMSNorm.apply(x, weight, eps)`` is ``F.rms_norm(x, weight.shape, weight, eps)`` with ``weight.dim() == 1``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, eps):
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.eps = inputs[2]

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        x_buffer, weight_buffer, _ = input_grad_buffers(ctx)
        grad_x = grad_weight = None
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
        normal = wide * scale
        if ctx.needs_input_grad[0]:
            grad_normal = grad * weight
            shift = -(grad_normal * normal).mean(-1, keepdim=True)
            if x_buffer is None:
                grad_x = (grad_normal + normal * shift) * scale
            else:
                x_buffer.addcmul_(grad_normal, scale).addcmul_(normal, shift * scale)
        if ctx.needs_input_grad[1]:
            rows = (grad * normal).reshape(-1, len(weight))
            grad_weight = product(weight_buffer, rows.t(), rows.new_ones(len(rows)))
        return grad_x, grad_weight, None


class ResidualAdd(Function):
    """``ResidualAdd.apply(x, update, scale)`` is ``x + scale * update`` for tensors of one shape and a number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, update, scale):
        if x.shape != update.shape:
            raise ValueError(f"ResidualAdd needs tensors of one shape, and got {[*x.shape]} and {[*update.shape]}")
        return torch.add(x, update, alpha=scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[2]

    @staticmethod
    def backward(ctx, grad):
        x_buffer, update_buffer, _ = input_grad_buffers(ctx)
        grad_x = grad if x_buffer is None else None
        grad_update = grad * ctx.scale if update_buffer is None else None
        if x_buffer is not None:
            x_buffer.add_(grad)
        if update_buffer is not None:
            update_buffer.add_(grad, alpha=ctx.scale)
        return grad_x, grad_update, None
