"""Clipped sums of parameters of 16 bits: what ``p.grad`` is rounded to and, beside it, the sum as it was.

Rounding the sum of many samples is no one sample's to be clipped for: with one more, the whole may go to the next of
numbers that are far apart. An optimizer that takes the sum as it was, adds noise to it and rounds afterwards has none
of that (post-processing).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dpfast.arithmetic import towards_zero
from dpfast.distributed import local, placed
from dpfast.errors import warn_caller

_NAME = "_dpfast_sum"
_TAKERS: Any = WeakIdKeyDictionary()
"""By parameter: a weak reference to the optimizer that takes its sums as they were, where it has 16 bits."""
_TOLD: Any = weakref.WeakSet()
"""Models that were warned of."""


def added(before: Tensor | None, total: Tensor, dtype: torch.dtype) -> Tensor:
    """Their sum, rounded once: to fp16 towards zero, because gradients below its normal numbers are common and there
    nothing bounds what rounding to nearest adds; otherwise to nearest. Written into ``before`` where it can be."""
    if dtype is torch.float16:
        return towards_zero(total if before is None else total + before, dtype)
    if before is None:
        return total if total.dtype is dtype else total.to(dtype)
    before += total
    return before


def rounding(parameter: nn.Parameter) -> float:
    """By how much, relatively, :func:`added` may make a clipped sum larger, where that counts: in bf16."""
    return _OF_BF16 if parameter.dtype is torch.bfloat16 else 0.0


_OF_BF16 = torch.finfo(torch.bfloat16).eps / 2


def takes_unrounded(parameters: Iterable[nn.Parameter], optimizer: object) -> None:
    """That optimizer takes :func:`unrounded` sums of them; also of those that are frozen or wider now."""
    taker = weakref.ref(optimizer)
    for p in parameters:
        _TAKERS[p] = taker


def is_taken_unrounded(parameter: nn.Parameter) -> bool:
    """Whether an optimizer takes its sums so."""
    if parameter.dtype.itemsize != 2:  # nearly always
        return False
    taker = _TAKERS.get(parameter)
    return taker is not None and taker() is not None


class Unrounded(dict[nn.Parameter, Tensor]):
    """Sums as they were before they were rounded to ``p.grad``; of a DTensor this rank's part."""

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter]) -> Unrounded:
        """Those that are kept beside gradients."""
        some = [(p, kept_beside(p.grad)) for p in parameters if p.dtype.itemsize == 2 and p.grad is not None]
        return cls((p, total) for p, total in some if total is not None)

    def settled(self, p: nn.Parameter, before: Tensor | None, total: Tensor) -> Tensor:
        """What ``p.grad`` is to be where ``before`` is in it, as it was before it was rounded if that is known: see
        :func:`added`. The sum of both is one of these then."""
        wider = before is not None and before.dtype is not p.dtype  # as an optimizer took it that is no more
        if total.dtype is p.dtype or not (wider or is_taken_unrounded(p)):
            return added(before, total, p.dtype)
        self[p] = total if before is None else total + before
        return added(None, self[p], p.dtype)

    def keep(self) -> None:
        """Beside ``p.grad``, for as long as nobody writes to it."""
        for p, total in self.items():
            if p.grad is not None:
                vars(p.grad)[_NAME] = total, p.grad._version


def unrounded(p: nn.Parameter) -> Tensor | None:
    """The sum in ``p.grad`` as it was before it was rounded, a DTensor where the parameter is one; None where nothing
    else is known than what is there."""
    kept = None if p.grad is None else kept_beside(p.grad)
    return None if kept is None else placed(p, kept.to(p.device))  # the model may have been moved since


def kept_beside(gradient: Tensor) -> Tensor | None:
    """Of a gradient that nobody has written to. Collectives, NumPy and ``.data`` leave no trace but the numbers, so an
    entry is taken as it stands where it is not what that of the sum is rounded to."""
    total: Tensor | None
    total, version = vars(gradient).get(_NAME, (None, 0))
    if total is None:
        return None
    there, rounded = local(gradient), added(None, total, gradient.dtype)
    if gradient._version == version:
        return torch.where(rounded == there, total, there, out=total)
    if torch.equal(rounded, there):
        return total
    del vars(gradient)[_NAME]
    if there.any():  # zero_grad() has not
        warn_caller(
            f"a clipped sum in {gradient.dtype} {tuple(gradient.shape)} was written to, so it is taken as it was "
            f"rounded, not as it was before: {_MOVES.format(eps=torch.finfo(gradient.dtype).eps)}. Leave p.grad alone "
            "between backward() and step(), or train parameters in fp32 (docs/bounds.md#parameters-of-16-bits)"
        )
    return None


_MOVES = "one sample may move that of N samples by {eps:.1g} · N · max_grad_norm more, as all are rounded together"


def warn_of_16_bits(model: nn.Module, parameters: Iterable[nn.Parameter], *, may_be_taken: bool = True) -> None:
    """Once a model, where trained parameters have 16 bits, and nobody takes their sums as they were; or nobody can."""
    some = (p for p in parameters if p.dtype.itemsize == 2)
    dtype = next((p.dtype for p in some if not (may_be_taken and is_taken_unrounded(p))), None)
    if dtype is not None and model not in _TOLD:
        warn_caller(
            f"{type(model).__name__} trains parameters in {dtype}, and so are the clipped sums in p.grad: "
            f"{_MOVES.format(eps=torch.finfo(dtype).eps)}, and noise below its last place is lost. Make dpfast's "
            "optimizer before the first step (PrivacyEngine with grad_sample_mode='dpfast', DPOptimizerFast), which "
            "takes the sums unrounded; or train parameters in fp32, and compute in 16 bits under torch.autocast "
            "(docs/bounds.md#parameters-of-16-bits)"
        )
        _TOLD.add(model)  # where warnings are errors, the next step is told again
