"""Modes that leave nothing behind: what a step's taps catch is timed, or weighed, and let go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dpfast.arithmetic import cost, finished, ops
from dpfast.factors import (
    Blocks,
    Dense,
    Factor,
    InTurn,
    OuterProduct,
    PatchProduct,
    Reshaped,
    Standardised,
    merge,
    sq_norms,
    weighted_together,
)
from dpfast.modes import Step, is_small, may_be_taken_in_turn, size_of, waits_for_its_turn, way_unwritten
from dpfast.report.memory import storages
from dpfast.taps import Record


class Caught:
    """Rules run, and that is all."""

    passes = 1
    gives_gradients = defers = False

    def on_forward(self, inputs: Sequence[Tensor], call: tuple[Any, Any]) -> None:
        pass

    def on_factor(self, step: Step, parameter: nn.Parameter, factor: Factor, only_use: bool) -> None:
        pass

    def has_left(self) -> bool:
        return False

    def on_finish(self, step: Step) -> None:
        pass


IN_TURN = "in turn"
"""The way of layers whose norms, factors and sums are taken sample by sample when all other norms are known."""


class Turns:
    """Which uses of a step are taken in turn: told of all of them, as they come.

    Args:
        parameters: of the model, in its order.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._places = {p: i for i, p in enumerate(parameters)}
        self._seen: list[tuple[nn.Parameter, cost.Size | None]] = []

    def see(self, parameter: nn.Parameter, factor: Factor) -> None:
        """A use more."""
        product, size = may_be_taken_in_turn(factor), None
        if product is not None and (not product.keeps or waits_for_its_turn(factor)):
            size = size_of(product)
        self._seen.append((parameter, size))

    def inputs(self, i: int) -> int:
        """Bytes that use i holds of a sample, if it may be taken in turn."""
        size = self._seen[i][1]
        return 0 if size is None else size.inputs

    @property
    def taken(self) -> set[int]:
        """By number."""
        uses = Counter(parameter for parameter, _ in self._seen)
        once = [(self._places[p], i, s) for i, (p, s) in enumerate(self._seen) if s is not None and uses[p] == 1]
        once.sort(key=lambda of: of[0])
        chosen = cost.in_turn([size for _, _, size in once])
        return {i for (_, i, _), is_chosen in zip(once, chosen, strict=True) if is_chosen}


def way_of(factor: Factor) -> str:
    """The one that is taken: of ``cost``, "lookup", or "dense" for gradients as they are."""
    if isinstance(factor, (Reshaped, Standardised)):
        return way_of(factor.factor)
    if isinstance(factor, Blocks):
        return " and ".join(dict.fromkeys(map(way_of, factor.factors)))
    if isinstance(factor, (OuterProduct, PatchProduct)):
        return "keep" if factor.keeps else way_unwritten(factor)
    return "lookup" if hasattr(factor, "indices") else "dense"


def ways_of(factor: Factor) -> tuple[str, ...]:
    """All that it can go."""
    if isinstance(factor, Reshaped):
        return ways_of(factor.factor)
    if isinstance(factor, OuterProduct):
        if factor.activations.shape[1] == 1:
            return ("rank_one",)
        return ("direct", "gram", "keep", *([IN_TURN] if may_be_taken_in_turn(factor) else []))
    if isinstance(factor, PatchProduct):
        return way_unwritten(factor), "keep"
    return (way_of(factor),)


def kept_in(factor: Factor, way: str) -> Factor:
    """What norm and clipped sum are read from."""
    if isinstance(factor, Reshaped):
        return Reshaped(kept_in(factor.factor, way), factor.shape)
    if isinstance(factor, (OuterProduct, PatchProduct)):
        return factor.written() if way == "keep" else factor
    return factor.kept()


def take_norm(kept: Factor, way: str) -> None:
    """Takes it, of what :func:`kept_in` gives."""
    if isinstance(kept, Reshaped):
        take_norm(kept.factor, way)
    elif isinstance(kept, OuterProduct):
        ops.certified_sq_norm(kept.activations, kept.backprops, way=way)
    else:
        kept.sq_norm()


def planned(factor: Factor) -> tuple[cost.Size, str]:
    """What a ``memory_budget`` knows of it, and its way where its gradients are not written."""
    if isinstance(factor, (Reshaped, Standardised)):
        return planned(factor.factor)
    if isinstance(factor, (OuterProduct, PatchProduct)):
        return size_of(factor), way_unwritten(factor)
    if isinstance(factor, Blocks):
        sizes = [(planned(block)[0], way_of(block)) for block in factor.factors]
        held = sum(size.gradient if way == "keep" else size.inputs for size, way in sizes)
        return _NOTHING._replace(gradient=held, inputs=held), way_of(factor)
    return size_of(factor), way_of(factor)


def _ones(factor: Factor, parameter: nn.Parameter) -> Tensor:
    return torch.ones(factor.num_samples, device=parameter.device)


_NOTHING = cost.Size(1, 0, 0, 0, "cpu")


@dataclass
class Taken:
    """One use of a parameter, and what it took in the way of this step."""

    layer: str
    parameter: nn.Parameter
    taken: str
    way: str
    ways: tuple[str, ...]
    seconds: tuple[float, float] = (0.0, 0.0)
    held: int = 0
    size: cost.Size = _NOTHING
    unwritten: str = ""
    num_samples: int = 0


class Takes(Caught):
    """Takes norm and clipped sum of each factor at once, and their times; all in one way, where a factor has it. Small
    gradients are taken at the end and together, as in a private step, and each has an equal part of the time."""

    def __init__(self, now: Callable[[], float], way: str, in_turn: Collection[int] = ()):
        self._now, self._way = now, way
        self._in_turn = in_turn
        self.uses: list[Taken] = []
        self._layer = ""
        self._several: dict[nn.Parameter, list[tuple[Taken, Factor]]] = {}
        self._small: dict[Any, list[tuple[Taken, Dense]]] = {}

    def observe(self, record: Record, parameter: nn.Parameter, factor: Factor) -> None:
        """Comes before the same factor's :meth:`on_factor`."""
        self._layer = record.tap.layer

    def on_factor(self, step: Step, parameter: nn.Parameter, factor: Factor, only_use: bool) -> None:
        taken, ways = IN_TURN if len(self.uses) in self._in_turn else way_of(factor), ways_of(factor)
        use = Taken(self._layer, parameter, taken, self._way if self._way in ways else taken, ways)
        self.uses.append(use)
        if only_use:
            self._take(use, factor)
        else:
            self._several.setdefault(parameter, []).append((use, factor))

    def on_finish(self, step: Step) -> None:
        for uses in self._several.values():
            factor = merge([factor for _, factor in uses])
            first = uses[0][0]
            for use, _ in uses:
                use.taken = use.way = way_of(factor) if len(uses) > 1 else use.way
                use.ways = (use.way,)
            self._take(first, factor)
        self._several.clear()
        for some in self._small.values():
            self._take_together(some)
        self._small.clear()

    def _take(self, use: Taken, factor: Factor) -> None:
        ones = _ones(factor, use.parameter)
        use.size, use.unwritten = planned(factor)
        use.num_samples = factor.num_samples
        if use.unwritten not in use.ways:
            use.unwritten = use.way
        product = may_be_taken_in_turn(factor)
        if use.way == IN_TURN and product is not None:
            use.seconds, use.held = self._in_turn_alone(InTurn([product])), product.nbytes
            return
        start = self._now()
        kept = kept_in(factor, use.way)
        if isinstance(kept, Dense) and is_small(kept):
            use.seconds = (self._now() - start, 0.0)
            values = kept.values
            self._small.setdefault((values.dtype, values.device, len(values)), []).append((use, kept))
            return
        take_norm(kept, use.way)
        between = self._now()
        kept.weighted_sum(ones)
        use.seconds = (between - start, self._now() - between)
        use.held = sum(nbytes for _, nbytes in storages(kept))

    def _take_together(self, some: Sequence[tuple[Taken, Dense]]) -> None:
        factors = [factor for _, factor in some]
        start = self._now()
        sq_norms(factors)
        between = self._now()
        weighted_together(factors, _ones(factors[0], some[0][0].parameter))
        end = self._now()
        for use, factor in some:
            norm, clipped_sum = (seconds / len(some) for seconds in (between - start, end - between))
            use.seconds = (use.seconds[0] + norm, use.seconds[1] + clipped_sum)
            use.held = sum(nbytes for _, nbytes in storages(factor))

    def _in_turn_alone(self, in_turn: InTurn) -> tuple[float, float]:
        norms = sums = 0.0
        for some in in_turn.samples():
            start = self._now()
            finished(in_turn.write(some))
            between = self._now()
            in_turn.add([1.0] * (some.stop - some.start))
            norms, sums = norms + between - start, sums + self._now() - between
        start = self._now()
        in_turn.totals()
        return norms, sums + self._now() - start


@dataclass
class _Held:
    parameter: nn.Parameter
    storages: list[int]
    in_turn: bool


class Held(Caught):
    """Keeps nothing, but knows what a private step would keep, and how much more the step would hold for it.

    Each use has four segments between marks: what autograd does before it, writing what is kept, the norm, the sum.
    """

    def __init__(self, in_turn: Collection[int] = ()) -> None:
        self._in_turn = in_turn
        self._entries: list[Any] = []
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._gone: list[int] = []  # bytes let go before each use, and before the end
        self._mark: Callable[[], None] = lambda: None

    def run(self, mark: Callable[[], None], step: Callable[[], None]) -> None:
        """``step()`` of a model in this mode."""
        self._mark = mark
        step()

    def on_factor(self, step: Step, parameter: nn.Parameter, factor: Factor, only_use: bool) -> None:
        self._note()
        self._mark()
        in_turn = len(self._entries) in self._in_turn
        kept = factor if in_turn else factor.kept()
        self._mark()
        if not in_turn:
            kept.sq_norm()
        self._mark()
        if not in_turn:
            kept.weighted_sum(_ones(factor, parameter))
        self._mark()
        keys = []
        for storage, nbytes in storages(kept):
            key = storage.cdata
            self._storages.setdefault(key, (storage, nbytes))
            keys.append(key)
        self._entries.append(_Held(parameter, keys, in_turn))

    def on_finish(self, step: Step) -> None:
        self._note()
        self._mark()

    def _note(self) -> None:
        self._gone.append(sum(nbytes for storage, nbytes in self._storages.values() if storage.expired()))

    def peak(self, segments: Sequence[tuple[int, int]], order: Mapping[nn.Parameter, int]) -> int:
        """The most bytes of the private step.

        Args:
            segments: the bytes at the start of each, and the most within it.
            order: in which sums are taken.
        """
        uses = len(self._entries)
        before = [segments[4 * i + j][1] + self._gone[i] for i in range(uses) for j in (0, 1)]
        before.append(segments[4 * uses][1] + self._gone[uses])
        more = [[peak - start for start, peak in segments[4 * i + 2 : 4 * i + 4]] for i in range(uses)]
        level = segments[4 * uses + 1][0] + self._gone[uses]
        most = max([*before, level + max((norm for norm, _ in more), default=0)])
        in_turn = [i for i in range(uses) if self._entries[i].in_turn]
        totals = [self._entries[i].parameter.nbytes for i in in_turn]
        most = max(most, level + 2 * sum(totals))  # one sample's gradients, and the sums
        level += sum(totals)
        most = max(most, level + max(totals, default=0))  # a sum that is transposed
        readers: dict[int, int] = {}
        for entry in self._entries:
            for key in entry.storages:
                readers[key] = readers.get(key, 0) + 1
        by_place = sorted(range(uses), key=lambda i: order.get(self._entries[i].parameter, 0))
        for i in sorted(by_place, key=lambda i: not self._entries[i].in_turn):
            entry = self._entries[i]
            if not entry.in_turn:
                most = max(most, level + more[i][1])
                level += entry.parameter.nbytes
            for key in entry.storages:
                readers[key] -= 1
                storage, nbytes = self._storages[key]
                if not readers[key] and storage.expired():
                    level -= nbytes
        return most
