"""The eager one-pass mode as it runs in a graph: the sums are results.

Norms become factors in the graph where samples are clipped to C, by the eager step's code, in fp64; what a compiler
might take for no rounding (Inductor drops one to fp32 that is undone again) rounds nothing there, because the bits that
fp32 has no room for are cut off before (``arithmetic.towards_zero``). Other clippers and units have one opaque
operation, which runs the eager step's code when the graph runs.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.arithmetic import SquaredNorm, bounds, pinned
from dpfast.errors import UnsupportedModuleError
from dpfast.factors import OuterProduct, added_up
from dpfast.modes import (
    UNITS,
    Clipped,
    GradSampleModuleFastGradientClipping,
    Hooks,
    Units,
    UnitsInGraph,
    clip_to,
    expect_loss,
    rounding,
)
from dpfast.taps import Mixed
from dpfast.trials import ONE_AT_A_TIME, put_back, without_graphs


class GraphMode(GradSampleModuleFastGradientClipping):
    """One pass on a copy of the model that nobody else runs; losses are summed over samples."""

    def add_hooks(
        self,
        *,
        loss_reduction: str | None = None,
        batch_first: bool | None = None,
        force_functorch: bool | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> None:
        self._tapped = Hooks(
            self._module, self, batch_first=self.batch_first, force_functorch=self.force_functorch, layout=layout
        )
        self._tapped.add(never_run=True)
        self.training = self._module.training  # losses are given this in the model's place, and may ask

    def set_grad_sample_to_none(self) -> None:
        """There is none."""

    def learn(self, losses: Callable[..., Tensor], batch: Sequence[Any]) -> bool:
        """Where the model's samples are; whether other batches would tell no more."""
        assert self._tapped is not None
        with ONE_AT_A_TIME, put_back(self._module, losses), torch.random.fork_rng(), torch.enable_grad():
            losses(self, *batch)
        return self._tapped.probe.is_settled

    def places(self) -> list[Any]:
        """What has been learned."""
        assert self._tapped is not None
        return [tap.places for tap in self._tapped._taps]

    def knows(self, other: GraphMode) -> None:
        """What the other has learned of another copy of the same model."""
        assert self._tapped is not None and other._tapped is not None
        self._tapped.probe.knows(other._tapped.probe)
        expect_loss(self._tapped)

    def drop_guards(self) -> None:
        """Lets other gradients than those of taps reach the parameters."""
        assert self._tapped is not None
        self._tapped.guards.drop()

    num_units: int | None = None
    """Of the steps that a graph is captured for; None: samples are clipped."""

    now: Units | None = None
    """Those of the step that runs."""

    @contextmanager
    def of(self, whose: Tensor) -> Iterator[None]:
        """Within it the step is captured: of units, by the samples' ids (N,), or of samples of which some may not be
        valid, (N,) bool."""
        if self.num_units is None:
            with self.valid(whose):
                yield
        else:
            with UNITS.within(self, UnitsInGraph(whose, self.num_units)):
                yield

    def own_clip(self, norms: Sequence[SquaredNorm | None], valid: Tensor) -> Clipped:
        """As an eager step of this mode."""
        return super()._clip(norms, 1.0 if self.now is None else self.now.scale("sum", valid.device), valid)

    def count(self, measured: Tensor) -> None:
        """Counts the samples that a graph has dropped by itself."""
        self._dropped.add(measured)

    def own_clip_in_turn(
        self, value: Tensor, upper: Tensor, valid: Tensor, activations: list[Tensor], backprops: list[Tensor]
    ) -> list[Tensor]:
        """As an eager step of this mode, of norms (P, N) and of the outer products that are taken in turn: what
        ``modes.Clipped`` holds, and the sums."""
        norms = [added_up(value, upper)] if len(value) else []
        products = [OuterProduct.of_rows(a, b) for a, b in zip(activations, backprops, strict=True)]
        clipped, totals = super()._clip_in_turn(products, norms, 1.0, valid)
        return [*clipped, *totals]

    def leave(self, sums: Mapping[nn.Parameter, Tensor | None]) -> None:
        """``p.grad += sums``, as an eager step of this mode."""
        super()._leave_sums(lambda p: sums[p])

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """These are what is clipped from here on."""
        numbers = list(map(id, parameters))
        if numbers != self._numbers:  # which are those of the parameters in ``_places``
            self._places, self._numbers = {p: i for i, p in enumerate(parameters)}, numbers
        if self._norm_clipper is not None:
            self._norm_clipper.for_parameters(len(parameters))

    # --- while a graph is captured ---

    sums: dict[nn.Parameter, Tensor | None]
    clipped: Clipped

    limit: Tensor
    """C, () fp64, which the graph is given."""

    counts = False
    """Whether the graph makes its factors itself, so that whoever runs it counts what it drops."""

    def _clip(self, norms: Sequence[SquaredNorm | None], scale: float | Tensor, valid: Tensor | None) -> Clipped:
        found = {i: n for i, n in enumerate(norms) if n is not None}
        if valid is None:
            assert self.num_units is not None
            of = next(iter(found.values())).value if found else torch.empty(0)
            valid = of.new_ones(self.num_units, dtype=torch.bool)
        if found and not self._clipper().is_per_layer:
            total = _total(list(found.values()))
            if self._norm_clipper is None and self.num_units is None:
                excess = max(map(rounding, self._places))
                clipped = clip_to(self.limit, total, 1.0, excess=excess, valid=valid.to(total.value.device))
                in_memory = {"weights": pinned(clipped.weights), "single": pinned(clipped.single)}
                self.clipped, self.counts = clipped._replace(**in_memory), True
                return self.clipped
            found = {0: total}  # all that a flat clipper is asked with
        value, upper = _stacked(list(found.values()), valid)
        self.clipped = Clipped(*torch.ops.dpfast.clip(value, upper, list(found), valid))
        return self.clipped

    def _one_by_one(self, step: Any) -> bool:
        return self.num_units is None and super()._one_by_one(step)

    def _clip_in_turn(
        self, products: Sequence[OuterProduct], norms: Sequence[Any], scale: float | Tensor, valid: Any
    ) -> tuple[Clipped, list[Tensor]]:
        inputs = [p.activations for p in products], [p.backprops for p in products]
        found = torch.ops.dpfast.clip_in_turn(*_stacked(norms, valid), valid, *inputs)
        count = len(Clipped._fields)
        self.clipped = Clipped(*found[:count])
        return self.clipped, found[count:]

    def _leave_sums(self, total: Callable[[nn.Parameter], Tensor | None]) -> None:
        self.sums = {p: total(p) for p in self._places}


def _stacked(norms: Sequence[SquaredNorm | None], valid: Tensor) -> tuple[Tensor, Tensor]:
    found = [n for n in norms if n is not None]
    empty = valid.new_empty(0, len(valid), dtype=torch.float64)
    value, upper = (torch.stack(x) if x else empty for x in ([n[i] for n in found] for i in (0, 1)))
    return value, upper


def _total(norms: Sequence[SquaredNorm]) -> SquaredNorm:
    """‖·‖² over all of them, as ``factors.total_sq_norm``: one after the other, in a loop that the compiler makes."""
    value, upper = (reduce(torch.add, of) for of in zip(*norms, strict=True))
    return SquaredNorm(value, upper * bounds.fp64_slop(len(norms)))


def learner(model: nn.Module, options: dict[str, Any]) -> GraphMode:
    """A tapped copy on the same parameters, which learns where samples are; its guards refuse every gradient of these
    until :meth:`GraphMode.drop_guards`."""
    try:
        copied = copy.deepcopy(model, without_graphs(model) | {id(p): p for p in model.parameters()})
    except (RuntimeError, TypeError) as error:
        raise UnsupportedModuleError(
            f"the model cannot be copied, which a capture needs: {error}; GradSampleModuleFastGradientClipping is the "
            "same step without a graph"
        ) from error
    return GraphMode(copied, loss_reduction="sum", **options)


def mixed_in(mode: GraphMode) -> tuple[Mapping[int | str, str], list[tuple[str, Mixed]]]:
    """Outputs of its last forward that are several samples', by number, and layers of which rows are, with what is
    wrong with them. (No methods: what the mode has none of, losses find in the model.)"""
    assert mode._tapped is not None
    layers = []
    for tap in mode._tapped._taps:
        for place in tap.places.values():
            there = place.values() if isinstance(place, dict) else [place]
            layers += [(tap.layer, x) for x in there if isinstance(x, Mixed)]
    return mode._tapped.probe.mixed_outputs(), layers


class _Running(threading.local):
    mode: GraphMode | None = None


_running = _Running()


@contextmanager
def running(mode: GraphMode) -> Iterator[None]:
    """Within it a graph that runs in this thread has that mode's clipper."""
    before, _running.mode = _running.mode, mode
    try:
        yield
    finally:
        _running.mode = before


def clip_op(value: Tensor, upper: Tensor, used: Sequence[int], valid: Tensor) -> list[Tensor]:
    """What :func:`dpfast.modes.clip` gives for the mode that runs, of the norms of the parameters ``used``, (P, N)."""
    mode = _running.mode
    assert mode is not None, "a captured step runs through dpfast.compile_step"
    norms: list[SquaredNorm | None] = [None] * len(mode._places)
    for i, of in zip(used, zip(value, upper, strict=True), strict=True):
        norms[i] = SquaredNorm(*of)
    return [x.clone() for x in mode.own_clip(norms, valid)]  # results of an operation share no memory


@torch.library.custom_op("dpfast::clip_in_turn", mutates_args=())
def clip_in_turn_op(
    value: Tensor, upper: Tensor, valid: Tensor, activations: list[Tensor], backprops: list[Tensor]
) -> list[Tensor]:
    """:func:`clip_op`, and the clipped sums of large layers, which are taken with it (``modes/in_turn.py``)."""
    mode = _running.mode
    assert mode is not None, "a captured step runs through dpfast.compile_step"
    return mode.own_clip_in_turn(value, upper, valid, activations, backprops)


@clip_in_turn_op.register_fake
def _(value: Tensor, upper: Tensor, valid: Tensor, activations: list[Tensor], backprops: list[Tensor]) -> list[Tensor]:
    products = [OuterProduct.of_rows(a, b) for a, b in zip(activations, backprops, strict=True)]
    totals = [valid.new_empty(tuple(p.shape), dtype=p.dtype) for p in products]
    return [*_empty(valid), *totals]


def _empty(valid: Tensor) -> list[Tensor]:
    """As ``modes.Clipped``."""
    mode = _running.mode
    assert mode is not None
    n, number = len(valid), len(mode._places)
    by_parameter = mode._clipper().is_per_layer

    def empty(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return valid.new_empty(shape, dtype=dtype)

    shape = (number, n) if by_parameter else (n,)
    factors, single = (empty(*shape, dtype=torch.float32) for _ in range(2))
    return [empty(n), empty(n), factors, empty(*shape), single, empty(number if by_parameter else 1, n)]


# As torch.library.custom_op would, whose own lines take as long as the operation.
_library = torch.library.Library("dpfast", "FRAGMENT")
_library.define("clip(Tensor value, Tensor upper, int[] used, Tensor valid) -> Tensor[]")
_library.impl("clip", clip_op, "CompositeExplicitAutograd")
torch.library.register_fake("dpfast::clip", lambda value, upper, used, valid: _empty(valid), lib=_library)
