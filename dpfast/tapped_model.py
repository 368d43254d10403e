"""The taps on one model, and what one backward pass gathers through them.

In the backward pass each tap hands (activations, backprops) to its module's rule and the factors to the mode.
Everything that belongs to one backward pass lives in a :class:`Step`, which only autograd's end-of-backward
callback keeps alive: a pass that fails takes its step with it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from dpfast.errors import DpfastError, EscapedGradientError, InputError, StateError
from dpfast.factors import Factor
from dpfast.ops import exact_arithmetic
from dpfast.registry import Activations, find_rule
from dpfast.rules.functorch import functorch
from dpfast.tap import DetachableParameters, Record, Tap, TappedForward, in_backward, taps_suspended


class Step:
    """What one backward pass has gathered."""

    def __init__(self) -> None:
        self.num_samples: int | None = None
        self.first_layer = ""
        self.gathered: dict[nn.Parameter, Any] = {}


class Mode(Protocol):
    """Which verb is called and when."""

    def on_factor(self, step: Step, parameter: nn.Parameter, factor: Factor, only_use: bool) -> None:
        """A use of the parameter has been differentiated; ``only_use``: the step has no other one."""

    def on_finish(self, step: Step) -> None:
        """The backward pass is over."""


class TappedModel:
    """The taps on one model.

    Args:
        model: every module of it that owns parameters is tapped.
        mode: receives factors and the end of each backward pass.
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
        self._taps: list[Tap] = []
        self._root_handles: list[RemovableHandle] = []
        self._guards: dict[nn.Parameter, RemovableHandle] = {}
        self._uses: dict[int, Counter[int]] = {}
        self._steps: weakref.WeakValueDictionary[int, Step] = weakref.WeakValueDictionary()

    def add(self) -> None:
        """Raises StateError where the model is tapped already."""
        for name, module in self.model.named_modules():
            if isinstance(module.__dict__.get("forward"), TappedForward):
                where = f"{name} ({type(module).__name__})" if name else type(module).__name__
                raise StateError(
                    f"Trying to add hooks twice to the same model: {where} has them already; remove the first ones "
                    "with remove_hooks() or to_standard_module()"
                )
        for name, module in self.model.named_modules():
            if module._parameters:
                tap = Tap(self, name, module)
                module.forward = TappedForward(tap, module.__dict__.get("forward"))
                module._parameters = DetachableParameters(module._parameters)
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
            if isinstance(tapped, TappedForward) and tapped.tap is tap:
                del tap.module.forward
                tap.module._parameters = dict(tap.module._parameters)
                if tapped.replaced is not None:
                    tap.module.forward = tapped.replaced
        self._taps.clear()
        for handle in [*self._root_handles, *self._guards.values()]:
            handle.remove()
        self._root_handles.clear()
        self._guards.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the taps, not what hangs on the originals' parameters and backward passes."""
        return {**self.__dict__, "_steps": None, "_guards": {}, "_uses": {}}

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
        if not (self.enabled and torch.is_grad_enabled()) or in_backward() is not None:
            return
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_output_grad)

    def _on_output_grad(self, grad: Tensor) -> None:
        if self.enabled and in_backward() not in self._steps:
            self._open_step()

    def _open_step(self) -> Step:
        step = self._steps[in_backward()] = Step()
        # The callback's reference is the one that keeps the step alive.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(step))
        return step

    def count_uses(self, parameters: list[nn.Parameter]) -> Counter[int]:
        """Counts a use of each parameter (by id) since this thread's last step; forwards that no backward
        followed may be counted too, so a count of 1 is exact and a larger one an upper bound."""
        uses = self._uses.setdefault(threading.get_ident(), Counter())
        uses.update(map(id, parameters))
        return uses

    def _finish(self, step: Step) -> None:
        self._uses.pop(threading.get_ident(), None)
        with torch.no_grad(), exact_arithmetic():
            self.mode.on_finish(step)

    def _step_of(self, created_in: int | None, layer: str) -> Step:
        """The step that a tap belongs to which ran forward in backward pass ``created_in`` (None: in a forward)."""
        step = self._steps.get(in_backward())
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

    def receive(self, tap: Tap, activations: Activations, backprops: Any, record: Record) -> None:
        """Hands a module's factors to the mode."""
        step = self._step_of(record.created_in, tap.layer)
        for parameter, factor in self.factors(tap, activations, backprops).items():
            if step.num_samples is None:
                step.num_samples, step.first_layer = factor.num_samples, tap.layer
            elif step.num_samples != factor.num_samples:
                raise InputError(
                    f"{tap.layer} saw a batch of {factor.num_samples} samples, {step.first_layer} one of "
                    f"{step.num_samples}: every layer must see the same samples in dimension {self.batch_dim} of its "
                    "input; expand an input that the model broadcasts, or set batch_first"
                )
            self.mode.on_factor(step, parameter, factor, record.is_only_use(parameter))

    def factors(self, tap: Tap, activations: Activations, backprops: Any) -> Mapping[nn.Parameter, Factor]:
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
            with torch.no_grad(), exact_arithmetic(), taps_suspended():
                if rule is None:
                    return functorch(tap.module, activations, backprops)
                return rule(tap.module, activations, backprops[0] if len(backprops) == 1 else backprops)
        except DpfastError as error:
            raise type(error)(f"{tap.layer}: {error}") from error


def batch_to_front(x: Any, batch_dim: int) -> Any:
    return x.movedim(batch_dim, 0) if isinstance(x, Tensor) and x.dim() > batch_dim else x
