"""Whether a sample's gradient changes with how long another one's packed sequence is.

Where samples are exchanged, lengths stay as they are: other lengths make other shapes. So here a short sample stands
in a batch with the longest, and in one of its like; what is padded to the longest (``pad_packed_sequence`` without
``total_length``, a mask as long as ``lengths.max()``) is as long as itself in the second. What the sample's outputs
give the parameters must be the same but for roundings, whatever the layout of what is in between; of an output without
samples, a loss, what changes with one sample in the place of another must not depend on who else is long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfast.looks.own_gradients import Outputs, Runs, differ, gradients_of
from dpfast.looks.seen import said_by
from dpfast.taps import Tap
from dpfast.trials import Entries, RandomNumbers, Trial

_CHANGES = (
    "a sample's gradient in it changes with how long the longest sequence of the batch is: what follows {}, which "
    "takes packed sequences, does not leave padding out (pad_packed_sequence without total_length pads to the longest, "
    "and a mean, maximum, softmax or convolution over time takes more or less of it then): divide by the sample's own "
    "length, mask, pick by the lengths, or give total_length=, the same number for every batch (docs/layouts.md)"
)
_CUT = (
    "a sample's gradient in it changes with how long the longest sequence of the batch is, or with what is in it: the "
    "model cuts or pads all to that (x[:, :lengths.max()]) and does not leave padding out (a mean, maximum, softmax or "
    "convolution over time takes more or less of it then): divide by the sample's own length, mask, pick by the "
    "lengths, or cut and pad to one length, the same for every batch (docs/layouts.md)"
)
_FROM_ELSEWHERE = "they come of no input"
_NOT_FINITE = "gradients of its outputs are not finite"
DIFFERS = "two runs on the same samples differ (random numbers, or a count, that cannot be put back?)"
_FAILS = "with shorter samples it fails, {}"
_OTHERS = "what it returns is otherwise where samples are shorter"


class Slot(NamedTuple):
    """A sample's number, how long it is to be, and whether its other inputs are zeros from there on."""

    sample: int
    length: int
    cut: bool = False


Slots = tuple[Slot, Slot, Slot, Slot]
"""The longest, what stands in its place, and two others (:meth:`LengthLook._wrong`)."""


class LengthLook:
    """At what the lengths of packed sequences do to other samples.

    Args:
        leaves, trial: the inputs, flattened. dims: of each, that of its samples. size: so many samples run.
        again: has random numbers start again.
        lengths: the numbers of inputs that say how long sequences are, one whole number a sample; None among them:
            some come of no input. counted: lengths of these samples, where the model counts them.
        packed: the layers that take sequences. parted: of outputs, by number, dimensions in which samples are apart.
        others: what stands where parameters are, by their ids.
    """

    def __init__(
        self,
        model: nn.Module,
        taps: Sequence[Tap],
        leaves: Sequence[Any],
        trial: Trial,
        dims: Sequence[int | None],
        size: int,
        again: RandomNumbers,
        *,
        lengths: set[int | None],
        counted: list[list[int]],
        packed: Sequence[str],
        parted: Mapping[int, Sequence[int]],
        others: dict[int, Any],
    ):
        self.runs, self.dims, self.size = Runs(model, taps, trial, again, others), dims, size
        self.lengths, self.packed, self.parted, self.counted = lengths, packed, parted, counted
        self.leaves = leaves

    def told(self) -> tuple[dict[int | str, str], str | None]:
        """Of the model's outputs, by number, and of what it keeps in attributes, by name, why a loss made of one has no
        gradients by sample; and why that could not be told."""
        found: dict[int | str, str] = {}
        why = _FROM_ELSEWHERE if None in self.lengths else None
        own = [(i, self.leaves[i].tolist()) for i in sorted(i for i in self.lengths if i is not None)]
        for i, lengths in (*own, *((None, some) for some in self.counted)):
            for ways in [_slots(lengths)] if i is not None else _samples(lengths):
                wrong, failed = self._wrong_in_one_of(i, lengths, ways)
                message = _CHANGES.format(", ".join(self.packed)) if self.packed else _CUT
                found.update(dict.fromkeys(wrong, message))
                why = why or failed
        return found, why

    def _wrong_in_one_of(
        self, i: int | None, lengths: Sequence[int], ways: Iterable[Slots]
    ) -> tuple[list[int | str], str | None]:
        """As :meth:`_wrong`, of the first of these that the model takes."""
        failed: str | None = None
        # Second, so that others go to another place where a model sorts them; first where it wants them sorted.
        for slots, place in product(ways, (1, 0)):
            try:
                with torch.enable_grad():
                    wrong, failed = self._wrong(i, place, *slots)
                    if wrong and any(lengths[slot.sample] != slot.length for slot in slots[2:]):
                        # Masks and targets may say otherwise than the lengths that such a sample was given.
                        cut, _ = self._wrong(i, place, *(slot._replace(cut=True) for slot in slots))
                        wrong = [key for key in wrong if key in cut]
                return wrong, failed
            except Exception as error:  # whatever a model raises that wants longer samples
                failed = failed or _FAILS.format(said_by(error))
        return [], failed

    def _wrong(
        self, i: int | None, place: int, long: Slot, mate: Slot, one: Slot, other: Slot
    ) -> tuple[list[int | str], str | None]:
        """Outputs that change with the lengths in that input, and why that cannot be told.

        Args:
            place: the longest one's, 0 or 1.
            long: the longest sample; ``mate`` stands in its place. one, other: shorter ones, the first over and over,
                behind it and, where there is room, before it: sorted by length, one goes to another place with it.
        """

        def run(in_place: Slot, beside: Slot) -> Outputs:
            some = [beside, *[one] * (self.size - 2)]
            some.insert(place, in_place)
            return self._run(i, some)

        samples = (1 - place, self.size - 1)
        among, alone = (run(first, one) for first in (long, mate))
        if among.found.keys() != alone.found.keys():
            return [], _OTHERS
        dims = {key: self._dim(key, x) for key, x in among.found.items()}
        changes = {key: self._change(key, among, alone, d, samples) for key, d in dims.items() if d is not None}
        losses = [key for key, d in dims.items() if d is None]
        if losses:
            others = [run(first, other) for first in (long, mate)]
            changes |= {key: self._change_of_loss(key, (among, alone), others) for key in losses}
        wrong = [key for key, change in changes.items() if change]
        if wrong:
            repeated = run(long, one)
            if any(self._change(key, among, repeated, dims[key], samples) is not False for key in wrong):
                return [], DIFFERS
        return wrong, _NOT_FINITE if None in changes.values() else None

    def _dim(self, i: int | str, x: Tensor) -> int | None:
        """Of its samples; None: it has none."""
        known = self.parted.get(i) if isinstance(i, int) else None
        return known[0] if known else next((d for d, s in enumerate(x.shape) if s == self.size), None)

    def _change(self, i: int | str, one: Outputs, two: Outputs, dim: int | None, samples: Sequence[int]) -> bool | None:
        """Whether the gradients of one of these samples differ; of an output without samples, all together. None: they
        are not finite."""
        changes = [self._change_of(i, (one, two), dim, j) for j in (samples[:1] if dim is None else samples)]
        return True if True in changes else None if None in changes else False

    def _change_of(self, i: int | str, runs: Sequence[Outputs], dim: int | None, j: int) -> bool | None:
        rows = [run.found[i] if dim is None else run.found[i].select(dim, j) for run in runs]
        if rows[0].dim() != rows[1].dim():
            return True
        # What one of them alone has is padding: who makes a loss of it leaves that out.
        box = tuple(slice(min(sizes)) for sizes in zip(rows[0].shape, rows[1].shape, strict=True))
        grads = [gradients_of([x[box]], run, [dim is None]) for x, run in zip(rows, runs, strict=True)]
        return differ(grads, [1.0, -1.0], rows[0].dtype)

    def _change_of_loss(self, i: int | str, runs: Sequence[Outputs], others: Sequence[Outputs]) -> bool | None:
        """Whether what one sample in another one's place changes depends on whether a third is longer."""
        grads = [gradients_of([run.found[i]], run, [True]) for run in (*runs, *others)]
        return differ(grads, [1.0, -1.0, -1.0, 1.0], runs[0].found[i].dtype)

    def _run(self, i: int | None, slots: Sequence[Slot]) -> Outputs:
        """One forward pass of a copy on these samples, whose lengths in input i, if any, are these."""
        samples, most = [slot.sample for slot in slots], 0 if i is None else int(self.leaves[i].max())
        some: list[Any] = [x.detach().clone() if isinstance(x, Tensor) else x for x in self.leaves]
        for number, dim in enumerate(self.dims):
            if isinstance(some[number], Entries):
                some[number] = some[number] if dim is None else some[number].taken(samples)
            elif dim is not None:
                some[number] = some[number].index_select(dim, torch.tensor(samples, device=some[number].device))
                _cut(some[number].movedim(dim, 0), slots, most)
        if i is not None:
            some[i] = torch.tensor([slot.length for slot in slots]).to(some[i])
        return self.runs.run(some)


def _slots(lengths: Sequence[int]) -> Iterator[Slots]:
    """The longest sample, what stands in its place, one of the shortest and another that is shorter: samples as they
    are, or where there are too few, others cut short. In the longest one's place stands the shortest, or where a model
    cannot take all so short, the longest one cut short."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    long = Slot(order[-1], lengths[order[-1]])
    shorter = [Slot(j, lengths[j]) for j in order if lengths[j] < long.length]
    own = shorter[0].length if shorter else long.length // 2
    one, other = [*shorter, *(Slot(j, own) for j in order if lengths[j] == long.length), Slot(order[-1], own)][:2]
    for length in dict.fromkeys((own, (own + long.length) // 2, long.length - 1) if 0 < own < long.length else ()):
        yield long, one if length == own else Slot(long.sample, length), one, other


def _samples(lengths: Sequence[int]) -> Iterator[list[Slots]]:
    """The same of samples as they are, for each but the longest: which of them sees that one may depend on its own
    length. In its place stands the like, or where the model takes no so short ones, the next longest."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    first = lengths.index(max(lengths))
    long, rest = Slot(first, lengths[first]), [Slot(j, lengths[j]) for j in order if j != first]
    second = next((slot for slot in reversed(rest) if slot.length < long.length), rest[0])
    for one, other in zip(rest, [*rest[1:], rest[0]], strict=True):
        yield [(long, mate, one, other) for mate in dict.fromkeys((one, second))]


def _cut(x: Tensor, slots: Sequence[Slot], most: int) -> None:
    """Zeros behind the samples' lengths, in the first dimension that is as long as the longest."""
    dim = next((d for d, s in enumerate(x.shape) if d and s >= most), None)
    for number, slot in enumerate(slots):
        if slot.cut and dim is not None:
            x[number].narrow(dim - 1, slot.length, x.shape[dim] - slot.length).zero_()
