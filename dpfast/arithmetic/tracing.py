"""Whether the arithmetic that runs now is being captured into a graph, and what a graph must leave as it is.

While it is captured tensors have no values: nothing may be read back, and results stand where the compiler puts them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Here(threading.local):
    capturing = False


_here = _Here()
_is_compiling = torch.compiler.is_compiling


@contextmanager
def capturing() -> Iterator[None]:
    """Within it :func:`is_traced` is true in this thread."""
    before, _here.capturing = _here.capturing, True
    try:
        yield
    finally:
        _here.capturing = before


def is_traced() -> bool:
    """Whether a graph is being made of what runs."""
    return _here.capturing or _is_compiling()


def operator(overload: Any) -> Any:
    """What a call of an operator's overload comes to, without its line of Python. (Of the packet, ``torch.ops.aten.x``,
    the overload is looked for at each call.)"""
    return getattr(overload, "_op", overload)


def pinned(x: Tensor) -> Tensor:
    """``x``, which in a captured graph is a tensor in memory from here on.

    A compiler may compute a tensor anew for each of its readers, another time with other roundings: norms would then be
    those of other gradients than the ones that are summed.
    """
    if not _here.capturing or x.dtype in (torch.int64, torch.int32, torch.bool):
        return x
    return torch.ops.dpfast.pinned(x)


_library = torch.library.Library("dpfast", "FRAGMENT")
_library.define("pinned(Tensor x) -> Tensor")
_library.impl("pinned", lambda x: x.clone(), "CompositeExplicitAutograd")
