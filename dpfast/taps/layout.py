"""Where each layer has its samples, and how they come to the front."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from dpfast.taps.registry import Activations, find_batch_dim, find_forward, find_rule, folds_samples

Call = tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]
"""The shapes of the tensors that one run of a module took, and of the floating-point ones that it gave."""

Place = int | str | None
"""The dimension of a module's samples; why there is none that could be taken; None: not known."""

Places = Place | dict[Any, Place]
"""The same for every kind of input, or by kinds."""

# What torch itself has in dimension 0.
_SAMPLES_FIRST = (nn.modules.conv._ConvNd, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm, nn.EmbeddingBag)


NO_SAMPLES = "its output is the same whatever the batch, one for all samples"


class Layout(NamedTuple):
    """Where a module has its samples.

    Attributes:
        batch_dim: the dimension of its inputs and outputs.
        folded: positions may be folded into them, (N, T, D) -> (N·T, D).
    """

    batch_dim: int
    folded: bool


class _Here(threading.local):
    """The kind of input that each model was last called with in this thread."""

    def __init__(self) -> None:
        self.kinds: dict[int, Any] = {}


_here = _Here()


def note_kind(taps: object, kind: Any) -> None:
    """The tapped model is being called with such inputs."""
    _here.kinds[id(taps)] = kind


def kind_here(taps: object) -> Any:
    """The kind of input that the tapped model was last called with in this thread."""
    return _here.kinds.get(id(taps))


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


def place_of(module: nn.Module, batch_dim: int, call: Call, other: Call, sizes: Sequence[int]) -> Place:
    """Where a module has its samples, from one run of it on a batch of each of two sizes.

    Args:
        batch_dim: where it is taken to have them. Rows there that are not just the samples (positions folded into
            them) are left to those who count the rows.
    """
    pairs = [list(zip(one, two, strict=True)) for one, two in zip(call, other, strict=True)]
    if any(len(one) != len(two) for some in pairs for one, two in some):
        return None
    inputs, outputs = ([_dims(one, two, sizes) for one, two in some] for some in pairs)
    if find_forward(module) is not None:  # what is tapped are pieces of it, laid out as it says itself
        own = 0 if getattr(module, "batch_first", True) else 1
        if not inputs or inputs[0] == {own: True}:
            return own
        return f"its batch_first says that samples are in dimension {own} of its input, where they are not"
    found = [dims for dims in outputs if dims]
    if not found:
        return NO_SAMPLES if outputs else None
    if len({dim for dims in found for dim in dims}) > 1:
        return "its output has the batch in several dimensions"
    ((dim, exact),) = found[0].items()
    if not exact:
        return dim if dim == batch_dim else f"its output has samples folded into dimension {dim}"
    if dim != 0 and isinstance(module, _SAMPLES_FIRST):
        return f"its samples are in dimension {dim}, where {type(module).__name__} cannot have them"
    if find_rule(module) is None and any(dims and dims != {dim: True} for dims in inputs):
        return f"its output has samples in dimension {dim}, an input has them elsewhere"
    return dim


def place_of_result(one: Sequence[Sequence[int]], two: Sequence[Sequence[int]], sizes: Sequence[int]) -> Place:
    """Where the result of an operation has its samples, from one run on a batch of each of two sizes."""
    found = [_dims(x, y, sizes) for x, y in zip(one, two, strict=True)]
    if not any(found):
        return NO_SAMPLES
    return next(iter(found[0])) if len(found) == 1 and list(found[0].values()) == [True] else None


def _dims(one: Sequence[int], two: Sequence[int], sizes: Sequence[int]) -> dict[int, bool]:
    """The dimensions that follow the batch, and whether each is just the samples."""
    return {d: list(pair) == list(sizes) for d, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1]}
