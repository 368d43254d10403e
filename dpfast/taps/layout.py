"""Where each layer has its samples, and how they come to the front."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpfast.errors import InputError
from dpfast.taps.activations import Activations
from dpfast.taps.registry import find_batch_dim, find_forward, find_rule, folds_samples

Call = tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]
"""The shapes of the tensors that one run of a module took, and of the floating-point ones that it gave."""


class Rows(NamedTuple):
    """Samples that stand in a dimension together with something else, k rows of each.

    Attributes:
        dim: the dimension, k·N long.
        together: a sample's rows stand together; False: the samples come again and again; None: not known.
    """

    dim: int
    together: bool | None


class Mixed(str):
    """Why the rows of a module are not each one sample's, whatever the dimension."""


class OtherRows(str):
    """Why a module's rows are not where a look before has found one of each sample."""


Place = int | Rows | str | None
"""The dimension of a module's samples; why there is none that could be taken; None: not known."""

Given = int | Rows | str | None
"""What the user says of a layer."""

NO_SAMPLES = "its output is the same whatever the batch, one for all samples"
NOT_RUN = "it runs for the first time, and has not been looked at yet"
SHARED = "shared"
_TOGETHER, _OVER_AND_OVER = "N*k", "k*N"

Places = Place | dict[Any, Place]
"""The same for every kind of input, or by kinds."""

SEVERAL = "its output has the batch in several dimensions"
ELSEWHERE = "its batch_first says that samples are in dimension"
_RECURRENT = (
    " (a recurrent layer of torch's is known as it is, not with a forward of its own, another method that the forward "
    "runs, or a parametrization; nn.LSTMCell and the like, in a loop, may have one)"
)

# What torch itself has in dimension 0.
_SAMPLES_FIRST = (nn.modules.conv._ConvNd, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm, nn.EmbeddingBag)


class Layout(NamedTuple):
    """Where a module has its samples.

    Attributes:
        batch_dim: the dimension of its inputs and outputs.
        folded: positions may be folded into them, (N, T, D) -> (N·T, D).
    """

    batch_dim: int
    folded: bool


class _Here(threading.local):
    """The kind of input that each tapped model was last called with in this thread."""

    def __init__(self) -> None:
        self.kinds: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


_here = _Here()


def note_kind(taps: object, kind: Any) -> None:
    """The tapped model is being called with such inputs."""
    _here.kinds[taps] = kind


def kind_here(taps: object) -> Any:
    """The kind of input that the tapped model was last called with in this thread."""
    return _here.kinds.get(taps)


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


def layout_line(name: str, folded: bool = False) -> str:
    """What settles where a layer has its samples."""
    if folded:
        return f"layout={{{name!r}: 'N*k'}} (a sample's rows stand together), or 'k*N' (the samples over and over)"
    return f"layout={{{name!r}: 0}} (the dimension; 'N*k' or 'k*N' for k rows a sample; 'shared' for none)"


def given_layout(layout: Mapping[str, Any], names: Sequence[str]) -> dict[str, Given]:
    """What the user says of layers, by name.

    Raises:
        InputError: a name that is no layer's with parameters of its own, or a value that is none.
    """
    if not isinstance(layout, Mapping):
        raise InputError(f"layout={layout!r} must be a dict of layers' names, as {layout_line('encoder.lin')}")
    found: dict[str, Given] = {}
    for name, value in layout.items():
        if name not in names:
            near = difflib.get_close_matches(str(name), names) or list(names[:3])
            raise InputError(
                f"layout: {name!r} is not the name of a layer with parameters of its own; near it: "
                f"{', '.join(map(repr, near)) or 'none'}"
            )
        if value == SHARED or (type(value) is int and value >= 0):
            found[name] = value
        elif value in (_TOGETHER, _OVER_AND_OVER):
            found[name] = Rows(0, value == _TOGETHER)
        else:
            raise InputError(
                f"layout: {name!r} has {value!r}, and not a dimension 0, 1, ..., 'N*k' (k rows of dimension 0 a "
                "sample, which stand together), 'k*N' (the samples over and over) or 'shared' (no samples)"
            )
    return found


def check_given(layer: str, given: Given, learned: Place, shape: Sequence[int], n: int) -> Place:
    """The place that has been given.

    Raises:
        InputError: it cannot be so.
    """
    if isinstance(learned, Mixed):
        return learned
    seen = f"{layer}: layout says {_in_words(given)}, and its output {tuple(shape)} of a batch of {n}"
    if given == SHARED:
        if isinstance(learned, (int, Rows)):
            raise InputError(f"{seen} has samples: {_in_words(learned)}")
        return NO_SAMPLES
    dim = given.dim if isinstance(given, Rows) else given
    assert isinstance(dim, int)
    size = shape[dim] if dim < len(shape) else None
    if size is None or (size % max(n, 1) if isinstance(given, Rows) else size != n):
        raise InputError(f"{seen} does not have that")
    if isinstance(learned, (int, Rows)) and not _may_be(given, learned, size == n):
        raise InputError(f"{seen} was found to have {_in_words(learned)}; leave that line out")
    return given


def place_in(tap: Any, place: Place, shape: tuple[int, ...] | None, n: int) -> Place:
    """Where a tap's samples are, of which this has been learned, in an output of a batch of n; None: of pieces.

    Raises:
        InputError: it is not what the user says, or it is not known and another dimension is as long as the batch.
    """
    if shape is None:
        return place if tap.given is None else _given_of_pieces(tap, place)
    if tap.given is not None:
        return check_given(tap.layer, tap.given, place, shape, n)
    dim = tap.batch_dim
    if place is None and n > 1 and n in (shape[:dim] + shape[dim + 1 :])[:-1]:
        raise InputError(
            f"{tap.layer}: are samples in dimension {dim} of its output {shape}? Another is as long as the batch of "
            f"{n}, and the model could not be run on fake tensors, nor on a few samples, to find out; say where they "
            f"are, {layout_line(tap.name)}"
        )
    return place


def _given_of_pieces(tap: Any, learned: Place) -> Place:
    """The place that has been given of a layer whose forward knows in which dimension its samples are; there may be
    several rows a sample.

    Raises:
        InputError: it cannot be so.
    """
    given, own = tap.given, own_dim(tap.module)
    if isinstance(learned, Mixed) or given == (own if learned is None else learned):
        return learned
    of_rows = learned is None or (isinstance(learned, Rows) and learned.together is None)
    if isinstance(given, Rows) and given.dim == own and of_rows:
        return given
    found = f"{learned}" if isinstance(learned, str) else f"it has {_in_words(own if learned is None else learned)}"
    raise InputError(f"{tap.layer}: layout says {_in_words(given)}, and {found}; leave that line out")


def own_dim(module: nn.Module) -> int:
    """Where a layer whose forward runs in pieces has its samples, or their rows."""
    return 0 if getattr(module, "batch_first", True) else 1


def _may_be(given: Given | None, learned: int | Rows, no_positions: bool) -> bool:
    """Whether samples found in one place may be in the other; where no positions are folded in, orders are the same."""
    one, two = (place.dim if isinstance(place, Rows) else place for place in (given, learned))
    if one != two or not (isinstance(given, Rows) and isinstance(learned, Rows)):
        return one == two
    return no_positions or learned.together in (None, given.together)


def _in_words(place: Place) -> str:
    if isinstance(place, Rows):
        return f"{_TOGETHER if place.together else _OVER_AND_OVER} rows in dimension {place.dim}"
    return f"samples in dimension {place}" if isinstance(place, int) else repr(place)


def batch_to_front(x: Any, batch_dim: int) -> Any:
    """A tensor with its samples in dimension 0; anything else as it is."""
    return x.movedim(batch_dim, 0) if isinstance(x, Tensor) and x.dim() > batch_dim else x


def batch_in_front(activations: Activations, backprops: Any, place: int | Rows) -> tuple[Activations, Any]:
    """Both with their samples, or rows, in dimension 0."""
    dim = place.dim if isinstance(place, Rows) else place
    if dim != 0:
        activations = activations.map(lambda x: batch_to_front(x, dim))
        backprops = tuple(batch_to_front(x, dim) for x in backprops)
    activations.batch_dim, activations.rows_together = dim, place.together if isinstance(place, Rows) else None
    return activations, backprops


def tokens_in(x: Tensor, place: Place, shape: Sequence[int]) -> Tensor | None:
    """One row for each token, (R, ...); None where its rows are no tokens.

    Args:
        place: of its samples. shape: (N, T) of the tokens, samples in front.
    """
    rows = torch.Size(shape).numel()
    if isinstance(place, Rows):
        x = batch_to_front(x, place.dim)
        return x if place.together and x.dim() and x.shape[0] == rows else None
    x = batch_to_front(x, place if isinstance(place, int) else 0)
    return x.flatten(0, len(shape) - 1) if x.shape[: len(shape)] == torch.Size(shape) else None


def unfolded(activations: Activations, backprops: Any, n: int) -> tuple[Activations, Any]:
    """(N·T, D) -> (N, T, D), in a container that is known to fold them so."""
    rows = backprops[0].shape[0]
    if len(backprops) != 1 or backprops[0].dim() != 2 or rows == n or n == 0 or rows % n:
        return activations, backprops

    def unfold(x: Any) -> Any:
        return x.unflatten(0, (n, rows // n)) if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows else x

    return activations.map(unfold), tuple(map(unfold, backprops))


def place_of(module: nn.Module, call: Call, other: Call, sizes: Sequence[int]) -> Place:
    """Where a module has its samples, from one run of it on a batch of each of two sizes.

    Args:
        call, other: of the two runs. sizes: of the batches.
    """
    pairs = [list(zip(one, two, strict=True)) for one, two in zip(call, other, strict=True)]
    if any(len(one) != len(two) for some in pairs for one, two in some):
        return None
    inputs, outputs = ([_dims(one, two, sizes) for one, two in some] for some in pairs)
    if find_forward(module) is not None:  # what is tapped are pieces of it, laid out as it says itself
        own = own_dim(module)
        if not inputs or inputs[0] == {own: 1}:
            return own
        if list(inputs[0]) == [own] and inputs[0][own] is not None:
            return Rows(own, None)
        return f"{ELSEWHERE} {own} of its input, where they are not"
    found = [dims for dims in outputs if dims]
    if not found:
        return NO_SAMPLES if outputs else None
    if len({dim for dims in found for dim in dims}) > 1:
        return SEVERAL + (_RECURRENT if isinstance(module, nn.RNNBase) else "")
    ((dim, times),) = found[0].items()
    if times is None:
        return f"dimension {dim} of its output follows the batch, but is no multiple of it"
    if dim != 0 and isinstance(module, _SAMPLES_FIRST):
        return f"its samples are in dimension {dim}, where {type(module).__name__} cannot have them"
    if find_rule(module) is None and any(dims and dims not in ({dim: times}, {dim: 1}) for dims in inputs):
        return f"its output has samples in dimension {dim}, an input has them elsewhere"
    return dim if times == 1 else Rows(dim, None)


def both(one: Place, other: Place) -> Place:
    """The place of a module that has samples in both, at different uses: a query, and several documents to each, which
    one encoder takes as so many rows."""
    dims = {place.dim if isinstance(place, Rows) else place for place in (one, other)}
    if len(dims) == 1 and all(isinstance(place, (int, Rows)) for place in (one, other)):
        return Rows(dims.pop(), None)  # type: ignore[arg-type]  # a dimension; one row of each sample are rows, too
    return "its samples are in different dimensions at different uses"


def place_of_result(one: Sequence[Sequence[int]], two: Sequence[Sequence[int]], sizes: Sequence[int]) -> Place:
    """Where the result of an operation, or the first of several, has its samples, from one run on each of two sizes."""
    found = [_dims(x, y, sizes) for x, y in zip(one, two, strict=True)]
    if not any(found):
        return NO_SAMPLES
    if len(found[0]) != 1:
        return None
    ((dim, times),) = found[0].items()
    return None if times is None else dim if times == 1 else Rows(dim, None)


def _dims(one: Sequence[int], two: Sequence[int], sizes: Sequence[int]) -> dict[int, int | None]:
    """The dimensions that follow the batch, and how many times as long as the batch each is, if any."""
    found: dict[int, int | None] = {}
    for d, (x, y) in enumerate(zip(one, two, strict=True)):
        if x != y:
            times, rest = divmod(x, sizes[0])
            found[d] = times if not rest and y == times * sizes[1] else None
    return found
