"""Whether a loss ranks the samples of its batch: hard examples by ``topk``, the largest loss, a median.

Which of them a sample's gradient goes through depends on all, and second derivatives of straight pieces do not show it
(:mod:`dpfast.modes.curvature`). The operations stand in the loss's graph; whether what they rank are samples is seen by
what half of it gives the model's outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpfast.modes.cut_graph import Cut

# The dimensions are what they have saved; None: all.
_ALONG = ("Topk", "Sort", "Kthvalue", "Max", "Min", "Amax", "Amin", "Cummax", "Cummin")
_RANK = {
    **{f"{name}Backward0": "dim" for name in _ALONG},
    **{f"{name}Backward1": None for name in ("Max", "Min")},
    **{f"{name}Backward0": None for name in ("Median", "Nanmedian")},
    **{f"{name}Backward1": "dim" for name in ("Sort", "Median", "Nanmedian")},
}


def ranked_samples(nodes: Iterable[Any], dims: dict[GradientEdge, Sequence[int]], half: Tensor, cut: Cut) -> str | None:
    """The name of an operation that ranks samples, where one of the nodes is of such.

    Args:
        nodes: between a model's outputs and its loss. dims: of each output, where its samples may be.
        half: of the samples (N,), bool. cut: where the loss's graph ends, there among others.
    """
    for node in nodes:
        name = type(node).__name__
        if name in _RANK and any(
            _are_samples(*where, dims, half, cut) for where in _ranked(node, _RANK[name], len(half))
        ):
            return name.partition("Backward")[0].lower()
    return None


def _ranked(node: Any, saved: str | None, n: int) -> Iterator[tuple[GradientEdge, Sequence[int], int]]:
    """What it ranks, its shape, and the dimensions in which it does that are n long."""
    made_by, number = node.next_functions[0]
    if made_by is None:
        return
    shape = made_by._input_metadata[number].shape
    which = getattr(node, f"_saved_{saved}", ()) if saved else ()
    some = [int(d) for d in (which if isinstance(which, (tuple, list)) else (which,))]
    ranked = {(d - 2**64 if d >= 2**63 else d) % len(shape) for d in some} if shape else set()  # torch loses its sign
    for d, size in enumerate(shape):
        if size == n and (d in ranked or not some):
            yield GradientEdge(made_by, number), shape, d


def _are_samples(
    ranked: GradientEdge,
    shape: Sequence[int],
    dim: int,
    dims: dict[GradientEdge, Sequence[int]],
    half: Tensor,
    cut: Cut,
) -> bool:
    """Whether either half of the entries along that dimension comes of that half of the samples."""
    like: Any = ranked.node._input_metadata[ranked.output_nr]
    where = half.view(-1, *[1] * (len(shape) - dim - 1))
    came = 0
    for own in (half, ~half):
        mask = (where if own is half else ~where).expand(shape).to(device=like.device, dtype=like.dtype)
        found = cut.gradients([ranked], [mask], list(dims))
        rows = [_rows_of(g, d, len(half)) for g, d in zip(found, dims.values(), strict=True) if g is not None]
        if any(bool((some & ~own).any()) for some in rows):
            return False
        came += sum(int(some.sum()) for some in rows)
    return came > 1


def _rows_of(g: Tensor, dims: Sequence[int], n: int) -> Tensor:
    """The samples (N,) in whose rows anything is."""
    return (g != 0).movedim(dims[0], 0).reshape(n, -1).any(1).cpu()
