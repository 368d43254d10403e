"""What is made of parameters alone keeps its history, through which samples' gradients go back at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from dpfast.factors import Dense, Factor, standardised


def remaining() -> AbstractContextManager[object]:
    """What the backward of the operations within it needs is kept, past a checkpoint around it: it is asked for many
    gradients at once, within which no forward can run again."""
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def pulled_back(factor: Factor, value: Tensor, sources: Sequence[Tensor]) -> list[Factor | None]:
    """The factor of each of the tensors that ``value``, whose ``factor`` is given, was made of; None of one that it
    does not depend on."""
    known = [standardised(factor, value, source) for source in sources]
    if any(known):
        return known
    gradients = factor.materialized().values
    if gradients.shape[0] == 0:
        return [Dense(gradients.new_zeros(0, *source.shape)) for source in sources]
    found = _gradients(value, sources, gradients.to(value.dtype))
    return [None if g is None else Dense(g) for g in found]


def _gradients(value: Tensor, sources: Sequence[Tensor], gradients: Tensor) -> Sequence[Tensor | None]:
    """The sources' (N, *shape), of N gradients of ``value``."""
    try:
        return torch.autograd.grad(
            value, sources, gradients, is_grads_batched=True, retain_graph=True, allow_unused=True
        )
    except RuntimeError:  # no rule for many at once (einsum in somebody's backward, a write); what else, comes again
        pass
    each = [torch.autograd.grad(value, sources, g, retain_graph=True, allow_unused=True) for g in gradients]
    return [_stacked(of_source) for of_source in zip(*each, strict=True)]


def _stacked(of_samples: Sequence[Tensor | None]) -> Tensor | None:
    like = next((g for g in of_samples if g is not None), None)
    return None if like is None else torch.stack([torch.zeros_like(like) if g is None else g for g in of_samples])
