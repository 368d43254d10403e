"""Parameters that a forward itself writes to: a moving average of others, weights that a first call scales.

What looks at a model runs copies that share its parameters, so such a write would come to the model, once a run. It
does not happen: the look begins anew, and from then on each copy has that parameter for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

P = ParamSpec("P")
R = TypeVar("R")

_written: Any = WeakIdKeyDictionary()

ATTENDED = [False]
"""Whether a kernel of attention has run in a copy since ``same_kernels`` has unset it."""


class ParameterWritten(BaseException):
    """A copy was about to write to a parameter of its model. No Exception, which looks and models may catch."""


def is_written(parameter: nn.Parameter) -> bool:
    """Whether a forward was seen to write to it."""
    return parameter in _written


def note_written(parameter: nn.Parameter) -> None:
    """That a copy has for itself."""
    _written[parameter] = True


def begun_anew(look: Callable[P, R]) -> Callable[P, R]:
    """Decorates a look. It begins anew where a copy was about to write to a parameter: then each has it for itself."""

    @functools.wraps(look)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        while True:
            try:
                return look(*args, **kwargs)
            except ParameterWritten:  # one more is known now
                continue

    return call


class Unwritten(TorchDispatchMode):
    """Within it a write to one of these parameters raises ParameterWritten before it happens; other memory that is put
    under one (``p.data = ...``), which torch tells nobody of, is taken away at the end. As it sees all operations, it
    notes ``ATTENDED``.

    Args:
        shared: (the model's parameter, what a copy has in its place, in memory that others have too).
    """

    supports_higher_order_operators = True

    def __init__(self, shared: Iterable[tuple[nn.Parameter, Tensor]]):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._shared: dict[int, list[nn.Parameter]] = {}
        self._stood: list[tuple[nn.Parameter, Tensor, int, Tensor]] = []
        for parameter, x in shared:
            if (place := _memory(x)) is not None:
                self._shared.setdefault(place, []).append(parameter)
                self._stood.append((parameter, x, place, x.data))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        moved = [(parameter, x, data) for parameter, x, place, data in self._stood if _memory(x) != place]
        for parameter, x, data in moved:
            x.data, _written[parameter] = data, True
        if moved and error[0] is None:
            raise ParameterWritten

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ATTENDED[0] = ATTENDED[0] or _attends(func)
        for x in _written_by(func, args, kwargs):
            if parameters := self._shared.get(_memory(x) or 0):
                for parameter in parameters:
                    _written[parameter] = True
                raise ParameterWritten
        return func(*args, **kwargs)


def _written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for i, name in _places_written(func):
        x = args[i] if i < len(args) else kwargs.get(name)
        yield from (y for y in (x if isinstance(x, (list, tuple)) else (x,)) if isinstance(y, Tensor))


@functools.cache  # asked of each operation of a look, and a schema makes its arguments anew each time
def _places_written(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes to: places, and names."""
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    arguments = () if schema is None else schema.arguments
    return tuple((i, x.name) for i, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write)


@functools.cache
def _attends(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or "attention" in schema.name or "transformer" in schema.name


def _memory(x: Tensor) -> int | None:
    """The address of what holds its numbers; None of what has other tensors inside, or no numbers."""
    if type(x) not in (Tensor, nn.Parameter) or x.is_meta or x.layout != torch.strided:
        return None
    return x.untyped_storage().data_ptr() or None
