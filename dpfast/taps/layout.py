"""Where each layer has its samples, and how they come to the front."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from dpfast.taps.registry import Activations, find_batch_dim, folds_samples


class Layout(NamedTuple):
    """Where a module has its samples.

    Attributes:
        batch_dim: the dimension of its inputs and outputs.
        folded: positions may be folded into them, (N, T, D) -> (N·T, D).
    """

    batch_dim: int
    folded: bool


def layouts(model: nn.Module, batch_dim: int) -> list[tuple[str, nn.Module, Layout]]:
    """Every module with its name and its layout, which containers say for what is inside them.

    Args:
        batch_dim: of the model itself.
    """
    by_name: dict[str, Layout] = {}
    found = []
    for name, module in model.named_modules():
        inherited = by_name[name.rpartition(".")[0]] if name else Layout(batch_dim, folded=False)
        dim = find_batch_dim(module)
        layout = Layout(inherited.batch_dim if dim is None else dim, inherited.folded or folds_samples(module))
        by_name[name] = layout
        found.append((name, module, layout))
    return found


def batch_to_front(x: Any, batch_dim: int) -> Any:
    """A tensor with its samples in dimension 0; anything else as it is."""
    return x.movedim(batch_dim, 0) if isinstance(x, Tensor) and x.dim() > batch_dim else x


def batch_in_front(activations: Activations, backprops: Any, dim: int) -> tuple[Activations, Any]:
    """Both with their samples in dimension 0."""
    if dim != 0:
        activations = activations.map(lambda x: batch_to_front(x, dim))
        backprops = tuple(batch_to_front(x, dim) for x in backprops)
    activations.batch_dim = dim
    return activations, backprops


def unfolded(activations: Activations, backprops: Any, n: int) -> tuple[Activations, Any]:
    """(N·T, D) -> (N, T, D), in a container that is known to fold them so."""
    rows = backprops[0].shape[0]
    if len(backprops) != 1 or backprops[0].dim() != 2 or rows == n or n == 0 or rows % n:
        return activations, backprops

    def unfold(x: Any) -> Any:
        return x.unflatten(0, (n, rows // n)) if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows else x

    return activations.map(unfold), tuple(map(unfold, backprops))
