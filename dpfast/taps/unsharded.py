"""Copies of models whose parameters ``fully_shard`` (FSDP2) has taken, which torch itself does not copy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def _units(model: nn.Module) -> list[nn.Module]:
    unit: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if unit is None else [m for m in model.modules() if isinstance(m, unit)]


@contextmanager
def copied_whole(model: nn.Module, memo: dict[int, Any], mode: FakeTensorMode) -> Iterator[None]:
    """Within it the model can be copied with ``memo``: its units are of their plain classes and without FSDP's hooks,
    and whole fake parameters take the places of shards."""
    before: list[tuple[Any, type[nn.Module], dict[str, Any]]] = []
    with mode:
        for p in model.parameters():
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
