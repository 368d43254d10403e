"""The taps of a copy, which note the rows of every tap's output.

What the parameters or values of this moment hide is brought out: a gate or an adapter that starts at zeros lets nothing
through before its first step, and rows that are the same for every sample do not change with any. So parameters that
are zeros have other numbers in the copy, and each tap's output is given noise, another for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpfast.errors import UnsupportedModuleError
from dpfast.looks.caught_beside import catch_beside, catch_picked
from dpfast.looks.fingerprints import Prints
from dpfast.looks.meetings import AtMeetings
from dpfast.looks.seen import Key, Run
from dpfast.taps import (
    Call,
    Operation,
    Picked,
    Place,
    Rows,
    Shared,
    Source,
    Tap,
    detached_parameters,
    find_by_row,
    find_forward,
    find_rule,
    owned_modules,
    packed_in,
    picked_here,
    rows_of,
    shapes_taken,
    tensors_in,
    with_data,
)
from dpfast.trials import (
    NOISE,
    Trial,
    among_all,
    noise_like,
)

MOST_CALLS = 250
"""Of a layer in a forward pass with noise, unless it has more without: iterations may not end with it."""


class RunsAway(RuntimeError):
    """Of an iteration that ends where its numbers say so, which noise keeps from it."""


class Witness(AtMeetings):
    """The tap of a copy, which notes fingerprints of rows.

    Attributes:
        at: where taps have their samples. size: how many there are.
        noisy: outputs are given noise. exchanged: the samples whose noise is another one.
        whole: gradients are noted as they are. most_calls: it runs in one forward pass with noise.
        steady: this is the same at each of them, so that iterations end.
    """

    size: int
    seen: Run
    at: dict[Key, Place]
    noisy: bool
    exchanged: tuple[int, ...]
    whole: bool
    most_calls: int
    steady: bool
    took_and_gave: list[tuple[int | None, Call]]
    called: tuple[Trial, Sequence[Any]]  # how the model is, and its inputs

    @classmethod
    def of(
        cls,
        tap: Tap,
        number: int,
        seen: Run,
        at: dict[Key, Place],
        size: int,
        *,
        noisy: bool = False,
        exchanged: tuple[int, ...] = (),
        whole: bool = False,
        most_calls: int = MOST_CALLS,
        steady: bool = False,
        ways: Mapping[Key, Place] = MappingProxyType({}),
    ) -> Witness:
        tap.__class__ = cls
        assert isinstance(tap, cls)
        tap.number, tap.seen, tap.at, tap.size, tap.took_and_gave = number, seen, at, size, []
        tap.noisy, tap.exchanged, tap.whole = noisy, exchanged, whole
        tap.most_calls, tap.steady = most_calls, steady
        tap.go_the_ways(ways)
        return tap

    def known_place(self, rank: int | None) -> Any:
        return self.at.get((self.number, rank))

    def caught(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.module, nn.Embedding):
            args, kwargs, _ = self.with_whole_batch(args, kwargs, self.size)
        trial, inputs = self.called
        trial.bags.says_of(self.module, args, kwargs, inputs)
        by_row = find_by_row(self.module)
        output = self._ran(forward, args, kwargs) if by_row is None else by_row(self.module, *args, **kwargs)
        output = self.without_samples(output)
        with torch._C.DisableTorchFunction():  # nobody is to follow what is done here
            noted, picked = self._noted(args, kwargs, output), picked_here()
            if not self.noisy:
                return output
            if noted is None:  # no noise: which rows are picked may be others in other runs, or all
                return output if picked is None else self._of_picked(picked, (args, kwargs), output)
            key, prints, x, noise = noted
            beside = catch_beside(self.seen, key, prints, x, output, self.size, picked)
            if x.requires_grad:
                self.seen.catch({key: prints}, x)
        # What the model gets has nodes of its own, which its hooks are on, and the strides that it may ask for. In the
        # noise's memory, where that has these and is no view, to which autograd would note more.
        apart = noise is not None and (noise._is_view() or noise.stride() != x.stride())
        noisy = x.view_as(x) if noise is None else x + noise if apart else noise.add_(x)
        output = replaced(output, x, noisy) if prints.packed is None else with_data(output, x, noisy)
        for other in beside:
            output = replaced(output, other, other.view_as(other))
        return output

    def _of_picked(self, picked: Picked, inputs: Any, output: Any) -> Any:
        outputs = [x for x in tensors_in(output) if x.is_floating_point()]
        rank = outputs[0].dim() if outputs and find_forward(self.module) is None else None
        key = self.number, rank
        self.seen.order.setdefault(key, len(self.seen.order))
        for x in catch_picked(self.seen, key, picked, inputs, output, whole=self.whole):
            output = replaced(output, x, x.view_as(x))
        return output

    def _ran(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module's forward gives, in a noisy run on parameters without their history, as in a step, where it
        has a rule: with it autograd would keep the inputs of every layer, for gradients that nobody asks for."""
        owned = owned_modules(self.module)
        trained = any(p is not None and p.requires_grad for m in owned for p in m._parameters.values())
        as_in_a_step = self.noisy and trained and torch.is_grad_enabled() and find_rule(self.module) is not None
        if not as_in_a_step or packed_in((*args, *kwargs.values())) is not None:
            return self.gave(forward, args, kwargs)
        with detached_parameters(owned):
            output = forward(*args, **kwargs)
        for x in tensors_in(output):
            if x.is_floating_point() and not x.requires_grad:  # of inputs that are data
                output = replaced(output, x, x + torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True))
        return output

    def _noted(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> tuple[Key, Prints, Tensor, Tensor | None] | None:
        """Notes what the module took and gave. Returns what may be given noise: its first output, and that noise."""
        packed, substitute = packed_in((*args, *kwargs.values())), find_forward(self.module)
        if packed is not None:
            self.seen.packed.append(self.layer)
            if substitute is None:  # it knows itself where its samples are
                return None
        outputs = [x for x in tensors_in(output) if x.is_floating_point()]
        rank = outputs[0].dim() if outputs and substitute is None else None
        self.took_and_gave.append((rank, (shapes_taken(self.module, (args, kwargs)), [x.shape for x in outputs])))
        if self.noisy and len(self.took_and_gave) > self.most_calls:
            raise RunsAway(f"{self.layer} runs on and on with it, {self.most_calls} times so far")
        key, place = (self.number, rank), self.at.get((self.number, rank))
        self.seen.order.setdefault(key, len(self.seen.order))
        # A layer of samples may run on what has none too (prototypes), whose rows may be as many by accident.
        if not outputs or isinstance(outputs[0], Shared) or not isinstance(place, (int, Rows)):
            return None
        x, dim = outputs[0], place.dim if isinstance(place, Rows) else place
        size, among = x.shape[dim] if dim < x.dim() else 0, picked_here()
        # Has run at their places among all rows.
        if among is not None and place == 0 and size != self.size and among.is_one_each(size):
            x, size = x[among.numbers], self.size
        if packed is not None:
            dim, size = 0, int(packed.batch_sizes[0])
            packed = packed._replace(data=x)
        fits = size % self.size == 0 if isinstance(place, Rows) else size == self.size
        calls = self.seen.calls.setdefault(key, [])
        prints = Prints(dim, self._order(dim) if isinstance(place, int) else None, self.whole, packed)
        if packed is not None and prints.order is not None:
            self.seen.reordered.add(key)
        own = prints.of(x) if fits else None
        calls.append(tuple(x.shape) if own is None else own if among is None else among.alone(own))
        if among is not None and among.is_at_places(size):
            self.seen.at_places.add(key)
        if not (self.noisy and fits and size) or x is not outputs[0]:
            return None
        return key, prints, x, self._noise_for(x, place, len(calls), prints)

    def met(self, operation: Operation, place: int | Rows, output: Tensor) -> Tensor:
        dim = place.dim if isinstance(place, Rows) else place
        size = output.shape[dim] if dim < output.dim() else 0
        if self.seen.picks is not None and self.seen.picks.has_picked(operation.others):
            self.seen.picked_ways.add((self.number, operation.way))
        if not output.is_floating_point() or not size or size % self.size:
            return output
        where = Rows(dim, True) if operation.func is Tensor.repeat and size != self.size else place
        fits = isinstance(where, Rows) or size == self.size  # else it had one row a sample before
        key, prints = (self.number, operation.way), Prints(dim, None, self.whole)
        self.seen.met[key] = where
        seed = self.seen.order.setdefault(key, len(self.seen.order))
        calls = self.seen.calls.setdefault(key, [])
        calls.append(prints.of(output) if fits else tuple(output.shape))
        if not (self.noisy and fits):
            return output
        if output.requires_grad:
            self.seen.catch({key: prints}, output)
        noise = self._noise_for(output, where, hash((seed, len(calls))), prints)
        return output.view_as(output) if noise is None else output + noise

    def met_rows(self, operation: Operation, picked: Picked) -> Tensor:
        """Each row at its place among all, in the samples' order, as where a module gets it (``run_picked``)."""
        key = self.number, operation.way
        self.seen.picked_ways.add(key)
        seed = self.seen.order.setdefault(key, len(self.seen.order))
        whole = picked.by_samples() or picked
        assert whole.numbers is not None and whole.of is not None
        if whole.numbers.dim() != 1:
            output: Tensor = operation.plain()
            caught = catch_picked(self.seen, key, picked, operation.others, output, whole=self.whole)
            return output.view_as(output) if self.noisy and caught else output
        numbers, rows, together = self._in_order(whole.numbers, whole.of)
        every = operation.plain(lambda x: among_all(x, numbers, rows) if x.shape[:1] == numbers.shape else x)
        where: int | Rows = 0 if rows == self.size else Rows(0, together)
        prints, calls = Prints(0, None, self.whole), self.seen.calls.setdefault(key, [])
        self.seen.met[key] = where
        self.seen.at_places.add(key)
        own = prints.of(every)
        calls.append(torch.zeros_like(own).index_copy(0, numbers, own[numbers]))
        if self.noisy and together:
            if every.requires_grad:
                self.seen.catch({key: prints}, every)
            noise = self._noise_for(every, where, hash((seed, 1)), prints)
            every = every.view_as(every) if noise is None else every + noise
        return every[numbers]

    def _in_order(self, numbers: Tensor, of: Source) -> tuple[Tensor, int, bool | None]:
        """Of rows their places, where those of each sample stand together; how many there are; None: it is not known
        whose they are, and they stand as they stood."""
        rows = of.shape.numel()
        try:
            whose = of.samples(self.size)
        except UnsupportedModuleError:
            return numbers, rows, None
        places = torch.empty_like(whose).index_copy(0, whose.argsort(stable=True), torch.arange(rows))
        return places.to(numbers.device)[numbers], rows, True

    def _order(self, dim: int) -> Tensor | None:
        """The numbers of the samples' rows, where samples are picked whole, each once, in another order."""
        if self.picked is None or self.picked.dim() <= dim or self.picked.shape[dim] != self.size:
            return None
        rows = self.picked.movedim(dim, 0).reshape(self.size, -1)
        return rows[:, 0].argsort() if rows.shape[1] and rows.unique().numel() == rows.numel() else None

    def _noise_for(self, x: Tensor, place: int | Rows, call: int, prints: Prints) -> Tensor | None:
        """Noise for a tap's output that is each sample's own; None where it is not known whose its rows are."""
        together = place.together if isinstance(place, Rows) else True
        if together is None:
            return None
        with torch._C._DisableTorchDispatch():  # modes that follow what a model does have nothing to see here
            return self._noise_of(x.detach().movedim(prints.dim, 0), together, call, prints)

    def _noise_of(self, x: Tensor, together: bool, call: int, prints: Prints) -> Tensor:
        packed = prints.packed
        # Of packed samples the same at all times, or it would change with how long others are.
        call = 1 if self.steady or picked_here() is not None else call
        noise = noise_like(x if packed is None else x[: packed.batch_sizes[0]], hash((self.number, call)))
        k = len(noise) // self.size
        for j in self.exchanged:
            own = noise[j * k : (j + 1) * k] if together else noise[j :: self.size]
            torch.sub(NOISE, own, out=own)
        if prints.order is not None:
            noise = noise[prints.order.argsort()]
        noise = noise if packed is None else noise[rows_of(packed)[0]]
        noise.addcmul_(x, noise)
        return noise if prints.dim == 0 else noise.movedim(0, prints.dim)


def whose_rows(rows: int, size: int, place: int | Rows, device: torch.device) -> Tensor | None:
    """The sample of each of so many rows; None where it is not known."""
    together = place.together if isinstance(place, Rows) else True
    if together is None:
        return None
    numbers = torch.arange(rows, device=device)
    return numbers // max(rows // size, 1) if together else numbers % size


def replaced(output: Any, x: Tensor, by: Tensor) -> Any:
    """A module's output with another tensor in the place of one."""
    if output is x:
        return by
    leaves, structure = tree_flatten(output)
    return tree_unflatten([by if y is x else y for y in leaves], structure)
