"""A parameter in several places of one function: a rule's answer has room for each use, and they are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpfast.factors import Factor, merge


def told_apart(parameters: Sequence[Any]) -> list[Any]:
    """The same, where one that is there again is another tensor on the same memory."""
    found = list(parameters)
    if len(set(map(id, found))) == len(found):  # nearly always
        return found
    found = []
    for p in parameters:
        again = p is not None and any(p is other for other in found)
        found.append(p.detach().requires_grad_(p.requires_grad) if again else p)
    return found


def added(parameters: Sequence[Any], uses: Sequence[Any], found: Mapping[Any, Factor]) -> dict[Any, Factor]:
    """One factor of each parameter that has some.

    Args:
        uses: :func:`told_apart`. found: by those.
    """
    factors: dict[Any, list[Factor]] = {}
    for parameter, use in zip(parameters, uses, strict=True):
        if use in found:
            factors.setdefault(parameter, []).append(found[use])
    return {parameter: merge(several) for parameter, several in factors.items()}
