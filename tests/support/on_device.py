"""Has what tests make stand on another device: `make test-gpu`.

torch.set_default_device would not do: it is a mode, in which dpfast takes other ways, and what dpfast makes on the
wrong device by mistake would be on the right one. Here only who asks from a test, from torch.nn or from a model's
package gets the device, and only who did not name one.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.jit._builtins import _find_builtin, _register_builtin

TESTS = str(Path(__file__).resolve().parents[1])
OF_KERNELS = str(Path(TESTS, "kernels"))
"""These say which device, and compare on the CPU."""

PACKAGES = ("torch.nn.modules", "torch.nn.parameter", "transformers.", "peft.", "timm.", "opacus.layers")
FACTORIES = (
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint"),
    *("randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
)

_stays: list[None] = []  # while there is one
_own: dict[str, Callable] = {}
"""torch's factories, by name."""


def put(device: str) -> None:
    """From now on, in this process."""
    for name in FACTORIES:
        factory = _own[name] = getattr(torch, name)
        setattr(torch, name, _on(factory, device))
        if operator := _find_builtin(factory):  # torch.jit.script would compile the function in its place
            _register_builtin(getattr(torch, name), operator)
    torch.Generator = _generator(device)
    torch.backends.cudnn.allow_tf32 = False  # tests compare with fp64
    # What tests before have left in cycles (a wrapped model and its taps) has memory that a copy to the host goes to. A
    # loader's forked worker that frees it asks CUDA, which it does not have, and is ended.
    os.register_at_fork(before=gc.collect, after_in_child=gc.disable)


@contextmanager
def on_cpu() -> Iterator[None]:
    """What is made within stands on the CPU, by torch's own functions, into which torch.compile looks no further."""
    placed = {name: getattr(torch, name) for name in _own}
    _stays.append(None)
    try:
        for name, factory in _own.items():
            setattr(torch, name, factory)
        yield
    finally:
        for name, factory in placed.items():
            setattr(torch, name, factory)
        _stays.pop()


def _asked_by_a_test() -> bool:
    if _stays:
        return False
    caller = sys._getframe(2)
    if caller.f_code.co_filename.startswith(TESTS):
        return not caller.f_code.co_filename.startswith(OF_KERNELS)
    return caller.f_globals.get("__name__", "").startswith(PACKAGES)


def _on(factory: Callable, device: str) -> Callable:
    @functools.wraps(factory)
    def made(*args, **kwargs):
        like_another = factory.__name__ == "normal" and any(isinstance(x, torch.Tensor) for x in args)
        if like_another or kwargs.get("device") is not None or not _asked_by_a_test():
            return factory(*args, **kwargs)
        kwargs.pop("device", None)
        return factory(*args, **kwargs, device=device)

    return made


def _generator(device: str) -> type:
    of_torch = torch.Generator

    class Meta(type):
        def __instancecheck__(cls, x: object) -> bool:
            return isinstance(x, of_torch)

        def __call__(cls, place: str | None = None, **kwargs):
            named = kwargs.get("device", place)
            return of_torch(device=device if named is None and _asked_by_a_test() else named or "cpu")

    return Meta("Generator", (), {})
