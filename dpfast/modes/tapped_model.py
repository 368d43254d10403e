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
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from dpfast.arithmetic import exact_arithmetic
from dpfast.distributed import in_process_group
from dpfast.errors import InputError, StateError
from dpfast.factors import Factor
from dpfast.modes.deferred import Deferred
from dpfast.modes.escaped_gradients import Guards
from dpfast.modes.mixed_losses import expect_loss, note_forward, refuse_mixed
from dpfast.modes.running import Pass, num_samples, running, storage
from dpfast.modes.scalar_loss import check_losses
from dpfast.modes.second_pass import FirstPass, Output, SecondPass, check_ordinary
from dpfast.modes.steps import Mode, Step, Steps, check_answer, check_valid
from dpfast.modes.swapped import SwappedParameters
from dpfast.modes.units import Units, check_same, factors_of, units_here, units_of_forward
from dpfast.rules import experts, functorch
from dpfast.taps import (
    Activations,
    BroadcastMethod,
    DetachableParameters,
    Documents,
    Probe,
    Record,
    Tap,
    TappedForward,
    end_model,
    experts_of,
    find_broadcast,
    follow_model,
    forget_compiled_code,
    given_layout,
    has_something_to_tap,
    in_backward,
    layouts,
    leaves_of,
    never_compiled,
    owned_modules,
    suspended,
)

_OF_THIS_PROCESS = ("_guards", "_steps", "_probe", "_documents", "_swapped")
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

    picks_rows = False  # whether its own forward picks rows of all samples, as has been seen
    valid: Tensor | None = None  # (N,) bool, of the batch that comes: which samples are no padding

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
        self._guards = Guards(self.model, self._is_fine)
        self._swapped = SwappedParameters(self._guards.guard)
        self._steps = Steps()
        self._probe = Probe(self, self._taps)
        self._documents = Documents(self, self._taps)

    def add(self, *, never_run: bool = False) -> None:
        """Raises StateError where the model is tapped already. ``never_run``: torch.compile has no code of it."""
        check_losses()
        for name, module in self.model.named_modules():
            if isinstance(module.__dict__.get("forward"), TappedForward):
                where = f"{name} ({type(module).__name__})" if name else type(module).__name__
                raise StateError(
                    f"Trying to add hooks twice to the same model: {where} has them already; remove the first ones "
                    "with remove_hooks() or to_standard_module()"
                )
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
        self._root_handles = [
            *experts.refuse_balancing(self.model),
            self.model.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.model.register_forward_hook(self._leave, always_call=True),
        ]
        self.guard_parameters()
        if not never_run:
            forget_compiled_code()

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
        self._guards.drop()
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
        size = num_samples(leaves, self.batch_dim)
        if size is not None and self._probe.look((args, kwargs), leaves, size, trainable):
            expect_loss(self)
        units = units_of_forward(self)
        if units is not None and self.enabled and torch.is_grad_enabled():
            units.look(self._documents, (args, kwargs))
        running.inputs = {storage(x) for x in tensors}
        running.push(self, size, units_here(self))
        follow_model(self, self.model, leaves)
        if self.valid is not None and size is not None:
            check_valid(self.valid, size)

    @never_compiled
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Opens the step when the outermost backward pass reaches the model's output, before any checkpointed
        region inside starts a backward pass of its own."""
        if suspended():
            return
        batch_size = running.pop(self)
        end_model(self)
        if not (self.enabled and torch.is_grad_enabled()) or in_backward() is not None:
            return
        note_forward(self)
        units, mixed, leaves = units_here(self), self._probe.mixed_outputs(), tree_leaves(output)
        if units is not None:
            mixed = {**mixed, **units.start(batch_size, self.valid, leaves)}
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                if number in mixed:
                    leaf.register_hook(partial(refuse_mixed, number, tuple(leaf.shape), mixed[number]))
                leaf.register_hook(partial(self._on_output_grad, Output(batch_size, self.batch_dim, self.valid, units)))

    def batch_size(self) -> int | None:
        """How many samples the first tensor of the model's input has; None where the model's own forward is not
        what runs. A forward that is repeated in a backward pass has its step's."""
        step, here = None if in_backward() is None else self._steps.repeating(in_backward()), running.here(self)
        if step is not None:
            step.repeats = True
        return here.size if here is not None else None if step is None else step.batch_size

    def forward_here(self) -> Pass | None:
        return running.here(self)

    def units(self) -> Units | None:
        """Those of the forward pass of this thread; one repeated in a backward pass has its step's."""
        step = None if in_backward() is None else self._steps.repeating(in_backward())
        return units_here(self) if step is None else step.units

    def is_input(self, x: Tensor) -> bool:
        """Whether ``x`` is, or is a view of, a tensor that the model was last called with in this thread."""
        return storage(x) in running.inputs

    def samples_are_bags(self, indices: Tensor, offsets: Tensor, bags: int) -> None:
        """All bags of an EmbeddingBag in one row: the batch is the bags, where the model was called with their
        offsets and what was taken for the batch is the length of that row or of the offsets."""
        passes = running.passes.get(id(self))
        if passes and passes[-1].size in (len(indices), len(offsets)) and self.is_input(offsets):
            passes[-1] = passes[-1]._replace(size=bags)

    # --- nothing escapes ---

    def guard_parameters(self) -> bytes:
        """Gradients may reach parameters through taps alone; any other is an error. Returns which are trainable."""
        return self._guards.set()

    def _is_fine(self, parameter: nn.Parameter, grad: Tensor) -> bool:
        """Whether a gradient that reaches a parameter comes from taps, or hooks are off."""
        if not self.active:
            return True
        step = self._steps.repeating(in_backward())
        return step is not None and step.came_as_given(parameter, grad)

    def drop_guards(self) -> None:
        """Lets ordinary gradients reach the parameters."""
        self._guards.drop()

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
        return self._swapped.own_all(self._guards.trainable())

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
        if self.enabled:
            step = step or self._open(output.batch_size, output.valid, output.units)
            check_same(self, output.units, step.units)
            if step.first is not None:
                output.first, output.grad = step.first, grad
            return None
        if output.first is None or not output.first.asked:  # hooks are off, and an ordinary gradient is wanted
            if step is None:
                self._steps.open(Step(output.batch_size, ordinary=True), self._finish)
            return None
        if step is None or step.ordinary:
            # At an output that others are computed from the gradient is partly the first pass's already.
            second = SecondPass(output.first, is_weighted=output.first.is_weighted(output, grad))
            step = self._steps.open(Step(output.batch_size, second=second), self._finish)
        if step.second is None or step.second.first is not output.first:
            raise StateError("the second backward pass goes through two first ones; call it once for each")
        return output.grad

    def _open(self, batch_size: int | None, valid: Tensor | None, units: Units | None) -> Step:
        first = FirstPass() if self.mode.passes == 2 else None
        step = self._steps.open(Step(batch_size, valid=valid, units=units, first=first), self._finish)
        if self.mode.defers and units is None and self.observe is None and not self.force_functorch:
            step.deferred = Deferred(self.factors, step.gathered, step.row_norms)
        return step

    def count_uses(self, parameters: Sequence[nn.Parameter]) -> Counter[int]:
        return self._steps.count_uses(parameters)

    def _finish(self, step: Step) -> None:
        self._steps.forget_uses()
        if step.ordinary:
            return
        sizes = {step.batch_size, step.num_samples}
        if step.units is None and None not in sizes and len(sizes) > 1:
            raise InputError(
                f"{step.first_layer} saw a batch of {step.num_samples} samples, but the first tensor of the model's "
                f"input has {step.batch_size} in dimension {self.batch_dim}: a layer must see each sample once, in "
                f"that dimension (samples folded into positions, or split into several rows, would not be clipped as "
                "one); reshape before the layer, set batch_first, or pass the model a tensor of the batch first"
            )
        with torch.no_grad(), exact_arithmetic(), step.row_norms:
            self.mode.on_finish(step)
        if step.units is not None:
            step.units.clipped = True

    def _step_of(self, record: Record) -> Step:
        """The step that a tap belongs to."""
        step = self._steps.here()
        if step is not None:
            return step
        if record.created_in is None:
            return self._open(record.batch_size, self.valid, record.units)
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
        fits = step is not None and record.units is step.units and units_here(self) is None
        return fits and step.defers(record, activations, backprops)  # type: ignore[union-attr]  # it fits

    def receive(self, record: Record, activations: Activations, backprops: Any) -> Mapping[nn.Parameter, Tensor]:
        """Hands a module's factors to the mode; returns the ordinary gradients that it wants beside."""
        step, layer = self._step_of(record), record.tap.layer
        check_same(self, record.units, step.units)
        of_two = step.first or step.second
        if of_two is not None:
            of_two.sketches.take(record, activations, backprops, whole=step.repeats)
            record.seen_by = step.first or record.seen_by
        one = len(activations) == 1 and len(backprops) == 1 and not activations.kwargs
        if one and step.defers(record, activations[0], backprops[0]):
            return {}
        with step.row_norms:
            factors = self.factors(record, activations, backprops)
        check_answer(layer, record.parameters, factors, self._name_of)
        ordinary = {}
        for parameter, factor in factors.items():
            step.saw(factor.num_samples, layer, record.tap.batch_dim)
            if self.observe is not None:
                self.observe(record, parameter, factor)
            with step.row_norms:
                gradient = self.mode.on_factor(step, self.own(parameter), factor, record.is_only_use(parameter))
            if gradient is not None:
                step.give(parameter, gradient)
                ordinary[parameter] = gradient
        return ordinary

    def _name_of(self, parameter: nn.Parameter) -> str:
        names = (name for name, p in self.model.named_parameters() if p is parameter)
        return f"parameter {next(names, 'of another model')}"

    def check_ordinary(self, record: Record) -> None:
        check_ordinary(record)

    def factors(self, record: Record, activations: Activations, backprops: Any) -> Mapping[nn.Parameter, Factor]:
        """The rule's answer; its errors name the layer."""
        return factors_of(record, activations, backprops, force_functorch=self.force_functorch)
