"""dpfast inside Opacus: its grad samplers and norm samplers, put in the place of Opacus's own.

import dpfast.opacus
dpfast.opacus.install()        # from here on every Opacus model, also one that exists, uses dpfast's samplers
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpfast import registry
from dpfast.errors import DpfastError, DpfastWarning, InputError
from dpfast.grad_sample_module import GradSampleModule
from dpfast.rules.linear import compute_linear_grad_sample, compute_linear_norm_sample

try:
    from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
    from opacus.grad_sample.gsm_base import AbstractGradSampleModule
except ImportError as error:
    raise DpfastError(
        f"dpfast.opacus needs Opacus 1.5.4 or newer ({error}); install it with: pip install 'dpfast[opacus]'"
    ) from error

OutputDtype = Literal["backprops", "float32", "param"]
Sampler = Callable[[nn.Module, list[Tensor], Tensor], dict[nn.Parameter, Tensor]]

# Code that asks Opacus whether a model is wrapped gets the truth about ours.
AbstractGradSampleModule.register(GradSampleModule)

_ABSENT = object()
_before: dict[tuple[int, type[nn.Module]], Any] = {}
"""What stood in (0: the grad samplers, 1: the norm samplers) before install(); empty while not installed."""


def _registries() -> tuple[dict, dict]:
    return GradSampleHooks.GRAD_SAMPLERS, GradSampleHooksFastGradientClipping.NORM_SAMPLERS


def install(output_dtype: OutputDtype = "backprops") -> None:
    """Registers dpfast's samplers with Opacus, for every layer that dpfast has a rule for.

    They work at once, also in models that exist: Opacus looks samplers up in the backward pass. Calling again
    changes ``output_dtype`` only.

    Args:
        output_dtype: dtype of ``p.grad_sample``. Sums are taken in fp32 in every case and rounded once to the dtype
            of the backprops ("backprops", as Opacus's own samplers), of the parameter ("param"), or not at all
            ("float32").

    Raises:
        InputError: another ``output_dtype``.
    """
    if output_dtype not in ("backprops", "float32", "param"):
        raise InputError(f"output_dtype={output_dtype!r} must be 'backprops', 'float32' or 'param'")
    grad_samplers = {**registry.GRAD_SAMPLERS, nn.Linear: compute_linear_grad_sample}
    norm_samplers = {**registry.NORM_SAMPLERS, nn.Linear: compute_linear_norm_sample}
    first = not _before
    for kind, (theirs, ours) in enumerate(zip(_registries(), (grad_samplers, norm_samplers), strict=True)):
        for cls, sampler in ours.items():
            if cls not in registry.RULES:
                continue
            if first:
                _before[kind, cls] = theirs.get(cls, _ABSENT)
                _warn_of_takeover(cls, theirs.get(cls))
            theirs[cls] = _rounded(sampler, output_dtype)


def uninstall() -> None:
    """Puts back what stood in Opacus's registries before :func:`install`. Safe to call twice."""
    for (kind, cls), sampler in _before.items():
        theirs = _registries()[kind]
        if sampler is _ABSENT:
            theirs.pop(cls, None)
        else:
            theirs[cls] = sampler
    _before.clear()


def _warn_of_takeover(cls: type[nn.Module], sampler: Sampler | None) -> None:
    module = getattr(sampler, "__module__", "opacus")
    if sampler is not None and module.partition(".")[0] != "opacus":
        warnings.warn(
            f"dpfast takes the place of the {cls.__name__} sampler that {module} registered with Opacus; "
            "dpfast.opacus.uninstall() puts it back",
            DpfastWarning,
            stacklevel=3,
        )


def _rounded(sampler: Sampler, output_dtype: OutputDtype) -> Sampler:
    """The sampler with its answers in the dtype that was asked for."""
    if output_dtype == "float32":
        return sampler

    def rounded(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        def dtype(p: nn.Parameter) -> torch.dtype:
            return p.dtype if output_dtype == "param" else backprops.dtype

        return {p: values.to(dtype(p)) for p, values in sampler(layer, activations, backprops).items()}

    return rounded
