"""Opacus's ``get_norm_sample`` and ``get_clipping_coef``, with sums and factors that round no sample above C.

Opacus adds squared norms and divides in fp32; over many layers that rounds a norm down by more than a sample may exceed
C. These two take their places while dpfast is installed (``backward.install``), and mean what they mean there.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import DPTensorFastGradientAdaptiveClipping
from torch import Tensor

from dpfast.arithmetic import towards_zero
from dpfast.modes import ClipFactors, DroppedSamples, safe_factors

_NOT_FINITE = "{count} of {n} samples have a gradient norm that is inf or NaN; their clip factor is 0"

_NOISE_MULTIPLIER = next(
    name
    for name in ("_adjusted_noise_multiplier", "noise_multiplier")  # the latter in Opacus 1.5
    if name in DPTensorFastGradientAdaptiveClipping.backward.__code__.co_names
)
"""Where Opacus's adaptive clipping leaves the multiplier of the step's noise."""

_DROPPED: WeakKeyDictionary[Any, DroppedSamples] = WeakKeyDictionary()
"""What was dropped by each module of Opacus's."""


def get_norm_sample(module: Any) -> Tensor:
    """The norms over all trainable parameters, (N,), rounded up; kept as ``per_sample_gradient_norms``.

    Raises:
        RuntimeError: no parameter is trainable. AttributeError: a parameter has no ``_norm_sample``: the step did not
            use it. Both as in Opacus.
    """
    norms = [p._norm_sample for p in module.trainable_parameters]
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    double = stacked.double()
    largest = double.amax(0)
    unit = torch.where((largest > 0) & torch.isfinite(largest), largest, 1.0)  # squares neither overflow nor vanish
    total = (double / unit).square().sum(0).sqrt() * unit * (1.0 + 2.0**-40)
    module.per_sample_gradient_norms = rounded_up(total, torch.promote_types(stacked.dtype, torch.float32))
    return module.per_sample_gradient_norms


def get_clipping_coef(module: Any) -> Tensor:
    """``min(1, C / (norm + 1e-6))`` (N,), lowered to where rounding makes no sample larger than C; 0 where the norm is
    inf or NaN, with a warning the first time.

    Raises:
        InputError: when they are multiplied with losses of any shape but (N,).
    """
    return _factors(module, module.get_norm_sample(), added=1e-6)


def get_adapted_clipping_coef(loss: Any) -> Tensor:
    """The factors of Opacus's adaptive clipping, ``min(1, C / norm)`` (N,) for the C that it makes of the norms and of
    noise; lowered as those of :func:`get_clipping_coef`. C and the noise's multiplier stay where Opacus leaves them.

    Raises:
        as :func:`get_clipping_coef`.
    """
    module, optimizer = loss.module, loss.optimizer
    norms = module.get_norm_sample()
    limit, noise_multiplier = loss._update_clip_and_noise(norms)
    module.max_grad_norm = optimizer.max_grad_norm = limit
    setattr(optimizer, _NOISE_MULTIPLIER, noise_multiplier)
    return _factors(module, norms, added=0.0)


def _factors(module: Any, norms: Tensor, *, added: float) -> Tensor:
    _DROPPED.setdefault(module, DroppedSamples(_NOT_FINITE)).add(norms.unsqueeze(0))
    double, limit = norms.double(), module.max_grad_norm
    factors = safe_factors((limit / (double + added)).clamp(max=1.0), double, limit)
    return towards_zero(factors, norms.dtype).as_subclass(ClipFactors)


def rounded_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``, no entry smaller than it was."""
    rounded = x.to(dtype)
    return torch.where(rounded.to(x.dtype) < x, rounded.nextafter(rounded.new_tensor(torch.inf)), rounded)
