"""The second backward pass of two repeats the first, and the factors are applied where gradients are summed.

A factor in front of the loss goes through the whole backward pass: what rounds, underflows, cancels or is a hook of
somebody's on the way makes another gradient of it than the one whose norm was taken. So the gradients that the first
pass saw at the model's outputs take the place of the second's, what lies below is computed again as it was, and each
tap sums its samples with the factors, which leave out a sample with factor 0 whatever it holds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpfast.taps import Activations, Record

_PROBED = 2048
"""The most entries of one sample's tensor that a probe looks at, spread over all its dimensions."""

_PROBES = 4

_SAME = 2.0**-12
"""How far the probes of two runs on a CPU may differ, relatively: only the order of sums is left to a library."""

_ALIKE = 2.0**-5
"""The same for 16-bit tensors, and for GPUs, where sums may be atomic."""

_WEIGHTED = 0.5
"""How far the second pass's gradients at an output may be from the weighted first ones, over the whole batch. Nothing
is computed with them: they only tell that the loss is another one."""

_LEAST_WEIGHT = 2.0**-100
"""Samples whose factors are smaller are left out of that."""


_NOT_WEIGHTED = (
    "the second backward pass is not that of Σ_n c_n loss_n with the factors of get_clipping_coef() and the losses of "
    "the first: give (factors * losses).sum(), or take passes=1"
)

_NOT_REPEATED = (
    "{layer}: the second backward pass saw other activations or gradients than the first, whose norms were taken; let "
    "checkpoints preserve the random state (preserve_rng_state=True), make the model deterministic, or take passes=1"
)


class Output:
    """One tensor of the model's output, and its gradient in the last first pass; lives as long as its graph."""

    def __init__(self, batch_size: int | None, batch_dim: int):
        self.batch_size = batch_size
        self.batch_dim = batch_dim
        self.grad: Tensor | None = None
        self.first: FirstPass | None = None


class FirstPass:
    """What the second backward pass needs of the first.

    Attributes:
        weights: what each sample's share is summed with, c_n times N where the loss was a mean, (N,) fp64; empty until
            the pass is over. single: the same rounded towards zero, fp32.
        asked: whether the factors have been handed out, so that a second pass is to come.
    """

    def __init__(self) -> None:
        self.weights = self.single = torch.zeros(0, dtype=torch.float64)
        self.probes = Probes()
        self.asked = False

    def is_weighted(self, output: Output, grad: Tensor) -> Tensor | None:
        """Whether ``grad`` is what factors in front of the loss make of the first pass's gradient at that output, (),
        on its device; None where it has no dimension of samples."""
        dim, n = output.batch_dim, len(self.weights)
        if output.grad is None or grad.dim() <= dim or grad.shape[dim] != n or n == 0:
            return None
        weights = self.weights.to(grad.device).unsqueeze(1)
        expected, found = (probe(x.movedim(dim, 0)).double() for x in (output.grad, grad))
        no_factor = weights < _LEAST_WEIGHT  # in fp32 it may be 0
        expected, found = (x.masked_fill(no_factor, 0.0) for x in (expected * weights, found))
        # What underflow hides, in both passes.
        lost = (weights.norm() + len(weights) ** 0.5) * torch.finfo(grad.dtype).tiny * _PROBED
        # A first pass that sees nothing but zeros says nothing of the loss.
        return ((found - expected).norm() <= _WEIGHTED * expected.norm() + lost) | (expected == 0).all()


class SecondPass:
    """What the second backward pass has seen, beside what the first had.

    Attributes:
        is_weighted: whether its loss is the first's with factors, by the first output that it comes to, (); None where
            that has no samples.
    """

    def __init__(self, first: FirstPass, is_weighted: Tensor | None):
        self.first = first
        self.probes = Probes()
        self.is_weighted = is_weighted

    def faults(self) -> dict[str, Tensor]:
        """What may be wrong with it, and whether it is, () each."""
        found = {}
        if self.is_weighted is not None:
            found[_NOT_WEIGHTED] = ~self.is_weighted
        for layer, differs in self.probes.differing(self.first.probes, self.first.weights).items():
            found[_NOT_REPEATED.format(layer=layer)] = differs
        return found


class Probes:
    """What the taps of one backward pass have seen: a few numbers a sample and tensor, in the order of the pass."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[Tensor, float]]] = defaultdict(list)

    def take(self, record: Record, activations: Activations, backprops: tuple[Tensor, ...], *, whole: bool) -> None:
        """Of one use of a tap; samples are where the module has them.

        Args:
            whole: forwards have been run again, so look at every entry, and at activations too; without that these are
                the very tensors that the forward has saved.
        """
        dim = record.tap.batch_dim
        for x in tree_leaves((tuple(activations), activations.kwargs, backprops)) if whole else backprops:
            if isinstance(x, Tensor) and not x.is_complex() and x.dim() > dim:
                x = x if x.is_floating_point() else x.double()  # rows of a table, masks
                exact = x.device.type == "cpu" and x.dtype.itemsize >= 4
                tolerance = _SAME if exact else _ALIKE
                self.seen[record.tap.layer].append((probe(x.movedim(dim, 0), whole), tolerance))

    def differing(self, first: Probes, weights: Tensor) -> dict[str, Tensor]:
        """By layer whether it has seen something else than in the first pass, () each; dropped samples do not count."""
        differ: dict[str, Tensor] = {}
        alike: dict[tuple[Any, ...], list[tuple[str, Tensor, Tensor]]] = defaultdict(list)
        for layer in {**first.seen, **self.seen}:
            before, now = first.seen.get(layer, []), self.seen.get(layer, [])
            if [p.shape for p, _ in before] != [p.shape for p, _ in now]:
                differ[layer] = torch.ones((), dtype=torch.bool, device=weights.device)
                continue
            for (p, tolerance), (q, _) in zip(before, now, strict=True):
                alike[tolerance, p.shape, p.dtype, p.device].append((layer, p, q))
        for (tolerance, *_), uses in alike.items():
            firsts, seconds = torch.stack([use[1] for use in uses]), torch.stack([use[2] for use in uses])
            flags = self._differ(firsts, seconds, tolerance, weights).to(weights.device)
            for (layer, _, _), flag in zip(uses, flags.unbind(), strict=True):
                differ[layer] = differ[layer] | flag if layer in differ else flag
        return differ

    @staticmethod
    def _differ(before: Tensor, now: Tensor, tolerance: float, weights: Tensor) -> Tensor:
        """Of probes (K, N, ·) taken together, (K,)."""
        far = (now - before).norm(dim=2) > tolerance * before.norm(dim=2)
        unlike = far | (torch.isfinite(now) != torch.isfinite(before)).any(2)
        if len(weights) == unlike.shape[1]:
            unlike = unlike & (weights.to(unlike.device) != 0)
        return unlike.any(1)


def probe(x: Tensor, whole: bool = False) -> Tensor:
    """A few linear combinations of entries of each sample of x (N, ...), (N, :data:`_PROBES`) fp32 or fp64; of a few
    entries, or of all."""
    dims = x.dim() - 1
    if whole and dims > 1:
        rows = x.detach().flatten(1, -2).to(torch.promote_types(x.dtype, torch.float32))
        sums = rows @ _combinations(rows.shape[2], x.device).to(rows.dtype)
        return (sums * _combinations(rows.shape[1], x.device).to(rows.dtype)).sum(1)
    most = x.numel() if whole else max(1, round(_PROBED ** (1.0 / max(1, dims))))
    for dim in range(1, x.dim()):
        step = math.ceil(x.shape[dim] / max(1, most))
        if step > 1:
            x = x[(slice(None),) * dim + (slice(None, None, step),)]
    x = x.detach().reshape(len(x), x.shape[1:].numel())
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x @ _combinations(x.shape[1], x.device).to(x.dtype)


@lru_cache(maxsize=256)
def _combinations(length: int, device: torch.device) -> Tensor:
    """(length, :data:`_PROBES`) fp32, no two rows alike."""
    places = torch.arange(1, length + 1, dtype=torch.float64).unsqueeze(1)
    return torch.sin(places * torch.tensor([1.0, 2.0**0.5, 3.0**0.5, 5.0**0.5], dtype=torch.float64)).float().to(device)
