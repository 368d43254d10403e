"""Optimizers of one dpfast module, as an engine makes them: it clips, they add noise, and both mean the same C."""

from __future__ import annotations

from typing import Any

from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import DistributedDPOptimizerFastGradientClipping
from torch import optim

from dpfast.distributed import refuse_disagreement
from dpfast.errors import StateError
from dpfast.modes import GradSampleModuleFastGradientClipping, Left, held_by
from dpfast.opacus.checks import why_none
from dpfast.opacus.optimizers import DPOptimizerFast
from dpfast.opacus.thresholds import set_sensitivity


class _BoundToModule(DPOptimizerFast):
    """The module clips, this optimizer adds the noise: both must mean the same C.

    ``max_grad_norm`` is the module's: a scheduler that sets it changes both. The noise of a step is that of the
    largest sensitivity that any of its backward passes was clipped to, should it have changed between them.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        *,
        module: GradSampleModuleFastGradientClipping,
        max_grad_norm: Any,
        **options: Any,
    ):
        self.module = module
        super().__init__(optimizer, max_grad_norm=max_grad_norm, **options)

    @property
    def max_grad_norm(self) -> float:
        """The most that a sample moves the sum, in L2 norm: the module's sensitivity."""
        return self._noise_for

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        set_sensitivity(self.module, value)
        self._noise_for = float(value)

    def accumulate(self) -> None:
        """Moves ``p.grad`` to ``p.summed_grad``, or adds it there."""
        left = held_by(self.params)
        if self.params and left is None:
            raise StateError(f"p.grad does not hold clipped gradients: {why_none(self.params)}")
        super().accumulate()

    def _check_sensitivity(self, left: Left) -> None:
        """Noise is for the largest in any case. Units are to be whole in one backward pass."""
        if self.module.needs_units and (left.passes > 1 or self._is_last_step_skipped):
            raise StateError(
                "the engine draws units (user_of_record), and this step sums several backward passes: a unit whose "
                "records are in two of them is clipped twice. Take a draw whole, without BatchMemoryManager and "
                "accumulation, or cap it by records_a_unit"
            )

    def _check_taken(self) -> None:
        """Noise is for the largest."""

    def add_noise(self) -> None:
        """Adds ``noise_multiplier · sensitivity`` times Gaussian noise. Stores the result in ``p.grad``."""
        before = self._noise_for
        self._noise_for = max(self._taken, before)
        try:
            super().add_noise()
        finally:
            self._noise_for = before


class TwoPassOptimizer(_BoundToModule):
    """Opacus's ``DPOptimizerFastGradientClipping`` for a module of two passes.

    Args:
        module: the module whose norms the criterion has weighted the losses by.
        max_grad_norm: C. Others: as in Opacus.

    Raises: StateError, ``step()`` without both backward passes since the last one.
    """


class OnePassOptimizer(_BoundToModule):
    """Noise for a module of one pass, whose ``loss.backward()`` has left ``p.grad = Σ_n c_n g_n``.

    Args:
        module: a ``GradSampleModuleFastGradientClipping(passes=1)``.
        max_grad_norm: C; with per-layer clipping ‖(C_p)‖, see PrivacyEngine. Others: as in Opacus.

    Raises: StateError, ``step()`` without a backward pass since the last one.
    """


class _DistributedFast(DistributedDPOptimizerFastGradientClipping, DPOptimizerFast):
    """Opacus's class in front: only where it asks for noise, on worker 0, is ours added. Each worker divides its own
    sum before they are added, and the noise is divided as worker 0's is. Other workers' sums are in their parameters'
    dtype, as Opacus adds them up."""

    _takes_unrounded = False

    def add_noise(self) -> None:
        if self.params:
            of_sum = self.accumulated_iterations, self.expected_batch_size, self.loss_reduction, len(self.params)
            of_noise = float(self.noise_multiplier), float(self.max_grad_norm)
            refuse_disagreement([p.summed_grad for p in self.params], *of_sum, *of_noise)
        super().add_noise()


class DistributedOnePassOptimizer(OnePassOptimizer, _DistributedFast):
    """:class:`OnePassOptimizer` where each worker clips its samples and worker 0 adds the noise, as in Opacus."""


class DistributedTwoPassOptimizer(TwoPassOptimizer, _DistributedFast):
    """:class:`TwoPassOptimizer` where each worker clips its samples and worker 0 adds the noise, as in Opacus."""
