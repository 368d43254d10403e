"""DP-SGD's optimizer in a few lines of torch, for machines without Opacus."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NoisySgd:
    """Clips `p.grad_sample` where there is one (else `p.grad` is the clipped sum), adds noise, divides by N, steps.

    Args: as Opacus's DPOptimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int,
    ):
        self.optimizer, self.max_grad_norm, self.divisor = optimizer, max_grad_norm, expected_batch_size
        self.std = noise_multiplier * max_grad_norm
        self.params = [p for group in optimizer.param_groups for p in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        for p in self.params:
            p.grad_sample = None

    @torch.no_grad()
    def step(self) -> None:
        grad_samples = [getattr(p, "grad_sample", None) for p in self.params]
        if any(g is not None for g in grad_samples):
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in grad_samples]).norm(dim=0)
            factors = (self.max_grad_norm / norms).clamp(max=1.0)
            for p, g in zip(self.params, grad_samples, strict=True):
                p.grad = torch.einsum("n,n...->...", factors.to(g.dtype), g).to(p.dtype)
        gradients = [p.grad for p in self.params]
        if self.std > 0:
            torch._foreach_add_(gradients, [torch.empty_like(g).normal_(0.0, self.std) for g in gradients])
        torch._foreach_div_(gradients, self.divisor)
        self.optimizer.step()


def two_backwards(wrapped: nn.Module, losses: Tensor) -> None:
    """Norms from the first backward pass, the sum of clipped gradients from the second."""
    losses.mean().backward(retain_graph=True)
    factors = wrapped.get_clipping_coef()
    wrapped.zero_grad(set_to_none=True)
    wrapped.disable_hooks()
    (factors.to(losses.dtype) * losses).sum().backward()
    wrapped.enable_hooks()
