"""What samples' outputs give the parameters, in one batch and in another of the same samples: black boxes, where there
is no saying which rows are whose. What differs by more than roundings is told apart here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfast.arithmetic import exact_convolutions, reduced_products
from dpfast.looks.run_on import copied
from dpfast.taps import Tap, find_by_row, following_model, results_in
from dpfast.trials import OfCopy, RandomNumbers, SameAtEverySize, Trial, kept, leaves_of_copy, put_back

_FOLDED = 1021  # numbers kept of a parameter's gradient, which is added up over and over: a prime
_ROWS = 64  # of these at once
_ROUNDINGS, FAR = 2**7, 2.0**-4
_OF_ALL = 2.0**-4  # of a parameter whose own gradient is next to nothing


class Outputs(NamedTuple):
    """What a run gives.

    Attributes:
        found: outputs with gradients, by number or by the name of an attribute.
        parameters: the copy's. shared: of these the numbers of those that are the model's own.
    """

    found: dict[int | str, Tensor]
    parameters: list[nn.Parameter]
    shared: frozenset[int]


class _Tap(OfCopy):
    """The tap of a copy, which runs as the module does; where packed samples share kernels, each by itself."""

    def caught(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_row = find_by_row(self.module)
        return forward(*args, **kwargs) if by_row is None else by_row(self.module, *args, **kwargs)


class Runs:
    """Of copies of a model, on batches of its samples. Random numbers say nothing of places or sizes.

    Args:
        trial: how it is called. again: has random numbers start again. others: what stands where parameters are, by
            their ids. double: in fp64.
    """

    def __init__(
        self,
        model: nn.Module,
        taps: Sequence[Tap],
        trial: Trial,
        again: RandomNumbers,
        others: dict[int, Any],
        *,
        double: bool = False,
    ):
        self.model, self.taps, self.trial, self.again, self.others = model, taps, trial, again, others
        self.double = double

    def in_double(self) -> Runs:
        """The same in fp64."""
        of_model = ((p, self.others.get(id(p), p)) for p in self.model.parameters() if p.is_floating_point())
        others = {id(p): nn.Parameter(x.detach().double(), requires_grad=p.requires_grad) for p, x in of_model}
        return Runs(self.model, self.taps, self.trial, self.again, others, double=True)

    def run(self, leaves: Sequence[Any]) -> Outputs:
        """One forward pass on these inputs."""
        stand_ins = leaves_of_copy(self.model) | self.others
        model, copies = copied(self.model, self.taps, stand_ins)
        if self.double:
            leaves = [_doubled(x) for x in leaves]
            for holder, name, x in [(m._buffers, name, x) for m in model.modules() for name, x in m._buffers.items()]:
                holder[name] = _doubled(x)
        some = self.trial.as_called(leaves)
        self.again()
        on_gpu = torch.cuda.is_initialized()
        with put_back(self.model):
            self.trial.run_passes(model, some)
            for tap in copies:
                tap.__class__ = _Tap
            args, kwargs = self.trial.unflatten(some)
            with (
                SameAtEverySize(self.again),
                following_model(copies[0].taps, model, some),
                exact_convolutions() if on_gpu else nullcontext(),
            ):
                outputs = results_in(model(*args, **kwargs))
        held = kept.differentiable(model, outputs)
        results: list[tuple[int | str, Any]] = [*enumerate(outputs), *held.items()]
        found = {key: x for key, x in results if kept.is_differentiable(x)}
        real = {key: torch.view_as_real(x) if x.is_complex() else x for key, x in found.items()}
        parameters, own = [p for p in model.parameters() if p.requires_grad], {id(p) for p in self.model.parameters()}
        return Outputs(real, parameters, frozenset(i for i, p in enumerate(parameters) if id(p) in own))


def _doubled(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def gradients_of(
    outputs: Sequence[Tensor], run: Outputs, losses: Sequence[bool], *, again: bool = True
) -> list[Tensor]:
    """A few numbers of each parameter's gradient, in fp64: of losses, of the sum of their entries; of others, of a loss
    whose gradient at each entry depends on that entry alone. They are taken as they come by: all at once are as much
    as the model. again: the graph stays for others."""
    own = [
        torch.ones_like(x) if loss else torch.where(x.isfinite(), x.cos(), 0.0).detach()
        for x, loss in zip(outputs, losses, strict=True)
    ]
    found: dict[int, Tensor] = {}

    def take(i: int, grad: Tensor) -> None:
        g = _folded(grad.detach().to_dense().flatten())
        found[i] = found[i] + g if i in found else g

    shared = [(i, run.parameters[i]) for i in sorted(run.shared)]  # of a kind that a copy has no other of
    leaves = [(i, p) for i, p in enumerate(run.parameters) if i not in run.shared]
    hooks = [p.register_hook(partial(take, i)) for i, p in leaves]
    try:
        if leaves:
            torch.autograd.backward(outputs, own, inputs=[p for _, p in leaves], retain_graph=again or bool(shared))
    finally:
        for hook, (_, p) in zip(hooks, leaves, strict=True):
            hook.remove()
            p.grad = None
    if shared:
        grads = torch.autograd.grad(outputs, [p for _, p in shared], own, allow_unused=True, retain_graph=True)
        for (i, _), grad in zip(shared, grads, strict=True):
            found.update({} if grad is None else {i: _folded(grad.to_dense().flatten())})
    nothing = outputs[0].new_zeros(1)
    return [found.get(i, nothing) for i in range(len(run.parameters))]


def _folded(g: Tensor) -> Tensor:
    whole = len(g) // _FOLDED * _FOLDED
    if not whole:
        return g.double()
    total = g.new_zeros(_FOLDED, dtype=torch.float64)
    for rows in g[:whole].view(-1, _FOLDED).split(_ROWS):
        total += rows.sum(0, dtype=torch.float64)
    total[: len(g) - whole] += g[whole:]
    return total


def differ(
    grads: Sequence[list[Tensor]], signs: Sequence[float], dtype: torch.dtype, least: float | None = None
) -> bool | None:
    """Whether these add up to more than roundings, with their signs, at any parameter, or than that part of it."""
    allowed = least or _allowed(dtype)
    sums = [sum(sign * g for sign, g in zip(signs, some, strict=True)) for some in zip(*grads, strict=True)]
    norms = torch.stack([torch.stack([g.norm() for g in some]).max() for some in zip(*grads, strict=True)])
    if not bool(norms.isfinite().all()):
        return None
    off = torch.stack([x.norm() for x in sums])
    return bool((off > allowed * (norms + _OF_ALL * norms.norm())).any())


def _allowed(dtype: torch.dtype) -> float:
    """By which part of themselves the same sums may differ that kernels add up in another order."""
    kinds = [dtype, *(torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))]
    lost = max(torch.finfo(kind).eps for kind in kinds)
    return min(_ROUNDINGS * max(lost, reduced_products()), FAR)
