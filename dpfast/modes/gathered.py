"""What a step knows of one parameter, and what becomes of its clipped sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.arithmetic import SquaredNorm, is_traced, ops
from dpfast.errors import StateError
from dpfast.factors import (
    Alike,
    Dense,
    Factor,
    OuterProduct,
    Reshaped,
    merge,
    norms_of_kinds,
    norms_or_unfinished,
    pin,
    sq_norms,
    total_sq_norm,
    weighted_together,
)
from dpfast.modes.clipped import Clipped
from dpfast.modes.clippers import safe_factors
from dpfast.modes.rounding import added, is_taken_unrounded


class Gathered:
    """What a step knows of one parameter."""

    norm: Any = None  # a SquaredNorm, or what it and others follow from, once it has been taken
    closed = False  # whether the norm has been taken, or waits to be, for good
    total: Any = None  # a Tensor, once it is clipped

    def __init__(self) -> None:
        self.factors: list[Factor] = []

    def wait(self, factor: Factor) -> None:
        """The factor waits for the end of the pass."""
        self.factors.append(factor)
        if type(factor) is Dense:  # nearly always
            return
        inner = _innermost(factor) if isinstance(factor, (OuterProduct, Reshaped)) else None
        if isinstance(inner, OuterProduct) and not is_traced():
            inner.note_versions()

    def receive(self, result: Dense | SquaredNorm) -> None:
        """What became of a factor that waited."""
        if isinstance(result, Dense):
            self.factors.append(result)
        else:
            self.norm = result

    def add(self, total: Tensor) -> None:
        """The clipped sum of one use more."""
        self.total = total if self.total is None else self.total + total

    def clip(self, factor: Factor, coefficients: Tensor, dtype: torch.dtype | None = None) -> None:
        """Takes the clipped sum; what the factor keeps is freed with it.

        Args:
            dtype: bf16, where the sum is all that a gradient of bf16 will be: it may be written in it.
        """
        device = self.norm.value.device if isinstance(self.norm, SquaredNorm) else self.norm.device
        coefficients = coefficients.to(device)
        if dtype is not None and (type(factor) is Dense or isinstance(factor, OuterProduct)):
            self.total = factor.weighted_sum(coefficients, dtype)
        else:
            self.total = factor.weighted_sum(coefficients)

    def clip_alone(
        self, factor: Factor, limit: float, scale: float | Tensor, excess: float, valid: Tensor | None
    ) -> None:
        """Takes the clipped sum of a parameter that is clipped by itself, to ``limit``.

        Args:
            scale, valid: as of ``clipped.clip``. excess: by how much, relatively, the sum may come out too large.
        """
        norm = self.norm.upper.sqrt() * (scale * (1.0 + excess))
        factors = safe_factors((limit / norm).clamp(max=1.0), norm, limit)
        if valid is not None:
            factors = torch.where(valid.to(factors.device), factors, 0.0)
        self.clip(factor, factors * scale)


def check_unwritten(
    places: Iterable[nn.Parameter], entries: Sequence[Gathered | None], name: Callable[[nn.Parameter], str]
) -> None:
    """Raises StateError where something has written to what waits for the end of the pass; ``name`` tells whose."""
    for p, entry in zip(places, entries, strict=True):
        for factor in () if entry is None else entry.factors:
            if type(factor) is Dense:
                continue
            inner = _innermost(factor) if isinstance(factor, (OuterProduct, Reshaped)) else None
            if isinstance(inner, OuterProduct) and inner.has_changed:
                raise StateError(
                    f"{name(p)}: its layer's input, or the gradient at its output, was written to while the backward "
                    "pass went on; write to a copy"
                )


def _innermost(factor: Factor) -> Factor:
    return _innermost(factor.factor) if isinstance(factor, Reshaped) else factor


def used_again(name: str) -> str:
    """Of a parameter whose norm has been taken for good by what was known of its uses."""
    return (
        f"parameter {name} is used again by this backward pass after its norm has been taken, as of its only use: the "
        "forward pass did not show the other one. Checkpoint with use_reentrant=False, or call the model in one thread "
        "with no other backward pass between the forward passes that this one goes through"
    )


Deferred = Sequence[tuple[list[nn.Parameter], Alike]]
"""Parameters of layers that stand together, one of each layer, and their factor."""


def take_norms(
    places: Mapping[nn.Parameter, int],
    entries: Sequence[Gathered | None],
    deferred: Deferred,
    n: int,
    *,
    each: bool,
) -> list[SquaredNorm | None]:
    """``each``: the norm of every entry. Else one over all, what is left to do for n samples done at once."""
    used = [e for e in entries if e is not None]
    without = [e for e in used if e.norm is None]
    traced = is_traced()
    for entry in without:
        if len(entry.factors) != 1:
            entry.factors = [merge(entry.factors)]
        if traced:
            pin(entry.factors[0])
    factors = [e.factors[0] for e in without]
    if each:
        for entry, norm in zip(without, sq_norms(factors), strict=True):
            entry.norm = norm
        return [None if e is None else e.norm for e in entries]
    norms: list[Any] = [e.norm for e in used if e.norm is not None]
    norms += [alike.norm for _, alike in deferred]
    of = [[i] for i, e in enumerate(entries) if e is not None and e.norm is not None]
    of += [[places[p] for p in layers] for layers, _ in deferred]
    own = [i for i, e in enumerate(entries) if e is not None and e.norm is None]  # places of those without
    for which, together in norms_of_kinds(factors):
        norms.append(together)
        of.append([own[i] for i in which])
        for i in which:
            without[i].norm = together
    rest = [i for i, entry in enumerate(without) if entry.norm is None]
    for i, alone in zip(rest, norms_or_unfinished([factors[i] for i in rest]), strict=True):
        without[i].norm = alone
        norms.append(alone)
        of.append([own[i]])
    return [total_sq_norm(norms, n, of)] if norms else []


def clipped_totals(
    places: Mapping[nn.Parameter, int],
    entries: Sequence[Gathered | None],
    deferred: Deferred,
    clipped: Clipped,
    *,
    alone: bool,
) -> Callable[[nn.Parameter], Tensor | None]:
    """What gives each parameter's clipped sum, once; what its factor keeps is freed with it. Those of layers that stand
    together, with one factor a sample, are views of one tensor for each shape.

    Args:
        alone: no other ranks' samples or parts are to be added to it.
    """
    alone = alone and not is_traced()  # what a gradient holds when a graph runs is not known
    of = dict(zip(map(id, places), entries, strict=True))  # by numbers: parameters hash by a line of Python
    sums: dict[int, Tensor] = {}
    for parameters, alike in deferred:
        weights = clipped.coefficients(0, parameters[0].dtype).to(parameters[0].device)
        sums.update(zip(map(id, parameters), alike.weighted_sums(weights), strict=True))

    for parameters, factors, coefficients in _small(places, entries, clipped):
        # Rounded before it is taken apart: one by one, rounding takes as many calls as there are parameters.
        dtype = parameters[0].dtype
        rounds = alone and dtype.itemsize == 2 and all(p.grad is None and not is_taken_unrounded(p) for p in parameters)
        rounded = partial(added, None, dtype=dtype) if rounds else None
        sums.update(zip(map(id, parameters), weighted_together(factors, coefficients, rounded), strict=True))

    def total(p: nn.Parameter) -> Tensor | None:
        found = sums.pop(id(p), None)
        if found is not None:
            return found
        entry = of.pop(id(p))
        if entry is not None and entry.total is None:
            rounds = alone and p.dtype is torch.bfloat16 and p.grad is None and not is_taken_unrounded(p)
            entry.clip(entry.factors.pop(), clipped.coefficients(places[p], p.dtype), p.dtype if rounds else None)
        return None if entry is None else entry.total

    return total


def is_small(factor: Dense) -> bool:
    """Whether its sum is quicker taken beside others'."""
    return factor.num_samples > 0 and 0 < factor.shape.numel() <= _SMALL


def _small(
    places: Iterable[nn.Parameter], entries: Iterable[Gathered | None], clipped: Clipped
) -> Iterator[tuple[list[nn.Parameter], list[Dense], Tensor]]:
    """Parameters whose sums are quicker taken in one product than one by one, their factors, which their entries have
    no longer, and the coefficients of that."""
    if clipped.single.dim() > 1:  # clipped one by one
        return
    traced = is_traced()
    alike: dict[Any, list[tuple[nn.Parameter, Gathered]]] = {}
    for p, entry in zip(places, entries, strict=True):
        if entry is None or entry.total is not None or type(entry.factors[0]) is not Dense:
            continue
        values = entry.factors[0].values
        if traced and not ops.runs_kernels(values):  # a compiler makes loops of them
            continue
        if is_small(entry.factors[0]):
            alike.setdefault((p.dtype, values.dtype, values.device), []).append((p, entry))
    for (dtype, *_), some in alike.items():
        if len(some) > 1:
            yield [p for p, _ in some], [e.factors.pop() for _, e in some], clipped.coefficients(0, dtype)  # type: ignore[misc]


_SMALL = 2**12
"""Entries of a sample up to which they are copied beside others, which takes less time than a product's calls."""


_READ_AT_ONCE = 2**17
"""Entries that are read in the time that the calls of a product take by themselves."""


def ordinary(factor: Factor, grad_sample: Tensor, scale: float) -> Tensor:
    """``Σ_n G_n``, the ordinary gradient, read from ``grad_sample`` where that is less work than one more product."""
    written = isinstance(factor, Dense) or getattr(factor, "keeps", False)
    if written or grad_sample.numel() <= _READ_AT_ONCE:
        return grad_sample.sum(0) if scale in (0.0, 1.0) else grad_sample.mean(0)  # the scale is N
    return factor.weighted_sum(torch.ones(factor.num_samples, device=grad_sample.device))
