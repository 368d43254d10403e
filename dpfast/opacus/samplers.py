"""install() and uninstall(): dpfast's grad samplers and norm samplers in Opacus's registries, one backward pass."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from opacus.grad_sample import GradSampleModule as OpacusModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping as OpacusGhostModule
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from torch import Tensor, nn

from dpfast.errors import InputError, warn_caller
from dpfast.factors import Factor
from dpfast.modes import GradSampleModule, answer_of
from dpfast.opacus import backward
from dpfast.opacus.clip_factors import rounded_up
from dpfast.rules import compute_linear_grad_sample, linear
from dpfast.taps import Activations, Rule, registry

OutputDtype = Literal["backprops", "float32", "param"]
Sampler = Callable[[Any, list[Tensor], Tensor], Mapping[nn.Parameter, Tensor]]

# Code that asks Opacus whether a model is wrapped gets the truth about ours.
AbstractGradSampleModule.register(GradSampleModule)

LEFT_TO_OPACUS: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
"""Opacus's hooks hand a sampler the positional inputs and the gradient of the first output. These layers have
other inputs or outputs that count, and Opacus's validator refuses them. So may classes of others, known by name, that
take more than one input."""

_ABSENT = object()

_lock = threading.Lock()
"""Of the registries, and of what we have put there."""


class _Installed:
    """One registry of Opacus: what we put there, and what stood there before."""

    def __init__(self, name: str, theirs: dict[type[nn.Module], Sampler]):
        self.name = name
        self.theirs = theirs
        self.ours: dict[type[nn.Module], Sampler] = {}
        self.before: dict[type[nn.Module], Any] = {}

    def put(self, cls: type[nn.Module], sampler: Sampler) -> str | None:
        """Registers ours. Returns the name of the module whose sampler it replaces, where that is not Opacus's."""
        current = self.theirs.get(cls, _ABSENT)
        owner = None
        if current is not self.ours.get(cls):
            self.before[cls] = current
            module = getattr(current, "__module__", "") or ""
            owner = module if current is not _ABSENT and module.partition(".")[0] != "opacus" else None
        self.ours[cls] = self.theirs[cls] = sampler  # in this order: what is theirs by us is in ours, Ctrl-C or not
        return owner

    def restore(self) -> None:
        """Puts back what stood there, except where somebody has registered a sampler over ours since."""
        for cls, sampler in self.ours.items():
            if self.theirs.get(cls) is sampler:
                if self.before[cls] is _ABSENT:
                    del self.theirs[cls]
                else:
                    self.theirs[cls] = self.before[cls]
        self.ours.clear()
        self.before.clear()


_GRAD_SAMPLERS = _Installed("grad sampler", OpacusModule.GRAD_SAMPLERS)
_NORM_SAMPLERS = _Installed("norm sampler", OpacusGhostModule.NORM_SAMPLERS)


def install(output_dtype: OutputDtype = "backprops") -> None:
    """Registers dpfast's samplers with Opacus, for every layer that dpfast has a rule for now, and spares ghost
    clipping its second backward pass.

    They work at once, also in models that exist: Opacus looks samplers up in the backward pass. Calling again
    takes in the rules that were registered since and changes ``output_dtype``. A sampler that another library has
    registered is replaced with one warning, and :func:`uninstall` puts it back.

    Where each trainable parameter belongs to a layer with a rule of dpfast's that the loss uses once, Opacus's
    ``loss.backward()`` of ghost clipping takes the clipped sum from the first backward pass (``opacus/backward.py``
    says what it takes for unusual and leaves to two). Norms are added and clip factors taken so that rounding makes
    no sample larger than C, a sample whose norm is not finite gets factor 0, and a loss that is not one number a sample
    is an error.

    Args:
        output_dtype: dtype of ``p.grad_sample``. Sums are taken in fp32 (fp64 for fp64 inputs) in every case and
            rounded once to the dtype of the backprops ("backprops", as Opacus's own samplers), of the parameter
            ("param"), or to fp32 ("float32").

    Raises:
        InputError: another ``output_dtype``.

    >>> install()
    >>> model = OpacusModule(nn.Linear(3, 2))  # Opacus's own; its per-sample gradients are dpfast's
    >>> model(torch.ones(4, 3)).sum(1).mean().backward()
    >>> next(model.parameters()).grad_sample.shape
    torch.Size([4, 2, 3])
    >>> uninstall()

    Numerics:
        Norm samples are fp32 (fp64 for fp64 backprops) whatever ``output_dtype``, and the proven upper ends of the
        norms (docs/bounds.md), so rounding never lets a sample through that is larger than Opacus's clip factor takes
        it for. Values that a sampler of your own (``dpfast.register_norm_sampler``) gives are passed on as they are.
    """
    if output_dtype not in ("backprops", "float32", "param"):
        raise InputError(f"output_dtype={output_dtype!r} must be 'backprops', 'float32' or 'param'")
    owners: dict[str, str] = {}
    with _lock:
        backward.install()
        for cls, rule, of_grads, of_norms in _all_rules():
            if _is_left_to_opacus(cls):
                continue
            # A Linear's weight and bias come from one kernel.
            of_grads = compute_linear_grad_sample if rule is linear.linear else of_grads
            for registered, sampler in (
                (_GRAD_SAMPLERS, _rounded(of_grads, output_dtype)),
                (_NORM_SAMPLERS, _norm_sampler(rule, of_norms)),
            ):
                owner = registered.put(cls, sampler)
                if owner:
                    owners[f"{cls.__name__} {registered.name}"] = owner
    if owners:
        what = ", ".join(f"the {sampler} of {module}" for sampler, module in owners.items())
        warn_caller(
            f"dpfast takes the place of what was registered with Opacus: {what}. dpfast.opacus.uninstall() puts it back"
        )


def uninstall() -> None:
    """Puts back Opacus's two backward passes, its clip factors and what stood in its registries before
    :func:`install`. Safe to call twice, and from several threads.

    A sampler that somebody has registered over dpfast's since is left where it is.
    """
    with _lock:
        _GRAD_SAMPLERS.restore()
        _NORM_SAMPLERS.restore()
        backward.uninstall()


def _all_rules() -> Iterator[tuple[type[nn.Module], Rule, Sampler, Sampler]]:
    """Classes, their rules, grad samplers and norm samplers; those known by name where their package is imported."""
    for cls, rule in list(registry.RULES.items()):
        yield cls, rule, registry.GRAD_SAMPLERS[cls], registry.NORM_SAMPLERS[cls]
    for name, rule in list(registry.RULES_BY_NAME.items()):
        module, _, attribute = name.rpartition(".")
        found = getattr(sys.modules.get(module), attribute, None)
        if found is not None and found not in registry.RULES:
            norms = registry.NORM_SAMPLERS.get(name) or registry.norm_sampler(rule)
            yield found, rule, registry.grad_sampler(rule), norms


def _is_left_to_opacus(cls: type[nn.Module]) -> bool:
    takes = list(inspect.signature(cls.forward).parameters.values())[1:]
    may_take_others = len(takes) > 1 or any(x.kind is not x.POSITIONAL_OR_KEYWORD for x in takes)
    return issubclass(cls, LEFT_TO_OPACUS) or (may_take_others and cls not in registry.RULES)


def _norm_sampler(rule: Rule, own: Sampler) -> Sampler:
    """Upper ends of the norms from the rule, or the sampler that a user has registered for norms alone."""
    if own.__module__ != registry.__name__:
        return own

    def sampler(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        factors = answer_of(rule, type(layer).__name__, layer, Activations(activations), backprops)
        double = backprops.dtype == torch.float64
        return {p: _norm(backward.keep(p, factor), double) for p, factor in factors.items()}

    sampler.keeps_factors = True  # type: ignore[attr-defined]  # for backward._all_from_rules
    return sampler


def _norm(factor: Factor, double: bool) -> Tensor:
    """The upper end of ‖G_n‖, (N,), fp32 rounded up, or fp64."""
    norms = factor.sq_norm().upper.sqrt()
    return norms if double else rounded_up(norms, torch.float32)


def _rounded(sampler: Sampler, output_dtype: OutputDtype) -> Sampler:
    """The sampler with its answers in the dtype that was asked for."""

    def dtype(p: nn.Parameter, backprops: Tensor) -> torch.dtype:
        return {"float32": torch.float32, "param": p.dtype, "backprops": backprops.dtype}[output_dtype]

    def rounded(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        return {p: values.to(dtype(p, backprops)) for p, values in sampler(layer, activations, backprops).items()}

    return rounded
