"""One forward pass of a model on fake tensors: shapes alone, no memory and no arithmetic.

What runs is a copy of the model, made of fake tensors too: nothing stays on the model itself, and no random number is
drawn.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from dpfast.errors import InputError
from dpfast.taps import (
    ALONE,
    BESIDE,
    ELSEWHERE,
    OWN,
    Call,
    Meeting,
    Operation,
    Picked,
    Pieces,
    Place,
    Rows,
    Shared,
    Tap,
    are_met_as_rows,
    detached_parameters,
    find_forward,
    find_function,
    find_rule,
    forward_in_pieces,
    gave_rows,
    in_function,
    met_as_rows,
    owned_modules,
    rows_among,
    shapes_taken,
    tensors_in,
    without_samples,
)
from dpfast.trials.beside_outputs import left_beside
from dpfast.trials.copies import copy_of
from dpfast.trials.dependence import Dependence
from dpfast.trials.exchanged_samples import first_samples
from dpfast.trials.left_behind import LeftBehind, taking_back
from dpfast.trials.nobody import Nobody
from dpfast.trials.outside import put_back
from dpfast.trials.trial import Trial
from dpfast.trials.unsharded import copied_whole


def fake_parameters(model: nn.Module, mode: FakeTensorMode) -> dict[int, Tensor]:
    """Those of copies, by the ids of the model's."""
    found: dict[int, Tensor] = {}
    for p in model.parameters():
        if type(p) is nn.Parameter and p.layout == torch.strided and not (p.is_meta or p.is_quantized):
            shape = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
            fake: Any = FakeTensor(mode, shape, p.device)
            fake._is_param = True  # all that makes a tensor of another class a parameter
            found[id(p)] = fake.requires_grad_(p.requires_grad)
    return found


@taking_back
def calls_in_forward(
    left: LeftBehind,
    model: nn.Module,
    mode: FakeTensorMode,
    parameters: dict[int, Tensor],
    taps: Sequence[Tap],
    leaves: list[Any],
    trial: Trial,
    dims: list[int | None],
    size: int,
) -> list[list[tuple[Any, Call | bool]]]:
    """What each tap's module takes and gives in one forward, each time that it runs, with the rank of its output; what
    operations on what has no samples give, with their way; and what came of it (``ShapeTap.told``).

    Args:
        left: what is made; given by the decorator.
        mode, parameters: of the fake tensors; several forwards may share them.
        leaves, trial: the inputs, flattened.
        dims: the dimension of each of them that is set to ``size``, if any.
    """
    memo: dict[int, Any] = {id(taps[0].taps): (nobody := Nobody()), **parameters}
    nobody.gives_batches = taps[0].taps.gives_batches
    original = model
    with copied_whole(model, memo, mode), FakeCopyMode(mode):
        model, taps = copy_of(model, taps, memo)
    with put_back(original), mode:
        sized = [_of_size(x, dim, size) for x, dim in zip(leaves, dims, strict=True)]
        inputs = trial.as_called(sized)
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        samples = [x for x, dim in zip(inputs, dims, strict=True) if isinstance(x, Tensor) and dim is not None]
        left.note((*tensors, *tensors_in(sized), *model.buffers()))
        dependence = Dependence(tensors, samples, size, left.note)
        if trial.passes:
            with left.noting():
                trial.run_passes(model, inputs)
        probes = [ShapeTap.of(tap, size, dependence, (trial, inputs)) for tap in taps]
        args, kwargs = trial.unflatten(inputs)
        try:
            with dependence, torch.enable_grad():
                model(*args, **kwargs)
        finally:
            inputs.clear()  # which the copy's taps hold, or the garbage collector would have to be asked for them
    return [probe.told() for probe in probes]


def _of_size(x: Any, dim: int | None, size: int) -> Any:
    if not isinstance(x, Tensor):
        return first_samples(x, dim, size)
    shape = [size if d == dim else s for d, s in enumerate(x.shape)]
    return torch.empty(shape, dtype=x.dtype, device=x.device)


class ShapeTap(Tap):
    """The tap of a copy, which notes shapes, and lets what has no samples go as it would go in earnest.

    Attributes:
        called: how the model is, and its inputs.
    """

    looks = True
    size: int
    dependence: Dependence
    at: dict[Any, Place] | None = None  # where its samples are; None: that is found out here
    called: tuple[Trial, Sequence[Any]]
    calls: list[tuple[Any, Call]]
    fine: dict[Any, bool]
    asked: bool  # whether its own forward has asked for a parameter
    stand_ins: list[Shared]  # what it got
    in_pieces: list[tuple[Any, Call]]  # calls in which its own forward has run in the place of its pieces
    took: list[Any]  # what those took was made of
    on_shared: list[tuple[tuple[Any, Call], list[Any]]]  # other calls on such, and what that was made of
    rounded: set[Any]  # of its parameters, those of which 16 bits are made
    in_layers: set[Any]  # those that come to trained layers without samples, of which functorch knows nothing

    @classmethod
    def of(cls, tap: Tap, size: int, dependence: Dependence, called: tuple[Trial, Sequence[Any]]) -> ShapeTap:
        tap.__class__ = cls
        assert isinstance(tap, cls)
        tap.size, tap.dependence, tap.called, tap.calls, tap.fine, tap.asked = size, dependence, called, [], {}, False
        tap.stand_ins, tap.in_pieces, tap.took, tap.on_shared, tap.rounded, tap.in_layers = [], [], [], [], set(), set()
        tap.stand_in_elsewhere()
        return tap

    def told(self) -> list[tuple[Any, Call | bool]]:
        """Its calls, and of its parameters and outputs whether what they came to has samples' gradients."""
        self._without_rounded()
        own = [fine for (where, *_), fine in self.fine.items() if where == OWN]
        if own or (self.calls and not self.asked and not (find_rule(self.module) or find_forward(self.module))):
            self.fine[(OWN,)] = all(own)
        # Which have no samples. They run as pieces where what they get is not followed in earnest, or they are not.
        followed = all(own) and all(x.tap.is_fine(x.key) for x in self.took)
        if not (followed and any(rank is None for rank, _ in self.calls)):
            self.calls += self.in_pieces
        for call, sources in self.on_shared:
            if not all(x.tap.is_fine(x.key) for x in sources):
                self.calls.append(call)
        return [*self.calls, *self.fine.items()]

    def is_fine(self, key: Any) -> bool:
        """Whether that of it is followed in earnest."""
        self._without_rounded()
        return all(fine for other, fine in self.fine.items() if other == key or other[0] == key[0] == OWN)

    def _without_rounded(self) -> None:
        """Gradients would be rounded to 16 bits once more, where functorch takes fp32."""
        self.fine.update(dict.fromkeys(self.rounded - self.in_layers, False))

    def caught(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        took = tensors_in((args, kwargs))
        batches = [x for x in took if x in self.dependence and not self.dependence.follows(x)]
        if isinstance(self.module, nn.Embedding) and batches:  # of one, to be broadcast
            args, kwargs, _ = self.with_whole_batch(args, kwargs, self.size)
        trial, inputs = self.called
        told = trial.bags.says_of(self.module, args, kwargs, inputs)
        if isinstance(self.module, nn.EmbeddingBag) and args and args[0].dim() == 1 and not told:
            raise InputError("bags in one row, by offsets that the model makes: whose they are is in their values")
        rule, owned = find_rule(self.module), owned_modules(self.module)
        substitute = forward_in_pieces(self.module, (args, kwargs))
        mixed = self.dependence.mixed
        if substitute is not None:
            with detached_parameters(owned, self.as_it_is):
                output = substitute(self.module, Pieces(self), *args, **kwargs)
        else:
            with detached_parameters(owned, self.as_it_is if rule is not None else functools.partial(self.own, owned)):
                output = forward(*args, **kwargs)
        if self.asked and self.module._modules:
            place = left_beside(self.module, forward, output, [x.value for x in self.stand_ins])
            if place is not None:
                self.fine[(BESIDE, place)] = True
        found = [x for x in tensors_in(output) if x.is_floating_point()]
        outputs = [x.shape for x in found]
        rank = len(outputs[0]) if outputs and substitute is None else None
        took_and_gave = rank, (shapes_taken(self.module, (args, kwargs)), outputs)
        if substitute is None and find_forward(self.module) is not None:  # its own runs in the place of its pieces
            self.fine[(ALONE, rank, "too")] = True
            self.in_pieces.append((None, took_and_gave[1]))
            self.took += [source for x in took if isinstance(x, Shared) for source in x.sources]
        elif isinstance(output, Shared):  # which tells by itself, where it is followed
            self.fine[(ALONE, rank, "too")] = True
            self.on_shared.append((took_and_gave, [*output.sources]))
        else:
            self.calls.append(took_and_gave)
        if self.dependence.mixed != mixed:
            self.fine[(OWN, "mixes")] = False
        # What is given as it is comes to samples elsewhere, if at all.
        for source in (source for x in found if isinstance(x, Shared) for source in x.sources):
            if source.tap is self and source.key[0] == OWN:
                self.fine.setdefault(source.key, True)
        parameters = [p for m in owned for p in m._parameters.values() if p is not None and p.requires_grad]
        if rule is None or substitute is not None or not parameters or not isinstance(output, Tensor):
            return output
        for source in _own_sources([output]) if isinstance(output, Shared) else ():
            source.tap.in_layers.add(source.key)
        if isinstance(output, Shared) or not (self.dependence.follows(output) or output in self.dependence):
            if not isinstance(output, Shared):
                self.fine.setdefault((ALONE, rank), True)
            return without_samples(self, output, ((), {}), parameters, rule)
        return output

    def tapped(self, output: Any, *_: Any, **__: Any) -> Any:
        return output

    def tapped_as_one(self, *_: Any) -> None:
        return None

    @property
    def follows(self) -> bool:
        return self.at is not None

    def known(self, key: Any) -> Any:
        return 0

    def known_place(self, rank: int | None) -> Any:
        return self.at.get(rank) if self.at is not None and self.given is None else self.given

    def own(self, owned: Sequence[nn.Module], parameter: nn.Parameter) -> Tensor:
        self.asked = True
        found = super().own(owned, parameter)
        self.stand_ins += [found] if isinstance(found, Shared) else []
        return found

    def elsewhere(self, parameter: nn.Parameter) -> Tensor:
        # A reentrant checkpoint's function runs once more in the backward pass; what else turns gradients off does not.
        if not parameter.requires_grad or not (torch.is_grad_enabled() or in_function()):
            return parameter
        return self._stand_in(ELSEWHERE, owned_modules(self.module), parameter)

    def follow(self, operation: Operation) -> Any:
        with torch.enable_grad():  # which tells what comes of parameters
            output = operation.plain()
        found = [x for x in tensors_in(output) if x.requires_grad]
        if not found:
            return output
        rows = rows_among(operation.others)
        if rows is not None and are_met_as_rows(operation, *rows):
            _note(operation, fine=self._has_rule_for_rows(operation, rows[0], output))
            gave_rows(output, rows[0])
            return output
        follows = any(map(self.dependence.follows, found))
        shapes = [operation.times()] if operation.func is Tensor.repeat else [x.shape for x in found]
        self.calls.append((operation.way, ([], shapes)))
        if not follows and not any(x in self.dependence for x in found):
            rounded = any(x.dtype.itemsize == 2 and not x._is_view() for x in found)
            into_others = operation.is_in_place() and not operation.writes()  # which have names that nobody follows
            for source in _own_sources(operation.shared) if rounded else ():
                source.tap.rounded.add(source.key)
            if into_others:
                _note(operation, fine=False, where=OWN)
            return operation.wrapped(output, lambda x: x.requires_grad)
        _note(operation, fine=follows and self._has_rule(operation, output, shapes))
        return output

    def _has_rule_for_rows(self, operation: Operation, picked: Picked, output: Any) -> bool:
        try:
            again = met_as_rows(operation, picked)
        except Exception:
            return False
        return isinstance(again, Tensor) and (again.shape, again.dtype) == (output.shape, output.dtype)

    def _has_rule(self, operation: Operation, output: Any, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether the operation has one, which gives what the operation itself gives."""
        places = [d if s == self.size else Rows(d, None) for d, s in enumerate(shapes[0]) if s and s % self.size == 0]
        substitute = find_function(operation.func)
        if len(places) != 1 or substitute is None:
            return False
        try:
            again = substitute(Meeting(operation, places[0], self.size), *operation.args, **operation.kwargs)
        except Exception:
            return False
        found, expected = ([(x.shape, x.dtype) for x in tensors_in(some)] for some in (again, output))
        return found == expected and isinstance(again, Tensor) == isinstance(output, Tensor)


def _own_sources(shared: Sequence[Shared]) -> list[Any]:
    """Parameters that come from their own module's forward."""
    return [source for x in shared for source in x.sources if source.key[0] == OWN]


def _note(operation: Operation, fine: bool, where: str = "") -> None:
    """Of the parameters and layers that what goes into the operation comes of."""
    for source in (source for x in operation.shared for source in x.sources):
        probe = source.tap
        assert isinstance(probe, ShapeTap)
        if source.key[0] == where or not where:
            # An argument of an autograd.Function, whose backward gives its gradient: not by samples.
            given = in_function() and any(x.way == source.key and x.requires_grad for x in probe.stand_ins)
            probe.fine[source.key] = fine and not given and probe.fine.get(source.key, True)


class WithoutGradients(TorchFunctionMode):
    """A forward may hang hooks on its tensors, or keep their gradients, which raises where there will be none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.register_hook, Tensor.retain_grad) and not args[0].requires_grad:
            return RemovableHandle(OrderedDict()) if func is Tensor.register_hook else None
        return func(*args, **(kwargs or {}))


class Writes(WithoutGradients):
    """Sees where parameters are written into what nobody follows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__setitem__ and isinstance(args[2], Shared) and not isinstance(args[0], Shared):
            _note(Operation(func, args, {}), fine=False)  # torch asks nobody but what is written to
        return super().__torch_function__(func, types, args, kwargs)


_MOST_TURNS = 100
"""Times that one place in the code may ask in a forward, and get the same answer."""


class Values(Writes):
    """Answers where a forward asks whether a tensor is true.

    Attributes:
        turns: how often each place in the code has asked in this forward.
    """

    def __init__(self, truth: bool):
        super().__init__()
        self.truth, self.asked = truth, False
        self.turns: Counter[Any] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__:
            frame = sys._getframe(1)
            place = frame.f_code, frame.f_lasti
            self.asked, self.turns[place] = True, self.turns[place] + 1
            return self.truth is (self.turns[place] <= _MOST_TURNS)  # a loop that goes on until something is so ends
        return super().__torch_function__(func, types, args, kwargs)
