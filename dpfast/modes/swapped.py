"""Parameters that others stand in for while a pass runs (FSDP2 puts whole ones where a rank keeps parts)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dpfast.distributed import is_shard
from dpfast.taps import DetachableParameters


class SwappedParameters:
    """Which of the model's own parameters each one stands in for.

    Args:
        guard: called with each parameter that comes in.
    """

    def __init__(self, guard: Callable[[nn.Parameter], None]):
        self._guard = guard
        self._homes: dict[tuple[int, str], Any] = {}
        self._own: Any = WeakIdKeyDictionary()

    def watch(self, parameters: DetachableParameters) -> None:
        """From here on every parameter that is put there is seen."""
        for name, p in parameters.items():
            self._seen(parameters, name, p)
        parameters.on_change = self._seen

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """The model's own, which is the parameter itself unless it stands in for one."""
        if not self._homes:  # nearly always: nothing is parted, so nothing stands in
            return parameter
        found: nn.Parameter = self._own.get(parameter, parameter)
        return found

    def own_all(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """:meth:`own` of each."""
        return list(map(self.own, parameters)) if self._own else parameters

    def any_of(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether one of them stands in for another now, or has been parted from the whole one."""
        return any(is_shard(p) or (self._own and p in self._own) for p in parameters)

    def _seen(self, place: DetachableParameters, name: str, p: Any) -> None:
        if not isinstance(p, nn.Parameter):
            return
        home = self._homes.get((id(place), name))
        if is_shard(p) and (home is None or p.device_mesh.ndim >= home.device_mesh.ndim):  # type: ignore[attr-defined]
            self._homes[id(place), name] = p
            return
        if home is not None and p not in self._own:
            self._own[p] = home
            if p.requires_grad:
                self._guard(p)
