"""One forward pass of a model on fake tensors: shapes alone, no memory and no arithmetic.

What runs is a copy of the model, made of fake tensors too: nothing stays on the model itself, and no random number is
drawn.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dpfast.errors import InputError
from dpfast.taps.layout import Call
from dpfast.taps.passes import taps_suspended
from dpfast.taps.registry import find_forward
from dpfast.taps.tap import Pieces, Tap


def calls_in_forward(
    model: nn.Module, taps: Sequence[Tap], leaves: list[Any], structure: Any, dims: list[int | None], size: int
) -> list[list[tuple[int | None, Call]]]:
    """What each tap's module takes and gives in one forward, each time that it runs, with the rank of its output.

    Args:
        leaves, structure: the inputs, flattened.
        dims: the dimension of each of them that is set to ``size``, if any.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {id(taps[0].taps): Nobody()}
    with FakeCopyMode(mode):
        model, taps = copy.deepcopy((model, list(taps)), memo)
    for module in model.modules():  # hooks are not copied with what they hold
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            hooks.clear()
    for tap in taps:
        tap.__class__ = _Probe
        tap.size, tap.calls = size, []  # type: ignore[attr-defined]  # a _Probe now
    with mode:
        inputs = [_of_size(x, dim, size) if isinstance(x, Tensor) else x for x, dim in zip(leaves, dims, strict=True)]
        args, kwargs = structure.unflatten(inputs)
        model(*args, **kwargs)
    return [tap.calls for tap in taps]  # type: ignore[attr-defined]  # as above


def _of_size(x: Tensor, dim: int | None, size: int) -> Tensor:
    shape = [size if d == dim else s for d, s in enumerate(x.shape)]
    return torch.empty(shape, dtype=x.dtype, device=x.device)


class _Probe(Tap):
    """The tap of a copy, which notes shapes."""

    size: int
    calls: list[tuple[int | None, Call]]

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.module, nn.Embedding):
            args, kwargs, _ = self.with_whole_batch(args, kwargs, self.size)
        if isinstance(self.module, nn.EmbeddingBag) and args and args[0].dim() == 1:
            raise InputError("bags in one row: the batch is not that of the first input")
        substitute = find_forward(self.module)
        if substitute is not None:
            output = substitute(self.module, Pieces(self), *args, **kwargs)
        else:
            output = forward(*args, **kwargs)
        outputs = [x.shape for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        rank = len(outputs[0]) if outputs and substitute is None else None
        inputs = [x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.calls.append((rank, (inputs, outputs)))
        return output

    def tapped(self, output: Any, *_: Any, **__: Any) -> Any:
        return output


class Nobody:
    """Stands where the tapped model is, in a copy: catches nothing."""

    active = inserts = False

    def is_input(self, x: Tensor) -> bool:
        return True  # what a 1-D input is is found out here, and no value is looked at


class Values(TorchFunctionMode):
    """Answers where a forward asks whether a tensor is true."""

    def __init__(self, truth: bool):
        super().__init__()
        self.truth, self.asked = truth, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__:
            self.asked = True
            return self.truth
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Random numbers, warnings and taps outside of the copy are as if nothing had run."""
    before = random.getstate()
    try:
        with (
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
            torch.no_grad(),
            taps_suspended(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(before)
