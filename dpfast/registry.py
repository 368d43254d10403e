"""Which rule a module has, and how users add their own.

A *rule* is a function ``(module, activations, backprops) -> {parameter: factor}``; ``activations`` is the list of
the positional inputs that the module's forward took, batch first (its attribute ``kwargs`` holds the others),
``backprops`` the loss's gradient at the module's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from dpfast.errors import InputError
from dpfast.factors import Dense, Factor


class Activations(list):
    """A module's positional inputs, and in ``kwargs`` those that can only be passed by keyword."""

    def __init__(self, values: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None):
        super().__init__(values)
        self.kwargs = dict(kwargs or {})
        self.batch_dim = 0  # where the module itself had its samples; here they are in front


Rule = Callable[[nn.Module, Activations, Tensor], Mapping[nn.Parameter, Factor]]
GradSampler = Callable[[nn.Module, list[Tensor], Tensor], Mapping[nn.Parameter, Tensor]]

RULES: dict[type[nn.Module], Rule] = {}
GRAD_SAMPLERS: dict[type[nn.Module], GradSampler] = {}
NORM_SAMPLERS: dict[type[nn.Module], GradSampler] = {}


def _classes(target: type[nn.Module] | Iterable[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    classes = tuple(target) if isinstance(target, (list, tuple, set, frozenset)) else (target,)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise InputError(f"{cls!r} is not a class of nn.Module; pass the layer's class, not an instance")
    return classes


def register_rule(target: type[nn.Module] | Iterable[type[nn.Module]]) -> Callable[[Rule], Rule]:
    """Decorator that makes a function the rule of one or several layer classes.

    The class's grad sampler and norm sampler follow from the rule.

    Raises:
        InputError: ``target`` is not a class, or classes, of nn.Module.
    """

    classes = _classes(target)

    def decorate(rule: Rule) -> Rule:
        for cls in classes:
            RULES[cls] = rule
            GRAD_SAMPLERS[cls] = _sampler(rule, lambda factor: factor.materialize())
            NORM_SAMPLERS[cls] = _sampler(rule, lambda factor: factor.sq_norm().value.sqrt().float())
        return rule

    return decorate


def register_grad_sampler(target: type[nn.Module] | Iterable[type[nn.Module]]) -> Callable[[GradSampler], GradSampler]:
    """Decorator, as Opacus's: the function gives ``{parameter: grad_sample (N, *shape)}`` for a layer class.

    Raises:
        InputError: ``target`` is not a class, or classes, of nn.Module.
    """

    classes = _classes(target)

    def decorate(sampler: GradSampler) -> GradSampler:
        def rule(module: nn.Module, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
            return {p: Dense(values) for p, values in sampler(module, activations, backprops).items()}

        for cls in classes:
            RULES[cls] = rule
            GRAD_SAMPLERS[cls] = sampler
            NORM_SAMPLERS[cls] = _sampler(rule, lambda factor: factor.sq_norm().value.sqrt().float())
        return sampler

    return decorate


def register_norm_sampler(target: type[nn.Module] | Iterable[type[nn.Module]]) -> Callable[[GradSampler], GradSampler]:
    """Decorator, as Opacus's: the function gives ``{parameter: norm_sample (N,)}`` for a layer class.

    It is what ``NORM_SAMPLERS`` hands to other code. Clipping itself takes norms from the rule (or grad sampler),
    because a norm that comes alone has no proven bound.

    Raises:
        InputError: ``target`` is not a class, or classes, of nn.Module.
    """

    classes = _classes(target)

    def decorate(sampler: GradSampler) -> GradSampler:
        NORM_SAMPLERS.update(dict.fromkeys(classes, sampler))
        return sampler

    return decorate


def _sampler(rule: Rule, verb: Callable[[Factor], Tensor]) -> GradSampler:
    def sampler(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        return {p: verb(factor) for p, factor in rule(layer, Activations(activations), backprops).items()}

    return sampler


def find_rule(module: nn.Module) -> Rule | None:
    """The rule of the module's class, or of a base class whose forward it has not changed."""
    for cls in type(module).__mro__:
        if cls in RULES:
            return RULES[cls] if type(module).forward is cls.forward else None
    return None
