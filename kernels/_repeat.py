"""A launcher's call like an earlier one: the same launches on other tensors, without the launcher's own lines.

From the shapes, strides, dtypes and alignment of its tensors, and from its other arguments, a launcher works out tiles,
parts, masks, descriptors and some thirty arguments, before each launch: three times what the launch takes then. It is
a function of those alone, so its first call of a kind is written down while it runs (`empty` and `noted`), and the next
ones do what was written: allocate the same tensors, start the same kernels with the same numbers. So a repeated call
has the bits of its first by construction.

What was written is used only where it is all that the call did: each tensor of each launch was given, or is one that
`empty` made and that nothing but launches has written to, and those of the result too. A launcher that copies its
input, or adds up parts afterwards, runs as it is written.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from . import _again
from ._tiles import Tile

_DEVICES = {"cuda"}
"""Where calls are repeated: on a CPU, where kernels are interpreted, launchers take no time."""

_MOST = 4096  # calls of a launcher that are known; a model has some dozens, unless its shapes change with every batch

_PLAIN = {int, bool, float, type(None), torch.dtype, Tile}

_Launcher = TypeVar("_Launcher", bound=Callable[..., Any])


class _Launch(NamedTuple):
    """One launch of a call.

    Attributes:
        values: its arguments in order; what stands at the following places is put there by each call.
        tensors: (place, number) of a tensor: that of a given one, or behind those of one that is made.
        descriptors: (place, number, all but the tensor) of a descriptor, likewise.
        compiled: what was started, `around` being its circumstances; None where Triton itself is to be asked.
        straight: the same, in one call of Triton's function; None where its launcher is to be asked.
    """

    kernel: Any
    programs: int
    tile: Tile
    names: tuple[str, ...]
    values: tuple[Any, ...]
    tensors: tuple[tuple[int, int], ...]
    descriptors: tuple[tuple[int, int, dict[str, Any]], ...]
    compiled: Any
    around: Hashable
    straight: _again.Straight | None


class _Call(NamedTuple):
    """
    Attributes:
        made: what each tensor that is made is like, of one number's memory. result: the number of each of its tensors,
            None where it has none. together: makes the result of them; None: it is the one tensor.
    """

    made: tuple[torch.Tensor, ...]
    launches: tuple[_Launch, ...]
    result: tuple[int | None, ...]
    together: Callable[[list[Any]], Any] | None


class _Here(threading.local):
    """What is written down of the call that runs in this thread, where one is."""

    made: list[torch.Tensor] | None = None
    launches: list[tuple[Any, int, Tile, dict[str, Any]]]


_here = _Here()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that launches are to fill."""
    found = torch.empty(shape, dtype=dtype, device=device)
    if _here.made is not None:
        _here.made.append(found)
    return found


def noted(kernel, programs: int, tile: Tile, arguments: dict[str, Any]) -> None:
    """A launch has been started."""
    if _here.made is not None:
        _here.launches.append((kernel, programs, tile, arguments))


def repeats(launcher: _Launcher) -> _Launcher:
    """A launcher of given tensors, all on one device, that may be repeated; it makes others by `empty`."""
    known: dict[Hashable, _Call | None] = {}

    @functools.wraps(launcher)
    def call(*given: Any, **options: Any) -> Any:
        device = given[0].device
        if device.type not in _DEVICES or _here.made is not None:  # a part of a call is written down with it
            return launcher(*given, **options)
        kind = _kind(given, options)
        if kind is None:
            return launcher(*given, **options)
        key, tensors, addresses = kind
        found = known.get(key, _UNKNOWN)
        if found is None:
            return launcher(*given, **options)
        if found is not _UNKNOWN:
            return _repeated([(found, tensors, addresses)], device)[0]
        if torch.is_inference_mode_enabled() or len(set(map(id, tensors))) < len(tensors):
            return launcher(*given, **options)  # writes are not counted, or one tensor stands for two
        if len(known) >= _MOST:
            known.clear()
        return _written_down(launcher, given, options, tensors, lambda found: known.__setitem__(key, found))

    call.known = known  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _kind(given: Sequence[Any], options: dict[str, Any]) -> tuple[Hashable, list[torch.Tensor], list[int]] | None:
    """What a call is known by, its tensors and their addresses; None for one with other arguments than these."""
    kind: list[Any] = [len(given), *options]
    tensors, addresses = [], []
    for x in (*given, *options.values()):
        if type(x) is torch.Tensor:
            address = x.data_ptr()
            kind += x.shape, x.stride(), x.dtype, x.device, address % 16 == 0
            tensors.append(x)
            addresses.append(address)
        elif type(x) in _PLAIN:
            kind += type(x), x
        else:
            return None
    return tuple(kind), tensors, addresses


class Like:
    """A launcher's calls on tensors that are known to be alike, without a look at what they are.

    ``Like(launcher, *names, **options)(*given)`` does what ``launcher(*given, **options)`` does, the last tensors given
    by these names. Who calls it answers for this: all calls have contiguous tensors of the same dtypes and device, and
    the first one's shape tells the others'. Strides of dimensions of length 1 may be any: nothing is read by them.
    """

    def __init__(self, launcher: Callable[..., Any], *names: str, **options: Any):
        self._launcher, self._names, self._options = launcher, names, options
        self._known: dict[torch.Size, _Call] = {}  # of aligned tensors
        self._device = torch.device("cpu")  # until one is known

    def __deepcopy__(self, memo: dict[int, Any]) -> Like:
        return self  # compiled kernels have no copies, and need none

    def __call__(self, *given: torch.Tensor) -> Any:
        return self.each((given,))[0]

    def each(self, calls: Iterable[tuple[torch.Tensor, ...]]) -> list[Any]:
        """The results of several calls, in less time than one by one."""
        ready: list[tuple[_Call, list[torch.Tensor], list[int]]] = []
        found: list[Any] = []
        for given in calls:
            call, addresses, together = self._known.get(given[0].shape), [], 0
            for x in given:
                address = x.data_ptr()
                addresses.append(address)
                together |= address
            if call is not None and not together % 16 and _here.made is None:
                ready.append((call, [*given], addresses))
                continue
            if ready:
                found += _repeated(ready, self._device)
                ready = []
            found.append(self._asked(given, aligned=not together % 16))
        if not ready:
            return found
        last = _repeated(ready, self._device)
        return found + last if found else last

    def _asked(self, given: tuple[torch.Tensor, ...], *, aligned: bool) -> Any:
        first = len(given) - len(self._names)
        by_name = dict(zip(self._names, given[first:], strict=True))
        found = self._launcher(*given[:first], **by_name, **self._options)
        if aligned and given[0].device.type in _DEVICES and all(type(x) is torch.Tensor for x in given):
            kind = _kind(given[:first], {**by_name, **self._options})
            call = None if kind is None else self._launcher.known.get(kind[0])  # type: ignore[attr-defined]
            if call is not None:
                if len(self._known) >= _MOST:
                    self._known.clear()
                self._known[given[0].shape], self._device = call, given[0].device
        return found


_UNKNOWN: Any = object()


def _written_down(
    launcher: Callable[..., Any],
    given: tuple[Any, ...],
    options: dict[str, Any],
    tensors: list[torch.Tensor],
    know: Callable[[_Call | None], None],
) -> Any:
    _here.made, _here.launches = [], []
    try:
        result = launcher(*given, **options)
        made, launches = _here.made, _here.launches
    finally:
        _here.made, _here.launches = None, []
    know(_call(tensors, made, launches, result))
    return result


def _call(tensors: list[torch.Tensor], made: list[torch.Tensor], launches: list[Any], result: Any) -> _Call | None:
    """None where that is not all that it did."""
    numbers = {id(x): i for i, x in enumerate((*tensors, *made))}
    if any(x._version for x in made) or not launches:
        return None
    shapes = [x.shape for x in made]
    of_result: list[int | None] = []
    for x in result if isinstance(result, tuple) else (result,):
        number = None if x is None else next((i for i, own in enumerate(made) if _is_whole(x, own)), -1)
        if number == -1:
            return None
        if number is not None:
            shapes[number] = x.shape  # a launch takes nothing but the address
        of_result.append(None if number is None else number + len(tensors))
    if len(set(of_result) - {None}) < len(of_result) - of_result.count(None):
        return None
    found = [_launch(numbers, len(tensors), *launch) for launch in launches]
    if None in found:
        return None
    together = getattr(type(result), "_make", tuple) if isinstance(result, tuple) else None
    known = tuple(launch for launch in found if launch is not None)
    like = tuple(_number(x.dtype, x.device).expand(shape) for x, shape in zip(made, shapes, strict=True))
    return _Call(like, known, tuple(of_result), together)


@functools.lru_cache(maxsize=64)
def _number(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Never read. What is like it is made in half the time that `torch.empty` takes for a shape and a dtype."""
    return torch.empty((), dtype=dtype, device=device)


def _is_whole(x: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether x is all of it, in order, in whatever shape."""
    same = x.data_ptr() == made.data_ptr() and x.dtype == made.dtype and x.numel() == made.numel() > 0
    return same and x.is_contiguous() and x._version == 0


def _launch(
    numbers: dict[int, int], given: int, kernel, programs: int, tile: Tile, arguments: dict[str, Any]
) -> _Launch | None:
    """Its tensors, by ``id``: of so many given ones, and behind them those that are made."""
    values, tensors, descriptors = [*arguments.values()], [], []
    index: Any = None  # of a GPU
    for place, x in enumerate(values):
        if isinstance(x, torch.Tensor):
            if id(x) not in numbers:
                return None
            tensors.append((place, numbers[id(x)]))
            values[place], index = None, x.device.index
        elif type(x) is TensorDescriptor:
            if numbers.get(id(x.base), given) >= given:
                return None  # one that is made need not be aligned as it has to be
            rest = {name: value for name, value in vars(x).items() if name != "base"}
            descriptors.append((place, numbers[id(x.base)], rest))
            values[place] = None
        elif type(x) not in _PLAIN:
            return None
    compiled = _again.compiled_for(kernel, tile, index, arguments)
    around = None if compiled is None else _again.circumstances(kernel)
    straight = None if around is None else _again.straight(compiled, values, tensors, descriptors)
    places = tuple(tensors), tuple(descriptors)
    return _Launch(kernel, programs, tile, tuple(arguments), tuple(values), *places, compiled, around, straight)


def _repeated(calls: Sequence[tuple[_Call, list[torch.Tensor], list[int]]], device: torch.device) -> list[Any]:
    """Each with the tensors that are given, which stand at these addresses; what is made is put behind them."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _repeated(calls, device)
    around: dict[int, Hashable | None] = {}  # by the kernel's id: circumstances, asked once
    stream, found = None, []
    for call, tensors, addresses in calls:
        made = 0
        for like in call.made:
            x = _empty_like(like, memory_format=_IN_ORDER)
            address = x.data_ptr()
            tensors.append(x)
            addresses.append(address)
            made |= address
        for of in call.launches:
            as_then = False
            if of.around is not None and not made % 16:  # an allocator of somebody's own need not align what it gives
                number = id(of.kernel)
                if number not in around:
                    around[number] = _again.circumstances(of.kernel)
                as_then = of.around == around[number]
            if of.straight is None or not as_then:
                _start(of, tensors, device, as_then=as_then)
                continue
            if stream is None:
                stream = _again.stream_of(device.index)
            function, front, in_one, values, of_tensors, of_descriptors = of.straight
            values = values.copy()
            for place, index in of_tensors:
                values[place] = addresses[index]
            for place, index, encode, maps in of_descriptors:
                address = addresses[index]
                known = maps.get(address)
                if known is None:
                    if len(maps) >= _again.MOST_MAPS:
                        maps.clear()
                    known = maps[address] = encode(tensors[index])
                values[place] = known
            if in_one:
                function(of.programs, 1, 1, stream, *front, values)
            else:
                function(of.programs, 1, 1, stream, *front, *values)
        results = [None if number is None else tensors[number] for number in call.result]
        found.append(results[0] if call.together is None else call.together(results))
    return found


def _start(of: _Launch, tensors: Sequence[torch.Tensor], device: torch.device, *, as_then: bool) -> None:
    """A launch through its launcher's or Triton's own lines; ``as_then``: what was compiled for it fits."""
    values = [*of.values]
    for place, number in of.tensors:
        values[place] = tensors[number]
    for place, number, rest in of.descriptors:
        values[place] = _again.described(tensors[number], rest)
    if as_then:
        _again.run(of.compiled, of.programs, device.index, values)
        return
    arguments = dict(zip(of.names, values, strict=True))
    if device.type == "cuda":
        _again.start(of.kernel, of.programs, of.tile, device.index, arguments)
    else:
        of.kernel[(of.programs,)](**arguments, **_again.options_of(of.tile))


_empty_like, _IN_ORDER = torch.empty_like, torch.contiguous_format
