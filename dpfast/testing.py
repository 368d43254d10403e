"""The oracle: per-sample gradients by a loop over samples in fp64, which everything else is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


def loop_over_samples(
    model: nn.Module, loss: Callable[..., Tensor], *batch: Any, batch_dim: int = 0
) -> dict[str, Tensor]:
    """Per-sample gradients, one ordinary backward pass a sample, in fp64.

    Args:
        model: not changed; a copy in fp64 does the work. Not wrapped by dpfast or Opacus.
        loss: ``loss(model, *batch)``, the scalar loss of a batch; it is called with batches of one sample, so it
            may be a sum or a mean over samples.
        batch: tensors (or trees of them) with N samples in dimension ``batch_dim``; floats are converted to fp64.

    Returns:
        {name: (N, *shape)} for every trainable parameter, zeros where a sample does not reach it.

    >>> import torch.nn.functional as F
    >>> layer, x = nn.Linear(3, 2), torch.ones(4, 3)
    >>> {k: tuple(g.shape) for k, g in loop_over_samples(layer, lambda m, x: m(x).sum(), x).items()}
    {'weight': (4, 2, 3), 'bias': (4, 2)}
    """
    model = copy.deepcopy(model).double()
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    batch = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, batch)
    num_samples = next(x for x in _tensors(batch)).shape[batch_dim]
    gradients: dict[str, list[Tensor]] = {name: [] for name in names}
    for i in range(num_samples):
        sample = tree_map(lambda x, i=i: x.narrow(batch_dim, i, 1) if isinstance(x, Tensor) else x, batch)
        model.zero_grad(set_to_none=True)
        loss(model, *sample).backward()
        for name, p in names.items():
            gradients[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    return {
        name: torch.stack(values) if values else names[name].new_zeros(0, *names[name].shape)
        for name, values in gradients.items()
    }


def clipped_sum(gradients: dict[str, Tensor], max_grad_norm: float) -> dict[str, Tensor]:
    """``Σ_n min(1, C / ‖g_n‖) g_n`` from :func:`loop_over_samples`'s answer."""
    norms = norms_of(gradients)
    factors = torch.where(norms > max_grad_norm, max_grad_norm / norms, 1.0)
    return {name: torch.einsum("n,n...->...", factors, g) for name, g in gradients.items()}


def norms_of(gradients: dict[str, Tensor]) -> Tensor:
    """L2 norms over all parameters, (N,)."""
    squares = [g.unsqueeze(-1).flatten(1).square().sum(1) for g in gradients.values()]
    return torch.stack(squares).sum(0).sqrt()


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """``‖actual − exact‖ / ‖exact‖`` in fp64; 0 where both are zero or empty, inf for NaN."""
    difference = float((actual.double() - exact.double()).norm())
    size = float(exact.double().norm())
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 and difference == difference else float("inf")


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]
