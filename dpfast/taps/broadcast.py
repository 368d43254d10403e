"""Taps on methods whose result the model broadcasts over its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Factor
from dpfast.taps.activations import Activations
from dpfast.taps.detached import detached_parameters
from dpfast.taps.passes import suspended, taps_suspended
from dpfast.taps.tap import Tap


class BroadcastMethod:
    """Stands in a method that computes something of shape (1, ...) from parameters alone, linearly, which the
    model then broadcasts: gives one copy to each sample, so that its gradient comes back by samples."""

    def __init__(self, tap: Tap, method: str, child: nn.Module, rule: Callable[..., Any]):
        self.tap, self.method, self.child, self.rule = tap, method, child, rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tap, host = self.tap, self.tap.module
        method = getattr(type(host), self.method).__get__(host)
        parameters = [p for p in self.child.parameters() if p.requires_grad]
        if not (tap.taps.inserts and parameters) or suspended():
            return method(*args, **kwargs)
        with taps_suspended(), detached_parameters(list(self.child.modules())):
            output = method(*args, **kwargs)
        n = tap.taps.batch_size()
        if not torch.is_grad_enabled():  # a checkpointed region that will run again: its output keeps its shape
            return output if n is None else output.expand(n, *output.shape[1:])
        if n is None or output.shape[0] != 1:
            raise UnsupportedModuleError(
                f"{tap.layer}: it is not known which batch its {self.method} is broadcast over; call the model "
                "through its own forward"
            )

        def rule(module: nn.Module, activations: Activations, backprops: Tensor) -> Mapping[nn.Parameter, Factor]:
            return self.rule(self.child, lambda: method(*args, **kwargs), backprops)

        return tap.tapped(output.expand(n, *output.shape[1:]), ((), {}), parameters, fresh=False, rule=rule, as_is=True)
