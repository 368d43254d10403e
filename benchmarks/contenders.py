"""What is compared on one layer: the kernels, cuBLAS and the ways that people compute per-sample gradients today.

`CONTENDERS[verb][name](a, b, c)` gives grad_sample (N, P, D), squared norms (N,) or the weighted sum (P, D), from
activations (N, T, D), backprops (N, T, P) and clip factors (N,); of an embedding from indices (N, T) and backprops
(N, T, D).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dpfast import kernels

Contender = Callable[[Tensor, Tensor, Tensor], Tensor]

# The largest relative error that is still timed. The peers round their gradients to the inputs' dtype.
TOLERANCE = {"dpfast": 1e-3, "cuBLAS": 2e-2, "Opacus": 2e-2, "float hook": 1e-3, "torch": 1e-3}


def _product(x: Tensor, y: Tensor) -> Tensor:
    """The (batched) product in fp32: cuBLAS's 16-bit product with an fp32 result where there is one."""
    if x.is_cuda and x.dtype != torch.float32:
        return (torch.bmm if x.dim() == 3 else torch.mm)(x, y, out_dtype=torch.float32)
    return x.float() @ y.float()


def _opacus(a: Tensor, b: Tensor) -> Tensor:
    """opacus.grad_sample.linear.compute_linear_grad_sample's contraction, word for word."""
    return torch.einsum("n...i,n...j->nij", b, a)


def _opacus_ghost(a: Tensor, b: Tensor) -> Tensor:
    """opacus.grad_sample.linear.compute_linear_norm_sample before its root."""
    ggT = torch.einsum("nik,njk->nij", b, b)
    aaT = torch.einsum("nik,njk->nij", a, a)
    return torch.einsum("n...i,n...i->n", ggT, aaT).clamp(min=0)


def _float_hook(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("n...i,n...j->nji", a.float(), b.float())


def _scaled(b: Tensor, c: Tensor) -> Tensor:
    return (b * c[:, None, None]).to(b.dtype).flatten(0, 1)


def _runs_by_torch(indices: Tensor, b: Tensor) -> Tensor:
    """An embedding's squared norms by operations of torch's: the rows of each index brought together and added."""
    N, T = indices.shape
    index, order = indices.sort(dim=1, stable=True)
    starts = torch.ones_like(index, dtype=torch.bool)
    starts[:, 1:] = index[:, 1:] != index[:, :-1]
    run = starts.flatten().cumsum(0) - 1
    rows = b.gather(1, order.unsqueeze(-1).expand_as(b)).float().flatten(0, 1)
    sums = torch.zeros_like(rows).index_add_(0, run, rows)
    sample = torch.zeros_like(run)
    sample[run] = torch.arange(N, device=b.device).repeat_interleave(T)
    return sums.new_zeros(N).index_add_(0, sample, sums.square().sum(1))


def sq_norm(grad_sample: Tensor) -> Tensor:
    return grad_sample.flatten(1).square().sum(1, dtype=torch.float32)


CONTENDERS: dict[str, dict[str, Contender]] = {
    "grad_sample": {
        "dpfast": lambda a, b, c: kernels.outer_product(a, b).grad_sample,
        "cuBLAS": lambda a, b, c: _product(b.mT, a),
        "Opacus": lambda a, b, c: _opacus(a, b),
        "float hook": lambda a, b, c: _float_hook(a, b),
    },
    "direct norm": {
        "dpfast": lambda a, b, c: kernels.outer_norm(a, b).sq_norm,
        "cuBLAS": lambda a, b, c: sq_norm(_product(b.mT, a)),
        "Opacus": lambda a, b, c: sq_norm(_opacus(a, b)),
        "float hook": lambda a, b, c: sq_norm(_float_hook(a, b)),
    },
    "Gram norm": {
        "dpfast": lambda a, b, c: kernels.gram_norm(a, b).sq_norm,
        "cuBLAS": lambda a, b, c: (_product(a, a.mT) * _product(b, b.mT)).sum((1, 2)),
        "Opacus": lambda a, b, c: _opacus_ghost(a, b),
    },
    "weighted sum": {
        "dpfast": lambda a, b, c: kernels.weighted_sum(a, b, c).weight,
        "cuBLAS": lambda a, b, c: _product(_scaled(b, c).mT, a.flatten(0, 1)),
        "Opacus": lambda a, b, c: torch.einsum("n,nij->ij", c.to(a.dtype), _opacus(a, b)),
        "float hook": lambda a, b, c: torch.einsum("n,nij->ij", c, _float_hook(a, b)),
    },
    "lookup norm": {
        "dpfast": lambda a, b, c: kernels.lookup_norm(a, b).sq_norm,
        "torch": lambda a, b, c: _runs_by_torch(a, b),
    },
}
NORMS = ("direct norm", "Gram norm", "lookup norm")


def exact(verb: str, a: Tensor, b: Tensor, c: Tensor, samples: int = 2) -> Tensor:
    """The answer in fp64, on the inputs' device: of the first samples, but for sums of all of them."""
    if verb == "weighted sum":
        scaled = (b.double() * c.double()[:, None, None]).flatten(0, 1)
        return scaled.mT @ a.double().flatten(0, 1)
    if verb == "lookup norm":
        return torch.stack([_lookup(x, y).norm() for x, y in zip(a[:samples], b[:samples], strict=True)])
    gradients = (y.double().mT @ x.double() for x, y in zip(a[:samples], b[:samples], strict=True))
    if verb == "grad_sample":
        return torch.stack(list(gradients))
    return torch.stack([g.norm() for g in gradients])


def _lookup(indices: Tensor, b: Tensor) -> Tensor:
    """One sample's rows of an embedding's gradient that are not zero, in fp64."""
    rows, place = indices.unique(return_inverse=True)
    return b.new_zeros((len(rows), b.shape[1]), dtype=torch.float64).index_add_(0, place, b.double())


def error(verb: str, answer: Tensor, expected: Tensor) -> float:
    """‖answer - expected‖ / ‖expected‖ in fp64; norms are compared, not their squares. NaN stays NaN."""
    answer = answer[: len(expected)].double()
    if verb in NORMS:
        answer = answer.clamp(min=0).sqrt()
    return float((answer - expected).norm() / expected.norm())
