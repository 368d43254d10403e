"""Which rule a module has, and how users add their own.

A *rule* is a function ``(module, activations, backprops) -> {parameter: factor}``; ``activations`` is the list of
the positional inputs that the module's forward took, batch first (its attribute ``kwargs`` holds the others),
``backprops`` the loss's gradient at the module's output (a tuple where it has several).

Classes of packages that may not be installed, or should not be imported, are registered by their full name
("transformers.pytorch_utils.Conv1D").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from dpfast.errors import InputError
from dpfast.factors import Factor
from dpfast.taps.activations import Activations
from dpfast.taps.inherited import inherits, note_methods
from dpfast.taps.others import dense

ModuleClass = type[nn.Module] | str
Target = ModuleClass | Iterable[ModuleClass]
# The module is one of the classes that the rule is registered for; backprops are a tuple where it has several outputs.
Rule = Callable[[Any, Activations, Any], Mapping[nn.Parameter, Factor]]
GradSampler = Callable[[Any, list[Tensor], Any], Mapping[nn.Parameter, Tensor]]
T = TypeVar("T")
R = TypeVar("R", bound=Rule)
S = TypeVar("S", bound=GradSampler)

RULES: dict[type[nn.Module], Rule] = {}
GRAD_SAMPLERS: dict[type[nn.Module], GradSampler] = {}
NORM_SAMPLERS: dict[ModuleClass, GradSampler] = {}

RULES_BY_NAME: dict[str, Rule] = {}
_WHOLE: set[Rule] = set()
_FRESH: set[Rule] = set()
_ALIKE: dict[Rule, Callable[[Any], Hashable]] = {}
_WITHOUT_INPUT: dict[Rule, frozenset[str]] = {}
_FORWARDS: dict[ModuleClass, Callable[..., Any]] = {}
_ONLY: dict[Callable[..., Any], Callable[[Any], bool]] = {}
_BY_ROW: dict[ModuleClass, Callable[..., Any]] = {}
_BROADCASTS: dict[ModuleClass, tuple[str, str]] = {}
_BATCH_DIMS: dict[ModuleClass, Callable[[Any], int]] = {}
_FOLDED: dict[ModuleClass, bool] = {}
_FAULTS: list[tuple[ModuleClass, Callable[[Any], str | None]]] = []
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
_registrations = [0]  # how many there have been


def _classes(target: Target) -> tuple[ModuleClass, ...]:
    classes: tuple[Any, ...] = tuple(target) if isinstance(target, (list, tuple, set, frozenset)) else (target,)
    for cls in classes:
        if not (isinstance(cls, str) or (isinstance(cls, type) and issubclass(cls, (nn.Module, LazyModuleMixin)))):
            raise InputError(
                f"{cls!r} is not a class of nn.Module, nor its full name; pass the layer's class, not an instance"
            )
    return classes


def _register(table: dict[ModuleClass, T], target: Target) -> Callable[[T], T]:
    classes = _classes(target)

    def decorate(value: T) -> T:
        _registrations[0] += 1
        note_methods(*classes)
        table.update(dict.fromkeys(classes, value))
        return value

    return decorate


def _set_rule(cls: ModuleClass, rule: Rule, grad_sampler: GradSampler) -> None:
    _registrations[0] += 1
    note_methods(cls)
    if isinstance(cls, str):
        RULES_BY_NAME[cls] = rule
        return
    RULES[cls] = rule
    GRAD_SAMPLERS[cls] = grad_sampler
    NORM_SAMPLERS[cls] = norm_sampler(rule)


# --- for users ---


def register_rule(
    target: Target,
    *,
    whole: bool = False,
    fresh: bool = False,
    alike: Callable[[Any], Hashable] | None = None,
    without_input: Collection[str] = (),
) -> Callable[[R], R]:
    """Decorator that makes a function the rule of one or several layer classes.

    The class's grad sampler and norm sampler follow from the rule. ``docs/writing-a-rule.md`` has an example.

    Args:
        target: a class of nn.Module, its full name as a string, or several of them. Subclasses that keep the
            class's forward, and the methods that it runs, have the rule too.
        fresh: the layer's forward ends in an operation that makes its output afresh and does not keep it for its own
            backward (a product, not a tanh); then an in-place activation may follow the layer.
        alike: gives all that the rule looks at of a layer, apart from which parameters are trainable. Small layers
            that are equal in it, with inputs of one shape, are given to the rule as one: the samples of all, with one
            of the layers. For rules of one input and one output that give outer products or dense factors.
        whole: the rule answers for the parameters of the module's children as well; they get no rules of their own.
        without_input: names of parameters whose factors follow from the backprops alone, as a bias's. Where no others
            are trained, the layer's input is not kept for them, and the rule finds NaNs of its shape in its place.
            Source: Bu et al., Differentially Private Bias-Term Fine-tuning of Foundation Models (2022).

    Raises:
        InputError: ``target`` is not a class, or classes, of nn.Module.

    >>> from dpfast.factors import OuterProduct
    >>> import torch
    >>> from dpfast.testing import check_rule
    >>> class Doubled(nn.Linear):
    ...     def forward(self, x):
    ...         return 2.0 * nn.functional.linear(x, self.weight)
    >>> @register_rule(Doubled)
    ... def doubled(layer, activations, backprops):
    ...     return {layer.weight: OuterProduct(activations[0], 2.0 * backprops)}
    >>> check_rule(Doubled(3, 2, bias=False), torch.ones(4, 3))
    """

    classes = _classes(target)

    def decorate(rule: R) -> R:
        if whole:
            _WHOLE.add(rule)
        if fresh:
            _FRESH.add(rule)
        if alike is not None:
            _ALIKE[rule] = alike
        _WITHOUT_INPUT[rule] = frozenset(without_input)
        for cls in classes:
            _set_rule(cls, rule, grad_sampler(rule))
        return rule

    return decorate


def register_grad_sampler(target: Target) -> Callable[[S], S]:
    """Decorator, as Opacus's: the function gives ``{parameter: grad_sample (N, *shape)}`` for a layer class.

    It is called with ``(layer, activations, backprops)``: a list of the layer's positional inputs (N, ...) and the
    gradient of the loss at its output (N, ...), in the layer's dtype. What it gives may be in fp32.

    Args:
        target: a class of nn.Module, its full name as a string, or several of them.

    Raises:
        InputError: ``target`` is not a class, or classes, of nn.Module.
    """

    classes = _classes(target)

    def decorate(sampler: S) -> S:
        def rule(module: nn.Module, activations: Activations, backprops: Tensor) -> dict[nn.Parameter, Factor]:
            return dense(type(module).__name__, sampler(module, activations, backprops))

        rule.__name__ = getattr(sampler, "__name__", "grad_sampler")
        for cls in classes:
            _set_rule(cls, rule, sampler)
        return sampler

    return decorate


def register_norm_sampler(target: Target) -> Callable[[GradSampler], GradSampler]:
    """Decorator, as Opacus's: the function gives ``{parameter: norm_sample (N,)}`` for a layer class.

    It is called as a grad sampler is, and is what ``NORM_SAMPLERS`` hands to other code. Clipping itself takes norms
    from the rule (or grad sampler), because a norm that comes alone has no proven bound.

    Args:
        target: as for :func:`register_grad_sampler`.

    Raises:
        InputError: ``target`` is not a class, or classes, of nn.Module.
    """
    return _register(NORM_SAMPLERS, target)


def _sampler(rule: Rule, verb: Callable[[Factor], Tensor]) -> GradSampler:
    def sampler(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        return {p: verb(factor) for p, factor in rule(layer, Activations(activations), backprops).items()}

    return sampler


def grad_sampler(rule: Rule) -> GradSampler:
    return _sampler(rule, lambda factor: factor.materialize())


def norm_sampler(rule: Rule) -> GradSampler:
    return _sampler(rule, lambda factor: factor.sq_norm().value.sqrt().float())


# --- for the families in rules/ ---


def register_forward(
    target: Target, *, only: Callable[[Any], bool] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a forward that runs in place of the class's own, the same mathematics made of tapped pieces.

    The function takes ``(module, piece, *args, **kwargs)``; see ``pieces.Pieces``. It answers for the whole subtree.
    ``only`` says of which modules of the class it is the forward; others go as if nothing were registered.
    """

    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        if only is not None:
            _ONLY[forward] = only
        return _register(_FORWARDS, target)(forward)

    return decorate


def register_by_row(target: Target) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the module's forward, ``(module, *args, **kwargs)``, such that no row's bits depend on what the others
    hold. It runs where it is looked at which rows change with a sample, or with its length."""
    return _register(_BY_ROW, target)


def register_broadcast(target: Target, method: str, child: str) -> None:
    """Names a method that computes something of shape (1, ...) from the parameters of one child, linearly, which the
    model then broadcasts over its samples (a table of relative positions), also past a reentrant checkpoint's end."""
    _register(_BROADCASTS, target)((method, child))


def register_batch_dim(target: Target) -> Callable[[Callable[[Any], int]], Callable[[Any], int]]:
    """Decorator: the function says where a container has its samples, for it and for what runs inside it."""
    return _register(_BATCH_DIMS, target)


def register_function(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: what runs in place of a function of torch's that brings tensors without samples, which parameters went
    into, together with samples.

    It takes ``(meeting, *args, **kwargs)``; see ``shared.Meeting``. Where it can do nothing it raises
    UnsupportedModuleError, on fake tensors already.
    """

    def decorate(substitute: Callable[..., Any]) -> Callable[..., Any]:
        _FUNCTIONS.update(dict.fromkeys(functions, substitute))
        return substitute

    return decorate


def register_folded(target: Target) -> None:
    """Names containers that fold their positions into the samples for some layers inside, (N, T, D) -> (N·T, D)."""
    _register(_FOLDED, target)(True)


def register_fault(target: Target) -> Callable[[Callable[[Any], str | None]], Callable[[Any], str | None]]:
    """Decorator: the function says why a layer cannot have per-sample gradients, and the remedy; None where it can.

    It is asked for subclasses too, whatever forward they have.
    """

    def decorate(fault: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        _registrations[0] += 1
        _FAULTS.extend((key, fault) for key in _classes(target))
        _faults_of.cache_clear()
        return fault

    return decorate


# --- look-up ---


@lru_cache(maxsize=4096)
def _names(cls: type) -> tuple[tuple[Any, Any], ...]:
    """(base class, key) of everything that the class may be registered as, its own first; last what is wrapped
    around its forward."""
    names = [(base, key) for base in cls.__mro__ for key in (base, f"{base.__module__}.{base.__qualname__}")]
    forward = getattr(cls, "forward", None)
    if hasattr(forward, "__wrapped__"):
        names.append((cls, f"{forward.__globals__['__name__']}.{forward.__code__.co_name}"))  # type: ignore[union-attr]
    return tuple(names)


def _find(module: nn.Module, *tables: Mapping[Any, T]) -> T | None:
    """The entry of the module's class, or of a base class whose forward, and its helpers, it has not changed."""
    own = module.__dict__.get("forward")
    own = getattr(own, "replaced", own)
    if own is not None and not hasattr(module, "_hf_hook"):  # accelerate's hooks call the old forward
        return None
    if "parametrizations" in module._modules:
        return None
    for base, key in _names(type(module)):  # type: ignore[arg-type]  # mypy takes Module.__hash__ for the class's own
        for table in tables:
            if key in table:
                return table[key] if inherits(module, base) else None
    return None


def find_rule(module: nn.Module) -> Rule | None:
    """The rule of the module's class, or of a base class whose forward it has not changed."""
    return _find(module, RULES, RULES_BY_NAME)


def plain_rule(module: nn.Module) -> Rule | None:
    """The rule of the module's class, where its own forward runs."""
    return None if find_forward(module) is not None else find_rule(module)


def registered(cls: type[nn.Module]) -> tuple[Any, ...]:
    """Equal where nothing has been registered since that could change :func:`plain_rule` of the class."""
    return _registrations[0], len(RULES), RULES.get(cls), cls.forward


def classes_with_rules() -> list[type[nn.Module]]:
    """Classes that have a rule of their own, or a forward of pieces that have; not those known by their full name."""
    return [cls for cls in dict.fromkeys((*RULES, *_FORWARDS)) if isinstance(cls, type)]


def find_likeness(rule: Rule, module: nn.Module) -> Hashable:
    """What the rule looks at of the module, where it takes several as one; None where it does not."""
    alike = _ALIKE.get(rule)
    return None if alike is None else alike(module)


def find_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that runs in place of the module's own; none where a child makes its weights itself."""
    found = _find(module, _FORWARDS)
    if found is None:
        return None
    for child in module._modules.values():
        if child is not None and "parametrizations" in child._modules:
            return None
    only = _ONLY.get(found)
    return found if only is None or only(module) else None


def find_by_row(module: nn.Module) -> Callable[..., Any] | None:
    """See :func:`register_by_row`."""
    return _find(module, _BY_ROW)


def find_broadcast(module: nn.Module) -> tuple[str, str] | None:
    """The method of the module whose result the model broadcasts, and the child whose parameters it uses."""
    return _find(module, _BROADCASTS)


def find_function(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """What runs in its place; see :func:`register_function`."""
    return _FUNCTIONS.get(function)


def find_batch_dim(module: nn.Module) -> int | None:
    """Where the module has its samples, where it says so itself."""
    say = _find(module, _BATCH_DIMS)
    return None if say is None else say(module)


def folds_samples(module: nn.Module) -> bool:
    """Whether the module is a container of :func:`register_folded`."""
    return _find(module, _FOLDED) is not None


def find_fault(module: nn.Module) -> str | None:
    """Why the module cannot have per-sample gradients."""
    for say in _faults_of(type(module)):  # type: ignore[arg-type]  # as in _find
        fault = say(module)
        if fault is not None:
            return fault
    return None


@lru_cache(maxsize=4096)
def _faults_of(cls: type) -> tuple[Callable[[Any], str | None], ...]:
    return tuple(fault for _, key in _names(cls) for of, fault in _FAULTS if of == key)


def owns_children(module: nn.Module) -> bool:
    """Whether what answers for the module answers for its whole subtree."""
    return find_rule(module) in _WHOLE or find_forward(module) is not None


def makes_fresh_output(rule: Rule | None) -> bool:
    """Whether nothing but its caller has the output of a module with this rule, not even autograd."""
    return rule in _FRESH


def reads_input(rule: Rule | None, names: Collection[str]) -> bool:
    """Whether the factors of the module's parameters of these names follow from more than the backprops."""
    return not _WITHOUT_INPUT.get(rule, frozenset()).issuperset(names)  # type: ignore[arg-type]  # None has no entry
