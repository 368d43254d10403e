"""What a tap asks of a layer's output before it passes it on, and makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from dpfast.arithmetic import operator
from dpfast.errors import DpfastError

_unsafe_view = operator(torch.ops.aten._unsafe_view.default)


def as_no_views(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same, each of which autograd takes for no view of another: an operation in place may follow."""
    return [_unsafe_view(x, x.shape) if x._is_view() else x for x in tensors]


def is_plain(x: object) -> bool:
    return type(x) is Tensor and x.is_floating_point()


def ready_for_change(tensors: list[Tensor], not_its_own: Sequence[object]) -> list[Tensor]:
    """Outputs that the tap may pass on as they are, so that operations in place may follow: autograd forbids those on
    views that a function of one's own made. What the layer keeps for its own backward pass stays so (the tap leaves the
    tensors' version counters alone, so a later change is noticed); views, which others may have too, and tensors of
    others are copied."""
    found: list[Tensor] = []
    for x in tensors:
        shared = x._is_view() or any(x is y for y in (*found, *not_its_own))
        found.append(x.clone() if shared else x)
    return found


def is_followed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a gradient goes through one of the inputs."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_flatten((args, kwargs))[0])


def failing_in_backward(output: Any, error: DpfastError) -> Any:
    """The output, whose gradient is an error."""

    def fail(grad: Tensor) -> None:
        raise error

    followed = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
    if not followed:  # no gradient would come by, but what comes out is not fit for private training either
        raise error
    for x in followed:
        x.register_hook(fail)
    return output
