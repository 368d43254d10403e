"""What rules answer: gradients of all parameters of their layer, in the parameters' shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn

from dpfast.distributed import local
from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Factor


def check_answer(
    layer: str,
    parameters: Iterable[nn.Parameter],
    factors: Mapping[nn.Parameter, Factor],
    name_of: Callable[[nn.Parameter], str],
) -> None:
    """Raises UnsupportedModuleError where a rule leaves a trainable parameter of its layer out, or gives gradients of
    another shape."""
    forgotten = [p for p in parameters if p.requires_grad and p not in factors]  # or frozen since
    if forgotten:
        raise UnsupportedModuleError(
            f"{layer}: its rule gives no gradient of {', '.join(map(name_of, forgotten))}; register a rule that does "
            "(dpfast.register_rule), or freeze it; or, where the model was called with other parameters than its own "
            "(torch.func.functional_call), call it with these"
        )
    for parameter, factor in factors.items():
        if factor.shape != parameter.shape and factor.shape != local(parameter).shape:
            raise UnsupportedModuleError(
                f"{layer}: its rule gives gradients {tuple(factor.shape)} of {name_of(parameter)}, which is "
                f"{tuple(parameter.shape)}"
            )
