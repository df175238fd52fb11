"""Autograd graphs as plain data, and their execution with and without ``ctx.input_grad_buffers``.

A ``Graph`` prints as the expression that builds it, so a failure can be pasted into a test. ``compare`` runs it twice:
once with Functions that return every gradient, once with the same Functions accumulating into the buffers they are
lent. Everything a user could see has to agree: gradients, what hooks saw and in which order, exceptions, and that
tensors which belong to the user were left alone. Sums are compared bit for bit where both runs add in the same order.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Callable, Union

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

# The description. Values are numbered in the order in which they come to exist: the leaves, then what each step yields.


class Terse:
    """A dataclass's mixin whose repr leaves out what has its default."""

    def __repr__(self) -> str:
        shown = [field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


@dataclass(frozen=True, repr=False)
class Leaf(Terse):
    layout: str = "dense"  # of LEAF_LAYOUTS
    requires_grad: bool = True
    grad: str | None = None  # of GRADIENT_LAYOUTS: what .grad is before the first pass


@dataclass(frozen=True, repr=False)
class Builtin(Terse):
    op: str  # of UNARY, or of BINARY
    values: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Argument(Terse):
    """A tensor argument of a custom Function, and what its backward does about this argument's gradient."""

    value: int
    use: str = "return"  # of WRITERS, or "return"
    scale: int = 1
    layout: str = "dense"  # of GRADIENT_LAYOUTS: what the contribution is


@dataclass(frozen=True, repr=False)
class Custom(Terse):
    """A custom Function; ``None``, numbers and strings stand for themselves among its arguments."""

    arguments: tuple[Argument | None | float | str, ...]
    outputs: int = 1
    worker: bool = False  # whether a second thread applies it, so that the engine runs it late
    style: str = "context"  # of STYLES
    reads: int = 1  # how often the property is read
    grad_mode: bool | None = None  # set within the body
    materialize: bool = True
    product: bool = False  # whether contributions are multiplied by the first tensor argument, from saved_tensors
    nested: str | None = None  # a grad() of another graph "before" or "after" the read
    fails: str | None = None  # "raise", or of MISUSES: how the body fails, after its work, the first time


@dataclass(frozen=True, repr=False)
class InPlace(Terse):
    """A custom Function that modifies a copy of a value, or its first row; yields the copy and twice the value."""

    argument: Argument
    row: bool = False
    worker: bool = False


@dataclass(frozen=True, repr=False)
class Checkpoint(Terse):
    """Steps under torch.utils.checkpoint; they number their own values, from ``values`` on, and yield the last one."""

    values: tuple[int, ...]
    steps: tuple[Builtin | Custom | InPlace, ...]
    reentrant: bool = False


@dataclass(frozen=True, repr=False)
class Hook(Terse):
    value: int
    kind: str  # "tensor", "retain" (the gradient), "accumulated", "node_pre" or "node_post"
    effect: str = "observe"  # of EFFECTS, for tensor and node_pre hooks
    removed: bool = False  # again, before the first pass


@dataclass(frozen=True, repr=False)
class Pass(Terse):
    """A call of torch.autograd.backward, or of grad; without explicit gradients the roots are summed up.

    No roots at all stand for what calls of grad() returned so far.
    """

    roots: tuple[int, ...]
    inputs: tuple[int, ...] | None = None
    grad: bool = False
    gradient: str | None = None  # of GRADIENT_LAYOUTS
    retain_graph: bool = True
    create_graph: bool = False
    anomaly: bool = False
    clear: bool = False  # the gradients so far, first


Step = Union[Builtin, Custom, InPlace, Checkpoint]


@dataclass(frozen=True, repr=False)
class Graph(Terse):
    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    passes: tuple[Pass, ...]
    hooks: tuple[Hook, ...] = ()
    size: int = 2  # all values are size by size
    dtype: torch.dtype = torch.float64
    integers: bool = True  # values are small integers, so that every sum is exact

    def same_order(self) -> bool:
        """Whether a run with buffers adds the same terms in the same order as one without."""
        nested = [step.steps for step in self.steps if isinstance(step, Checkpoint)]
        return not any(
            argument.use in REORDERING for steps in (self.steps, *nested) for argument in arguments_of(steps)
        )


def arguments_of(steps: Iterable[Step]) -> Iterable[Argument]:
    for step in steps:
        if isinstance(step, Custom):
            yield from (argument for argument in step.arguments if isinstance(argument, Argument))
        elif isinstance(step, InPlace):
            yield step.argument


# What the names in a description mean. `run.weight` is the identity, or the modulus in the run that bounds the others.

UNARY: dict[str, Callable[[Run, Tensor], Tensor]] = {
    "double": lambda run, a: a * 2,
    "negate": lambda run, a: a * run.weight(-1),
    "clone": lambda run, a: a.clone(),
    "alias": lambda run, a: a.view_as(a),
    "transpose": lambda run, a: a.t(),
    "contiguous": lambda run, a: a.t().contiguous(),
    "conj": lambda run, a: a.conj(),
    "expand_row": lambda run, a: a[:1].expand_as(a),
    "sum_rows": lambda run, a: a.sum(0, keepdim=True).expand_as(a),
    "flip": lambda run, a: a.flip(0),
    "in_place": lambda run, a: a.clone().mul_(2),
    "in_place_on_view": lambda run, a: in_place_on_view(a),
    "split": lambda run, a: a.split(1)[0].expand_as(a) if a.numel() else a.clone(),
    "detach": lambda run, a: a.detach(),
}
BINARY: dict[str, Callable[[Run, Tensor, Tensor], Tensor]] = {
    "add": lambda run, a, b: a + b,
    "subtract": lambda run, a, b: a.add(b, alpha=run.weight(-1)),
    "stack": lambda run, a, b: torch.stack([a, b]).sum(0),
    "cat": lambda run, a, b: torch.cat([a, b])[1 : len(a) + 1],
    "select": lambda run, a, b: torch.where(torch.eye(len(a), dtype=torch.bool), a, b),
    "multiply": lambda run, a, b: a * b,
    "matmul": lambda run, a, b: a @ b,
}
# The second operand of these is a leaf, or an input of the checkpoint: products of products would soon leave any range.
GROWING = ("multiply", "matmul")


def in_place_on_view(a: Tensor) -> Tensor:
    copy = a.clone()
    copy[:1].mul_(2)
    return copy


LEAF_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t,
    "transposed": lambda t: t.t(),
    "expanded": lambda t: t[:1].expand_as(t),
    "strided": lambda t: torch.stack([t, t], 2)[:, :, 0],
}


class Subclass(Tensor):
    """Does nothing of its own, but is not a plain tensor."""


# What a body may hand over as a contribution; "incoming" is the gradient it was given, "shared" the same tensor for
# each argument that has it, "kept" a tensor that the user goes on holding, and "large" one that the engine has to sum
# up and cast.
GRADIENT_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "expanded": lambda t: t.sum(0, keepdim=True).expand_as(t),
    "strided": lambda t: torch.stack([t, t], 2)[:, :, 0],
    "conj": lambda t: t.conj().resolve_conj().conj(),
    "neg": lambda t: torch._neg_view(-t),
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "sparse": lambda t: t.to_sparse(),
    "subclass": lambda t: t.as_subclass(Subclass),
    "large": lambda t: torch.stack([t, torch.zeros_like(t)]).to(torch.promote_types(t.dtype, torch.float64)),
    "incoming": lambda t: t,
    "shared": lambda t: t,
    "kept": lambda t: t,
}


def add_rows(buffer: Tensor, contribution: Tensor) -> None:
    for index in range(len(buffer)):
        buffer[index].add_(contribution[index])


def add_attached(buffer: Tensor, contribution: Tensor) -> None:
    buffer.requires_grad_()
    with torch.no_grad():
        buffer.add_(contribution)


# How a body accumulates into a buffer.
WRITERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda buffer, contribution: buffer.add_(contribution),
    "rows": add_rows,
    "out": lambda buffer, contribution: torch.add(buffer.detach(), contribution.detach(), out=buffer),
    "alias": lambda buffer, contribution: buffer.detach().add_(contribution.detach()),
    "attach": add_attached,
    "keep": lambda buffer, contribution: buffer.add_(contribution),  # and go on holding the buffer
    "keep_view": lambda buffer, contribution: buffer.add_(contribution),  # and go on holding a view of it
    "matmul": lambda buffer, contribution: buffer.addmm_(torch.eye(len(buffer), dtype=buffer.dtype), contribution),
    "both": lambda buffer, contribution: buffer.add_(contribution),  # and return the contribution too
}
REORDERING = ("matmul", "both")

# What a body must not do with a buffer; it returns what this gives.
MISUSES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "return": lambda buffer: buffer,
    "return_alias": lambda buffer: buffer.detach(),
    "unsqueeze": lambda buffer: returns_nothing(buffer.unsqueeze_(0)),
    "resize": lambda buffer: returns_nothing(buffer.resize_(len(buffer) + 1, len(buffer) + 1)),
    "set": lambda buffer: returns_nothing(buffer.set_(torch.zeros_like(buffer))),
    "data": lambda buffer: returns_nothing(setattr(buffer, "data", torch.zeros_like(buffer))),
}


def returns_nothing(_: object) -> None:
    pass


EFFECTS = ("observe", "scale", "keep", "replace", "read")


class Body(torch.autograd.Function):
    """The custom Function that a ``Custom`` step stands for."""

    @staticmethod
    def forward(ctx: Any, task: Task, *arguments: Any) -> Any:
        result = task.forward(*arguments)
        task.set_up(ctx, arguments)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return (None, *ctx.task.backward(ctx, gradients))


class BodyWithSetup(Body):
    @staticmethod
    def forward(task: Task, *arguments: Any) -> Any:
        return task.forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        task, *arguments = inputs
        task.set_up(ctx, arguments)


class BodyOnce(Body):
    backward = staticmethod(once_differentiable(Body.backward))


class BodyInPlace(Body):
    @staticmethod
    def forward(ctx: Any, task: Task, *arguments: Any) -> Any:
        task.set_up(ctx, arguments)
        ctx.mark_dirty(arguments[0])
        return arguments[0].mul_(task.run.weight(task.step.arguments[0].scale))


STYLES = {"context": Body, "setup": BodyWithSetup, "once": BodyOnce}


class Broken(Exception):
    """The property did something that it must not do."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Broken(what)


@dataclass(frozen=True)
class Task:
    """A custom Function at work in one run."""

    run: Run
    name: str
    step: Custom
    in_place: bool = False

    def forward(self, *arguments: Any) -> Any:
        terms = [
            tensor * self.run.weight(argument.scale)
            for argument, tensor in zip(self.step.arguments, arguments)
            if isinstance(argument, Argument)
        ]
        outputs = tuple(sum(terms[1:], terms[0]) + number for number in range(self.step.outputs))
        return outputs if self.step.outputs > 1 else outputs[0]

    def set_up(self, ctx: Any, arguments: Sequence[Any]) -> None:
        ctx.task = self
        ctx.set_materialize_grads(self.step.materialize)
        if self.step.product:
            ctx.save_for_backward(next(a for a in arguments if isinstance(a, Tensor)))

    def backward(self, ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        self.run.record(f"body {self.name}", *gradients, *(leaf.grad for leaf in self.run.leaves))
        with nullcontext() if self.step.grad_mode is None else torch.set_grad_enabled(self.step.grad_mode):
            contributions = self.contributions(ctx, gradients)
            if self.step.nested == "before":
                self.run.other_grad()
            buffers = self.run.buffers(ctx, self, gradients)
            if self.step.nested == "after":
                self.run.nested_after(buffers)
            results = [
                self.run.deliver(argument, contribution, buffer) if isinstance(argument, Argument) else None
                for argument, contribution, buffer in zip(self.step.arguments, contributions, buffers)
            ]
        if self.step.fails and self.name not in self.run.failed:
            self.run.failed.add(self.name)
            return self.run.fail(self, buffers, results)
        return results

    def contributions(self, ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        present = [g.to_dense() * (i + 1) for i, g in enumerate(gradients) if g is not None]
        if not present:
            return [None for _ in self.step.arguments]
        total = sum(present[1:], present[0])
        if self.step.product:
            total = total * ctx.saved_tensors[0]
        shared = total * 1
        results: list[Tensor | None] = []
        for argument in self.step.arguments:
            if not isinstance(argument, Argument):
                results.append(None)
                continue
            if argument.layout == "incoming":
                contribution = next(g for g in gradients if g is not None)
            elif argument.layout == "shared":
                contribution = shared
            else:
                contribution = GRADIENT_LAYOUTS[argument.layout](total * self.run.weight(argument.scale))
            if argument.layout == "kept":
                self.run.kept.append(contribution)
            results.append(contribution)
        return results


class Other(torch.autograd.Function):
    """A Function of another graph, whose backward starts while a body runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fused: bool) -> Tensor:
        ctx.fused = fused
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        if not ctx.fused or torch.is_anomaly_enabled():
            return gradient * 2, None
        ctx.input_grad_buffers[0].add_(gradient * 2)
        return None, None


def other_grad(fused: bool) -> None:
    with torch.enable_grad():
        leaf = torch.ones(2, requires_grad=True)
        (gradient,) = torch.autograd.grad(Other.apply(leaf, fused).sum() + (leaf * 3).sum(), leaf)
    require(gradient.tolist() == [5, 5], "the gradient of another graph is wrong")


@dataclass(frozen=True)
class Event:
    label: str
    values: tuple[Tensor | None, ...]
    requires_grad: tuple[bool, ...]


class Run:
    """A run of a graph whose Functions return every gradient; ``FusedRun`` has them use the buffers."""

    def __init__(self, graph: Graph, absolute: bool = False) -> None:
        self.graph = graph
        self.absolute = absolute
        self.events: list[Event] = []
        self.failed: set[str] = set()
        self.current: Pass | None = None
        self.interrupted = False
        self.leaves: list[Tensor] = []
        self.values: list[Tensor] = []
        self.results: list[Tensor | None] = []
        self.nodes: list[Any] = []  # of leaves: they live only as long as somebody needs them
        self.kept: list[Tensor] = []  # what the user holds
        self.held: list[Tensor] = []  # buffers that a body held on to
        self.watched: list[Any] = []  # weak references to all that came up
        self.worker = ThreadPoolExecutor(1)

    def execute(self) -> list[Event]:
        with self.worker:
            for number, leaf in enumerate(self.graph.leaves):
                self.leaves.append(self.leaf(number, leaf))
            self.values += self.leaves
            self.steps(self.graph.steps, self.values, "")
            self.kept += self.values
            removed = [handle for hook in self.graph.hooks if (handle := self.hook(hook)) and hook.removed]
            for handle in removed:
                handle.remove()
            for current in self.graph.passes:
                self.differentiate(current)
        self.record("what the user holds", *self.kept)
        return self.events

    def close(self) -> int:
        """Drop everything, and count what is still alive."""
        self.drop()
        if self.interrupted and self.alive():
            gc.collect()  # An exception's frames may refer to one another.
        return self.alive()

    def drop(self) -> None:
        for value in self.values:
            if value.is_leaf or value.retains_grad:
                value.grad = None  # which refers to its leaf, after create_graph=True
        for held in (self.leaves, self.values, self.results, self.nodes, self.kept, self.held):
            held.clear()

    def alive(self) -> int:
        return sum(not reference.expired() for reference in self.watched)

    def weight(self, number: int) -> int:
        return abs(number) if self.absolute else number

    # What is built before the first pass.

    def leaf(self, number: int, leaf: Leaf) -> Tensor:
        tensor = LEAF_LAYOUTS[leaf.layout](self.constant(number)).detach().requires_grad_(leaf.requires_grad)
        if leaf.grad and leaf.requires_grad:
            tensor.grad = GRADIENT_LAYOUTS[leaf.grad](self.constant(number + 1) * 50)
        return tensor

    def constant(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (self.graph.size, self.graph.size)
        if self.graph.integers:
            tensor = torch.randint(-2, 3, shape, generator=generator, dtype=torch.float64).to(self.graph.dtype)
        else:
            tensor = torch.randn(shape, generator=generator, dtype=self.graph.dtype)
        if self.graph.dtype.is_complex and self.graph.integers:
            tensor = tensor * (1 + 1j)
        return tensor.abs().to(self.graph.dtype) if self.absolute else tensor

    def steps(self, steps: Sequence[Step], values: list[Tensor], prefix: str) -> None:
        for number, step in enumerate(steps):
            values += self.step(step, values, f"{prefix}{number}")

    def step(self, step: Step, values: list[Tensor], name: str) -> Sequence[Tensor]:
        if isinstance(step, Builtin):
            operation: Any = UNARY.get(step.op) or BINARY[step.op]
            return [operation(self, *(values[index] for index in step.values))]
        if isinstance(step, Checkpoint):
            return [self.checkpoint(step, [values[index] for index in step.values], name)]
        if isinstance(step, InPlace):
            return self.in_place(step, values[step.argument.value], name)
        arguments = [values[a.value] if isinstance(a, Argument) else a for a in step.arguments]
        outputs = self.call(step.worker, STYLES[step.style].apply, Task(self, name, step), *arguments)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    def in_place(self, step: InPlace, value: Tensor, name: str) -> list[Tensor]:
        copy = value * 1
        twice = copy * 2  # which the engine gets to before a Function that the worker applies
        task = Task(self, name, Custom((step.argument,), worker=step.worker), in_place=True)
        self.call(step.worker, BodyInPlace.apply, task, copy[:1] if step.row else copy)
        return [copy, twice]

    def call(self, worker: bool, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.worker.submit(function, *arguments).result() if worker else function(*arguments)

    def checkpoint(self, step: Checkpoint, inputs: list[Tensor], name: str) -> Tensor:
        def inner(*inputs: Tensor) -> Tensor:
            values = list(inputs)
            self.steps(step.steps, values, f"{name}.")
            return values[-1]

        return checkpoint(inner, *inputs, use_reentrant=step.reentrant, preserve_rng_state=False)

    def hook(self, hook: Hook) -> Any:
        value = self.values[hook.value]
        if not value.requires_grad:
            return None
        node = get_gradient_edge(value).node
        self.nodes.append(node)
        act = self.action(hook)
        if hook.kind == "tensor":
            return value.register_hook(act)
        if hook.kind == "retain":
            return value.retain_grad()
        if hook.kind == "accumulated":
            if not value.is_leaf:
                return None
            return value.register_post_accumulate_grad_hook(lambda leaf: self.record("accumulated", leaf.grad))
        if hook.kind == "node_pre":
            return node.register_prehook(lambda gradients: tuple(g if g is None else act(g) for g in gradients))
        if not hook.removed:
            node.metadata["post_hook"] = True
        return node.register_hook(lambda inputs, outputs: self.record("post-hook", *inputs, *outputs))

    def action(self, hook: Hook) -> Callable[[Tensor], Tensor]:
        def act(gradient: Tensor) -> Tensor:
            self.record(f"{hook.kind} hook of {hook.value}", gradient)
            if hook.effect == "scale":
                return gradient * 2
            if hook.effect == "keep":
                self.kept.append(gradient)
            if hook.effect == "replace":
                gradient = self.constant(hook.value).expand_as(gradient).clone()
                self.kept.append(gradient)
            if hook.effect == "read":
                self.read_outside(self.values[hook.value].grad_fn)
            return gradient

        return act

    # What happens in a pass.

    def differentiate(self, current: Pass) -> None:
        if current.clear:
            for leaf in self.leaves:
                leaf.grad = None
        roots = [self.values[index] for index in current.roots] or self.results
        roots = [root for root in roots if root is not None and root.requires_grad]
        if not roots:
            return
        gradients = None
        if current.gradient:
            gradients = [GRADIENT_LAYOUTS[current.gradient](self.constant(number)) for number in range(len(roots))]
            self.kept += gradients
        else:
            roots = [torch.view_as_real(root.sum()).sum() if root.is_complex() else root.sum() for root in roots]
        chosen = range(len(self.leaves)) if current.grad and current.inputs is None else current.inputs
        inputs = None if chosen is None else [v for v in (self.values[index] for index in chosen) if v.requires_grad]
        options = {"retain_graph": current.retain_graph, "create_graph": current.create_graph}
        before = [leaf.grad for leaf in self.leaves]
        self.current = current
        with ExitStack() as stack:
            if current.anomaly:
                stack.enter_context(torch.autograd.detect_anomaly(check_nan=False))
            try:
                if current.grad:
                    self.results += torch.autograd.grad(roots, inputs, gradients, allow_unused=True, **options)
                else:
                    torch.autograd.backward(roots, gradients, inputs=inputs, **options)
            except Broken:
                raise
            except Exception as error:
                self.record(self.failure(error))
                self.interrupted = True
        self.current = None
        if self.interrupted:
            other_grad(False)  # The engine drops what an interrupted pass left in its queue when it next runs.
        self.after_pass()
        same = [leaf.grad is old for leaf, old in zip(self.leaves, before)]
        self.record(f"gradients, the same tensors: {same}", *self.results, *self.gradients())

    def gradients(self) -> list[Tensor | None]:
        return [value.grad if value.is_leaf or value.retains_grad else None for value in self.values]

    def record(self, label: str, *tensors: Tensor | None) -> None:
        with torch.no_grad():
            for held in self.held:
                held.fill_(777)
        self.watch(tensors)
        values = tuple(None if t is None else numbers(t) for t in tensors)
        self.events.append(Event(label, values, tuple(t is not None and t.requires_grad for t in tensors)))

    def watch(self, tensors: Iterable[Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None:
                self.watched.append(torch._C._WeakTensorRef(tensor))

    # Where the runs differ.

    def buffers(self, ctx: Any, task: Task, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [None] * len(task.step.arguments)

    def deliver(self, argument: Argument, contribution: Tensor | None, buffer: Tensor | None) -> Tensor | None:
        """Hand a contribution over, and return what the body is to return."""
        return contribution + contribution if contribution is not None and argument.use == "both" else contribution

    def fail(self, task: Task, buffers: Sequence[Tensor | None], results: list[Tensor | None]) -> list[Tensor | None]:
        raise ValueError(f"{task.name} fails")

    def failure(self, error: Exception) -> str:
        return f"{type(error).__name__}: {error}"

    def other_grad(self) -> None:
        other_grad(False)

    def nested_after(self, buffers: Sequence[Tensor | None]) -> None:
        other_grad(False)

    def read_outside(self, node: Any) -> None:
        pass

    def after_pass(self) -> None:
        pass


class FusedRun(Run):
    """A run whose Functions accumulate into the buffers that they are lent; ``tally`` counts what came up."""

    def __init__(self, graph: Graph, tally: Counter[str]) -> None:
        super().__init__(graph)
        self.tally = tally
        self.lent: list[tuple[Any, int]] = []  # weak references to buffers, and where their memory is
        self.misused: str | None = None  # the name of a Task whose misuse of a buffer has to be noticed

    def buffers(self, ctx: Any, task: Task, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        nothing = super().buffers(ctx, task, gradients)
        if not task.step.reads:
            return nothing
        current = self.current
        assert current is not None
        # A reentrant checkpoint calls backward() itself, without create_graph.
        outer = self.graph.steps[int(task.name.split(".")[0])]
        create_graph = current.create_graph and not (isinstance(outer, Checkpoint) and outer.reentrant)
        refused = create_graph or current.anomaly or "post_hook" in ctx.metadata
        self.tally["reads"] += 1
        try:
            entries = ctx.input_grad_buffers
        except RuntimeError as error:
            self.tally["refused reads"] += 1
            require(refused, f"a read was refused: {error}")
            return nothing
        require(not refused, "a read was not refused")
        require(
            type(entries) is tuple and len(entries) == len(ctx.needs_input_grad), f"not an entry an argument: {entries}"
        )
        for _ in range(task.step.reads - 1):
            require(all(a is b for a, b in zip(ctx.input_grad_buffers, entries)), "a second read gave other tensors")
        self.check_apart([entry for entry in entries if entry is not None], gradients)
        for entry, needed, argument in zip(entries, ctx.needs_input_grad, (None, *task.step.arguments)):
            self.tally["entries"] += bool(needed)
            if entry is not None:
                require(needed and isinstance(argument, Argument), "an entry for an argument that needs no gradient")
                self.check_entry(entry)
                self.watch([entry])
                self.lent.append((self.watched[-1], storage_key(entry)))
                self.count(task, argument, entry, current)
        return entries[1:]

    def check_entry(self, entry: Tensor) -> None:
        require(type(entry) is Tensor and entry.layout == torch.strided, "an entry is not a plain tensor")
        require(not entry.requires_grad and not entry.is_inference(), "an entry cannot be written to freely")
        require(
            not (entry.is_conj() or entry.is_neg() or entry._is_zerotensor()), "an entry is not what its memory holds"
        )
        extent = 1 + sum((size - 1) * stride for size, stride in zip(entry.shape, entry.stride()))
        require(entry.numel() in (0, extent), "an entry overlaps itself or has gaps")

    def check_apart(self, entries: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """An entry shares memory with nothing that anybody else can see."""
        storages = {storage_key(entry) for entry in entries}
        require(len(storages) == len(entries), "two entries share memory")
        require(
            storages.isdisjoint(map(storage_key, self.visible(gradients))), "an entry shares memory with another tensor"
        )

    def visible(self, more: Iterable[Tensor | None] = ()) -> Iterable[Tensor]:
        """All that the user can get at."""
        tensors = (*self.kept, *self.held, *self.results, *self.gradients(), *more)
        return (tensor for tensor in tensors if tensor is not None and has_storage(tensor))

    def count(self, task: Task, argument: Argument, entry: Tensor, current: Pass) -> None:
        step = task.step
        self.tally["lent"] += 1
        self.tally.update(
            [
                f"use {argument.use}",
                f"style {step.style}",
                f"grad mode {step.grad_mode}",
                f"dtype {entry.dtype}",
                f"size {len(entry)}",
                f"buffer {'dense' if entry.is_contiguous() else 'transposed'}",
                f"contribution {argument.layout}",
                "pass " + ("grad" if current.grad else "backward"),
                "roots " + ("values" if current.roots else "gradients"),
                "inputs " + ("all" if current.inputs is None else "some"),
                "place " + ("checkpoint" if "." in task.name else "graph"),
                "thread " + ("worker" if step.worker else "main"),
                "effect " + ("in place" if task.in_place else "new tensor"),
            ]
        )

    def deliver(self, argument: Argument, contribution: Tensor | None, buffer: Tensor | None) -> Tensor | None:
        if buffer is None or contribution is None or argument.use == "return":
            return super().deliver(argument, contribution, buffer)
        WRITERS[argument.use](buffer, contribution.to_dense().sum_to_size(buffer.shape).to(buffer.dtype))
        if argument.use == "keep":
            self.held.append(buffer)
        if argument.use == "keep_view":
            self.held.append(buffer.detach())
        return contribution if argument.use == "both" else None

    def fail(self, task: Task, buffers: Sequence[Tensor | None], results: list[Tensor | None]) -> list[Tensor | None]:
        for index, buffer in enumerate(buffers):
            if buffer is not None and task.step.fails in MISUSES:
                self.misused = task.name
                self.tally[f"misuse {task.step.fails}"] += 1
                results[index] = MISUSES[task.step.fails](buffer)
                return results
        return super().fail(task, buffers, results)

    def failure(self, error: Exception) -> str:
        if not self.misused or not isinstance(error, RuntimeError):
            return super().failure(error)
        name, self.misused = self.misused, None
        return f"ValueError: {name} fails"  # which is how the other run fails here

    def other_grad(self) -> None:
        other_grad(True)

    def nested_after(self, buffers: Sequence[Tensor | None]) -> None:
        try:
            other_grad(True)
        except RuntimeError:
            require(any(buffer is not None for buffer in buffers), "grad() was refused though nothing had been lent")
        else:
            require(all(buffer is None for buffer in buffers), "grad() was not refused though a buffer had been lent")

    def read_outside(self, node: Any) -> None:
        if not isinstance(node, torch.autograd.function.BackwardCFunction):
            return
        try:
            entries = node.input_grad_buffers
        except RuntimeError:
            return
        raise Broken(f"a read outside the body gave {entries}")

    def after_pass(self) -> None:
        for value in self.values:
            self.read_outside(value.grad_fn)
        visible = set(map(storage_key, self.visible()))
        for reference, storage in self.lent:
            require(reference.expired() or storage in visible or self.interrupted, "a buffer outlived the pass")


def has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor._is_zerotensor()


def storage_key(tensor: Tensor) -> int:
    return torch._C._storage_address(tensor)


def numbers(tensor: Tensor) -> Tensor:
    """The tensor's numbers, in a tensor of their own without any peculiarity."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return torch.zeros(tensor.shape, dtype=tensor.dtype).add_(tensor)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def close(a: Tensor, b: Tensor, bound: Tensor, integers: bool) -> bool:
    """Whether two sums of the same terms, whose absolute values add up to ``bound``, differ by rounding only."""
    size = bound.abs()
    unit = torch.finfo(a.dtype).eps
    if integers and bool((size < 1 / unit).all()):
        return same(a, b)
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a - b).abs() <= 8 * unit * size).all())


def compare(graph: Graph, tally: Counter[str], fused_type: type[FusedRun] = FusedRun) -> None:
    """Raise AssertionError or Broken unless the buffers make no difference that a user could see."""
    runs = [Run(graph), fused_type(graph, tally)]
    if not graph.same_order():
        runs.append(Run(graph, absolute=True))
    expected, found, *others = (run.execute() for run in runs)
    bounds = others[0] if others else expected
    labels = [event.label for event in expected]
    assert all([event.label for event in run.events] == labels for run in runs), f"{[run.events for run in runs]}"
    for event, other, bound in zip(found, expected, bounds):
        assert event.requires_grad == other.requires_grad, f"{event.label}: {event} instead of {other}"
        for a, b, limit in zip(event.values, other.values, bound.values):
            if a is None or b is None or limit is None:
                assert a is b, f"{event.label}: {a} instead of {b}"
            elif graph.same_order():
                assert same(a, b), f"{event.label}: {a} instead of {b}"
            else:
                assert close(a, b, limit, graph.integers), f"{event.label}: {a} instead of {b}"
    for run in runs:
        left = run.close()
        assert not left, f"{type(run).__name__} left {left} tensors behind"
    tally["graphs"] += 1
    tally["graphs with an error"] += any("Error" in event.label for event in expected)


# The nodes of a second thread count from zero: with a head start for this thread they always are the older ones.
for _ in range(1000):
    torch.ones(1, requires_grad=True).clone()
