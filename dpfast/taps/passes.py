"""Which pass runs in this thread: a backward pass, a rule that runs modules again, code that is being compiled."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_local = threading.local()

_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

P = ParamSpec("P")
R = TypeVar("R")


class taps_suspended:
    """Within it modules run untapped: rules may run them again, which is not part of the model's pass. No generator,
    because every layer enters it."""

    def __enter__(self) -> None:
        self._before = suspended()
        _local.suspended = True

    def __exit__(self, *_: object) -> None:
        _local.suspended = self._before


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """As ``torch.compiler.disable``, which imports much (Triton too), from the time that something is compiled."""
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        asked = _compiles[0] or _found()
        if asked is None or asked() is None:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch's own mark
    return call


_compiles: list[Callable[[], object] | None] = [None]
"""Gives None where no code of this thread is compiled as it runs, so that there is nothing to disable."""


def _found() -> Callable[[], object] | None:
    """None as long as nothing has ever been compiled here."""
    if "torch._dynamo" in sys.modules:
        frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
        _compiles[0] = getattr(frames, "get_eval_frame_callback", lambda: True)
        skip: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
        if skip is not None:  # or dynamo compiles what stands in front, for each kind of arguments anew, and says so
            skip(never_compiled(suspended).__code__)  # all have the same
    return _compiles[0]


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """What it does with tensors no mode sees that follows a model's: there is nothing to follow, and each would take
    its time."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def suspended() -> bool:
    """Whether a rule is running modules again in this thread."""
    return getattr(_local, "suspended", False)


def in_backward() -> int | None:
    """The backward pass that runs in this thread."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def in_function() -> bool:
    """Whether this runs within the forward of an ``autograd.Function``, where no graph is made; its backward may run it
    again (reentrant checkpoints)."""
    return not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def saves_as_torch_does() -> bool:
    """Whether nobody else decides what is saved for the backward pass (checkpoints, offloading)."""
    return _hooks is not None and _hooks(True) is None


def forget_compiled_code() -> None:
    """Code that torch.compile made of the modules would not notice that taps have come or gone."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "reset"):
        dynamo.reset()
