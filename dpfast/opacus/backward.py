"""Opacus's ghost clipping in one backward pass: the second is replaced by sums over what the first has seen.

``DPTensorFastGradientClipping.backward`` runs a whole backward pass for the norms, throws its gradients away, and runs
another one for the clipped sum. While dpfast is installed, the first pass goes down to the lowest module hooks and no
further, so no weight gradient is computed in it; and where every gradient that the second would find is that of a layer
whose norm came from a rule, the rule's factors give the clipped sum at once (book-keeping, as in dpfast's own modules).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping as OpacusGhostModule
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import DPTensorFastGradientAdaptiveClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn

from dpfast.arithmetic import towards_zero
from dpfast.errors import InputError, StateError
from dpfast.factors import Factor
from dpfast.modes import GradSampleModule, Unrounded, is_taken_unrounded, warn_of_16_bits
from dpfast.opacus.clip_factors import get_adapted_clipping_coef, get_clipping_coef, get_norm_sample
from dpfast.opacus.ghost_graph import Graph, check_caught, survey, used_once
from dpfast.opacus.two_passes import one_a_sample, reduced, second_pass, two_passes

_KEPT: dict[nn.Parameter, list[Factor]] = {}
"""The parameters of the backward passes that run now, in any thread, and the factors of each."""


def install() -> None:
    """Puts ours in the places of Opacus's ``backward`` and of what makes clip factors; where somebody else's stands,
    that stays, and so does what a subclass overrides (FSDP's)."""
    for place in _PLACES:
        place.install()


def uninstall() -> None:
    """Puts Opacus's back, unless somebody has put another there since. Safe to call twice."""
    for place in _PLACES:
        place.uninstall()


def run(loss: DPTensorFastGradientClipping) -> None:
    """A step of :class:`ClippedLossTensor`: in one pass where :func:`install` has been called and that is enough."""
    if DPTensorFastGradientClipping.backward is _backward:
        _backward(loss)
    else:
        two_passes(loss, loss.module.get_clipping_coef)


def keep(parameter: nn.Parameter, factor: Factor) -> Factor:
    """Keeps the factor until the clipped sum, where the pass that runs will ask for it. Returns the form to take the
    norm of."""
    kept = _KEPT.get(parameter)
    if kept is None:
        return factor
    kept.append(factor.kept())
    return kept[-1]


def _backward(self: DPTensorFastGradientClipping) -> None:
    """Leaves ``Σ_n c_n g_n`` in ``p.grad``, as Opacus's does; by two passes wherever anything is unusual.

    Raises:
        InputError: the losses are not one a sample, (N,).
    """
    _clip(self, self.module.get_clipping_coef)


def _adaptive_backward(self: DPTensorFastGradientAdaptiveClipping) -> None:
    """The same with Opacus's adaptive C, which moves between norms and factors.

    Raises:
        InputError: the losses are not one a sample, (N,), or the module is dpfast's own.
    """
    if self.loss_per_sample.dim() == 0:
        raise InputError(
            "the criterion has put the samples' losses together before they could be clipped, as Opacus 1.6's "
            "PrivacyEngineAdaptiveClipping leaves it; set criterion.criterion.reduction = 'none' behind make_private"
        )
    if isinstance(self.module, GradSampleModule):
        raise InputError(
            f"{type(self).__name__} moves max_grad_norm once the norms are known, and {type(self.module).__name__} of "
            "dpfast has clipped by then; wrap the model in Opacus's (grad_sample_mode='ghost'), or set max_grad_norm "
            "between steps"
        )
    _clip(self, partial(get_adapted_clipping_coef, self))


def _clip(self: DPTensorFastGradientClipping, factors_of: Callable[[], Tensor]) -> None:
    module, losses = self.module, one_a_sample(self.loss_per_sample)
    loss, graph = reduced(self), None
    if loss.grad_fn is not None and _hooks_run(module):
        graph = survey(loss.grad_fn, set(module._module.parameters()))
        check_caught(graph, module)
    if graph is None or not graph.is_all or not graph.lowest or _is_reduced(module):
        two_passes(self, factors_of)
        return
    parameters = _all_from_rules(graph, module, losses)
    with _keeping(parameters or ()) as kept:
        torch.autograd.grad(loss, graph.lowest, retain_graph=parameters is None)
    _check_complete(module, kept)
    self.optimizer.zero_grad()
    factors = factors_of()
    if parameters is not None:
        warn_of_16_bits(module._module, kept)
        _leave_sums(kept, factors)
    else:
        second_pass(module, losses, factors)


def _hooks_run(module: Any) -> bool:
    """Whether Opacus's own do."""
    theirs = OpacusGhostModule.capture_backprops_hook
    return getattr(type(module), "capture_backprops_hook", None) is theirs and module.hooks_enabled


def _is_reduced(module: Any) -> bool:
    """Whether a reducer of torch's hangs on the parameters."""
    return any(isinstance(m, nn.parallel.DistributedDataParallel) for m in module._module.modules())


def _all_from_rules(graph: Graph, module: Any, losses: Tensor) -> list[nn.Parameter] | None:
    """The parameters under the loss, where a rule's factors will stand for all that a second pass would find: every
    leaf is a parameter that one call of its own module uses, and nothing else. None otherwise."""
    owners = {p: m for m in module._module.modules() for p in m.parameters(recurse=False)}
    dim = 0 if module.batch_first else 1
    parameters = [leaf.variable for leaf in graph.leaves]  # type: ignore[attr-defined]  # AccumulateGrad has it
    for p, leaf in zip(parameters, graph.leaves, strict=True):
        owner = owners.get(p)
        sampler = module.NORM_SAMPLERS.get(type(owner)) if module.use_ghost_clipping else None
        calls: Any = getattr(owner, "activations", ())
        one_row_a_loss = len(calls) == 1 and _has_row_a_loss(calls[0][0], losses, dim)
        if not (getattr(sampler, "keeps_factors", False) and one_row_a_loss and used_once(leaf, graph)):
            return None
    return parameters


def _has_row_a_loss(x: Tensor, losses: Tensor, dim: int) -> bool:
    """Whether a layer's input has the samples in that dimension, as far as shapes tell: not where positions, of
    (N, T, D) or of numbers (N, T), are as many, nor of numbers in a row, which may be positions. These must not be
    weighted by samples' factors."""
    if losses.shape != x.shape[dim : dim + 1]:
        return False
    if x.dim() == (3 if x.is_floating_point() else 2):
        return x.shape[1 - dim] != len(losses)
    return x.is_floating_point() or x.dim() > 2


@contextmanager
def _keeping(parameters: Iterable[nn.Parameter]) -> Iterator[dict[nn.Parameter, list[Factor]]]:
    kept: dict[nn.Parameter, list[Factor]] = {p: [] for p in parameters}
    _KEPT.update(kept)
    try:
        yield kept
    finally:
        for p in kept:
            del _KEPT[p]


def _check_complete(module: Any, kept: dict[nn.Parameter, list[Factor]]) -> None:
    missing = [name for name, p in module._module.named_parameters() if p in kept and len(kept[p]) != 1]
    if missing:
        raise StateError(
            f"{', '.join(missing)}: used by another module than its own, where its gradient cannot be clipped; call "
            "its own module instead, or freeze it"
        )


@torch.no_grad()
def _leave_sums(kept: dict[nn.Parameter, list[Factor]], factors: Tensor) -> None:
    """``p.grad += Σ_n c_n g_n``; what is kept is freed parameter by parameter."""
    unrounded, before = Unrounded(), Unrounded.of(kept)
    for p, of_p in kept.items():
        total = of_p.pop().weighted_sum(factors.to(p.device, torch.float64))
        if is_taken_unrounded(p):
            p.grad = unrounded.settled(p, before.get(p, p.grad), total)
            continue
        total = towards_zero(total, p.dtype)
        p.grad = total if p.grad is None else p.grad.add_(total)
    unrounded.keep()


class _Place:
    """A method of Opacus's, and ours for it."""

    def __init__(self, cls: type, name: str, ours: Callable[..., Any]):
        self.cls = next(base for base in cls.__mro__ if name in vars(base))  # where Opacus's own version has it
        self.name = name
        self.ours = ours
        self.theirs = vars(self.cls)[name]

    def install(self) -> None:
        if vars(self.cls)[self.name] is self.theirs:
            setattr(self.cls, self.name, self.ours)

    def uninstall(self) -> None:
        if vars(self.cls)[self.name] is self.ours:
            setattr(self.cls, self.name, self.theirs)


_PLACES = (
    _Place(DPTensorFastGradientClipping, "backward", _backward),
    _Place(DPTensorFastGradientAdaptiveClipping, "backward", _adaptive_backward),
    _Place(OpacusGhostModule, "get_norm_sample", get_norm_sample),
    _Place(OpacusGhostModule, "get_clipping_coef", get_clipping_coef),
)
