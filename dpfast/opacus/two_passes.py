"""Opacus's second backward pass, on Σ_n c_n loss_n: what must be so for it to be one, and where it proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor

from dpfast.errors import InputError, warn_caller
from dpfast.modes import GradSampleModule, check_loss_reduction, left_in
from dpfast.opacus.optimizers import DPOptimizerFast
from dpfast.taps import nodes_behind

_LOOKED_AT: WeakSet[Any] = WeakSet()
"""Modules of Opacus's whose first second pass has been looked at."""


def one_a_sample(losses: Tensor) -> Tensor:
    """The losses. Raises InputError where they are not (N,)."""
    if losses.dim() != 1:
        raise InputError(
            f"a loss of shape {tuple(losses.shape)} is not one loss a sample, (N,); reduce or squeeze all dimensions "
            "but the first, and leave the first to dpfast"
        )
    return losses


def reduced(loss: DPTensorFastGradientClipping) -> Tensor:
    """The loss of the first pass. Raises InputError where ``loss_reduction`` is not "mean" or "sum"."""
    check_loss_reduction(loss.loss_reduction)
    return loss.loss_per_sample.mean() if loss.loss_reduction == "mean" else loss.loss_per_sample.sum()


def two_passes(loss: DPTensorFastGradientClipping, factors: Callable[[], Tensor]) -> None:
    """The norms, then :func:`second_pass`.

    Args:
        factors: what the norms make of the samples' clip factors.
    """
    reduced(loss).backward(retain_graph=True)
    # dpfast's first pass leaves what is there: clipped sums of earlier losses of this step, which Opacus's would lose.
    # Opacus's optimizer leaves what it has taken there too, and would take that twice.
    sums_stay = isinstance(loss.module, GradSampleModule) and isinstance(loss.optimizer, DPOptimizerFast)
    if not (sums_stay and left_in(loss.module.parameters()) is not None):
        loss.optimizer.zero_grad()
    second_pass(loss.module, loss.loss_per_sample, factors())


def second_pass(module: Any, losses: Tensor, factors: Tensor) -> None:
    """``p.grad += Σ_n c_n g_n`` by a backward pass.

    Raises:
        InputError: the backward pass before saw another number of samples than there are losses.
    """
    if factors.shape != losses.shape:
        raise InputError(
            f"{factors.numel()} samples went through the model and there are {losses.numel()} losses; give the "
            "criterion one loss a sample (and shape= where a sample has several targets)"
        )
    if not isinstance(module, GradSampleModule) and module not in _LOOKED_AT:
        _warn_of_16_bits(module, losses)  # first: where warnings are errors, the next one is told again
        _LOOKED_AT.add(module)
    module.disable_hooks()
    try:
        (factors.to(losses.device) * losses).sum().backward()
    finally:
        module.enable_hooks()


def _warn_of_16_bits(module: Any, losses: Tensor) -> None:
    """A factor in front of the loss goes through the whole pass: in 16 bits it makes other gradients than those whose
    norms were taken. Looked for once a module, in autograd's graph and the parameters."""
    dtype = next((p.dtype for p in module._module.parameters() if p.requires_grad and _is_16_bit(p)), None)
    dtype = dtype or _dtype_in_graph(losses)
    if dtype is not None:
        warn_caller(
            f"{type(module._module).__name__}: Opacus's second backward pass computes in {dtype} here, where it rounds "
            "otherwise than the first, whose norms were taken: a sample may add more than max_grad_norm, by about "
            "half a percent in ordinary models. dpfast's engine holds it to max_grad_norm: from dpfast.opacus import "
            "PrivacyEngine, with grad_sample_mode='dpfast'"
        )


def _dtype_in_graph(losses: Tensor) -> torch.dtype | None:
    """The first dtype of 16 bits under the losses."""
    results = (result for node in nodes_behind([losses.grad_fn]) for result in node._input_metadata)
    return next((result.dtype for result in results if _is_16_bit(result)), None)


def _is_16_bit(x: Any) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)
