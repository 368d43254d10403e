"""Catches one module's activations and backprops on their way.

A tapped module runs with its own parameters detached (unless their ordinary gradient is wanted too), so autograd
never computes the summed weight gradients that private training throws away. An identity on the module's output
keeps the inputs through autograd's own saved tensors: activation checkpointing, CPU offload, reuse of a module and
``retain_graph`` work by themselves, and nothing is left on modules or parameters when no backward follows.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpfast.detached import detached_parameters
from dpfast.errors import InputError, StateError, UnsupportedModuleError
from dpfast.factors import Factor
from dpfast.ops import exact_arithmetic
from dpfast.registry import (
    Activations,
    Rule,
    find_fault,
    find_forward,
    find_rule,
    makes_fresh_output,
    owned_modules,
)

_local = threading.local()


class taps_suspended:
    """Within it modules run untapped: rules may run them again, which is not part of the model's pass. No generator,
    because every layer enters it."""

    def __enter__(self) -> None:
        self._before = suspended()
        _local.suspended = True

    def __exit__(self, *_: object) -> None:
        _local.suspended = self._before


def never_compiled(function: Callable) -> Callable:
    """As ``torch.compiler.disable``, which imports much (Triton too), from the time that something is compiled."""
    disabled: list[Callable] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True
    return call


def suspended() -> bool:
    """Whether a rule is running modules again in this thread."""
    return getattr(_local, "suspended", False)


def in_backward() -> int | None:
    """The backward pass that runs in this thread."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


class Receiver(Protocol):
    """Where taps hand what they catch: the tapped model."""

    enabled: bool
    detach: bool
    batch_dim: int

    def batch_size(self) -> int | None:
        """How many samples the model's input has, in the pass that runs in this thread; None: not known."""

    def is_input(self, x: Tensor) -> bool:
        """Whether ``x`` is, or is a view of, a tensor that the model was called with."""

    def receive(self, record: Record, activations: Activations, backprops: tuple) -> None:
        """One use of the tap's module has been differentiated."""

    def count_uses(self, parameters: list[nn.Parameter]) -> Counter[int]:
        """Counts one use more of each; uses by id, of the step that this thread is building."""

    def factors(self, record: Record, activations: Activations, backprops: tuple) -> Mapping[nn.Parameter, Factor]:
        """The module's factored gradients."""


class TappedForward:
    """Stands in a tapped module's ``forward``; an object, so that copies of the module tap the copy."""

    def __init__(self, tap: Tap, replaced: Callable | None):
        self.tap = tap
        self.replaced = replaced

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.tap.module
        return self.tap.run(self.replaced or type(module).forward.__get__(module), args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.replaced or type(self.tap.module).forward.__get__(self.tap.module))


class Tap:
    """One module's tap.

    Args:
        batch_dim: where the module has its samples.
        folded: positions may be folded into them.
    """

    def __init__(self, taps: Receiver, name: str, module: nn.Module, *, batch_dim: int, folded: bool):
        self.taps = taps
        self.batch_dim = batch_dim
        self.folded = folded
        self.module = module
        self.layer = f"{name} ({type(module).__name__})" if name else type(module).__name__

    @property
    def active(self) -> bool:
        return self.taps.enabled and torch.is_grad_enabled() and not suspended()

    def run(self, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The module's forward with its output tapped, or as it is where there is nothing to do."""
        if isinstance(self.module, nn.Embedding) and self.taps.enabled and not suspended():
            args, kwargs = self._with_whole_batch(args, kwargs)
        if not self.active:
            return forward(*args, **kwargs)
        fault = find_fault(self.module)
        if fault is not None:
            return _failing_in_backward(forward(*args, **kwargs), f"{self.layer}: {fault}")
        owned = owned_modules(self.module)
        parameters = [p for m in owned for p in m._parameters.values() if p is not None and p.requires_grad]
        if not parameters:
            return forward(*args, **kwargs)
        substitute = find_forward(self.module)
        if substitute is not None:
            return substitute(self.module, Pieces(self), *args, **kwargs)
        with detached_parameters(owned if self.taps.detach else ()):
            output = forward(*args, **kwargs)
        rule = find_rule(self.module)
        inputs = self._bound(forward, args, kwargs)
        return self.tapped(output, inputs, parameters, fresh=makes_fresh_output(rule), rule=rule)

    def _with_whole_batch(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """An input with a batch of one that the model broadcasts later (``position_ids``), expanded to the batch."""
        n, dim = self.taps.batch_size(), self.batch_dim
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        if n is None or n == 1 or len(tensors) != 1 or not self.module.weight.requires_grad:
            return args, kwargs
        x = leaves[tensors[0]]
        ambiguous = x.dim() == 1 and x.shape[0] == n and n > 1 and not self.taps.is_input(x)
        if ambiguous and bool((x.diff() == 1).all()):
            raise InputError(
                f"{self.layer}: its input {tuple(x.shape)} counts up by one and is as long as the batch: positions "
                "that the model broadcasts, or samples? Give positions as (1, T), samples as an input of the model"
            )
        if x.dim() < 2 or x.dim() <= dim or x.shape[dim] != 1:
            return args, kwargs
        leaves[tensors[0]] = x.expand(*x.shape[:dim], n, *x.shape[dim + 1 :])
        return tree_unflatten(leaves, structure)

    def _bound(self, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Keyword arguments moved to their positions, so that rules find the input however it was passed."""
        if not kwargs:
            return args, kwargs
        bound = inspect.signature(forward).bind(*args, **kwargs)
        return bound.args, bound.kwargs

    def tapped(
        self,
        output: Any,
        inputs: tuple[tuple, dict],
        parameters: Sequence[nn.Parameter],
        *,
        fresh: bool,
        rule: Rule | None,
        as_is: bool = False,
    ) -> Any:
        """``output`` as it is, with its gradient caught.

        Args:
            inputs: positional and keyword inputs that the rule needs.
            parameters: those that the rule answers for.
            fresh: the output was made afresh and nothing else refers to it.
            rule: what makes factors of the tensors; None: autograd itself.
            as_is: the tensors come to the rule as they are, samples in any dimension.
        """
        leaves, structure = ([output], None) if isinstance(output, Tensor) else tree_flatten(output)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        if not places:
            raise UnsupportedModuleError(
                f"{self.layer}: its output is a {type(output).__name__}, not a tensor or a tuple of tensors, so its "
                "gradient cannot be followed; return tensors or freeze its parameters"
            )
        tensors = [leaves[i] for i in places]
        if fresh:
            # It passes on as the tensor itself, no view of it, because an in-place activation may follow.
            tensors = [torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x for x in tensors]
        record = Record(self, inputs, parameters, num_outputs=len(places), fresh=fresh, rule=rule, as_is=as_is)
        if record.created_in is None:  # a forward that is repeated in a backward pass has been counted
            record.uses = self.taps.count_uses(parameters)
        results = _TapFunction.apply(record, *tensors, *parameters)
        for i, result in zip(places, results, strict=True):
            leaves[i] = result
        return leaves[0] if structure is None else tree_unflatten(leaves, structure)


class Pieces:
    """What a forward of ``registry.register_forward`` makes its steps with."""

    def __init__(self, tap: Tap):
        self._tap = tap

    def __call__(
        self,
        rule: Callable[..., Mapping[nn.Parameter, Factor]],
        function: Callable[..., Any],
        parameters: Sequence[nn.Parameter | None],
        *inputs: Any,
        fresh: bool = True,
    ) -> Any:
        """``function(*inputs, *parameters)``, tapped.

        Args:
            rule: ``rule(parameters, activations, backprops)``, a rule that takes the parameters and finds the
                tensors laid out as ``function`` has them; what it says of frozen parameters is left out.
            fresh: the function makes its output afresh and keeps no reference to it.
        """
        tap = self._tap
        detach = tap.taps.detach
        output = function(*inputs, *(p.detach() if detach and p is not None else p for p in parameters))
        trainable = [p for p in parameters if p is not None and p.requires_grad]
        if not trainable:
            return output

        def of_piece(module: nn.Module, activations: Activations, backprops: Any) -> Mapping[nn.Parameter, Factor]:
            found = rule(parameters, activations, backprops)
            return {p: factor for p, factor in found.items() if p is not None and p.requires_grad}

        of_piece.__name__ = rule.__name__
        return tap.tapped(output, (inputs, {}), trainable, fresh=fresh, rule=of_piece, as_is=True)


def _failing_in_backward(output: Any, message: str) -> Any:
    """The output, whose gradient is an error."""

    def fail(grad: Tensor) -> None:
        raise UnsupportedModuleError(message)

    followed = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
    if not followed:  # no gradient would come by, but what comes out is not fit for private training either
        raise UnsupportedModuleError(message)
    for x in followed:
        x.register_hook(fail)
    return output


class Record:
    """What one run of a tapped module leaves for its backward, apart from the tensors, which autograd keeps."""

    def __init__(
        self,
        tap: Tap,
        inputs: tuple[tuple, dict],
        parameters: Sequence[nn.Parameter],
        *,
        num_outputs: int,
        fresh: bool,
        rule: Rule | None,
        as_is: bool,
    ):
        self.tap = tap
        self.rule = rule
        self.as_is = as_is
        self.parameters = parameters
        self.batch_size = tap.taps.batch_size()
        self.num_outputs = num_outputs
        self.fresh = fresh
        self.created_in = in_backward()
        self.uses: Counter[int] | None = None
        args, kwargs = inputs
        if kwargs or not all(isinstance(x, Tensor) for x in args):
            self.leaves, self.structure = tree_flatten(inputs)
            self.tensor_places: Sequence[int] = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor)]
        else:  # nearly all layers; a flattened tree costs as much as all else here
            self.leaves, self.structure, self.tensor_places = list(args), None, range(len(args))
        self.followed = [isinstance(x, Tensor) and x.requires_grad for x in self.leaves]

    def is_only_use(self, parameter: nn.Parameter) -> bool:
        """Whether the step has no other use of the parameter; False where that is not known."""
        return self.uses is not None and self.uses[id(parameter)] == 1

    def take_tensors(self) -> list[Tensor]:
        tensors = [self.leaves[i].detach() for i in self.tensor_places]
        for i in self.tensor_places:
            self.leaves[i] = None
        return tensors

    def activations(self, tensors: tuple[Tensor, ...]) -> Activations:
        if self.structure is None:
            activations = Activations(tensors)
        else:
            leaves = list(self.leaves)
            for i, x in zip(self.tensor_places, tensors, strict=True):
                leaves[i] = x
            activations = Activations(*tree_unflatten(leaves, self.structure))
        activations.followed = self.followed
        return activations


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
        try:
            wanted = any(node is not None and torch._C._will_engine_execute_node(node) for node in nodes)
        except RuntimeError as error:
            raise StateError(
                f"{record.tap.layer}: torch.autograd.grad() cannot give the gradients of its parameters; "
                "loss.backward() leaves them in the parameters"
            ) from error
        to_parameters: tuple[Tensor | None, ...] = (None,) * len(nodes)
        if wanted and any(g is not None for g in grads):
            activations = record.activations(ctx.saved_tensors)
            backprops = tuple(
                torch.zeros(s, dtype=t, device=d) if g is None else g
                for g, (s, t, d) in zip(grads, ctx.shapes, strict=True)
            )
            with exact_arithmetic():
                if taps.enabled:
                    taps.receive(record, activations, backprops)
                elif taps.detach:  # hooks are off: the parameters' ordinary gradients
                    to_parameters = _ordinary_gradients(record, activations, backprops, nodes)
        return None, *grads, *to_parameters


def _ordinary_gradients(record: Record, activations: Activations, backprops: tuple, nodes: list) -> tuple:
    """Σ_n G_n for the parameters whose AccumulateGrad nodes these are, as autograd itself would give."""
    factors = record.tap.taps.factors(record, activations, backprops)
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
