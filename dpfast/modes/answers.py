"""What rules answer: gradients of all parameters of their layer, in the parameters' shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from dpfast.distributed import local
from dpfast.errors import DpfastError, UnsupportedModuleError
from dpfast.factors import Factor
from dpfast.taps import Activations, Rule, looked_at


def answer_of(
    rule: Rule, layer: str, module: nn.Module, activations: Activations, backprops: Any
) -> Mapping[nn.Parameter, Factor]:
    """What the rule gives, :func:`looked_at`. What it raises beside our errors has a note of the layer, where Python
    has notes (3.11)."""
    try:
        found = rule(module, activations, backprops)
    except DpfastError:
        raise
    except Exception as error:
        if (add_note := getattr(error, "add_note", None)) is not None:
            add_note(f"dpfast: raised by the rule of {layer}")
        raise
    return looked_at(rule, type(module).__name__, found)


def check_answer(
    layer: str,
    parameters: Iterable[nn.Parameter],
    factors: Mapping[nn.Parameter, Factor],
    name_of: Callable[[nn.Parameter], str],
) -> None:
    """Raises UnsupportedModuleError where a rule leaves a trainable parameter of its layer out, or gives gradients of
    another shape."""
    if list(map(id, parameters)) != list(map(id, factors)) and (
        forgotten := [p for p in parameters if p.requires_grad and p not in factors]  # or frozen since
    ):
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


def check_own_layer(layer: str, parameters: Iterable[nn.Parameter], own: Collection[nn.Parameter]) -> None:
    """Raises UnsupportedModuleError where a layer ran with parameters that are not the model's, and whose gradients
    would be lost."""
    other = next((p for p in parameters if p not in own), None)
    if other is not None:
        raise UnsupportedModuleError(
            f"{layer} ran with a parameter {tuple(other.shape)} that is not the model's: where the model was called "
            "with other parameters than its own (torch.func.functional_call), call it with these; where they were "
            "swapped while it ran (fully_shard? a parametrization?), unshard the model, or use DistributedDataParallel"
        )
