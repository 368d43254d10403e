"""Whether a loss ranks the samples of its batch (hard examples by ``topk``, the largest loss, a median), or has a bend
where several meet: a hinge of their difference, the larger of two, the mean loss above a floor.

Which of them a sample's gradient goes through depends on all, and second derivatives of straight pieces do not show it
(:mod:`dpfast.modes.curvature`). The operations stand in the loss's graph; whether what they choose by is several
samples' is seen by what that gives the model's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpfast.modes.cut_graph import Cut
from dpfast.modes.loss_ends import Output
from dpfast.trials import noise_like

_GROUPS = 4  # that come of samples, of what one operation ranks with each other, are asked whose they are
_ASKED = 64  # so many at most

# The dimensions are what they have saved; None: all.
_ALONG = ("Topk", "Sort", "Kthvalue", "Max", "Min", "Amax", "Amin", "Aminmax", "Cummax", "Cummin")
_RANK = {
    **{f"{name}Backward0": "dim" for name in (*_ALONG, "LinalgVectorNorm", "Gather")},
    **{f"{name}Backward1": None for name in ("Max", "Min")},
    **{f"{name}Backward0": None for name in ("Median", "Nanmedian")},
    **{f"{name}Backward1": "dim" for name in ("Sort", "Median", "Nanmedian")},
}
_NORM = "LinalgVectorNormBackward0"
_GATHER = "GatherBackward0"
"""Of one entry among many: by ``argmax``, and in ``torch.quantile``, in whose graph torch 2.15 has no sort."""

_BENT = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Abs", "Relu", "LeakyRelu", "PreluKernel", "RreluWithNoise", "Elu", "Threshold", "Hardtanh", "Hardsigmoid"),
        *("Hardswish", "Softshrink", "Hardshrink", "Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum", "Fmax"),
        *("Fmin", "Where", "SmoothL1Loss", "HuberLoss", "LinalgVectorNorm", "Norm"),
    )
    for number in (0, 1)
)
"""Of operations on entries, which choose between pieces by an entry of each of what they take."""
_DISTANCES = frozenset(("CdistBackward0", "PdistBackward0"))
"""Which have no second derivatives, and take rows for an entry."""


def ranked_samples(nodes: Iterable[Any], ends: dict[GradientEdge, Output], cut: Cut) -> str | None:
    """The name of an operation that ranks samples, or units, where one of the nodes is of such.

    Args:
        nodes: between a model's outputs and its loss. ends: outputs that have samples. cut: where the loss's graph
            ends, there among others.
    """
    for node in nodes:
        if type(node).__name__ in _RANK and node.next_functions[0][0] is not None:
            ranked = _Chosen([GradientEdge(*node.next_functions[0])], ends, cut)
            dims = _dims(node, len(ranked.shape))
            several = math.prod(ranked.shape[d] for d in dims) > 1  # entries that are ranked with each other
            if dims and several and (any(map(ranked.are_samples, dims)) or ranked.are_several(dims)):
                return _name(node)
    return None


def bent_where_samples_meet(nodes: Iterable[Any], ends: dict[GradientEdge, Output], cut: Cut) -> str | None:
    """The name of an operation with a bend that takes an entry of several samples, or units, where one of the nodes is
    of such.

    Args:
        nodes, ends, cut: as ``ranked_samples``'; outputs of one number come of all samples.
    """
    bent = [(_name(node), _Chosen(taken, ends, cut)) for node in nodes if (taken := _taken(node))]
    if not bent:
        return None
    forward = next(iter(ends.values())).forward
    with_samples = [x for _, x in bent if forward.n in x.shape]
    if all(_stay_apart(with_samples, own, ends, cut) for half in forward.halves() for own in (half, ~half)):
        bent = [(name, x) for name, x in bent if forward.n not in x.shape]
    return next((name for name, x in bent if not x.is_apart() and x.are_several(())), None)


def _stay_apart(some: Sequence[_Chosen], own: Tensor, ends: dict[GradientEdge, Output], cut: Cut) -> bool:
    """Whether half of the entries comes of that half of the samples alone: of all at once, as nearly always so."""
    forward = next(iter(ends.values())).forward
    parts = [part for x in some for part in x.parts(x.along(x.shape.index(forward.n), own))]
    return not _samples(parts, ends, cut) & _numbers(forward.whose, ~own)


def _taken(node: Any) -> list[GradientEdge]:
    """What an operation with a bend chooses by, where it is one."""
    name = type(node).__name__
    if name in _DISTANCES:
        return [GradientEdge(node, 0)]
    if name not in _BENT:
        return []
    taken = [GradientEdge(x, i) for x, i in node.next_functions if x is not None and x.next_functions]
    return taken if name != "WhereBackward0" or len(taken) > 1 else []  # one is multiplied by zeros and ones


def _name(node: Any) -> str:
    return type(node).__name__.partition("Backward")[0].lower()


def _dims(node: Any, dims: int) -> list[int]:
    """Along which an operation ranks."""
    name, saved = type(node).__name__, _RANK[type(node).__name__]
    if not dims or (name == _NORM and not math.isinf(node._saved_ord)):
        return []
    which = getattr(node, f"_saved_{saved}", ()) if saved else ()
    some = [int(d) for d in (which if isinstance(which, (tuple, list)) else (which,)) if d is not None]
    some = [d - 2**64 if d >= 2**63 else d for d in some]  # torch loses its sign
    found = sorted({d % dims for d in some or range(dims)})
    return found if name != _GATHER or all(node._input_metadata[0].shape[d] == 1 for d in found) else []


class _Chosen:
    """What an operation chooses by: entries of one tensor, or of several in which they stand alike.

    Attributes:
        shape: in which those of several are broadcast.
    """

    def __init__(self, edges: Sequence[GradientEdge], ends: dict[GradientEdge, Output], cut: Cut):
        self.edges, self._ends, self._cut = edges, ends, cut
        self.shape = tuple(torch.broadcast_shapes(*(_like(edge).shape for edge in edges)))

    def along(self, dim: int, own: Tensor) -> Tensor:
        return own.view(-1, *[1] * (len(self.shape) - dim - 1)).expand(self.shape)

    def parts(self, entries: Tensor) -> list[tuple[GradientEdge, Tensor]]:
        """Noise on what gives these entries."""
        found = []
        for edge in self.edges:
            like = _like(edge)
            shape = tuple(like.shape)
            noise = noise_like(torch.empty((), dtype=like.dtype, device=like.device).expand(shape), 0)
            own = entries if shape == self.shape else entries.float().sum_to_size(shape) > 0
            found.append((edge, noise * own.to(noise.device)))
        return found

    def are_samples(self, dim: int) -> bool:
        """Whether either half of the entries along a dimension comes of that half of the samples."""
        return self._came(dim) > 1

    def is_apart(self) -> bool:
        """Whether that is so in any dimension."""
        return any(self._came(dim) >= 0 for dim in range(len(self.shape)))

    def _came(self, dim: int) -> int:
        """Of how many samples; -1: not of that half."""
        forward = next(iter(self._ends.values())).forward
        came: set[int] = set()
        if self.shape[dim] != forward.n:
            return -1
        for own in (own for half in forward.halves() for own in (half, ~half)):
            found = self._samples(self.along(dim, own))
            if found & _numbers(forward.whose, ~own):
                return -1
            came |= found
        return len(came)

    def are_several(self, dims: Sequence[int]) -> bool:
        """Whether what is chosen among comes of several samples: entries along these dimensions."""
        others = [d for d in range(len(self.shape)) if d not in dims]
        groups, reached = math.prod(self.shape[d] for d in others), 0
        for group in range(0, groups, max(1, -(-groups // _ASKED))):
            index: list[Any] = [slice(None)] * len(self.shape)
            for d in others:
                group, index[d] = divmod(group, self.shape[d])
            entries = torch.zeros(self.shape, dtype=torch.bool)
            entries[tuple(index)] = True
            found = self._samples(entries)
            reached += bool(found)
            if len(found) > 1 or reached == _GROUPS:
                return len(found) > 1
        return False

    def _samples(self, entries: Tensor) -> set[int]:
        return _samples(self.parts(entries), self._ends, self._cut)


def _samples(parts: Sequence[tuple[GradientEdge, Tensor]], ends: dict[GradientEdge, Output], cut: Cut) -> set[int]:
    """The numbers of those that parts come of, or of their units."""
    found: set[int] = set()
    grads = cut.gradients([edge for edge, _ in parts], [part for _, part in parts], list(ends)) if parts else ()
    for g, output in zip(grads, ends.values(), strict=False):
        if g is not None and output.dims:
            rows = ((g != 0) & g.isfinite()).movedim(output.dims[0], 0).flatten(1).any(1)
            found.update(output.whose()[rows.cpu()].tolist())
        elif g is not None and bool((g != 0).any()):
            found.update(output.forward.whose)
    return found


def _numbers(whose: Iterable[int], among: Tensor) -> set[int]:
    return {number for number, is_one in zip(whose, among.tolist(), strict=True) if is_one}


def _like(edge: GradientEdge) -> Any:
    node: Any = edge.node
    return node._input_metadata[edge.output_nr]
