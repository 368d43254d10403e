"""Whose the rows are that a module picks out of its input, by their numbers, for one of its experts after the other.

How many rows an expert gets depends on the data, and nothing in their shape tells whose they are. Within the module's
forward its input is followed through what keeps rows whole: picking them by index, and views that keep the last
dimension. Anything else is not followed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Runs
from dpfast.taps.layout import Mixed, Place, Rows
from dpfast.taps.node import TappedLayer


def experts_of(module: nn.Module) -> list[nn.Module]:
    """What the module may send rows of its input to: those in its list or dict of experts."""
    lists: list[Any]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        own = type(module).forward is not nn.Module.forward
        lists = [module] if own and "Experts" in type(module).__name__ else []
    else:
        lists = [
            m for name, m in module._modules.items() if "expert" in name and type(m) in (nn.ModuleList, nn.ModuleDict)
        ]
    return [expert for some in lists for expert in some.children()]


class Picked:
    """Rows of a module's input.

    Args:
        numbers: of the rows, in the shape of what was picked without its last dimension; None: not known.
        by_index: some are picked; False: all, in their order.
        of: who follows them; None: nobody.
    """

    def __init__(self, numbers: Tensor | None, by_index: bool, of: Following | None):
        self.numbers, self.by_index, self.of = numbers, by_index, of
        self._runs: Runs | None = None

    def place(self, learned: Any) -> Place:
        """Of a layer in the expert: its rows are taken for samples, unless it has been seen to mix them."""
        return learned if isinstance(learned, Mixed) else 0

    def runs(self, batch_size: int | None) -> Runs:
        """Whose they are. Raises UnsupportedModuleError where that is not known."""
        if self.of is None:
            raise UnsupportedModuleError(
                "it is one of a block's experts, and runs outside of that block's forward (a checkpoint within it, or "
                "another module that calls it), so whose its rows are is not known; checkpoint the whole block, call "
                "it there, or freeze it"
            )
        if self.numbers is None:
            raise UnsupportedModuleError(
                f"it gets rows that {self.of.layer} makes out of its input in a way that is not followed; pick them "
                "from that input as it is, x[rows], or freeze it"
            )
        if self._runs is None:
            samples = self.of.samples(batch_size)
            self._runs = Runs(samples[self.numbers.flatten().cpu()], batch_size or 0)
        return self._runs


class Following(TorchFunctionMode):
    """Follows the rows of one input, in one forward of a module.

    Args:
        layer: the module, as errors name it. x: its input, (..., D).
    """

    def __init__(self, layer: str, x: Tensor):
        super().__init__()
        self.layer, self.shape = layer, x.shape[:-1]
        self.place: Place = None  # of the samples in it, once the forward has ended
        numbers = torch.arange(self.shape.numel(), device=x.device).view(self.shape)
        self._seen: dict[int, tuple[Tensor, int, Picked]] = {}
        self._note(x, Picked(numbers, False, self))

    def _note(self, x: Tensor, picked: Picked) -> None:
        self._seen[id(x)] = x, x._version, picked  # held, or another might have its id

    def picked(self, x: Any) -> Picked | None:
        """The rows that a tensor has; None where that is not known."""
        found = self._seen.get(id(x))
        return found[2] if found is not None and found[1] == x._version else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        source = self.picked(args[0]) if args and id(args[0]) in self._seen and func in _KEEP else None
        if (
            source is None
            or source.numbers is None
            or not isinstance(result, Tensor)
            or result.shape[-1:] != args[0].shape[-1:]
        ):
            return result
        numbers = _KEEP[func](source.numbers, result, *args[1:], **(kwargs or {}))
        if numbers is not None and numbers.shape == result.shape[:-1]:
            self._note(result, Picked(numbers, source.by_index or func in _PICK, self))
        return result

    def ended(self, output: Any, place: Callable[[int], Any]) -> None:
        """The forward has given that. Its rows are those of the input, and ``place(rank)`` says where samples are."""
        found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        if picked_here() is not None:
            self.place = "it is in an expert itself"
        elif not found or found[0].shape[:-1] != self.shape:
            self.place = f"its output {tuple(found[0].shape) if found else ''} has other rows"
        else:
            self.place = place(found[0].dim())

    def samples(self, batch_size: int | None) -> Tensor:
        """The sample of each row of the input, on the CPU."""
        place, n = self.place, batch_size or 0
        if n == 1:
            return torch.zeros(self.shape.numel(), dtype=torch.int64)
        dim = place.dim if isinstance(place, Rows) else place
        if not isinstance(dim, int) or dim >= len(self.shape) or self.shape[dim] % max(n, 1):
            raise UnsupportedModuleError(
                f"it gets rows that {self.layer} picks out of its input {(*self.shape, '...')}, and where the batch of "
                f"{n} samples is in that is not known ({place}); freeze it"
            )
        k = self.shape[dim] // max(n, 1)
        if k != 1 and not isinstance(place, Rows):
            raise UnsupportedModuleError(f"{self.layer}: its input {(*self.shape, '...')} has not {n} samples in {dim}")
        along = torch.arange(self.shape[dim])
        whose = along // k if not isinstance(place, Rows) or place.together else along % n
        return whose.view(-1, *[1] * (len(self.shape) - dim - 1)).expand(self.shape).flatten()

    def __exit__(self, *error: Any) -> None:
        self._seen.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's


def _by_index(numbers: Tensor, result: Tensor, index: Any) -> Tensor | None:
    parts = index if isinstance(index, tuple) else (index,)
    if any(x is Ellipsis for x in parts):  # it stands for the last dimension too
        return None
    try:
        return numbers[index]
    except (IndexError, TypeError):
        return None


def _by_select(numbers: Tensor, result: Tensor, dim: int, index: Tensor) -> Tensor | None:
    return numbers.index_select(dim, index) if 0 <= dim < numbers.dim() else None


def _viewed(numbers: Tensor, result: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    lead = result.shape[:-1]
    return numbers.reshape(lead) if lead.numel() == numbers.numel() else None


_PICK: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.__getitem__: _by_index,
    Tensor.index_select: _by_select,
    torch.index_select: _by_select,
}
_VIEWS = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone", "to", "type_as")
_KEEP = _PICK | {
    f: _viewed for name in (*_VIEWS, "float", "half", "bfloat16", "double") for f in (getattr(Tensor, name),)
}
_KEEP |= dict.fromkeys((torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze, torch.clone), _viewed)


class _Here(threading.local):
    def __init__(self) -> None:
        self.following: list[Following] = []
        self.picked: list[Picked] = []


_here = _Here()


@contextmanager
def following(layer: str, inputs: Any) -> Iterator[Following | None]:
    """The first tensor of numbers among a module's inputs is followed within its forward."""
    x = next((x for x in inputs if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1), None)
    if x is None:
        yield None
        return
    with Following(layer, x) as mode:
        _here.following.append(mode)
        try:
            yield mode
        finally:
            _here.following.pop()


def picked_for(inputs: Any) -> Picked | None:
    """The rows that an expert is called with, where they are other than all, or may be."""
    x = next((x for x in inputs if isinstance(x, Tensor)), None)
    if x is None or _here.picked:  # it is within an expert that has been called
        return None
    if not _here.following:
        return Picked(None, True, None)
    of = _here.following[-1]
    picked = of.picked(x)
    if picked is not None:
        return picked if picked.by_index else None
    kept = x.dim() > 2 and x.shape[0] == of.shape[0]  # slots of each sample
    return None if kept or x.shape[:-1].numel() == of.shape.numel() else Picked(None, True, of)


@contextmanager
def with_picked(picked: Picked) -> Iterator[None]:
    """An expert runs with those rows."""
    _here.picked.append(picked)
    try:
        yield
    finally:
        _here.picked.pop()


def picked_here() -> Picked | None:
    """The rows that the expert got which runs in this thread; None: none does."""
    return _here.picked[-1] if _here.picked else None


class RoutedLayer(TappedLayer):
    """What a tap does where its module sends rows to experts, or is one."""

    known: Callable[[Any], Place]
    caught: Callable[..., Any]

    @property
    def active(self) -> bool:
        """Whether what runs now is tapped."""
        return False

    @property
    def follows(self) -> bool:
        """Whether it is of interest whose rows are."""
        return self.active

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward, of whose rows it is known whose they are where it sends some to experts, or is one."""
        if not (self.sends or self.receives) or not self.follows:
            return self.caught(forward, args, kwargs)
        picked = picked_for((*args, *kwargs.values())) if self.receives else None
        if picked is not None:
            with with_picked(picked):
                return self.run_picked(picked, forward, args, kwargs)
        if not self.sends:
            return self.caught(forward, args, kwargs)
        with following(self.layer, (*args, *kwargs.values())) as rows:
            output = self.caught(forward, args, kwargs)
            if rows is not None:
                rows.ended(output, lambda rank: self.known(rank) if self.given is None else self.given)
        return output

    def run_picked(
        self, picked: Picked, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An expert's forward on rows that were picked for it."""
        return self.caught(forward, args, kwargs)
