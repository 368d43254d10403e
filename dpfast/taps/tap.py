"""Catches one module's activations and backprops on their way.

A tapped module runs with its own parameters detached, so autograd never computes the summed weight gradients that
private training throws away, and whatever reaches a parameter has come another way. An identity on the module's output
keeps the inputs through autograd's own saved tensors: activation checkpointing, CPU offload, reuse of a module and
``retain_graph`` work by themselves, and nothing is left on modules or parameters when no backward follows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpfast.errors import InputError, StateError, UnsupportedModuleError
from dpfast.taps.around import is_around, sees_its_own_heads, with_inner, without_its_own_sums
from dpfast.taps.detached import DetachableParameters, detached_parameters, say_what_it_wants
from dpfast.taps.gathered import may_be_all, picked_here
from dpfast.taps.gave import Before, before, gave
from dpfast.taps.layout import NO_SAMPLES, NOT_RUN, SHARED, Place, Rows, kind_here, place_in
from dpfast.taps.leaves import leaf
from dpfast.taps.meets import Meets
from dpfast.taps.node import Record, TapFunction
from dpfast.taps.outputs import as_no_views, failing_in_backward, is_followed, is_plain, ready_for_change
from dpfast.taps.own_node import OwnStep, may_be_one, tapped_step
from dpfast.taps.owned import owned_modules
from dpfast.taps.passes import in_backward, in_function, never_compiled, suspended
from dpfast.taps.pieces import Pieces, forward_in_pieces, is_of_piece
from dpfast.taps.plain import caught_plainly
from dpfast.taps.registry import Rule, find_fault, find_rule, makes_fresh_output
from dpfast.taps.shared import Shared, Source, without_samples
from dpfast.taps.watch import Watch, may_keep_output, refuse_what_is_left

# What ways begin with: a parameter in its own module's forward, in another's, what a layer gave.
OWN, ELSEWHERE, ALONE = "own", "elsewhere", "alone"

_NOT_TOLD = "its samples are in different dimensions for different kinds of input, and it is not known which came in"

_transforms = torch._C._are_functorch_transforms_active
_apply = super(torch.autograd.Function, TapFunction).apply  # without transforms of torch.func, which are refused before


def has_hooks(module: nn.Module) -> bool:
    """Whether a tapped model has its forward, or Opacus hooks on it, which leave per-sample gradients too."""
    return isinstance(module.__dict__.get("forward"), TappedForward) or isinstance(
        module.__dict__.get("autograd_grad_sample_hooks"), list
    )


class TappedForward:
    """Stands in a tapped module's ``forward``; an object, so that copies of the module tap the copy."""

    def __init__(self, tap: Tap, before: Callable[..., Any] | None):
        self.tap, self.before = tap, before
        around = is_around(before, tap.module)
        self.replaced = None if around else before
        self.around = before if around else None
        if sees_its_own_heads(tap.module):
            self.around = None
            without_its_own_sums(tap.module)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As an earlier version has pickled it, nothing is around the module's own forward."""
        self.__dict__.update({"before": state.get("replaced"), "around": None, **state})

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.around is not None:
            return with_inner(self.around, self._inner)(*args, **kwargs)
        if len(args) == 1 and not kwargs and self.replaced is None:
            output = caught_plainly(self.tap, self, args[0])
            if output is not None:
                return output
        return self._inner(*args, **kwargs)

    def _inner(self, *args: Any, **kwargs: Any) -> Any:
        module = self.tap.module
        return self.tap.run(self.replaced or type(module).forward.__get__(module), args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.replaced or type(self.tap.module).forward.__get__(self.tap.module))


class Tap(Meets):
    """How one module runs tapped."""

    looks = False

    @property
    def active(self) -> bool:
        """Whether what runs now is tapped."""
        return self.taps.inserts and torch.is_grad_enabled() and not suspended()

    def caught(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward with its output tapped, or as it is where there is nothing to do."""
        expanded = False
        if isinstance(self.module, nn.Embedding) and self.taps.inserts and not suspended():
            n = self.taps.batch_size() if torch.is_grad_enabled() or in_function() else None  # evaluation is as it is
            if n is not None and n > 1:
                args, kwargs, expanded = self.with_whole_batch(args, kwargs, n)
        if not self.active:
            if in_function():
                self._note_hidden([p for m in owned_modules(self.module) for p in m._parameters.values()])
            return forward(*args, **kwargs)
        fault = find_fault(self.module)
        if fault is not None:
            return failing_in_backward(forward(*args, **kwargs), UnsupportedModuleError(f"{self.layer}: {fault}"))
        substitute = forward_in_pieces(self.module, (args, kwargs))
        owned = owned_modules(self.module, True if substitute is not None else None)
        parameters = [p for m in owned for p in m._parameters.values() if p is not None and p.requires_grad]
        if not parameters:
            return forward(*args, **kwargs)
        if self.taps.forward_here() is None and in_backward() is None:
            error = StateError(
                f"{self.layer} runs outside of the wrapped model's forward (by another method, or alone), where its "
                "rows would be taken for samples; let forward call it, or take torch.no_grad() or disable_hooks()"
            )
            return failing_in_backward(forward(*args, **kwargs), error)  # who detaches it (to save it) goes on
        if substitute is not None:
            with detached_parameters(owned, self.as_it_is):
                return substitute(self.module, Pieces(self), *args, **kwargs)
        rule = find_rule(self.module)
        if rule is None and self.known((OWN,)) == 0 and not (self.taps.force_functorch or self._by_rows()):
            with detached_parameters(owned, partial(self.own, owned)):
                return forward(*args, **kwargs)
        if rule is None and self.module._modules:
            refuse_what_is_left(self.layer, [key for key in self.places if self.known(key) == 0])
        fresh = makes_fresh_output(rule)
        watch = None if fresh or not may_keep_output(forward) else Watch(self)
        shown: Callable[[nn.Parameter], Tensor] = Tensor.detach
        if watch is not None and not self.module._modules and not is_followed(args, kwargs):
            shown = watch.shown
        began = before(self.module, None if self.taps.force_functorch else rule)
        try:
            with detached_parameters(owned, shown):
                output = forward(*args, **kwargs)
        except RuntimeError as error:
            say_what_it_wants(self.layer, error)
            raise
        inputs = self._bound(forward, args, kwargs)
        if isinstance(self.module, nn.EmbeddingBag):
            indices, offsets = (*inputs[0], None)[:2]
            if offsets is not None:
                self.taps.samples_are_bags(indices, offsets, len(offsets) - self.module.include_last_offset)
        more: dict[str, Any] = {"watch": watch, "began": began, "expanded": expanded}
        return self.tapped(output, inputs, parameters, fresh=fresh, rule=rule, **more)

    def _by_rows(self) -> bool:
        """Whether rows are several units', or an expert's, of which copies by sample say nothing."""
        return picked_here() is not None or getattr(self.taps.whose()[0], "of_tokens", False)

    # --- what has no samples ---

    def known(self, key: Any) -> Place:
        """What has been learned of it for this kind of input."""
        place = self.places.get(key)
        if isinstance(place, dict):
            place = place.get(kind_here(self.taps)) if in_backward() is None else None
        return place

    def _is_alone(self, rank: int) -> bool:
        """Whether an output of that rank has no samples, and comes to what has a rule."""
        return picked_here() is None and self.known(rank) == NO_SAMPLES and self.known((ALONE, rank)) == 0

    def note_uses(self) -> None:
        """More may have been learned."""
        ways = {key[0] for key in self.places if isinstance(key, tuple)}
        self.alone = ALONE in ways
        if ELSEWHERE in ways or OWN in ways:
            self.stand_in_elsewhere()

    def stand_in_elsewhere(self) -> None:
        """Others ask :meth:`elsewhere` from here on."""
        for module in owned_modules(self.module):
            if isinstance(module._parameters, DetachableParameters):
                module._parameters.elsewhere = self.elsewhere

    def as_it_is(self, parameter: nn.Parameter) -> Tensor:
        return parameter

    def own(self, owned: Sequence[nn.Module], parameter: nn.Parameter) -> Tensor:
        """What the module's own forward gets in its place, where that has no rule."""
        return self._stand_in(OWN, owned, parameter) if parameter.requires_grad else parameter.detach()

    def elsewhere(self, parameter: nn.Parameter) -> Tensor:
        """What other modules' forwards get in its place."""
        if not (parameter.requires_grad and self.active) or self.taps.batch_size() is None:
            if in_function():
                self._note_hidden([parameter])
            return parameter
        # A part of the module's own forward may run again in a backward pass (checkpointing).
        repeats = in_backward() is not None and self.known((OWN,)) == 0 and not self.taps.force_functorch
        return self._stand_in(OWN if repeats else ELSEWHERE, owned_modules(self.module), parameter)

    def _stand_in(self, where: str, owned: Sequence[nn.Module], parameter: nn.Parameter) -> Tensor:
        names = [f"{i}.{name}" for i, m in enumerate(owned) for name, p in m._parameters.items() if p is parameter]
        key = (where, *names)
        if self.known(key) != 0:
            return parameter
        value = self._value(parameter, names[0])
        return Shared.make(self, key, value, (Source(self, key, [parameter], value, lambda f: {parameter: f}),))

    def _value(self, parameter: nn.Parameter, name: str) -> Tensor:
        """What a stand-in holds."""
        return leaf(parameter, self.layer, name)

    def with_whole_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], n: int
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        """An input with a batch of one that the model broadcasts later (``position_ids``), expanded to the batch;
        and whether there was one."""
        dim = self.batch_dim
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        if len(tensors) != 1 or not (self.taps.gives_batches and self.module.weight.requires_grad) or not may_be_all(n):
            return args, kwargs, False
        x = leaves[tensors[0]]
        if self.alone and self._is_alone(x.dim() + 1):  # its output is not expanded before it meets samples
            return args, kwargs, False
        ambiguous = x.dim() == 1 and x.shape[0] == n and self.places.get(2) is None and not self.taps.is_input(x)
        if ambiguous and self.known((OWN,)) != 0 and bool((x.diff() == 1).all()):
            raise InputError(
                f"{self.layer}: its input {tuple(x.shape)} counts up by one and is as long as the batch: positions "
                "that the model broadcasts, or samples? Give positions as (1, T), samples as an input of the model"
            )
        if x.dim() < 2 or x.dim() <= dim or x.shape[dim] != 1 or self._has_samples_elsewhere(x, dim, n):
            return args, kwargs, False
        leaves[tensors[0]] = x.expand(*x.shape[:dim], n, *x.shape[dim + 1 :])
        args, kwargs = tree_unflatten(leaves, structure)
        return args, kwargs, True

    def _has_samples_elsewhere(self, x: Tensor, dim: int, n: int) -> bool:
        """Whether a one in that dimension of an embedding's input is no batch to be broadcast, because the samples
        are in another dimension (time-first tokens of length 1), or may be: that is asked for by name later on."""
        place = self.known_place(x.dim() + 1)
        if place in (NO_SAMPLES, SHARED):
            return False
        place = place.dim if isinstance(place, Rows) else place
        return place != dim if isinstance(place, int) else n in (*x.shape[:dim], *x.shape[dim + 1 :])

    def _bound(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keyword arguments moved to their positions, so that rules find the input however it was passed."""
        if not kwargs:
            return args, kwargs
        bound = inspect.signature(forward).bind(*args, **kwargs)
        return bound.args, bound.kwargs

    def tapped(
        self,
        output: Any,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        parameters: Sequence[nn.Parameter],
        *,
        fresh: bool,
        rule: Rule | None,
        as_is: bool = False,
        watch: Watch | None = None,
        began: Before | None = None,
        expanded: bool = False,
    ) -> Any:
        """``output`` as it is, with its gradient caught.

        Args:
            inputs: positional and keyword inputs that the rule needs.
            parameters: those that the rule answers for.
            fresh: the output was made afresh and nothing else refers to it.
            rule: what makes factors of the tensors; None: autograd itself.
            as_is: the tensors come to the rule as they are, samples in any dimension.
            watch: looks out for what the forward may have kept. began: how the module was, if it will run again.
            expanded: the tap itself has given the input its batch.
        """
        if _transforms():
            raise UnsupportedModuleError(
                f"{self.layer} runs within torch.func (vmap, grad, jvp), where its samples cannot be told; call it on "
                "the whole batch, and for functions of your own take copy.deepcopy(wrapped).to_standard_module()"
            )
        if fresh and type(output) is Tensor and output.is_floating_point() and not (self.alone and not as_is):
            # Nearly all layers. What else may come takes as long as the layer.
            if output._is_view():
                (output,) = as_no_views([output])
            record = Record(self, inputs, parameters, num_outputs=1, fresh=True, rule=rule, as_is=as_is)
            self._note(record, None if as_is else output, expanded)
            return _apply(record, output, *parameters)[0]  # type: ignore[no-untyped-call]  # torch's
        if fresh and as_is and type(output) is tuple and all(map(is_plain, output)):  # copies of parameters
            tensors = as_no_views(output)
            record = Record(self, inputs, parameters, num_outputs=len(output), fresh=True, rule=rule, as_is=True)
            self._note(record, None, expanded)
            return _apply(record, *tensors, *parameters)  # type: ignore[no-untyped-call]  # torch's
        leaves, structure = ([output], None) if isinstance(output, Tensor) else tree_flatten(output)
        places = [
            i
            for i, x in enumerate(leaves)
            if isinstance(x, Tensor) and (x.is_floating_point() or (as_is and x.is_complex()))
        ]
        if not places:
            raise UnsupportedModuleError(
                f"{self.layer}: its output is a {type(output).__name__}, not a tensor or a tuple of tensors, so its "
                "gradient cannot be followed; return tensors or freeze its parameters"
            )
        tensors = [leaves[i] for i in places]
        if isinstance(output, Shared) or (not as_is and self.alone and self._is_alone(tensors[0].dim())):
            return without_samples(self, output, inputs, parameters, rule)
        if fresh:
            # It passes on as the tensor itself, no view of it, because an in-place activation may follow.
            tensors = as_no_views(tensors)
        record = Record(self, inputs, parameters, num_outputs=len(places), fresh=fresh, rule=rule, as_is=as_is)
        if not as_is:
            record.gave = gave(self.module, tensors, began)
        if watch is not None:
            record.watch = watch
            tensors = watch.watched(tensors, not_its_own=(*record.leaves, *self.module._buffers.values()))
            watch.guard_kept(self.module)
        self._note(record, None if as_is else tensors[0], expanded)
        if not (fresh or as_is) and not any(x.is_inference() for x in tensors):
            tensors = ready_for_change(tensors, (*record.leaves, *self.module._buffers.values()))
            record.fresh = True
            with _unsafe_preserve_version_counter(tuple(tensors)):
                results = _apply(record, *tensors, *parameters)  # type: ignore[no-untyped-call]  # torch's
        else:
            results = _apply(record, *tensors, *parameters)  # type: ignore[no-untyped-call]  # torch's
        for i, result in zip(places, results, strict=True):
            leaves[i] = result
        return leaves[0] if structure is None else tree_unflatten(leaves, structure)

    def tapped_as_one(
        self, step: OwnStep, values: Sequence[Tensor], x: Tensor, parameters: Sequence[nn.Parameter], rule: Rule
    ) -> Tensor | None:
        """The step's output, in one node with its tap; None, and nothing has run, where they are to be two."""
        if type(x) is not Tensor or _transforms() or in_backward() is not None or not may_be_one(x):
            return None
        record = Record(self, ((), {}), parameters, num_outputs=1, fresh=True, rule=rule, as_is=True)
        self._note(record, None, False)
        return tapped_step(record, step, values, x, *parameters)  # type: ignore[no-untyped-call]  # torch's

    def _note(self, record: Record, output: Tensor | None, expanded: bool) -> None:
        """Where the record's samples are, and that its parameters are used."""
        record.picked = picked_here()
        if record.picked is not None:
            rank = None if output is None else output.dim()
            record.place = record.picked.place(self.known(rank))
            if self.given is None and (output is not None or is_of_piece(record.rule)):
                self.taps.probe.is_new(self, record, None if output is None else tuple(output.shape))
            if getattr(self.taps.whose()[0], "of_tokens", False) and record.created_in is None:
                self.taps.whose()[0].ran(self, rank)
        else:
            record.place = self.batch_dim if expanded else self._place(output, record)
        if record.created_in is None:  # a forward that is repeated in a backward pass has been counted
            record.uses = self.taps.count_uses(record.parameters)

    def _note_hidden(self, parameters: Sequence[nn.Parameter | None]) -> None:
        """That these are used where nothing is tapped, and may be once more, tapped, in the backward pass."""
        if self.taps.inserts and not suspended() and in_backward() is None and self.taps.forward_here() is not None:
            self.taps.count_uses([p for p in parameters if p is not None])

    def _place(self, output: Tensor | None, record: Record) -> Place:
        """Where the record's samples are, as far as that has been learned.

        Args:
            output: None for pieces, whose layout their forward knows.
        """
        n = record.batch_size
        if n is None or (output is None and not is_of_piece(record.rule)):  # no forward of the model's, or a meeting
            return None
        shape = None if output is None else tuple(output.shape)
        rank = None if shape is None else len(shape)
        place, kind = self.places.get(rank), kind_here(self.taps)
        if isinstance(place, dict):
            place = place.get(kind, _NOT_TOLD) if record.created_in is None else _NOT_TOLD
        elif kind is None and record.created_in is None:
            place = None  # one of too many kinds, which has not been looked at
        new = place is None and self.given is None and self.taps.probe.is_new(self, record, shape)
        try:
            return place_in(self, place, shape, n)
        except InputError:
            if new:
                return NOT_RUN  # until it has been looked at
            raise
