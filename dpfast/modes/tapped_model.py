"""The taps on one model.

In the backward pass each tap hands (activations, backprops) to its module's rule and the factors to the mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpfast.arithmetic import exact_arithmetic, is_traced
from dpfast.distributed import in_process_group
from dpfast.errors import InputError, StateError
from dpfast.factors import Factor
from dpfast.looks import Documents, Probe
from dpfast.modes.answers import check_answer
from dpfast.modes.blocks import UNITS, VALID
from dpfast.modes.deferred import Deferred
from dpfast.modes.escaped_gradients import Guards
from dpfast.modes.mixed_losses import begin_forward, note_forward, refuse_mixed
from dpfast.modes.running import Pass, num_samples, running
from dpfast.modes.scalar_loss import check_losses
from dpfast.modes.second_pass import FirstPass, Output, SecondPass, check_ordinary
from dpfast.modes.steps import Mode, Step, Steps, check_same_mask, check_valid, own_copy
from dpfast.modes.swapped import SwappedParameters
from dpfast.modes.units import Units, check_same, factors_of
from dpfast.rules import experts, functorch
from dpfast.taps import (
    Activations,
    BroadcastMethod,
    DetachableParameters,
    Record,
    Tap,
    TappedForward,
    end_model,
    experts_of,
    find_broadcast,
    follow_model,
    forget_compiled_code,
    given_layout,
    has_hooks,
    has_something_to_tap,
    in_backward,
    layouts,
    leaves_of,
    never_compiled,
    owned_modules,
    results_in,
    suspended,
)

_OF_THIS_PROCESS = ("guards", "_steps", "probe", "_documents", "_swapped")
"""Attributes of a tapped model that copies and pickles leave out."""


class TappedModel:
    """The taps on one model.

    Args:
        model: every module of it that owns parameters is tapped.
        mode: receives factors and the end of each backward pass.
        batch_first: whether samples are the first or the second dimension of inputs and outputs.
        force_functorch: take no layer's own rule.
        layout: where layers have their samples, by name, where that must not be found out.
    """

    picks_rows, gives_batches = False, True  # of its own forward, as has been seen (``node.TappedModel``)

    def __init__(
        self,
        model: nn.Module,
        mode: Mode,
        *,
        batch_first: bool = True,
        force_functorch: bool = False,
        layout: Mapping[str, Any] | None = None,
    ):
        self.model = model
        self.mode = mode
        self.layout = {} if layout is None else layout
        self.batch_dim = 0 if batch_first else 1
        self.force_functorch = force_functorch
        self.enabled = True
        self.observe: Callable[[Record, nn.Parameter, Factor], None] | None = None  # dpfast.explain
        self._taps: list[Tap] = []
        self._parameter_owners: list[nn.Module] = []
        self._broadcasts: list[tuple[nn.Module, str]] = []
        self._root_handles: list[RemovableHandle] = []
        self._for_this_process()

    def _for_this_process(self) -> None:
        self.guards = Guards(self.model, self._is_fine, hooks=self.mode.gives_gradients)
        self._swapped = SwappedParameters(self.guards.guard)
        self._steps = Steps()
        self.probe = Probe(self, self._taps)
        self._documents = Documents(self, self._taps)

    def add(self, *, never_run: bool = False) -> None:
        """Raises StateError where the model is tapped already. ``never_run``: torch.compile has no code of it."""
        check_losses()
        for name, module in self.model.named_modules():
            if has_hooks(module):
                where = f"{name} ({type(module).__name__})" if name else type(module).__name__
                raise StateError(
                    f"Trying to add hooks twice to the same model: {where} has them already; remove the first ones "
                    "with remove_hooks() or to_standard_module()"
                )
        # What these learned before was of taps that are gone.
        self.probe, self._documents = Probe(self, self._taps), Documents(self, self._taps)
        self.guard_parameters()
        inner = {id(m) for module in self.model.modules() for m in owned_modules(module)[1:]}
        sent = {id(expert): expert for module in self.model.modules() for expert in experts_of(module)}
        within = {id(module) for expert in sent.values() for module in expert.modules()}
        for name, module, layout in layouts(self.model, self.batch_dim):
            if module._parameters:
                module._parameters = DetachableParameters(module._parameters)
                self._swapped.watch(module._parameters)
                self._parameter_owners.append(module)
            sends = bool(experts_of(module))
            if id(module) not in inner and (sends or id(module) in sent or has_something_to_tap(module)):
                tap = Tap(self, name, module, **layout._asdict())
                tap.sends, tap.receives = sends, id(module) in within
                module.forward = TappedForward(tap, module.__dict__.get("forward"))
                self._taps.append(tap)
            method, child = find_broadcast(module) or ("", "")
            if isinstance(getattr(module, child, None), nn.Module):
                tap = Tap(self, f"{name}.{child}", module, **layout._asdict())
                setattr(
                    module, method, BroadcastMethod(tap, method, getattr(module, child), functorch.linear_in_parameters)
                )
                self._broadcasts.append((module, method))
        try:
            given = given_layout(self.layout, [tap.name for tap in self._taps])
        except InputError:
            self.remove()
            raise
        for tap in self._taps:
            tap.given = given.get(tap.name)
        self._root_handles = [*experts.refuse_balancing(self.model), *self._around_forward()]
        if not never_run:
            forget_compiled_code()

    def _around_forward(self) -> list[RemovableHandle]:
        before = self.model.register_forward_pre_hook(self._enter, with_kwargs=True)
        return [before, self.model.register_forward_hook(self._leave, always_call=True)]

    def remove(self) -> None:
        """Puts every module back as it was. Safe to call twice."""
        for tap in self._taps:
            tapped = tap.module.__dict__.get("forward")
            if isinstance(tapped, TappedForward) and tapped.tap is tap:
                del tap.module.forward
                if tapped.before is not None:
                    tap.module.forward = tapped.before
        for module in self._parameter_owners:
            module._parameters = dict(module._parameters)
        for module, method in self._broadcasts:
            module.__dict__.pop(method, None)
        for gathered in (self._taps, self._parameter_owners, self._broadcasts):
            gathered.clear()
        for handle in self._root_handles:
            handle.remove()
        self._root_handles.clear()
        self.guards.remove()
        forget_compiled_code()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the taps, not what hangs on the originals' parameters and backward passes."""
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._for_this_process()

    # --- the forward pass ---

    @never_compiled
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if suspended():
            return
        leaves = leaves_of((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if self.enabled and in_process_group():
            self.mode.on_forward(tensors, (args, kwargs))
        trainable = self.guard_parameters()
        size = num_samples((args, kwargs), leaves, self.batch_dim)
        is_new = self.probe.look((args, kwargs), leaves, size, trainable)
        size = self.probe.lists.number((args, kwargs), leaves, size, self.batch_dim)
        if is_new and not is_traced():
            self.guards.set_beside(tensors, lambda: self.active and self._steps.repeating(in_backward()) is not None)
        units, valid = UNITS.of_forward(self.mode), VALID.of_forward(self.mode)
        if units is not None and self.enabled and torch.is_grad_enabled():
            units.look(self._documents, (args, kwargs))
        begin_forward(self, tensors, is_new=is_new)
        running.note_inputs(tensors)
        running.push(self, size, units, own_copy(valid), self._steps.graph())
        follow_model(self, self.model, leaves)
        if valid is not None and size is not None:
            check_valid(valid, size)

    @never_compiled
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Opens the step when the outermost backward pass reaches the model's output, before checkpoints' own."""
        if suspended():
            return
        ended = running.pop(self)
        end_model(self)
        self.probe.forward_ended(output)
        if ended is None or not (self.enabled and torch.is_grad_enabled()) or in_backward() is not None:
            return
        units, mixed, leaves = ended.units, self.probe.mixed_outputs(), results_in(output)
        if units is not None:
            mixed = {**mixed, **units.start(ended.size, ended.valid, leaves)}
        refuse_mixed(self.model, leaves, mixed, self.batch_dim)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                found = Output(leaf, ended.size, self.batch_dim, ended.valid, units, ended.graph)
                leaf.register_hook(partial(self._on_output_grad, found))
        note_forward(self, leaves, ended, self.probe.parted_outputs(), mixed)

    def batch_size(self) -> int | None:
        """How many samples the model's input has; None where the model's own forward is not what runs. A forward that
        is repeated in a backward pass has its step's."""
        step, here = None if in_backward() is None else self._steps.repeating(in_backward()), running.here(self)
        if step is not None:
            step.repeats = True
        return here.size if here is not None else None if step is None else step.batch_size

    def forward_here(self) -> Pass | None:
        return running.here(self)

    def whose(self) -> tuple[Units | None, Tensor | None]:
        """The units and the mask of the forward pass of this thread; one repeated in a backward pass has its step's."""
        step, here = None if in_backward() is None else self._steps.repeating(in_backward()), running.here(self)
        if step is not None:
            return step.units, step.valid
        return (UNITS.here(self.mode), None) if here is None else (here.units, here.valid)

    def is_input(self, x: Tensor, *, whole: bool = False) -> bool:
        """Whether ``x`` is a tensor that the model was last called with in this thread, or a view if not ``whole``."""
        return running.is_input(x, whole=whole)

    def samples_are_bags(self, indices: Tensor, offsets: Tensor, bags: int) -> None:
        """All bags of an EmbeddingBag in one row: the batch is the bags, where the model was called with their
        offsets and what was taken for the batch is the length of that row or of the offsets."""
        passes = running.passes.get(id(self))
        if passes and passes[-1].size in (len(indices), len(offsets)) and self.is_input(offsets):
            passes[-1] = passes[-1]._replace(size=bags)

    # --- nothing escapes ---

    def guard_parameters(self) -> bytes:
        """Gradients may reach parameters through taps alone. Returns which are trainable."""
        return self.guards.set()

    def _is_fine(self, parameter: nn.Parameter, grad: Tensor) -> bool | None:
        """Whether a gradient that reaches a parameter comes from taps; None: hooks are off."""
        if not self.active:
            return None
        step = self._steps.repeating(in_backward())
        return step is not None and step.came_as_given(parameter, grad)

    # --- steps ---

    @property
    def inserts(self) -> bool:
        """Whether modules that run now are tapped: hooks are on, or a backward pass repeats forwards (checkpoints) of
        a graph that was tapped, whatever it does with what the taps catch."""
        return self.enabled or self._steps.through_taps()

    @property
    def active(self) -> bool:
        """Whether taps catch what comes by: hooks are on, or a second backward pass repeats one that was tapped."""
        return self.enabled or self._steps.second()

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """The model's own, where this one stands in for it (FSDP2)."""
        return self._swapped.own(parameter)

    def trainable(self) -> list[nn.Parameter]:
        """The model's own that are trained now, one that is there twice twice."""
        return self._swapped.own_all(self.guards.trainable())

    def has_stand_ins(self) -> bool:
        """Whether parameters are parted, or others stand in for them."""
        return self._swapped.any_of(self.model.parameters())

    def withholds(self) -> bool:
        """Whether the backward pass that runs in this thread is one of the mode's."""
        step = self._steps.here()
        return step is not None and not step.ordinary

    def _on_output_grad(self, output: Output, grad: Tensor) -> Tensor | None:
        """Returns what goes on in the gradient's place, if anything."""
        step = self._steps.here()
        self._steps.came_to(output.graph)
        if self.enabled:
            step = step or self._open(output)
            step.comes_to(output.graph)
            check_same(self, output.units, step.units)
            check_same_mask(self.mode, output.valid, step.valid)
            if step.first is not None:
                output.first, output.grad = step.first, grad
            return None
        if output.first is None or not output.first.asked:  # hooks are off, and an ordinary gradient is wanted
            if step is None:
                self._steps.open(Step(output, ordinary=True), self._finish)
            return None
        if step is None or step.ordinary:
            # At an output that others are computed from the gradient is partly the first pass's already.
            second = SecondPass(output.first, is_weighted=output.first.is_weighted(output, grad))
            step = self._steps.open(Step(output, second=second), self._finish)
        if step.second is None or step.second.first is not output.first:
            raise StateError("the second backward pass goes through two first ones; call it once for each")
        step.comes_to(output.graph)
        return output.grad

    def _open(self, of: Output | Record) -> Step:
        first = FirstPass() if self.mode.passes == 2 else None
        step = self._steps.open(Step(of, units=of.units, first=first), self._finish)
        if self.mode.defers and of.units is None and self.observe is None and not self.force_functorch:
            step.deferred = Deferred(self.factors, step.gathered, step.row_norms)
        return step

    def count_uses(self, parameters: Sequence[nn.Parameter]) -> Counter[int]:
        return self._steps.count_uses(parameters)

    def _finish(self, step: Step) -> None:
        if not self._steps.ended(step):
            return
        step.check_size(self.batch_dim)
        with torch.no_grad(), exact_arithmetic(), step.row_norms:
            self.mode.on_finish(step)
        step.was_clipped()

    def _step_of(self, record: Record) -> Step:
        """The step that a tap belongs to."""
        if (step := self._steps.here()) is not None:
            return step
        if record.created_in is None:
            return self._open(record)
        # The forward was repeated within a backward pass (reentrant checkpointing), and this is a pass nested in it.
        step = self._steps.repeating(record.created_in)
        if step is None:
            raise StateError(
                f"{record.tap.layer}: this checkpointed region does not belong to one backward pass of the wrapped "
                "model; call the model through its forward, or checkpoint with use_reentrant=False"
            )
        return step

    def waits(self, record: Record, activations: Tensor, backprops: Tensor) -> bool:
        """What :meth:`receive` does with a layer that waits for others alike, where nothing else has to be asked."""
        step = self._steps.here() if self.enabled else None
        if step is None or record.units is not step.units or record.valid is not step.valid:
            return False
        step.goes_through(record.graph, self.mode.has_left)
        return UNITS.are_of(self.mode, None) and step.defers(record, activations, backprops)

    def receive(self, record: Record, activations: Activations, backprops: Any) -> Mapping[nn.Parameter, Tensor]:
        """Hands a module's factors to the mode; returns the ordinary gradients that it wants beside."""
        step, layer = self._step_of(record), record.tap.layer
        step.goes_through(record.graph, self.mode.has_left)
        check_same(self, record.units, step.units)
        check_same_mask(self.mode, record.valid, step.valid)
        if (of_two := step.first or step.second) is not None:
            of_two.saw(record, activations, backprops, whole=step.repeats)
        one = len(activations) == len(backprops) == 1 and not activations.kwargs
        if one and step.defers(record, activations[0], backprops[0]):
            return {}
        ordinary = {}
        with step.row_norms:
            factors = self.factors(record, activations, backprops)
            check_answer(layer, record.parameters, factors, self._name_of)
            for parameter, factor in factors.items():
                if step.num_samples != factor.num_samples:
                    step.saw(factor.num_samples, layer, record.tap.batch_dim)
                if self.observe is not None:
                    self.observe(record, parameter, factor)
                gradient = self.mode.on_factor(step, self.own(parameter), factor, record.is_only_use(parameter))
                if gradient is not None:
                    step.give(parameter, gradient)
                    ordinary[parameter] = gradient
        return ordinary

    def _name_of(self, parameter: nn.Parameter) -> str:
        names = (name for name, p in self.model.named_parameters() if p is parameter)
        return f"parameter {next(names, 'of another model')}"

    def check_ordinary(self, record: Record) -> None:
        check_ordinary(record, self._steps.last_first)

    def factors(self, record: Record, activations: Activations, backprops: Any) -> Mapping[nn.Parameter, Factor]:
        """The rule's answer; its errors name the layer."""
        return factors_of(record, activations, backprops, force_functorch=self.force_functorch)
