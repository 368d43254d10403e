"""Whether each loss is its own sample's alone: a step that the eager mode cannot see, because its loss comes from
outside, is a function here, and is asked. Evidence on the batches that are looked at, not a proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.compiled.batches import Batch
from dpfast.compiled.mode import GraphMode, learner, mixed_in
from dpfast.errors import InputError
from dpfast.taps import taps_suspended
from dpfast.trials import put_back, same_random_numbers

Losses = Callable[..., Tensor]

_DEPENDS = (
    "losses(model, *batch): a sample's loss changes with the other samples of the batch, so clipping bounds nothing. "
    "Compute each loss from its own sample alone: no mean, no weights, no negatives and no order over the batch"
)


def check_apart(
    model: nn.Module, losses: Losses, learned: GraphMode, batch: Batch, captured: Batch, options: dict[str, Any]
) -> None:
    """Looks at all samples roughly, and at some of them as an eager step looks at a model.

    Args:
        learned: a copy of the model that has learned where its samples are. options: its. captured: what a graph has of
            the batch, padded: losses may go by how many samples they are given.

    Raises:
        InputError: another sample changes a loss, or its gradient.
    """
    several = _compare_values(losses, learned, batch)
    if several and len(captured.tensors[0]) != len(batch.tensors[0]):
        _compare_values(losses, learned, captured)
    if several and not mixed_in(learned)[1]:
        _look(model, losses, batch, options)


def check_losses(losses: Any) -> None:
    """Raises InputError for what is not called with the model: a criterion, or what it gave."""
    if isinstance(losses, nn.modules.loss._Loss) or not callable(losses):
        raise InputError(
            f"losses={losses!r} is to be a function that is called with the model and the batch, and gives one loss a "
            "sample: lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y, reduction='none')"
        )


def _compare_values(losses: Losses, model: GraphMode, batch: Batch) -> bool:
    """Exchanges every other sample, and each half of them, for their neighbours: the losses of the others must stay.

    Returns:
        whether there are losses of several samples.
    """
    n = len(batch.tensors[0])
    with torch.no_grad(), taps_suspended(), same_random_numbers() as again:

        def of(exchanged: Tensor) -> Tensor:
            again()
            rows = torch.where(exchanged, torch.arange(n).roll(1), torch.arange(n))
            with put_back(model._module, losses):
                return losses(model, *batch.of([x[rows.to(x.device)] for x in batch.tensors]))

        nobody = torch.zeros(n, dtype=torch.bool)
        base = of(nobody)
        if not (isinstance(base, Tensor) and base.shape == (n,) and base.is_floating_point()):
            return False  # another error's
        for mask in (torch.arange(n) % 2 == 0, torch.arange(n) < n / 2):
            for exchanged in (mask, ~mask):
                if not _same(base, of(exchanged), ~exchanged) and _same(base, of(nobody), ~nobody):
                    raise InputError(_DEPENDS)
    return n > 1


def _same(one: Tensor, two: Tensor, rows: Tensor) -> bool:
    """But for rounding, which an operation may do otherwise for other values (an attention mask of ones)."""
    rows = rows.to(one.device)
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one[rows], two[rows], rtol=tolerance, atol=0.0, equal_nan=True)


class _Kept:
    """What is not copied."""

    def __init__(self, value: Callable[..., Any]):
        self.value = value

    def __deepcopy__(self, memo: object) -> _Kept:
        return self


class _WithLosses(nn.Module):
    """The model whose output is the losses, which is looked at to the bit, with noise, and with gradients."""

    def __init__(self, model: nn.Module, losses: Losses, batch: Batch):
        super().__init__()
        self.model = model
        self.of = _Kept(lambda model, *tensors: losses(model, *batch.of(tensors)))

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.of.value(self.model, *tensors)


_WithLosses.__name__ = "losses(model, *batch)"  # what a warning calls it that could not be looked at


def _look(model: nn.Module, losses: Losses, batch: Batch, options: dict[str, Any]) -> None:
    layout = options["layout"] and {f"model.{name}" if name else "model": at for name, at in options["layout"].items()}
    whole = learner(_WithLosses(model, losses, batch), {**options, "layout": layout})
    try:
        with put_back(model, losses):
            whole.learn(lambda mode, *tensors: mode(*tensors), batch.copies())
        outputs, layers = mixed_in(whole)
        if 0 in outputs:
            raise InputError(_DEPENDS)
        for layer, message in layers:
            raise InputError(f"losses(model, *batch): at {layer}, {message}")
    finally:
        whole.drop_guards()
