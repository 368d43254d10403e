"""Whether a loss ranks the samples of its batch: hard examples by ``topk``, the largest loss, a median.

Which of them a sample's gradient goes through depends on all, and second derivatives of straight pieces do not show it
(:mod:`dpfast.modes.curvature`). The operations stand in the loss's graph; whether what they rank with each other are
several samples' is seen by what that gives the model's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpfast.modes.cut_graph import Cut
from dpfast.modes.loss_ends import Output

_GROUPS = 4  # of what one operation ranks, so many are asked whose they are

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
        if name in _RANK and any(_of_several(*group, ends, cut) for group in _ranked(node, _RANK[name])):
            return name.partition("Backward")[0].lower()
    return None


def _ranked(node: Any, saved: str | None) -> Iterator[tuple[GradientEdge, Tensor]]:
    """What it ranks, and some of the entries that are ranked with each other, bool."""
    made_by, number = node.next_functions[0]
    if made_by is None:
        return
    like = made_by._input_metadata[number]
    shape = tuple(like.shape)
    which = getattr(node, f"_saved_{saved}", ()) if saved else ()
    some = [int(d) for d in (which if isinstance(which, (tuple, list)) else (which,))]
    dims = {(d - 2**64 if d >= 2**63 else d) % len(shape) for d in some} if shape else set()  # torch loses its sign
    others = [d for d in range(len(shape)) if dims and d not in dims]
    groups = math.prod(shape[d] for d in others)
    if math.prod(shape) <= groups:  # of one entry each
        return
    for group in range(0, groups, -(-groups // _GROUPS)):
        index: list[Any] = [slice(None)] * len(shape)
        for d in others:
            group, index[d] = divmod(group, shape[d])
        entries = torch.zeros(shape, dtype=torch.bool, device=like.device)
        entries[tuple(index)] = True
        yield GradientEdge(made_by, number), entries


def _of_several(ranked: GradientEdge, entries: Tensor, ends: dict[GradientEdge, Output], cut: Cut) -> bool:
    """Whether these come of several samples."""
    like: Any = ranked.node._input_metadata[ranked.output_nr]
    found: set[int] = set()
    for g, output in zip(cut.gradients([ranked], [entries.to(like.dtype)], list(ends)), ends.values(), strict=True):
        if g is not None and output.dims:
            found.update(output.whose()[(g != 0).movedim(output.dims[0], 0).flatten(1).any(1).cpu()].tolist())
    return len(found) > 1
