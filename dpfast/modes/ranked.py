"""Whether a loss ranks the samples of its batch: hard examples by ``topk``, the largest loss, a median.

Which of them a sample's gradient goes through depends on all, and second derivatives of straight pieces do not show it
(:mod:`dpfast.modes.curvature`). The operations stand in the loss's graph; whether what they rank with each other are
several samples' is seen by what that gives the model's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpfast.modes.cut_graph import Cut
from dpfast.modes.loss_ends import Output
from dpfast.taps import noise_like

_GROUPS = 4  # that come of samples, of what one operation ranks with each other, are asked whose they are
_ASKED = 64  # so many at most

# The dimensions are what they have saved; None: all.
_ALONG = ("Topk", "Sort", "Kthvalue", "Max", "Min", "Amax", "Amin", "Cummax", "Cummin")
_RANK = {
    **{f"{name}Backward0": "dim" for name in _ALONG},
    **{f"{name}Backward1": None for name in ("Max", "Min")},
    **{f"{name}Backward0": None for name in ("Median", "Nanmedian")},
    **{f"{name}Backward1": "dim" for name in ("Sort", "Median", "Nanmedian")},
}


def ranked_samples(nodes: Iterable[Any], ends: dict[GradientEdge, Output], cut: Cut) -> str | None:
    """The name of an operation that ranks samples, or units, where one of the nodes is of such.

    Args:
        nodes: between a model's outputs and its loss. ends: outputs that have samples. cut: where the loss's graph
            ends, there among others.
    """
    for node in nodes:
        name = type(node).__name__
        if name in _RANK and node.next_functions[0][0] is not None:
            ranked = _Ranked(node, _RANK[name], ends, cut)
            if any(map(ranked.are_samples, ranked.dims)) or ranked.are_several():
                return name.partition("Backward")[0].lower()
    return None


class _Ranked:
    """What an operation ranks.

    Attributes:
        dims: along which.
    """

    def __init__(self, node: Any, saved: str | None, ends: dict[GradientEdge, Output], cut: Cut):
        self._edge, self._ends, self._cut = GradientEdge(*node.next_functions[0]), ends, cut
        like: Any = self._edge.node._input_metadata[self._edge.output_nr]
        self._shape = tuple(like.shape)
        self._noise = noise_like(torch.empty((), dtype=like.dtype, device=like.device).expand(self._shape), 0)
        which = getattr(node, f"_saved_{saved}", ()) if saved else ()
        some = [int(d) for d in (which if isinstance(which, (tuple, list)) else (which,))]
        some = [d - 2**64 if d >= 2**63 else d for d in some]  # torch loses its sign
        self.dims = sorted({d % len(self._shape) for d in some or range(len(self._shape))}) if self._shape else []

    def are_samples(self, dim: int) -> bool:
        """Whether either half of the entries along a dimension comes of that half of the samples."""
        forward = next(iter(self._ends.values())).forward
        if self._shape[dim] != forward.n:
            return False
        half, came = forward.half(), 0
        for own in (half, ~half):
            found = self._samples(own.view(-1, *[1] * (len(self._shape) - dim - 1)))
            others = {number for number, is_own in zip(forward.whose, own.tolist(), strict=True) if not is_own}
            if found & others:
                return False
            came += len(found)
        return came > 1

    def are_several(self) -> bool:
        """Whether what is ranked with each other comes of several samples."""
        others = [d for d in range(len(self._shape)) if d not in self.dims]
        groups, reached = math.prod(self._shape[d] for d in others), 0
        if math.prod(self._shape) <= groups:  # of one entry each
            return False
        for group in range(0, groups, -(-groups // _ASKED)):
            index: list[Any] = [slice(None)] * len(self._shape)
            for d in others:
                group, index[d] = divmod(group, self._shape[d])
            entries = torch.zeros(self._shape, dtype=torch.bool)
            entries[tuple(index)] = True
            found = self._samples(entries)
            reached += bool(found)
            if len(found) > 1 or reached == _GROUPS:
                return len(found) > 1
        return False

    def _samples(self, entries: Tensor) -> set[int]:
        """The numbers of those that entries come of, or of their units."""
        found: set[int] = set()
        grads = self._cut.gradients([self._edge], [self._noise * entries.to(self._noise.device)], list(self._ends))
        for g, output in zip(grads, self._ends.values(), strict=True):
            if g is not None and output.dims:
                rows = ((g != 0) & g.isfinite()).movedim(output.dims[0], 0).flatten(1).any(1)
                found.update(output.whose()[rows.cpu()].tolist())
        return found
