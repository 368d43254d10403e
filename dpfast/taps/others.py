"""What rules of others give is looked at: no factors, and errors that would lower a bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Dense


def looked_at(rule: Any, name: str, found: Any) -> Any:
    """The answer of ``rule`` for a layer of that name, as it is where the rule is dpfast's own.

    Raises:
        UnsupportedModuleError: it is no mapping, or not of factors. InputError: an error of Dense is no tensor (N,).
    """
    if not str(rule.__module__).startswith("dpfast."):
        _check(name, found)
    return found


def _check(cls: str, found: Any) -> None:
    page = "(docs/writing-a-rule.md)"
    if not isinstance(found, Mapping):
        raise UnsupportedModuleError(
            f"the rule of {cls} gives {_kind(found)}, and not a factor for each trainable parameter: "
            f"{{layer.weight: OuterProduct(...), ...}} {page}"
        )
    for parameter, factor in found.items():
        if not hasattr(factor, "sq_norm"):
            raise UnsupportedModuleError(
                f"the rule of {cls} gives {_kind(factor)} for its parameter {tuple(parameter.shape)}, and not a "
                f"factor: dpfast.factors.Dense(values) holds gradients (N, *shape) {page}"
            )
        if isinstance(factor, Dense):
            factor.check_error()


def _kind(x: object) -> str:
    return "None" if x is None else f"a {type(x).__name__}"
