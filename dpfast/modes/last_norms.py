"""What the last backward pass has left to read: norms, clip factors, how careful they are, and who was dropped."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpfast.arithmetic import SquaredNorm
from dpfast.errors import StateError
from dpfast.modes.clippers import ClipFactors
from dpfast.modes.nonfinite_samples import DroppedSamples
from dpfast.modes.second_pass import FirstPass


class LastNorms(nn.Module):
    """The part of a mode that tells of them."""

    passes: int
    _norms: SquaredNorm | None
    _clip_factors: Tensor
    _dropped: DroppedSamples
    _first: FirstPass

    def get_norm_sample(self) -> Tensor:
        """L2 norms of the per-sample gradients over all trainable parameters, (N,) fp32, as computed.

        They are private: do not publish them.

        Raises:
            StateError: before any backward pass.
        """
        return self._last_norms().value.sqrt().float()

    def get_clipping_coef(self) -> Tensor:
        """The clip factors c (N,) fp32 of the last backward pass, (P, N) for P parameters clipped one by one.

        Raises:
            StateError: before any backward pass. InputError: with two passes, when they are multiplied with losses
                of any shape but (N,).
        """
        self._last_norms()
        if self.passes == 1:
            return self._clip_factors
        self._first.asked = True
        return self._clip_factors.as_subclass(ClipFactors)

    @property
    def per_sample_gradient_norms(self) -> Tensor:
        """:meth:`get_norm_sample` as an attribute; AttributeError before any backward pass."""
        if self._norms is None:
            raise AttributeError(
                "per_sample_gradient_norms is not set. Please call forward and backward on the model before accessing "
                "this property."
            )
        return self.get_norm_sample()

    @property
    def nonfinite_samples(self) -> int:
        """How many samples were dropped so far because their norm was inf or NaN. Waits for a GPU."""
        return self._dropped.count

    @property
    def norm_slack(self) -> Tensor:
        """(bound - norm) / norm of the last backward pass, (N,): how much too careful the clip factors are."""
        norms = self._last_norms()
        return (norms.upper.sqrt() / norms.value.sqrt().clamp(min=torch.finfo(torch.float64).tiny) - 1.0).float()

    def _last_norms(self) -> SquaredNorm:
        if self._norms is None:
            raise StateError("no backward pass has run yet; call loss.backward() before reading norms or clip factors")
        return self._norms
