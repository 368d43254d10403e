"""Catches activations and backprops on their way.

A tapped module runs with its own parameters detached (unless their ordinary gradient is wanted too), so autograd
never computes the summed weight gradients that private training throws away. An identity on the module's output
keeps the inputs through autograd's own saved tensors: activation checkpointing, CPU offload, reuse of a module and
``retain_graph`` work by themselves, and nothing is left on modules or parameters when no backward follows.

In the backward pass the identity hands (activations, backprops) to the module's rule and the factors to the mode.
Everything that belongs to one backward pass lives in a :class:`Step`, which only autograd's end-of-backward
callback keeps alive: a pass that fails takes its step with it.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from dpfast.errors import DpfastError, EscapedGradientError, InputError, StateError, UnsupportedModuleError
from dpfast.factors import Factor
from dpfast.registry import Activations, find_rule
from dpfast.rules.functorch import functorch

_local = threading.local()
_swap_lock = threading.Lock()


@contextmanager
def _taps_suspended() -> Iterator[None]:
    """Rules may run modules again; those runs are not part of the model's pass."""
    before = getattr(_local, "suspended", False)
    _local.suspended = True
    try:
        yield
    finally:
        _local.suspended = before


@contextmanager
def _without_autocast() -> Iterator[None]:
    """A backward pass that runs under autocast must not round our own arithmetic to 16 bits."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class Step:
    """What one backward pass has gathered."""

    def __init__(self) -> None:
        self.num_samples: int | None = None
        self.first_layer = ""
        self.gathered: dict[nn.Parameter, Any] = {}


class Mode(Protocol):
    """Which verb is called and when."""

    def on_factor(self, step: Step, parameter: nn.Parameter, factor: Factor) -> None:
        """A use of the parameter has been differentiated."""

    def on_finish(self, step: Step) -> None:
        """The backward pass is over."""


class Taps:
    """The taps on one model.

    Args:
        model: every module of it that owns parameters is tapped.
        mode: receives factors and the end of each backward pass; holds this object, so it is kept weakly.
        detach: whether autograd is kept from computing the parameters' ordinary gradients.
        batch_first: whether samples are the first or the second dimension of inputs and outputs.
        force_functorch: take no layer's own rule.
    """

    def __init__(
        self, model: nn.Module, mode: Mode, *, detach: bool, batch_first: bool = True, force_functorch: bool = False
    ):
        self.model = model
        self.mode = mode
        self.detach = detach
        self.batch_dim = 0 if batch_first else 1
        self.force_functorch = force_functorch
        self.enabled = True
        self._taps: list[_Tap] = []
        self._root_handles: list[RemovableHandle] = []
        self._guards: dict[nn.Parameter, RemovableHandle] = {}
        self._steps: weakref.WeakValueDictionary[int, Step] = weakref.WeakValueDictionary()

    def add(self) -> None:
        """Raises StateError where the model is tapped already."""
        for name, module in self.model.named_modules():
            if isinstance(module.__dict__.get("forward"), _TappedForward):
                where = f"{name} ({type(module).__name__})" if name else type(module).__name__
                raise StateError(
                    f"Trying to add hooks twice to the same model: {where} has them already; remove the first ones "
                    "with remove_hooks() or to_standard_module()"
                )
        for name, module in self.model.named_modules():
            if module._parameters:
                tap = _Tap(self, name, module)
                module.forward = _TappedForward(tap, module.__dict__.get("forward"))
                self._taps.append(tap)
        self._root_handles = [
            self.model.register_forward_pre_hook(self._guard_parameters),
            self.model.register_forward_hook(self._watch_outputs),
        ]
        self._guard_parameters()

    def remove(self) -> None:
        """Puts every module back as it was. Safe to call twice."""
        for tap in self._taps:
            tapped = tap.module.__dict__.get("forward")
            if isinstance(tapped, _TappedForward) and tapped.tap is tap:
                del tap.module.forward
                if tapped.replaced is not None:
                    tap.module.forward = tapped.replaced
        self._taps.clear()
        for handle in [*self._root_handles, *self._guards.values()]:
            handle.remove()
        self._root_handles.clear()
        self._guards.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the taps, not what hangs on the originals' parameters and backward passes."""
        return {**self.__dict__, "_steps": None, "_guards": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _steps=weakref.WeakValueDictionary())

    # --- nothing escapes ---

    def _guard_parameters(self, *_: Any) -> None:
        """Where gradients may reach parameters through taps alone, any other gradient is an error."""
        if not self.detach:
            return
        for p in self.model.parameters():
            if p.requires_grad and p not in self._guards:
                self._guards[p] = p.register_hook(lambda grad, p=p: self._refuse(p, grad))

    def _refuse(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        if grad is None or not self.enabled:
            return
        name = next((n for n, p in self.model.named_parameters() if p is parameter), "of another model")
        raise EscapedGradientError(
            f"a gradient reached parameter {name} {tuple(parameter.shape)} without being clipped: it is used outside "
            "its own module's forward (functionally by another module, or in a penalty on the weights). Call the "
            "module instead, register a rule for the module that uses it, or freeze it; weight decay belongs in the "
            "optimizer"
        )

    # --- steps ---

    def _watch_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        """Opens the step when the outermost backward pass reaches the model's output, before any checkpointed
        region inside starts a backward pass of its own."""
        if not (self.enabled and torch.is_grad_enabled()) or _in_backward() is not None:
            return
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_output_grad)

    def _on_output_grad(self, grad: Tensor) -> None:
        if self.enabled and _in_backward() not in self._steps:
            self._open_step()

    def _open_step(self) -> Step:
        step = self._steps[_in_backward()] = Step()
        # The callback's reference is the one that keeps the step alive.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(step))
        return step

    def _finish(self, step: Step) -> None:
        with torch.no_grad(), _without_autocast():
            self.mode.on_finish(step)

    def _step_of(self, created_in: int | None, layer: str) -> Step:
        """The step that a tap belongs to which ran forward in backward pass ``created_in`` (None: in a forward)."""
        step = self._steps.get(_in_backward())
        if step is not None:
            return step
        if created_in is None:
            return self._open_step()
        # The forward was repeated within a backward pass (reentrant checkpointing), and this is a pass nested in it.
        step = self._steps.get(created_in)
        running = set(self._steps.values()) if step is None else {step}
        if len(running) != 1:
            raise StateError(
                f"{layer}: this checkpointed region does not belong to one backward pass of the wrapped model; call "
                "the model through its forward, or checkpoint with use_reentrant=False"
            )
        return running.pop()

    def receive(self, tap: _Tap, activations: Activations, backprops: Any, created_in: int | None) -> None:
        """Hands a module's factors to the mode."""
        step = self._step_of(created_in, tap.layer)
        for parameter, factor in self.factors(tap, activations, backprops).items():
            if step.num_samples is None:
                step.num_samples, step.first_layer = factor.num_samples, tap.layer
            elif step.num_samples != factor.num_samples:
                raise InputError(
                    f"{tap.layer} saw a batch of {factor.num_samples} samples, {step.first_layer} one of "
                    f"{step.num_samples}: every layer must see the same samples in dimension {self.batch_dim} of its "
                    "input; expand an input that the model broadcasts, or set batch_first"
                )
            self.mode.on_factor(step, parameter, factor)

    def factors(self, tap: _Tap, activations: Activations, backprops: Any) -> Mapping[nn.Parameter, Factor]:
        """The rule's answer; its errors name the layer."""
        if self.batch_dim != 0:
            activations = Activations(
                (batch_to_front(x, self.batch_dim) for x in activations),
                {k: batch_to_front(x, self.batch_dim) for k, x in activations.kwargs.items()},
            )
            backprops = tuple(batch_to_front(x, self.batch_dim) for x in backprops)
        activations.batch_dim = self.batch_dim
        rule = None if self.force_functorch else find_rule(tap.module)
        try:
            with torch.no_grad(), _without_autocast(), _taps_suspended():
                if rule is None:
                    return functorch(tap.module, activations, backprops)
                return rule(tap.module, activations, backprops[0] if len(backprops) == 1 else backprops)
        except DpfastError as error:
            raise type(error)(f"{tap.layer}: {error}") from error


def batch_to_front(x: Any, batch_dim: int) -> Any:
    return x.movedim(batch_dim, 0) if isinstance(x, Tensor) and x.dim() > batch_dim else x


def _in_backward() -> int | None:
    """The backward pass that runs in this thread."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


class _TappedForward:
    """Stands in a tapped module's ``forward``; an object, so that copies of the module tap the copy."""

    def __init__(self, tap: _Tap, replaced: Callable | None):
        self.tap = tap
        self.replaced = replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.tap.module
        return self.tap.run(self.replaced or type(module).forward.__get__(module), args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.replaced or type(self.tap.module).forward.__get__(self.tap.module))


class _Tap:
    """One module's tap."""

    def __init__(self, taps: Taps, name: str, module: nn.Module):
        self.taps = taps
        self.module = module
        self.layer = f"{name} ({type(module).__name__})" if name else type(module).__name__
        self._swapped: dict[str, nn.Parameter] = {}
        self._runs = 0

    def run(self, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The module's forward with its output tapped, or as it is where there is nothing to do."""
        if not (self.taps.enabled and torch.is_grad_enabled()) or getattr(_local, "suspended", False):
            return forward(*args, **kwargs)
        parameters = [p for p in self._own_parameters().values() if p is not None and p.requires_grad]
        if not parameters:
            return forward(*args, **kwargs)
        if self.taps.detach:
            with self._detached():
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
        return self._tapped(output, self._bound(forward, args, kwargs), parameters)

    def _own_parameters(self) -> Mapping[str, nn.Parameter | None]:
        return {**self.module._parameters, **self._swapped} if self._swapped else self.module._parameters

    @contextmanager
    def _detached(self) -> Iterator[None]:
        """The module sees its parameters without their history, however many threads run it at once."""
        parameters = self.module._parameters
        with _swap_lock:
            self._runs += 1
            if self._runs == 1:
                self._swapped = {k: p for k, p in parameters.items() if p is not None}
                parameters.update({k: p.detach() for k, p in self._swapped.items()})
        try:
            yield
        finally:
            with _swap_lock:
                self._runs -= 1
                if self._runs == 0:
                    parameters.update(self._swapped)
                    self._swapped = {}

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
        record = _Record(self, inputs, num_outputs=len(places), fresh=fresh)
        results = _TapFunction.apply(record, *tensors, *parameters)
        for i, result in zip(places, results, strict=True):
            leaves[i] = result
        return leaves[0] if structure is None else tree_unflatten(leaves, structure)


class _Record:
    """What one run of a tapped module leaves for its backward, apart from the tensors, which autograd keeps."""

    def __init__(self, tap: _Tap, inputs: tuple[tuple, dict], num_outputs: int, fresh: bool):
        self.tap = tap
        self.num_outputs = num_outputs
        self.fresh = fresh
        self.created_in = _in_backward()
        self.leaves, self.structure = tree_flatten(inputs)
        self.tensor_places = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor)]

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
    def forward(ctx, record: _Record, *tensors: Tensor):
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
                taps.receive(record.tap, activations, backprops, record.created_in)
            elif taps.detach:  # hooks are off: the parameters' ordinary gradients
                to_parameters = _ordinary_gradients(record.tap, activations, backprops, nodes)
        return None, *grads, *to_parameters


def _ordinary_gradients(tap: _Tap, activations: Activations, backprops: tuple, nodes: list) -> tuple:
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
