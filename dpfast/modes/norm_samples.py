"""``p._norm_sample``, where Opacus's ghost clipping has the norms of each parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dpfast.arithmetic import SquaredNorm
from dpfast.factors import Dense


def create_norm_sample(*, param: nn.Parameter, grad_sample: Tensor, max_batch_len: int) -> None:
    """Leaves the L2 norms of ``grad_sample`` (N, *shape) in ``param._norm_sample`` (N,), as Opacus's function does.

    Args:
        param: one that needs no gradient is left alone.
        grad_sample: (N, *shape of param), bf16, fp16, fp32 or fp64.
        max_batch_len: N; 0 stands for an empty batch.

    >>> p = nn.Parameter(torch.zeros(2))
    >>> create_norm_sample(param=p, grad_sample=torch.tensor([[3.0, 4.0], [0.0, 2.0]]), max_batch_len=2)
    >>> p._norm_sample
    tensor([5., 2.])
    """
    if not param.requires_grad:
        return
    if max_batch_len == 0:
        param._norm_sample = grad_sample.new_zeros(0)  # type: ignore[attr-defined]  # as in Opacus
        return
    value = Dense(grad_sample).sq_norm().value.sqrt()
    value = value if grad_sample.dtype == torch.float64 else value.float()
    param._norm_sample = value  # type: ignore[attr-defined]  # as in Opacus


def leave_norm_samples(
    norms: Mapping[nn.Parameter, SquaredNorm | None], like: Tensor, scale: float, valid: Tensor | None
) -> None:
    """``p._norm_sample`` (N,), where Opacus's ghost clipping has it: the norms as computed, one op for all.

    Args:
        norms: None for a parameter that the step has not used. like: (N,), of any norms. valid: 0 where it is False.
    """
    squares = [torch.zeros_like(like) if norm is None else norm.value.to(like.device) for norm in norms.values()]
    roots = torch.stack(squares or [torch.zeros_like(like)]).sqrt() * scale
    if valid is not None:
        roots = torch.where(valid.to(roots.device), roots, 0.0)
    dtypes = [torch.float64 if p.dtype is torch.float64 else torch.float32 for p in norms]
    rows = {dtype: roots.to(dtype).unbind() for dtype in set(dtypes)}
    for i, (p, dtype) in enumerate(zip(norms, dtypes, strict=True)):
        p._norm_sample = rows[dtype][i].to(p.device)  # type: ignore[attr-defined]  # as in Opacus
