"""Large linear layers on a CPU: norm, factor and clipped sum of a few samples after the others.

A norm without the gradient costs products of its own, and a gradient that is kept costs memory, because factors need
the norms of all layers. When all other norms are known, one sample's gradients of the remaining layers give its factor,
and are added to the sums while caches hold them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpfast.arithmetic import SquaredNorm, cost, ops
from dpfast.factors import Factor, InTurn, OuterProduct, Reshaped, added_up
from dpfast.modes.clipped import Clipped, clip
from dpfast.modes.clippers import AutomaticClipper, ConstantFlatClipper, NormClipper
from dpfast.modes.gathered import Gathered
from dpfast.modes.memory_budget import size_of

SMALL = {"cpu": 2**16, "cuda": 2**20}
"""Bytes of an input or a gradient up to which a layer waits for others alike: on a CPU copies of more would not stay in
the caches, and new memory costs page faults; a GPU copies so many in less than a launch takes."""


def is_never_in_turn(factor: Factor) -> bool:
    """Whether, for all that is known of a sample's shapes, it goes the same way in whatever company."""
    product = may_be_taken_in_turn(factor)
    if product is None or product.keep_ratio is not None:
        return product is None
    size = size_of(product)
    return not cost.may_save_in_turn(size) or (product.keeps and not cost.waits(size))


def waits_for_its_turn(factor: Factor) -> bool:
    """Whether a factor that would be kept waits for the end, which may take it in turn: its inputs are less until
    then."""
    product = may_be_taken_in_turn(factor) if isinstance(factor, (OuterProduct, Reshaped)) else None
    if product is None or product.keep_ratio is not None or not product.keeps:
        return False
    return cost.waits(size_of(product))


def may_be_taken_in_turn(factor: Factor) -> OuterProduct | None:
    """The outer product of a factor on a CPU, which the reference sums up in fp32; None: it cannot be taken so. Nor can
    what is so small that few samples of it would wait for others alike instead: how many there are must not tell."""
    if isinstance(factor, Reshaped):
        return may_be_taken_in_turn(factor.factor)
    if not isinstance(factor, OuterProduct) or factor.device.type != "cpu" or factor.dtype is not torch.float32:
        return None
    a, b, n = factor.activations, factor.backprops, factor.num_samples
    large = max(a.nbytes, b.nbytes) > n * SMALL["cpu"]
    return factor if large and not ops.runs_kernels(a, b) else None


def clips_one_by_one(clipper: NormClipper) -> bool:
    """Whether a sample's factor follows from its own norm. Clippers of others may look at the batch."""
    return type(clipper) in (ConstantFlatClipper, AutomaticClipper)


def find_in_turn(entries: Sequence[Gathered | None]) -> dict[int, OuterProduct]:
    """By place what is taken so (``cost.in_turn``), and no entry has any longer: of parameters with one use. What has
    waited for its turn in vain is kept."""
    found: dict[int, OuterProduct] = {}
    alone: list[Gathered] = []
    for i, entry in enumerate(entries):
        if entry is not None and len(entry.factors) == 1 and isinstance(entry.factors[0], (OuterProduct, Reshaped)):
            alone.append(entry)
            product = may_be_taken_in_turn(entry.factors[0])
            if product is not None:
                found[i] = product
    if not found:  # nor does one of these wait for its turn
        return {}
    chosen = cost.in_turn([size_of(product) for product in found.values()])
    in_turn = {i: product for (i, product), is_chosen in zip(found.items(), chosen, strict=True) if is_chosen}
    for i in in_turn:
        entries[i].factors.clear()  # type: ignore[union-attr]  # found there
    for entry in alone:
        if entry.factors and waits_for_its_turn(entry.factors[0]):
            entry.factors = [entry.factors[0].kept()]
    return in_turn


def clip_in_turn(
    in_turn: InTurn,
    norms: Sequence[SquaredNorm | None],
    clipper: NormClipper,
    excess: float,
    scale: float | Tensor,
    valid: Tensor | None,
) -> Clipped:
    """``clipped.clip`` of all parameters, the sums of ``in_turn`` taken with it.

    Args:
        norms: one over all other parameters, if there are any.
        excess: by how much, relatively, a parameter's sum may come out too large.
    """
    known = [norm for norm in norms if norm is not None]
    before = [torch.stack(of) for of in zip(*known, strict=True)]
    found = []
    for some in in_turn.samples():
        written: Sequence[Tensor] = in_turn.write(some)
        if before:
            written = [torch.cat((x[:, some], y)) for x, y in zip(before, written, strict=True)]
        norm = added_up(*written)
        own = scale[some] if isinstance(scale, Tensor) else scale
        mask = None if valid is None else valid[some]
        found.append(clip(clipper, [norm], scale=own, rounding=[excess], valid=mask))
        in_turn.add(found[-1].coefficients(0, in_turn.dtype).tolist())
    return Clipped(*(torch.cat(parts, dim=-1) for parts in zip(*found, strict=True)))
