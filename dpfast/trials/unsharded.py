"""Copies of models whose parameters ``fully_shard`` (FSDP2) has taken, which torch itself does not copy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

_LEAST = 0.1
"""Of a spread: parameters that all start at one number say nothing."""


def _units(model: nn.Module) -> list[nn.Module]:
    unit: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if unit is None else [m for m in model.modules() if isinstance(m, unit)]


@contextmanager
def copied_whole(model: nn.Module, memo: dict[int, Any], mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Within it the model can be copied with ``memo``: its units are of their plain classes and without FSDP's hooks.

    Args:
        memo: has what takes the places of shards, where ``mode`` does not give it: whole fake parameters.
    """
    before: list[tuple[Any, type[nn.Module], dict[str, Any]]] = []
    with mode or nullcontext():
        for p in model.parameters() if mode is not None else ():
            if hasattr(p, "device_mesh"):
                whole = torch.empty(p.shape, dtype=p.dtype)
                memo[id(p)] = nn.Parameter(whole, requires_grad=p.requires_grad)
    try:
        for unit in _units(model):
            hooks = {name: x for name, x in vars(unit).items() if name.endswith("_hooks") and isinstance(x, dict)}
            before.append((unit, type(unit), hooks))
            vars(unit).update({name: type(x)() for name, x in hooks.items()})
            states = [x for name, x in vars(unit).items() if name.startswith("__composable_api")]
            memo.update({id(state): {} for state in states})
            unit.__class__ = type(unit).__bases__[1]
        yield
    finally:
        for unit, cls, hooks in before:
            unit.__class__ = cls
            vars(unit).update(hooks)


def whole_stand_in(p: Any, noise: Tensor) -> nn.Parameter:
    """A whole parameter of numbers as large as those of this rank's part. No rank is asked for the others: one with an
    empty batch would not answer, and what shows whose rows are whose needs some numbers, not these.

    Args:
        noise: of the whole parameter's shape, with a standard deviation of one.
    """
    own = p.to_local().detach().float()
    mean, spread = (float(x) for x in (own.mean(), own.std())) if own.numel() > 1 else (0.0, 0.0)
    whole = noise.mul_(max(spread, _LEAST)).add_(mean)
    return nn.Parameter(whole.to(p.dtype), requires_grad=p.requires_grad)
