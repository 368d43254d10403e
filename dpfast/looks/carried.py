"""Whether what a forward pass keeps of its samples changes what the next one gives.

A codebook that follows the batches, a queue of negatives, a running mean: with these a sample moves the sums of later
steps, in which it is not, and no clipping bounds by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.errors import UnsupportedModuleError
from dpfast.looks.run_on import copied
from dpfast.looks.seen import Key, Run, in_reentrant_checkpoint
from dpfast.looks.witness import Witness
from dpfast.taps import Place, Tap, following_model, results_in
from dpfast.trials import Trial, kept, leaves_of_copy, put_back

_NEXT = 2  # passes in which it may show: what is kept may wait for one before it is used


def carried(
    model: nn.Module,
    taps: Sequence[Tap],
    trial: Trial,
    leaves: Sequence[Any],
    exchanged: Sequence[Sequence[Any]],
    places: dict[Key, Place],
    size: int,
    stand_ins: dict[int, Any],
    again: Callable[[], None],
) -> list[str]:
    """The names of buffers and attributes that differ with samples of a pass, where one of the next two, on the same
    samples, does too: in what it gives, in what its modules keep of it for a loss, or in the gradients of both. None
    where it does not.

    Args:
        leaves: the inputs, of ``size`` samples. exchanged: with some of them exchanged, and with others.
            Others: as ``run_on``'s.
    """

    def passes(first: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
        copy, own = copied(model, taps, leaves_of_copy(model) | stand_ins)
        witnesses = [Witness.of(tap, i, Run(), places, size) for i, tap in enumerate(own)]

        def forward(some: Sequence[Any]) -> list[Any]:
            again()
            some = trial.as_called([x.clone() if isinstance(x, Tensor) else x for x in some])
            for witness in witnesses:
                witness.called = trial, some
            args, kwargs = trial.unflatten(some)
            before, beside = kept.beside_parameters(copy), kept.made_outside(outside.values())
            with following_model(witnesses[0].taps, copy, some), torch.enable_grad():  # as in training
                results = results_in(copy(*args, **kwargs))
                results += kept.made(copy, before)
                results += kept.made_outside(outside.values(), beside)
                results += _gradients(results, copy)
                return [x.detach() if isinstance(x, Tensor) else x for x in results]

        with put_back(model) as outside:
            forward(first)
            held = kept.held(copy, outside.values())
            kept_by_it = {name: x.clone() if isinstance(x, Tensor) else x for name, (x, *_) in held.items()}
            return kept_by_it, [y for _ in range(_NEXT) for y in forward(leaves)]

    kept_by_one, one = passes(leaves)
    for some in exchanged:
        kept_by_other, other = passes(some)
        if _same(one, other):
            continue
        _, repeated = passes(leaves)
        if not _same(one, repeated):  # what goes by itself says nothing (sums of a GPU's, in any order)
            told = [i for i, (x, y) in enumerate(zip(one, repeated, strict=True)) if _same([x], [y])]
            if _same([one[i] for i in told], [other[i] for i in told]):
                raise RuntimeError("its results on the same samples differ from run to run")
        return [name for name, x in kept_by_one.items() if _differs(x, kept_by_other.get(name))] or ["what it keeps"]
    return []


def _gradients(results: Sequence[Any], copy: nn.Module) -> list[Any]:
    """Of the parameters, by all that is differentiable: what is kept may weigh a gradient alone."""
    ends = [x for x in results if kept.is_differentiable(x) and not x.is_complex()]
    parameters = [p for p in copy.parameters() if p.requires_grad]
    if not ends or not parameters:
        return []
    sums = [(x + x.square()).sum() for x in ends]  # with gradients that follow samples behind a linear layer too
    if not in_reentrant_checkpoint(sums):
        return [*torch.autograd.grad(sums, parameters, allow_unused=True)]
    if any(type(p) is not nn.Parameter for p in parameters):  # the model's own, whose gradients are the caller's
        return []
    found: dict[int, Tensor] = {}
    handles = [p.register_hook(partial(_add, found, i)) for i, p in enumerate(parameters)]
    torch.autograd.backward(sums)
    for handle in handles:
        handle.remove()
    return [found.get(i) for i in range(len(parameters))]


def _add(found: dict[int, Tensor], i: int, gradient: Tensor) -> None:
    found[i] = found[i] + gradient if i in found else gradient


def _differs(one: Any, other: Any) -> bool:
    """Not where they are of a kind that torch does not compare (sparse, meta, numbers beyond 64 bits)."""
    try:
        return not _same([one], [other])
    except Exception:
        return False


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """To the bit."""
    return len(some) == len(others) and all(map(_is_same, some, others))


def _is_same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) or isinstance(other, Tensor)):
        if all(isinstance(x, (int, float, complex)) for x in (one, other)):
            return bool(one == other or (one != one and other != other))
        return type(one) is type(other) and (not isinstance(one, (str, bytes)) or one == other)
    if not all(isinstance(x, (Tensor, int, float, complex)) for x in (one, other)):
        return False
    x, y = torch.as_tensor(one), torch.as_tensor(other)
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())


def refuse_carried(model: nn.Module, names: Sequence[str]) -> None:
    """Raises UnsupportedModuleError where there are such."""
    if names:
        raise UnsupportedModuleError(
            f"{type(model).__name__}: what a forward pass keeps of its samples ({', '.join(names)}) changes what the "
            "next one gives: a sample would move sums of later steps, past clipping and noise. Keep nothing of samples "
            "in training (take it from public data, and leave it as it is)"
        )
