"""Per-sample gradients on a plain model, nothing wrapped: Opacus 0.13's ``opacus.autograd_grad_sample``.

autograd_grad_sample.add_hooks(model)
loss(model(x), y).backward()          # p.grad_sample (N, *p.shape) beside p.grad
autograd_grad_sample.remove_hooks(model)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dpfast.errors import StateError
from dpfast.modes.grad_sample_module import GradSampleModule
from dpfast.modes.hooks import Hooks

_NAME = "autograd_grad_sample_hooks"  # as in Opacus, so that each refuses a model that the other has


def add_hooks(
    model: nn.Module,
    loss_reduction: str = "mean",
    batch_first: bool = True,
    layout: Mapping[str, Any] | None = None,
) -> None:
    """From here on a backward pass leaves ``p.grad_sample`` on every trainable parameter of ``model``.

    Several backward passes without clearing ``p.grad_sample`` make it a list, one entry (N, *p.shape) a pass.

    Args:
        model: stays what it is: same class, same attributes, same state_dict. loss_reduction: how the loss adds
            up samples, "mean" or "sum". batch_first: whether samples are dimension 0 or 1 of inputs and outputs.
            layout: where layers have their samples, as in :class:`dpfast.GradSampleModule`.

    Raises:
        StateError: the model has hooks already. UnsupportedModuleError: it mixes samples. InputError: another
            ``loss_reduction``, or a ``layout`` that names no layer.

    Numerics:
        grad_sample is fp32 (fp64 for fp64 inputs) whatever the parameter's dtype.

    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> add_hooks(model, loss_reduction="sum")
    >>> model(torch.ones(4, 3)).sum().backward()
    >>> model.weight.grad_sample.shape
    torch.Size([4, 2, 3])
    >>> remove_hooks(model)
    >>> hasattr(model.weight, "grad_sample")
    False
    """
    if hasattr(model, _NAME):
        raise StateError("Trying to add hooks twice to the same model; remove the first ones with remove_hooks(model)")
    # In the model's __dict__, and not among its submodules: the state_dict and parameters() stay as they are.
    model.__dict__[_NAME] = GradSampleModule(
        model, loss_reduction=loss_reduction, batch_first=batch_first, layout=layout
    )


def remove_hooks(model: nn.Module) -> None:
    """Puts the model back as it was before :func:`add_hooks`, ``p.grad_sample`` removed.

    Raises:
        StateError: the model has none.
    """
    hooks = model.__dict__.get(_NAME)
    if not isinstance(hooks, GradSampleModule):
        raise StateError("Asked to remove hooks, but no hooks found: add_hooks(model) has not been called")
    hooks.to_standard_module()
    del model.__dict__[_NAME]


def disable_hooks() -> None:
    """Switches dpfast's hooks off in the whole process, those of wrapped modules and clippers too.

    Backward passes then give ordinary gradients, also through graphs that were made before.
    """
    Hooks.enabled_in_process = False


def enable_hooks() -> None:
    """Undoes :func:`disable_hooks`."""
    Hooks.enabled_in_process = True


def is_supported(layer: nn.Module) -> bool:
    """Whether this one layer has per-sample gradients; its children are not looked at."""
    return GradSampleModule.is_supported(layer)
