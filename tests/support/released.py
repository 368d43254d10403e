"""What a sample really adds to ``p.grad``: the oracle of the tests in ``tests/holes``."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import torch
from torch import Tensor, nn

from dpfast import DpfastError
from dpfast.errors import DpfastWarning, StateError

MARGIN = 1e-9
"""What an exact norm may exceed C by, relatively: nothing but the oracle's own conversions to a float."""

EXACT_UP_TO = 20_000
"""Entries of which the norm is taken in fractions; of more, in fp64 after scaling (relative error below 1e-12)."""


def norm_over(values: Iterable[Tensor | None], limit: float) -> float:
    """The exact L2 norm of the numbers in all tensors over ``limit``; inf where one of them is not finite.

    >>> norm_over([torch.tensor([3.0, 4.0])], 5.0)
    1.0
    """
    tensors = [x.detach().double().flatten() for x in values if x is not None]
    flat = torch.cat(tensors) if tensors else torch.zeros(0, dtype=torch.float64)
    if not torch.isfinite(flat).all():
        return math.inf
    if flat.numel() <= EXACT_UP_TO:
        square = sum((Fraction(x) ** 2 for x in flat[flat != 0].tolist()), Fraction(0))
        return math.sqrt(square / Fraction(limit) ** 2)
    largest = float(flat.abs().max())
    return float((flat / largest).norm()) * (largest / limit) if largest else 0.0


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters() if p.requires_grad]


def in_two_passes(model: nn.Module, losses: Tensor, loss_reduction: str = "mean") -> Tensor:
    """Opacus's protocol of ghost clipping; leaves ``p.grad``. Returns the clip factors."""
    loss = losses.mean() if loss_reduction == "mean" else losses.sum()
    loss.backward(retain_graph=True)
    model.zero_grad()
    factors = model.get_clipping_coef()
    model.disable_hooks()
    try:
        (factors.to(losses.device) * losses).sum().backward()
    finally:
        model.enable_hooks()
    return factors.detach().clone()


@contextmanager
def nothing_released(model: nn.Module, message: str, *, waited_for: bool | None = None) -> Iterator[None]:
    """A second backward pass that is not the first's, in ``model``.

    Args:
        message: of the StateError.
        waited_for: whether it is told at once, as on a CPU. Nobody waits for a GPU: where not even taps can tell, sums
            are zeros, and a warning comes when it has told.
    """
    waited_for = all(p.is_cpu for p in model.parameters()) if waited_for is None else waited_for
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DpfastWarning)
        try:
            yield
        except StateError as error:
            assert re.search(message, str(error)), error
        else:
            assert not waited_for, "nothing was raised"
            assert model._at_fault.count == len(model.get_clipping_coef())
            assert any("its clipped sums are zeros" in str(w.message) for w in caught)
    assert not any(g is not None and g.any() for g in gradients(model))


def keeps_or_refuses(step: Callable[[], object], model: nn.Module, limit: float) -> float:
    """Over ``limit``, the norm of what a step leaves in ``p.grad``; 0 where dpfast refuses it with an error."""
    try:
        step()
    except DpfastError:
        return 0.0
    return norm_over(gradients(model), limit)
