"""The verbs on units that are runs of one list of rows, where kernels run: a launch for all units that may share one.

Activations (R, D), backprops (R, P), and :class:`UnitRuns` that say which positions are whose. A unit has the bits of a
sample with as many positions, in whatever company: those share a launch whose :func:`launch_class` is the same, and it
follows from a unit's own length.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from dpfast.arithmetic import cost, kernel_norms
from dpfast.arithmetic.bounds import SquaredNorm
from dpfast.arithmetic.kernel_norms import Direct, UnitRuns, import_kernels, unit_last_stride
from dpfast.arithmetic.precision import exact_arithmetic

Verb = Literal["sq_norm", "certified", "gradient"]


@lru_cache(maxsize=2**14)
def launch_class(verb: Verb, t: int, d: int, p: int, dtype: torch.dtype, device: torch.device) -> Hashable:
    """What units of ``t`` positions must have alike to share a launch; None where they are better taken as samples.

    Args:
        dtype: what activations (·, d) and backprops (·, p) are promoted to.
        device: one where kernels run.
    """
    kernels, _ = import_kernels()
    launcher = "outer_product"
    if verb == "sq_norm":
        way = cost.norm_way(t, d, p)
        if way == "rank_one":
            return None
        launcher = "gram_norm" if way == "gram" else "outer_norm"
    if launcher != "gram_norm" and verb != "gradient" and kernel_norms.groups(t, d, p):
        return "grouped"
    return launcher, kernels.run_class(launcher, t, d, p, dtype, device)


def sq_norm(activations: Tensor, backprops: Tensor, runs: UnitRuns) -> SquaredNorm:
    """``‖G_u‖²``, (U,), and its bound."""
    a, b = _rows(activations), _rows(backprops)
    way = cost.norm_way(runs.longest, a.shape[2], b.shape[2])
    with exact_arithmetic():
        return kernel_norms.sq_norm(a, b, way, runs)


def certified(activations: Tensor, backprops: Tensor, runs: UnitRuns) -> Direct:
    """G (U, P, D), how far it may be off, and its norm."""
    with exact_arithmetic():
        return kernel_norms.direct(_rows(activations), _rows(backprops), keep=True, runs=runs)


def grad_sample(activations: Tensor, backprops: Tensor, runs: UnitRuns, *, scale: float = 1.0) -> Tensor:
    """``scale · G_u``, (U, P, D)."""
    kernels, _ = import_kernels()
    rows = _rows(activations), _rows(backprops)
    with exact_arithmetic():
        found = kernels.outer_product(*rows, scale=scale, runs=runs.places, longest=runs.longest)
    gradients: Tensor = found.grad_sample
    return gradients


def _rows(x: Tensor) -> Tensor:
    return unit_last_stride(x).unsqueeze(0)
