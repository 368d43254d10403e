"""What a model runs that no look at it has: an expert that no sample came to, a branch."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import nn

from dpfast.errors import UnsupportedModuleError
from dpfast.taps import Record, Tap, TappedForward, find_rule

_SWITCHES = 1024  # numbers that are no weights

New = tuple[Tap, Record, tuple[int, ...] | None]
"""What runs for the first time, and the shape of its output; None: of pieces."""


def rank_of(shape: tuple[int, ...] | None) -> int | None:
    return None if shape is None else len(shape)


def like_those_seen(model: nn.Module, taps: Sequence[Tap], keys: Iterable[Any], seen: Container[Any]) -> set[Any]:
    """Of experts' layers those of which one beside has been looked at that does the same with other parameters."""
    numbers = {tap.name: i for i, tap in enumerate(taps)}
    return {
        (number, rank)
        for number, rank in keys
        for beside, own, name in _beside(model, taps[number].name)
        if (numbers.get(name), rank) in seen and _do_the_same(beside, own)
    }


def _beside(model: nn.Module, name: str) -> Iterator[tuple[nn.Module, nn.Module, str]]:
    """Of a module within one of a list: the others, that one, and the name of what stands there in theirs."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        parent = model.get_submodule(".".join(parts[:i]))
        if isinstance(parent, (nn.ModuleList, nn.ModuleDict)):
            for other, module in parent.named_children():
                if other != parts[i]:
                    yield module, parent.get_submodule(parts[i]), ".".join((*parts[:i], other, *parts[i + 1 :]))


def _do_the_same(one: nn.Module, two: nn.Module) -> bool:
    pairs = list(zip_longest(one.named_modules(), two.named_modules()))
    if not all(x and y and x[0] == y[0] and _state(x[1]) == _state(y[1]) for x, y in pairs):
        return False
    numbers = ((a, b) for x, y in pairs for a, b in zip(_switches(x[1]), _switches(y[1]), strict=True))
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in numbers)  # they may be on several devices


def _state(module: nn.Module) -> tuple[Any, ...]:
    """All but its numbers: what is no plain value is the same where it is one object."""
    hooks = [kind for kind in _OF_ALL if "hooks" in kind and getattr(module, kind)]
    own = {k: v for k, v in vars(module).items() if k not in _OF_ALL and k != "forward"}
    forward = vars(module).get("forward")
    own["forward"] = (forward.replaced or forward.around) if isinstance(forward, TappedForward) else forward
    values = {k: v if _is_plain(v) else id(v) for k, v in own.items()}
    numbers = chain(module._parameters.items(), module._buffers.items())
    shapes = [(k, None if x is None else (x.shape, x.dtype, x.requires_grad)) for k, x in numbers]
    # Of hooks nothing is known.
    return type(module), module.training, values, shapes, [id(module)] if hooks else []


def _switches(module: nn.Module) -> list[torch.Tensor]:
    """What nobody trains and a forward may go by (an observer that is on, a coefficient). Large ones are weights, and
    so is what a rule knows the use of."""
    numbers = chain(module._parameters.values(), module._buffers.values())
    if find_rule(module) is not None:
        return []
    whole = [x for x in numbers if x is not None and not (x.is_meta or hasattr(x, "device_mesh"))]
    return [x for x in whole if not x.requires_grad and x.numel() <= _SWITCHES]


def _is_plain(x: Any) -> bool:
    return type(x) in (int, float, bool, str, type(None)) or (type(x) is tuple and all(map(_is_plain, x)))


_OF_ALL = frozenset(vars(nn.Module()))


def samples_of(records: Iterable[Record]) -> list[int]:
    """Those whose rows came to them, the first of each before the second of one, as far as that is known."""
    in_turns = chain.from_iterable(zip_longest(*map(_samples_of, records)))
    return list(dict.fromkeys(i for i in in_turns if i is not None))


def _samples_of(record: Record) -> list[int]:
    picked: Any = record.picked
    if picked is None:
        return []
    try:
        picked.check()
        whose: torch.Tensor = picked.of.samples(record.batch_size)[picked.numbers.cpu()]
    except UnsupportedModuleError:  # nobody knows
        return []
    return whose.flatten().unique().tolist()
