"""Opacus's criterion of two backward passes, with one loss a sample and nothing else."""

from __future__ import annotations

from typing import Any, NoReturn

from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping, DPTensorFastGradientClipping
from torch import Tensor

from dpfast.errors import StateError
from dpfast.opacus import backward
from dpfast.opacus.checks import NO_SCALER
from dpfast.opacus.two_passes import one_a_sample


class ClippedLossTensor(DPTensorFastGradientClipping):
    """Opacus's ``DPTensorFastGradientClipping`` that holds one loss a sample, (N,), whatever is done to it.

    A loss of shape (N, 1) would broadcast with the clip factors (N,) to (N, N), and every sample's gradient would be
    weighted by the factors of all.

    Raises:
        InputError: losses of any other shape.
    """

    def __init__(self, module: Any, optimizer: Any, loss_per_sample: Tensor, loss_reduction: str = "mean"):
        super().__init__(module, optimizer, one_a_sample(loss_per_sample), loss_reduction)

    def backward(self) -> None:
        """``Σ_n c_n g_n`` in ``p.grad``: two passes, or what ``install()`` makes of them.

        Raises:
            InputError: the backward pass saw another number of samples than there are losses.
        """
        backward.run(self)

    def __iter__(self) -> NoReturn:
        """StateError: what would scale each of several losses, as ``GradScaler.scale`` does, takes it for them."""
        raise StateError(NO_SCALER)


def _closed(name: str) -> Any:
    operation = getattr(DPTensorFastGradientClipping, name)

    def method(self: ClippedLossTensor, *others: Any) -> ClippedLossTensor:
        others = tuple(one_a_sample(x) if isinstance(x, Tensor) and x.dim() else x for x in others)
        result = operation(self, *others)
        return type(self)(result.module, result.optimizer, result.loss_per_sample, result.loss_reduction)

    method.__doc__ = "As in Opacus; the result is a ClippedLossTensor, a tensor operand has one value a sample."
    return method


# Opacus 1.5.4 has fewer of them.
for _name in ("__truediv__", "__mul__", "__rmul__", "__add__", "__radd__", "__sub__", "__rsub__", "__neg__"):
    if hasattr(DPTensorFastGradientClipping, _name):
        setattr(ClippedLossTensor, _name, _closed(_name))


class ClippedLoss(DPLossFastGradientClipping):
    """Opacus's ``DPLossFastGradientClipping``: the criterion of the modes "dpfast_two_pass" and "ghost"."""

    @classmethod
    def of(cls, loss: DPLossFastGradientClipping) -> ClippedLoss:
        """Opacus's, with one loss a sample and nothing else. (Opacus 1.5.4 cannot wrap a criterion twice.)"""
        made = cls.__new__(cls)
        made.__dict__.update(vars(loss))
        return made

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> ClippedLossTensor:
        """The loss of each sample. Args as the criterion's.

        Args:
            shape: (N, T, ...) where inputs and targets are flattened to N·T rows: losses are then reduced per sample.

        Raises:
            InputError: the criterion gives losses of any shape but (N,).
        """
        loss = super().__call__(*args, shape=shape, **kwargs)
        return ClippedLossTensor(loss.module, loss.optimizer, loss.loss_per_sample, loss.loss_reduction)
