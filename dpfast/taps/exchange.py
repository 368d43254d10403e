"""Which rows of each layer are whose, where shapes cannot tell: the model runs a few times on three samples, one of
which is another each time, and what changes is that one's.

That parts the orders in which samples are folded into rows, and shows rows that several samples went into. What runs is
a copy of the model that shares its parameters; random numbers are the same in every run, so dropout is too, and are put
back as they were. Rows that nothing changed are the same to the bit, as no row of a product looks at others; where that
is not so (sums whose order changes from run to run), nothing is told.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from dpfast.taps.fake_run import Nobody, nothing_left_behind
from dpfast.taps.layout import NO_SAMPLES, Call, Mixed, Place, Rows
from dpfast.taps.registry import find_forward
from dpfast.taps.tap import Tap

_SAMPLES = 3
_AT_ONCE = 2**22
_ODD = -7046029254386353131  # 2^64 over the golden ratio

Key = tuple[int, Any]
"""The number of a tap and the rank of its output; None: of pieces."""


class Told(NamedTuple):
    """What the runs tell.

    Attributes:
        places: of taps, where they correct what shapes tell.
        outputs: of the model's outputs, by number, why a loss made of one has no gradients by sample.
        changed: whether anything has changed at all.
    """

    places: dict[Key, Place]
    outputs: dict[int, str]
    changed: bool


class _Run(NamedTuple):
    calls: dict[Key, list[Any]]  # fingerprints along the samples' dimension, or the shape where these do not fit
    order: dict[Key, int]
    outputs: list[dict[int, Tensor]]  # the same of the model's outputs, along every dimension as long as the batch
    packed: list[str]  # layers that took packed sequences


def told_by_exchange(
    model: nn.Module,
    taps: Sequence[Tap],
    leaves: list[Any],
    structure: Any,
    dims: list[int | None],
    places: dict[Key, Place],
    n: int,
) -> Told | None:
    """What comes of exchanging samples; None where the model does not run so.

    Args:
        leaves, structure: the inputs, flattened. dims: of each, that of its samples. places: as shapes tell them.
        n: the number of samples.
    """
    for size in dict.fromkeys((_SAMPLES, n)):
        if size < 2:
            continue
        try:
            return _Exchange(model, taps, leaves, structure, dims, places, size).told()
        except Exception:  # whatever a model raises that wants its batch otherwise
            pass
    return None


def calls_on_data(
    model: nn.Module, taps: Sequence[Tap], leaves: list[Any], structure: Any, dims: list[int | None], size: int
) -> list[list[tuple[int | None, Call]]]:
    """As ``fake_run.calls_in_forward``, of a forward on that many of the samples themselves."""
    model, taps = _copy(model, taps)
    witnesses = [_Witness.of(tap, i, _Run({}, {}, [], []), {}, size) for i, tap in enumerate(taps)]
    with _same_random_numbers():
        some = [first_samples(x, dim, size) for x, dim in zip(leaves, dims, strict=True)]
        args, kwargs = structure.unflatten([x.clone() if isinstance(x, Tensor) else x for x in some])
        model(*args, **kwargs)
    return [witness.took_and_gave for witness in witnesses]


class _Exchange:
    def __init__(
        self,
        model: nn.Module,
        taps: Sequence[Tap],
        leaves: list[Any],
        structure: Any,
        dims: list[int | None],
        places: dict[Key, Place],
        size: int,
    ):
        self.model, self.taps, self.structure, self.dims, self.size = model, taps, structure, dims, size
        # Not those of operations on what has no samples, which have the way to them where others have a rank.
        self.by_shapes = {k: p for k, p in places.items() if not isinstance(k[1], tuple)}
        self.places: dict[Key, Place] = {k: p for k, p in self.by_shapes.items() if isinstance(p, (int, Rows))}
        # Taps by which tensors without samples go too, which have a way of their own.
        self.also_alone = {(number, way[1]) for number, way in places if isinstance(way, tuple) and way[2:] == ("too",)}
        self.leaves = leaves
        self.packed = False

    def told(self) -> Told:
        which = list(dict.fromkeys((0, 1, self.size - 1)))
        with _same_random_numbers() as again:
            base = self._run(None, again)
            self.packed = bool(base.packed)
            runs = [self._run(j, again) for j in which]
            found: dict[Key, Place] = {}
            wrong: list[Key] = []
            for key, place in self.places.items():
                calls = [base.calls.get(key), *(run.calls.get(key) for run in runs)]
                if key in self.also_alone:
                    calls = [some and [x for x in some if isinstance(x, Tensor)] for some in calls]
                told = self._place(place, calls[0], calls[1:], which)
                if isinstance(told, str):
                    wrong.append(key)
                found[key] = told
            outputs = {i: m for i in range(len(base.outputs)) if (m := self._output(i, base, runs, which))}
            if wrong or outputs:  # is it the exchange that it comes from?
                repeated = self._run(None, again)
                if not _alike(base, repeated):
                    return Told({}, {}, changed=True)
                if outputs:
                    outputs = self._of_batch(outputs, base, again)
        mixed = [key for key in wrong if isinstance(found[key], Mixed)]
        if mixed:
            # Those whose shapes did not part the samples are before those that see what came of it.
            suspects = {*wrong, *(key for key, place in self.by_shapes.items() if _is_odd(place))} & base.order.keys()
            first = self.taps[min(suspects, key=lambda key: base.order[key])[0]].layer
            where = f"; samples meet in {first}, or between it and the layer before"
            found.update({key: Mixed(f"{found[key]}{where}") for key in mixed})
            outputs = {i: message + where for i, message in outputs.items()}
        changed = any(
            not _equal(x, y)
            for run in runs
            for key, calls in run.calls.items()
            for x, y in zip(calls, base.calls.get(key, []), strict=False)
        )
        return Told(found, outputs, changed)

    def _run(self, other: int | None, again: Callable[[], None], size: int | None = None) -> _Run:
        """One forward with the sample of that number exchanged."""
        leaves = list(self.leaves)
        # Where sequences are packed, numbers of samples are lengths, and others of them make other shapes.
        more = self.packed and any(
            dim is not None and not _is_a_number_each(leaves[i]) for i, dim in enumerate(self.dims)
        )
        for i, dim in enumerate(self.dims):
            if dim is not None:
                leaves[i] = first_samples(leaves[i], dim, size or self.size)
                if other is not None and not (more and _is_a_number_each(leaves[i])):
                    leaves[i] = _exchanged(leaves[i], dim, other)
        model, taps = _copy(self.model, self.taps)
        run = _Run({}, {}, [], [])
        for i, tap in enumerate(taps):
            _Witness.of(tap, i, run, self.places, size or self.size)
        leaves = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = self.structure.unflatten(leaves)
        again()
        output = model(*args, **kwargs)
        for x in tree_leaves(output):
            some = {}
            if isinstance(x, Tensor) and x.is_floating_point():
                some = {d: _fingerprints(x, d) for d, s in enumerate(x.shape) if s == (size or self.size)}
            run.outputs.append(some)
        return run

    def _place(self, place: Place, base: Any, runs: list[Any], which: list[int]) -> Place:
        """The place that the runs tell, or what is wrong with it."""
        if base is None or any(run is None or len(run) != len(base) for run in runs):
            return "whether it runs depends on the data of the batch"
        found: Place = place
        for call, *others in zip(base, *runs, strict=True):
            if any(type(x) is not type(call) or (isinstance(x, Tensor) and x.shape != call.shape) for x in others):
                return "how many rows it has depends on the data of the batch"
            if not isinstance(call, Tensor):
                return f"its output {call} has no samples in dimension {place if isinstance(place, int) else 0}"
            told = self._of_call(place, [x != call for x in others], which)
            if isinstance(told, str):
                return told
            if isinstance(found, Rows) and isinstance(told, Rows) and told.together is not None:
                if found.together not in (None, told.together):
                    return "its samples are folded into rows in different orders at different uses"
                found = told
        return found

    def _of_call(self, place: Place, changed: list[Tensor], which: list[int]) -> Place:
        rows = torch.arange(len(changed[0]), device=changed[0].device)
        k = len(rows) // self.size
        orders = {True: rows // max(k, 1), False: rows % self.size}
        fits = [
            together
            for together, whose in orders.items()
            if all(bool((whose[c] == j).all()) for c, j in zip(changed, which, strict=True))
        ]
        if fits:
            if not isinstance(place, Rows) or len(fits) == 2:
                return place
            return Rows(place.dim, fits[0])
        if bool((torch.stack(changed).sum(0) > 1).any()) or not isinstance(place, Rows):
            once = torch.stack(changed).sum(0) <= 1
            if not isinstance(place, Rows) and bool(once.all()) and all(int(c.sum()) <= 1 for c in changed):
                return "its samples stand in another order than in the model's input"
            return Mixed("a row of its output changes with a sample that is not its own")
        return "its samples are folded into rows in an order that is neither sample by sample nor over and over"

    def _output(self, i: int, base: _Run, runs: list[_Run], which: list[int]) -> str | None:
        """What is wrong with an output of the model: in no dimension as long as the batch it is parted by samples."""
        if not base.outputs[i] or any(len(run.outputs) != len(base.outputs) for run in runs):
            return None
        for d, prints in base.outputs[i].items():
            others = [run.outputs[i][d] for run in runs if d in run.outputs[i]]
            if len(others) < len(runs):
                return None
            number = torch.arange(len(prints), device=prints.device)
            if all(not bool(((x != prints) & (number != j)).any()) for x, j in zip(others, which, strict=True)):
                return None
        return "each of its entries depends on several samples"

    def _of_batch(self, outputs: dict[int, str], base: _Run, again: Callable[[], None]) -> dict[int, str]:
        """Those whose dimensions follow the batch, and are not as long by accident."""
        other = self._run(None, again, self.size + 1)
        return {
            i: m for i, m in outputs.items() if i < len(other.outputs) and set(base.outputs[i]) & set(other.outputs[i])
        }


class _Witness(Tap):
    """The tap of a copy, which notes fingerprints of rows."""

    number: int
    size: int
    seen: _Run
    at: dict[Key, Place]
    took_and_gave: list[tuple[int | None, Call]]

    @classmethod
    def of(cls, tap: Tap, number: int, seen: _Run, at: dict[Key, Place], size: int) -> _Witness:
        tap.__class__ = cls
        assert isinstance(tap, cls)
        tap.number, tap.seen, tap.at, tap.size, tap.took_and_gave = number, seen, at, size, []
        return tap

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.module, nn.Embedding):
            args, kwargs, _ = self.with_whole_batch(args, kwargs, self.size)
        output = forward(*args, **kwargs)
        if any(isinstance(x, PackedSequence) for x in args):  # it knows itself where its samples are
            self.seen.packed.append(self.layer)
            return output
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        rank = outputs[0].dim() if outputs and find_forward(self.module) is None else None
        inputs = [x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.took_and_gave.append((rank, (inputs, [x.shape for x in outputs])))
        key, place = (self.number, rank), self.at.get((self.number, rank))
        self.seen.order.setdefault(key, len(self.seen.order))
        if outputs and isinstance(place, (int, Rows)):
            x, dim = outputs[0], place.dim if isinstance(place, Rows) else place
            size = x.shape[dim] if dim < x.dim() else 0
            fits = size % self.size == 0 if isinstance(place, Rows) else size == self.size
            self.seen.calls.setdefault(key, []).append(_fingerprints(x, dim) if fits else tuple(x.shape))
        return output

    def tapped(self, output: Any, *_: Any, **__: Any) -> Any:
        return output


def _copy(model: nn.Module, taps: Sequence[Tap]) -> tuple[nn.Module, list[Tap]]:
    """The model with its taps, on the same parameters; buffers and all that a forward may keep are its own."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    memo[id(taps[0].taps)] = Nobody()
    model, copies = copy.deepcopy((model, list(taps)), memo)
    for module in model.modules():  # hooks are not copied with what they hold
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            hooks.clear()
    return model, copies


@contextmanager
def _same_random_numbers() -> Iterator[Callable[[], None]]:
    """Nothing is left of what runs within it; what it gives starts all random numbers again."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    numpy: Any = sys.modules.get("numpy")
    with nothing_left_behind(), torch.random.fork_rng(devices=devices):
        states = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in devices], random.getstate()
        of_numpy = None if numpy is None else numpy.random.get_state()

        def again() -> None:
            torch.set_rng_state(states[0])
            for device, state in zip(devices, states[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            random.setstate(states[2])
            if numpy is not None:
                numpy.random.set_state(of_numpy)

        try:
            yield again
        finally:
            again()


def first_samples(x: Any, dim: int | None, size: int) -> Any:
    """That many of a tensor's samples, in turns where it has fewer."""
    if dim is None or not isinstance(x, Tensor):
        return x
    return x.detach().index_select(dim, torch.arange(size, device=x.device) % x.shape[dim])


def _is_a_number_each(x: Any) -> bool:
    """One whole number a sample."""
    return isinstance(x, Tensor) and x.dim() == 1 and not x.is_floating_point()


def _exchanged(x: Tensor, dim: int, j: int) -> Tensor:
    """With the next sample in the place of that number; another one made of it, where these are the same."""
    x = x.clone()
    own, other = x.select(dim, j), x.select(dim, (j + 1) % x.shape[dim]).clone()
    if torch.equal(own, other):
        other = own.flip(tuple(range(own.dim())))
    if torch.equal(own, other) and x.dtype != torch.bool:  # no number larger than what has been seen
        other = own * 0.5 if x.is_floating_point() else torch.where(own > 0, own - 1, own)
    own.copy_(other)
    return x


def _fingerprints(x: Tensor, dim: int) -> Tensor:
    """One number for the bits of each row along the dimension."""
    rows = x.detach().movedim(dim, 0).reshape(x.shape[dim], -1)
    found = torch.zeros(len(rows), dtype=torch.int64, device=x.device)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    step = max(1, _AT_ONCE // max(1, len(rows)))
    for start in range(0, rows.shape[1], step):
        part = rows[:, start : start + step] + 0.0  # a zero has a sign, which may come of zero times another row
        factors = torch.arange(start + 1, start + part.shape[1] + 1, device=x.device) * _ODD
        factors = (factors ^ (factors >> 29)) * _ODD | 1
        found += (part.contiguous().view(bits).to(torch.int64) * factors).sum(1)
    return found


def _is_odd(place: Place) -> bool:
    return isinstance(place, str) and place != NO_SAMPLES


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.equal(x, y)
    return type(x) is type(y) and bool(x == y)


def _alike(one: _Run, two: _Run) -> bool:
    """Whether two runs gave the same."""
    if one.calls.keys() != two.calls.keys():
        return False
    calls = all(len(x) == len(two.calls[key]) and all(map(_equal, x, two.calls[key])) for key, x in one.calls.items())
    return calls and all(
        x.keys() == y.keys() and all(_equal(x[d], y[d]) for d in x)
        for x, y in zip(one.outputs, two.outputs, strict=True)
    )
