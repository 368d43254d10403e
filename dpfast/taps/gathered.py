"""Rows that a module picks out of those of all samples, for one of its experts after the other.

How many rows an expert gets depends on the data, and nothing in their shape tells whose they are. So they are followed
(``followed``) in a module that has a list of experts, or that has been seen to pick rows (``picks``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.taps.followed import Following
from dpfast.taps.inputs import tensors_in
from dpfast.taps.layout import Place
from dpfast.taps.node import TappedLayer
from dpfast.taps.packed import packed_in
from dpfast.taps.passes import in_backward
from dpfast.taps.picked import Picked
from dpfast.taps.whole_recurrent import WholeRecurrent
from dpfast.taps.written import Unwritten


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


NOT_FOLLOWED = Picked(None, (None,), None)
"""Rows of which nobody knows whose they are."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.following: list[Following] = []
        self.models: dict[int, Following] = {}  # those of whole models
        self.picked: list[Picked] = []


_here = _Here()


@contextmanager
def following(layer: str, inputs: Any, place: Callable[[Tensor], Place], **how: Any) -> Iterator[Following]:
    """Rows are followed within a module's forward; ``place`` says where samples are in an input of it."""
    with Following(layer, inputs, place, **how) as mode:
        _here.following.append(mode)
        try:
            yield mode
        finally:
            _here.following.remove(mode)


def follow_model(taps: Any, model: nn.Module, inputs: Any, *, trial: bool = False) -> None:
    """The same in the model's own forward, from its hooks, where that has been seen to pick rows."""
    if taps.picks_rows:
        end_model(taps)
    if taps.picks_rows and not torch.is_inference_mode_enabled():  # where nothing is tapped, and no version is counted
        dim = taps.batch_dim
        n = next((x.shape[dim] for x in inputs if isinstance(x, Tensor) and x.dim() > dim), None)
        mode = Following(type(model).__name__, inputs, lambda _: dim, trial=trial, n=n, dim=dim)
        _here.models[id(taps)] = mode
        mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
        _here.following.append(mode)


def end_model(taps: object) -> None:
    """That forward has ended."""
    mode = _here.models.pop(id(taps), None)
    if mode is not None:
        _here.following.remove(mode)
        mode.__exit__(None, None, None)


@contextmanager
def following_model(taps: Any, model: nn.Module, inputs: Any, *, trial: bool = True) -> Iterator[None]:
    """The same in a copy's forward, which writes to none of the parameters that it shares."""
    follow_model(taps, model, inputs, trial=trial)
    try:
        with WholeRecurrent() if trial else nullcontext(), Unwritten(taps.shared):
            yield
    finally:
        end_model(taps)


def picked_for(inputs: Any, *, seen: bool) -> Picked | None:
    """The rows that an expert is called with, where they are other than all, or may be.

    Args:
        seen: it has been seen to get picked rows, so what is not followed is not taken for all of them.
    """
    packed = packed_in(inputs)
    x = next((x for x in inputs if isinstance(x, Tensor)), None)
    if (x is None and packed is None) or _here.picked:  # it is within an expert that has been called
        return None
    if packed is not None:  # what is not followed is in its samples' order, or has been seen not to be
        rows = (of.picked_packed(packed) for of in reversed(_here.following))
        return next((some for some in rows if some is not None), None)
    assert x is not None
    if not _here.following:
        return NOT_FOLLOWED
    for of in reversed(_here.following):
        picked = of.picked(x)
        if picked is not None:
            return picked if picked.by else None
        if of.has_all(x):  # tokens of each sample in one dimension, say: its shape tells how many
            return None
    source = _here.following[-1].source
    kept = x.dim() > 2 and x.shape[0] == source.shape[0]  # slots of each sample
    whole = not seen and (kept or x.shape[:-1].numel() == source.shape.numel())
    return None if whole else Picked(None, (None,), source)


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


def rows_among(tensors: Iterable[Tensor]) -> tuple[Picked, Tensor] | None:
    """Of the tensors the first that has rows which were picked, and these; None within an expert, which has all of them
    for its samples."""
    if not _here.following or _here.picked:
        return None
    some = ((of.picked(x), x) for x in tensors for of in reversed(_here.following))
    return next(((picked, x) for picked, x in some if picked is not None and picked.by), None)


def known_rows(x: Tensor) -> Picked | None:
    """Those that a tensor has, where it is followed."""
    return next((rows for of in reversed(_here.following) if (rows := of.picked(x)) is not None), None)


def gave_rows(output: Any, picked: Picked) -> None:
    """Something has given that of picked rows, one of each."""
    for outer in _here.following:
        outer.gave_rows(output, picked)


def may_be_all(n: int) -> bool:
    """Whether as many rows, or samples, as these run in this thread: of a batch of one, others may stand for it."""
    picked = picked_here()
    return picked is None or picked.numbers is None or len(picked.numbers) == n


def rows_are_followed() -> bool:
    """Whether what runs in this thread stands within a module whose rows are followed, or within an expert."""
    return bool(_here.following or _here.picked)


class RoutedLayer(TappedLayer):
    """What a tap does where its module sends rows to experts, or is one."""

    known: Callable[[Any], Place]
    caught: Callable[..., Any]
    trial = False  # whether it is that of a copy
    size: int | None = None  # of samples in the forward of a copy

    @property
    def active(self) -> bool:
        """Whether what runs now is tapped."""
        return False

    @property
    def follows(self) -> bool:
        """Whether it is of interest whose rows are."""
        return self.active

    def known_place(self, rank: int | None) -> Any:
        """Of the samples in an output of that rank."""
        return self.known(rank) if self.given is None else self.given

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward, of whose rows it is known whose they are where it sends some to experts, or is one."""
        if not (self.sends or self.receives or _here.following) or not self.follows:
            return self.caught(forward, args, kwargs)
        if _here.picked and not self.trial:
            return self._run_within(forward, args, kwargs)
        picked = self.rows_picked((*args, *kwargs.values())) if self.receives else None
        if picked is not None:
            if _here.following:  # what else it gets may have as many rows
                _here.following[-1].knows_nothing_of(tensors_in((args, kwargs)))
            with with_picked(picked):
                output = self.run_picked(picked, forward, args, kwargs)
            gave_rows(output, picked)
            return output
        if not self.sends:
            output = self.caught(forward, args, kwargs)
        else:
            n = self.size if self.size is not None or self.trial else self.taps.batch_size()
            n = None if _here.picked else n
            how = {"trial": self.trial, "n": n, "dim": self.batch_dim}
            with following(self.layer, (*args, *kwargs.values()), self._place_of_input, **how) as rows:
                output = self.caught(forward, args, kwargs)
                rows.ended(output, self.known_place, in_expert=bool(_here.picked))
        if _here.following and not _here.picked:
            packed = packed_in((*args, *kwargs.values()))
            for outer in _here.following:
                if packed is None:
                    recurrent = type(self.module) in (nn.RNN, nn.LSTM, nn.GRU)
                    outer.gave(self.layer, output, self._place_of_output, recurrent=recurrent)
                else:
                    outer.gave_packed(packed, output)
        return output

    def _run_within(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Within an expert, on what is made of the rows that it got, or on something else of the samples'."""
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        rows = None if x is None else known_rows(x)
        if rows is None or rows.packed:
            return self.caught(forward, args, kwargs)
        rows = rows.within(_here.picked[0])
        with with_picked(rows):
            output = self.caught(forward, args, kwargs)
        gave_rows(output, rows)
        return output

    def rows_picked(self, inputs: Any) -> Picked | None:
        """As of :func:`picked_for`."""
        return picked_for(inputs, seen=self.gathers)

    def _place_of_output(self, rank: int) -> Any:
        """Of the samples in the first that the module gives. A forward in pieces knows itself where: of any rank."""
        place = self.known_place(rank)
        return self.known_place(None) if place is None else place

    def _place_of_input(self, x: Tensor) -> Place:
        """Of the samples in what the module is called with, where that is an input of the model; None: not known."""
        return self.taps.batch_dim if in_backward() is None and self.taps.is_input(x, whole=True) else None

    def run_picked(
        self, picked: Picked, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An expert's forward on rows that were picked for it."""
        return self.caught(forward, args, kwargs)
