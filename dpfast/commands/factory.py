"""``package.module:factory``: a user's own function that makes a model and a batch."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from dpfast.errors import DpfastError, InputError

T = TypeVar("T")

_SHAPE = "(model, batch) or (model, batch, loss)"


class Made(NamedTuple):
    """What a factory has made: ``model(*args, **kwargs)``, and what its output becomes one number by."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None

    def run(self, call: Callable[[], T]) -> T:
        """``call()``, which runs the user's code; its errors are InputErrors that say where they come from."""
        return _of_user(self.name, call)


def made_by(name: str) -> Made:
    """Imports and calls it.

    The factory takes no arguments and returns (model, batch) or (model, batch, loss): a ``torch.nn.Module``; its
    input, a tuple or list of positional arguments, a mapping of keyword arguments, or anything else as the only
    argument; and a function of the model's output that gives the training loss, one number.

    Raises:
        InputError: there is no such module or function, it fails, or it returns something else.
    """
    module, colon, function = name.partition(":")
    if not (colon and function and all(part.isidentifier() for part in module.split("."))):
        raise InputError(f"{name!r} must be package.module:factory")
    try:
        imported = _of_user(name, lambda: importlib.import_module(module))
        factory = getattr(imported, function)
    except AttributeError:
        raise InputError(f"module {module} has no {function!r}") from None
    if not callable(factory):
        raise InputError(f"{name} is a {type(factory).__name__}, not a function that returns {_SHAPE}")
    made = _of_user(name, factory)
    if not (isinstance(made, (tuple, list)) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
        raise InputError(f"{name} returned {_kind(made)}, not {_SHAPE}")
    model, batch, loss = (*made, None)[:3]
    if loss is not None and not callable(loss):
        raise InputError(f"{name}: its loss is a {type(loss).__name__}, not a function of the model's output")
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    else:
        args = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    return Made(name, model, args, kwargs, loss)


def _of_user(name: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except DpfastError:
        raise
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, ModuleNotFoundError) else f" ({at.filename}, line {at.lineno})"
        raise InputError(f"{name}: {type(error).__name__}: {error}{where}") from error


def _kind(made: object) -> str:
    if isinstance(made, (tuple, list)):
        return f"({', '.join(type(x).__name__ for x in made)})"
    return f"a {type(made).__name__}"
