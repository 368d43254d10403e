"""Random numbers in a step that is captured: a checkpointed region that runs again has those that it had.

``torch.utils.checkpoint`` sets torch's generator back before it repeats a region. A graph has no such operation, and
would draw anew: activations of one mask of dropout would meet the gradients of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dpfast.errors import UnsupportedModuleError
from dpfast.taps import in_backward

_FIRST = 2**63
"""Of the seeds that stand for the generator's states; nobody seeds by hand up there."""

_SET_BACK = (
    "the step sets torch's random numbers back (fork_rng, set_rng_state) and draws them again for other values ({}), "
    "which a graph does only where a checkpointed region runs again: draw them once, or take "
    "GradSampleModuleFastGradientClipping, the same step without a graph"
)


@contextmanager
def same_draws() -> Iterator[None]:
    """Within it what is drawn where torch's generator stands as before is what was drawn there.

    Raises:
        UnsupportedModuleError: in a forward pass, where what is drawn depends on other values than before.
    """
    with torch.random.fork_rng(devices=[]), _SameDraws():
        yield


class _SameDraws(TorchDispatchMode):
    """No numbers are drawn while a step is captured, so nothing moves the generator on. Each draw does it here, to a
    seed of its own. The CPU's generator tells of those of all devices: a checkpoint sets it back in any case."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._next = _FIRST
        self._drawn: dict[Any, tuple[int, list[Tensor], Any]] = {}
        self._move()

    def _move(self) -> int:
        torch.default_generator.manual_seed(self._next)
        self._next += 1
        return self._next - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _arguments(func, args, kwargs or {})
        if given is None:
            return func(*args, **(kwargs or {}))
        places = func._schema.arguments
        changed = [a.name for a in places if a.alias_info is not None and a.alias_info.is_write]
        key = torch.default_generator.initial_seed(), func, str(tree_map_only(Tensor, _looks, given))
        if key in self._drawn:
            read = [x for name, x in given.items() if isinstance(x, Tensor) and name not in changed]
            if read and "_like" not in func.__name__ and in_backward() is None:
                raise UnsupportedModuleError(_SET_BACK.format(func))
            return self._again(key, [given[name] for name in changed])
        result = func(*args, **(kwargs or {}))
        in_place = func._schema.returns[0].alias_info is not None
        written = _copies([given[name] for name in changed])  # as whoever drew may write to what he has
        self._drawn[key] = self._move(), written, None if in_place else _copies(result)
        return result

    def _again(self, key: Any, changed: list[Tensor]) -> Any:
        after, written, result = self._drawn[key]
        torch.default_generator.manual_seed(after)
        for x, before in zip(changed, written, strict=True):
            x.copy_(before)
        return changed[0] if result is None else _copies(result)


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """By name, of an operation that draws from torch's generator; None: of any other."""
    if torch.Tag.nondeterministic_seeded not in func.tags or func.__name__.partition(".")[0].endswith("_backward"):
        return None
    given = {a.name: a.default_value for a in func._schema.arguments}
    given |= {**{a.name: x for a, x in zip(func._schema.arguments, args, strict=False)}, **kwargs}
    rates = [given[name] for name in ("dropout_p", "dropout") if name in given]
    off = any(given.get(name) is False for name in ("train", "training"))
    return None if off or (rates and not any(rates)) or given.get("generator") is not None else given


def _looks(x: Tensor) -> Any:
    return x.shape, x.dtype


def _copies(x: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, x)
