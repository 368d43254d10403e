"""Optimizers that add noise to what dpfast's one-pass and two-pass modules have clipped."""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import DistributedDPOptimizerFastGradientClipping
from torch import optim

from dpfast.accumulation import held_by
from dpfast.clipping import ConstantFlatClipper, ConstantPerLayerClipper, check_threshold
from dpfast.errors import InputError, StateError
from dpfast.fast_gradient_clipping import GradSampleModuleFastGradientClipping


class _BoundToModule(DPOptimizerFastGradientClipping):
    """The module clips, this optimizer adds the noise: both must mean the same C.

    ``max_grad_norm`` is the module's: a scheduler that sets it changes both. The noise of a step is that of the
    largest sensitivity that any of its backward passes was clipped to, should it have changed between them.
    """

    def __init__(
        self, optimizer: optim.Optimizer, *, module: GradSampleModuleFastGradientClipping, max_grad_norm: Any, **options
    ):
        self.module = module
        self._taken = 0.0
        super().__init__(optimizer, max_grad_norm=max_grad_norm, **options)

    @property
    def max_grad_norm(self) -> float:
        """The most that a sample moves the sum, in L2 norm: the module's sensitivity."""
        return self._noise_for

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        clip_to(self.module, value)
        self._noise_for = float(value)

    def add_noise(self) -> None:
        """Adds ``noise_multiplier · sensitivity`` times Gaussian noise. Stores the result in ``p.grad``."""
        before = self._noise_for
        self._noise_for = max(self._taken, before)
        try:
            super().add_noise()
        finally:
            self._noise_for, self._taken = before, 0.0


class TwoPassOptimizer(_BoundToModule):
    """Opacus's ``DPOptimizerFastGradientClipping`` for a module of two passes.

    Args:
        module: the module whose norms the criterion has weighted the losses by.
        max_grad_norm: C. Others: as in Opacus.
    """

    def accumulate(self) -> None:
        """``p.summed_grad += p.grad``."""
        self._taken = max(self._taken, self.module.sensitivity)
        super().accumulate()


class OnePassOptimizer(_BoundToModule):
    """Noise for a module of one pass, whose ``loss.backward()`` has left ``p.grad = Σ_n c_n g_n``.

    Differs from Opacus's ``DPOptimizerFastGradientClipping`` where that would let the promise slip:
    a gradient is taken once (``p.grad`` is None after a skipped step, so a forgotten ``zero_grad`` adds nothing
    twice), and several backward passes before one step count as several in ``accumulated_iterations``, which the
    accountant and the division by the batch size read.

    Args:
        module: a ``GradSampleModuleFastGradientClipping(passes=1)``.
        max_grad_norm: C; with per-layer clipping ‖(C_p)‖, see PrivacyEngine. Others: as in Opacus.

    Raises:
        StateError: ``step()`` without a backward pass since the last one.
    """

    def __init__(self, optimizer: optim.Optimizer, *, module: GradSampleModuleFastGradientClipping, **options: Any):
        self._passes = 0
        super().__init__(optimizer, module=module, **options)

    @property
    def accumulated_iterations(self) -> int:
        """The most backward passes that a sub-step of the current step has taken together; 1 before any."""
        return max(self._passes, 1)

    def accumulate(self) -> None:
        """Moves ``p.grad`` to ``p.summed_grad``, or adds it there."""
        left = held_by(self.params)
        if self.params and left is None:
            raise StateError(
                "p.grad does not hold clipped gradients: no backward pass of the dpfast module since the last step"
            )
        for p in self.params:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = None
            p.summed_grad = grad if p.summed_grad is None else p.summed_grad.add_(grad)
        if left is not None:
            self._passes = max(self._passes, left.passes)
            self._taken = max(self._taken, left.sensitivity)

    def pre_step(self, closure: Any = None) -> bool:
        """Takes the gradients; adds noise and scales unless the step is to be skipped. As in Opacus."""
        full_step = super().pre_step(closure)
        if full_step:
            self._passes = 0
        return full_step


class DistributedOnePassOptimizer(OnePassOptimizer, DistributedDPOptimizerFastGradientClipping):
    """:class:`OnePassOptimizer` where each worker clips its samples and worker 0 adds the noise, as in Opacus."""


class DistributedTwoPassOptimizer(TwoPassOptimizer, DistributedDPOptimizerFastGradientClipping):
    """:class:`TwoPassOptimizer` where each worker clips its samples and worker 0 adds the noise, as in Opacus."""


def clip_to(module: GradSampleModuleFastGradientClipping, sensitivity: float) -> None:
    """Has the module clip to that sensitivity from the next backward pass on; per-layer thresholds keep their ratios.

    Raises:
        InputError: not a positive finite number, or the module has a clipper whose thresholds are its own business.
    """
    value, clipper = check_threshold(sensitivity), module.norm_clipper
    if clipper is None:
        module.max_grad_norm = value
    elif isinstance(clipper, ConstantPerLayerClipper):
        ratio = value / clipper.sensitivity
        clipper.flat_values = [threshold * ratio for threshold in clipper.flat_values]
    elif isinstance(clipper, ConstantFlatClipper):
        clipper.flat_value = value
    elif value != clipper.sensitivity:
        raise InputError(f"{type(clipper).__name__} clips to {clipper.sensitivity}, not to max_grad_norm={value}")
