"""Opacus's optimizer for fast gradient clipping, its noise and scaling as operations over all parameters at once."""

from __future__ import annotations

import torch

from dpfast.errors import DpfastError

try:
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
except ImportError as error:
    raise DpfastError(
        f"dpfast.opacus_optimizer needs Opacus 1.5.4 or newer ({error}); install it with: pip install 'dpfast[opacus]'"
    ) from error


class DPOptimizerFast(DPOptimizerFastGradientClipping):
    """``DPOptimizerFastGradientClipping`` with the same noise from the same generator, in fewer passes over memory.

    Args: as Opacus's class.

    The sum ``p.summed_grad`` is ``p.grad`` itself where one backward pass makes a step, not a deep copy of it; the
    noise is drawn parameter by parameter, in Opacus's order, and added and divided by the expected batch size for
    all parameters at once. ``secure_mode`` takes Opacus's own way.
    """

    def accumulate(self) -> None:
        with torch.no_grad():
            for p in self.params:
                if p.summed_grad is None:
                    p.summed_grad, p.grad = p.grad.detach(), None
                else:
                    p.summed_grad.add_(p.grad)

    def add_noise(self) -> None:
        std = getattr(self, "_adjusted_noise_multiplier", self.noise_multiplier) * self.max_grad_norm
        if self.secure_mode:
            super().add_noise()
            return
        for p in self.params:
            _check_processed_flag(p.summed_grad)
        sums = [p.summed_grad for p in self.params]
        with torch.no_grad():
            if std > 0:
                noise = [torch.empty_like(s).normal_(0.0, std, generator=self.generator) for s in sums]
                torch._foreach_add_(noise, sums)
            else:
                noise = [s.clone() for s in sums]
        for p, noised in zip(self.params, noise, strict=True):
            p.grad = noised.view_as(p)
            _mark_as_processed(p.summed_grad)

    def scale_grad(self) -> None:
        if self.loss_reduction == "mean":
            with torch.no_grad():
                divisor = self.expected_batch_size * self.accumulated_iterations
                torch._foreach_div_([p.grad for p in self.params], divisor)
