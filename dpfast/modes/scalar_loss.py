"""A loss that is not one number, found before torch refuses it: the error names the layer and what to do.

``loss.backward()`` checks the loss's shape before it runs any hook, so its check is the one place where such an error
can be made. The first wrapped model puts a check of dpfast in front of it, which looks at losses with more than one
number only and leaves those alone that were made without a tap; everything else is torch's own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.errors import LossError
from dpfast.modes.mixed_losses import check_expected, check_for_counts
from dpfast.taps import is_of_tap, nodes_behind


def check_losses() -> None:
    """Puts the check in front of ``torch.autograd.backward``. Safe to call twice."""
    original = torch.autograd.backward
    if hasattr(original, "_checks_losses"):
        return

    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(tensors, Tensor) and grad_tensors is None and tensors.numel() != 1:
            layer = _tapped_layer(tensors)
            if layer is not None:
                raise LossError(
                    f"the loss has shape {tuple(tensors.shape)}, and backward() takes one number; it was made from the "
                    f"output of {layer}: reduce it by .mean() (loss_reduction='mean') or .sum()"
                )
        reaches_parameters, is_last = _asked(*args, **kwargs)
        if reaches_parameters:
            check_expected(*_losses(tensors, grad_tensors), is_last=is_last)
        for loss in _losses(tensors, grad_tensors)[0]:
            check_for_counts(loss)
        return original(tensors, grad_tensors, *args, **kwargs)

    backward._checks_losses = True  # type: ignore[attr-defined]  # a mark of ours
    torch.autograd.backward = backward


def _asked(
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> tuple[bool, bool]:
    """Of a backward pass with these arguments of torch's, whether parameters get gradients (attacks on inputs ask for
    no others than these), and whether none follows through the same graph, as one task's does another's."""
    some = [inputs] if isinstance(inputs, Tensor) else list(inputs or ())
    others = some and all(isinstance(x, Tensor) and not isinstance(x, nn.Parameter) for x in some)
    return not others, not (retain_graph or create_graph)


def _losses(tensors: Any, grads: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """Those that are tensors, and the gradients that are given for them."""
    some = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [grads] * len(some) if grads is None or isinstance(grads, Tensor) else list(grads)
    found = [(x, g) for x, g in zip(some, given, strict=False) if isinstance(x, Tensor)]
    return [x for x, _ in found], [g for _, g in found]


def _tapped_layer(loss: Tensor) -> str | None:
    """The tapped layer nearest to the loss in its graph."""
    return next((node.record.tap.layer for node in nodes_behind([loss.grad_fn]) if is_of_tap(node)), None)
