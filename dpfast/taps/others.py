"""What rules of others give is looked at: no factors, and errors that would lower a bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Dense, Factor


def looked_at(rule: Any, name: str, found: Any) -> Any:
    """The answer of ``rule`` for a layer of that name, as it is where the rule is dpfast's own.

    Raises:
        UnsupportedModuleError: it is no mapping, or not of factors. InputError: an error of Dense is no tensor (N,).
    """
    if not str(rule.__module__).startswith("dpfast."):
        _check(name, found)
    return found


def dense(name: str, found: Any) -> dict[nn.Parameter, Factor]:
    """The answer of a grad sampler for a layer of that name, ``{parameter: grad_sample (N, *shape)}``, as factors.

    Raises:
        UnsupportedModuleError: it is no mapping, or not of tensors.
    """
    kind = "grad sampler"
    if not isinstance(found, Mapping):
        raise _refusal(kind, name, _kind(found), "{layer.weight: grad_sample, ...} of tensors (N, *shape)")
    for parameter, values in found.items():
        if not isinstance(values, Tensor):
            raise _refusal(kind, name, f"{_kind(values)} for {_said(parameter)}", "a tensor (N, *shape)")
    return {parameter: Dense(values) for parameter, values in found.items()}


def _check(cls: str, found: Any) -> None:
    if not isinstance(found, Mapping):
        wanted = "a factor for each trainable parameter: {layer.weight: OuterProduct(...), ...}"
        raise _refusal("rule", cls, _kind(found), wanted)
    for parameter, factor in found.items():
        if not hasattr(factor, "sq_norm"):
            wanted = "a factor: dpfast.factors.Dense(values) holds gradients (N, *shape)"
            raise _refusal("rule", cls, f"{_kind(factor)} for {_said(parameter)}", wanted)
        if isinstance(factor, Dense):
            factor.check_error()


def _kind(x: object) -> str:
    return "None" if x is None else f"a {type(x).__name__}"


def _said(parameter: Any) -> str:
    return f"its parameter {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else f"{parameter!r}"


def _refusal(kind: str, cls: str, found: str, wanted: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(f"the {kind} of {cls} gives {found}, and not {wanted} (docs/writing-a-rule.md)")
