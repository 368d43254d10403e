"""Catches one module's activations and backprops on their way.

A tapped module runs with its own parameters detached (unless their ordinary gradient is wanted too), so autograd
never computes the summed weight gradients that private training throws away. An identity on the module's output
keeps the inputs through autograd's own saved tensors: activation checkpointing, CPU offload, reuse of a module and
``retain_graph`` work by themselves, and nothing is left on modules or parameters when no backward follows.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Factor
from dpfast.registry import Activations, find_rule

_local = threading.local()


@contextmanager
def taps_suspended() -> Iterator[None]:
    """Rules may run modules again; those runs are not part of the model's pass."""
    before = getattr(_local, "suspended", False)
    _local.suspended = True
    try:
        yield
    finally:
        _local.suspended = before


class DetachableParameters(dict):
    """A module's ``_parameters``. Within :func:`_detached` the module's own code, which asks by name, gets its
    parameters without their history, in that thread alone; whoever iterates (``parameters()``, ``state_dict()``,
    an optimizer, another thread's backward pass) gets the parameters themselves."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if value is None or not any(own is self for own in getattr(_local, "detached", ())):
            return value
        return value.detach()


@contextmanager
def _detached(module: nn.Module) -> Iterator[None]:
    """The module's forward sees its parameters without their history."""
    if not hasattr(_local, "detached"):
        _local.detached = []
    _local.detached.append(module._parameters)
    try:
        yield
    finally:
        _local.detached.pop()


def in_backward() -> int | None:
    """The backward pass that runs in this thread."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


class Receiver(Protocol):
    """Where taps hand what they catch: the tapped model."""

    enabled: bool
    detach: bool

    def receive(self, tap: Tap, activations: Activations, backprops: tuple, record: Record) -> None:
        """One use of the tap's module has been differentiated."""

    def count_uses(self, parameters: list[nn.Parameter]) -> Counter[int]:
        """Counts one use more of each; uses by id, of the step that this thread is building."""

    def factors(self, tap: Tap, activations: Activations, backprops: tuple) -> Mapping[nn.Parameter, Factor]:
        """The module's factored gradients."""


class TappedForward:
    """Stands in a tapped module's ``forward``; an object, so that copies of the module tap the copy."""

    def __init__(self, tap: Tap, replaced: Callable | None):
        self.tap = tap
        self.replaced = replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.tap.module
        return self.tap.run(self.replaced or type(module).forward.__get__(module), args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.replaced or type(self.tap.module).forward.__get__(self.tap.module))


class Tap:
    """One module's tap."""

    def __init__(self, taps: Receiver, name: str, module: nn.Module):
        self.taps = taps
        self.module = module
        self.layer = f"{name} ({type(module).__name__})" if name else type(module).__name__

    def run(self, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The module's forward with its output tapped, or as it is where there is nothing to do."""
        if not (self.taps.enabled and torch.is_grad_enabled()) or getattr(_local, "suspended", False):
            return forward(*args, **kwargs)
        parameters = [p for p in self.module._parameters.values() if p is not None and p.requires_grad]
        if not parameters:
            return forward(*args, **kwargs)
        if self.taps.detach:
            with _detached(self.module):
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
        return self._tapped(output, self._bound(forward, args, kwargs), parameters)

    def _bound(self, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Keyword arguments moved to their positions, so that rules find the input however it was passed."""
        if not kwargs:
            return args, kwargs
        bound = inspect.signature(forward).bind(*args, **kwargs)
        return bound.args, bound.kwargs

    def _tapped(self, output: Any, inputs: tuple[tuple, dict], parameters: list[nn.Parameter]) -> Any:
        leaves, structure = ([output], None) if isinstance(output, Tensor) else tree_flatten(output)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        if not places:
            raise UnsupportedModuleError(
                f"{self.layer}: its output is a {type(output).__name__}, not a tensor or a tuple of tensors, so its "
                "gradient cannot be followed; return tensors or freeze its parameters"
            )
        tensors = [leaves[i] for i in places]
        fresh = find_rule(self.module) is not None
        if fresh:
            # A layer with a rule has made its output afresh and keeps no reference to it. It passes on as the tensor
            # itself, no view of it, because an in-place activation may follow.
            tensors = [torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x for x in tensors]
        record = Record(self, inputs, num_outputs=len(places), fresh=fresh)
        if record.created_in is None:  # a forward that is repeated in a backward pass has been counted
            record.uses = self.taps.count_uses(parameters)
        results = _TapFunction.apply(record, *tensors, *parameters)
        for i, result in zip(places, results, strict=True):
            leaves[i] = result
        return leaves[0] if structure is None else tree_unflatten(leaves, structure)


class Record:
    """What one run of a tapped module leaves for its backward, apart from the tensors, which autograd keeps."""

    def __init__(self, tap: Tap, inputs: tuple[tuple, dict], num_outputs: int, fresh: bool):
        self.tap = tap
        self.num_outputs = num_outputs
        self.fresh = fresh
        self.created_in = in_backward()
        self.uses: Counter[int] | None = None
        self.leaves, self.structure = tree_flatten(inputs)
        self.tensor_places = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor)]

    def is_only_use(self, parameter: nn.Parameter) -> bool:
        """Whether the step has no other use of the parameter; False where that is not known."""
        return self.uses is not None and self.uses[id(parameter)] == 1

    def take_tensors(self) -> list[Tensor]:
        tensors = [self.leaves[i].detach() for i in self.tensor_places]
        for i in self.tensor_places:
            self.leaves[i] = None
        return tensors

    def activations(self, tensors: tuple[Tensor, ...]) -> Activations:
        leaves = list(self.leaves)
        for i, x in zip(self.tensor_places, tensors, strict=True):
            leaves[i] = x
        return Activations(*tree_unflatten(leaves, self.structure))


class _TapFunction(torch.autograd.Function):
    """Identity on a module's outputs. The parameters are inputs, so the graph shows where they are used."""

    @staticmethod
    def forward(ctx, record: Record, *tensors: Tensor):
        outputs = tensors[: record.num_outputs]
        ctx.record = record
        ctx.shapes = [(x.shape, x.dtype, x.device) for x in outputs]
        ctx.save_for_backward(*record.take_tensors())
        ctx.set_materialize_grads(False)
        if record.fresh:
            ctx.mark_dirty(*outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):
        record, taps = ctx.record, ctx.record.tap.taps
        nodes = [node for node, _ in ctx.next_functions[record.num_outputs :]]
        wanted = any(node is not None and torch._C._will_engine_execute_node(node) for node in nodes)
        to_parameters: tuple[Tensor | None, ...] = (None,) * len(nodes)
        if wanted and any(g is not None for g in grads):
            activations = record.activations(ctx.saved_tensors)
            backprops = tuple(
                torch.zeros(s, dtype=t, device=d) if g is None else g
                for g, (s, t, d) in zip(grads, ctx.shapes, strict=True)
            )
            if taps.enabled:
                taps.receive(record.tap, activations, backprops, record)
            elif taps.detach:  # hooks are off: the parameters' ordinary gradients
                to_parameters = _ordinary_gradients(record.tap, activations, backprops, nodes)
        return None, *grads, *to_parameters


def _ordinary_gradients(tap: Tap, activations: Activations, backprops: tuple, nodes: list) -> tuple:
    """Σ_n G_n for the parameters whose AccumulateGrad nodes these are, as autograd itself would give."""
    factors = tap.taps.factors(tap, activations, backprops)
    gradients = []
    for node in nodes:
        parameter = getattr(node, "variable", None)
        factor = factors.get(parameter)
        if factor is None:
            gradients.append(None)
            continue
        ones = torch.ones(factor.num_samples, device=parameter.device, dtype=torch.float32)
        gradients.append(factor.weighted_sum(ones).to(parameter.dtype))
    return tuple(gradients)
