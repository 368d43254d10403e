"""The same random numbers in several runs of a model, or others; when these have ended, none is gone."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpfast.trials.left_behind import nothing_left_behind

MOST_DRAWS = 12
"""Times that other random numbers are tried: of layers that each batch drops with a probability of one half, one in
8,192 is still out then."""


class RandomNumbers:
    """Torch's own, Python's and NumPy's. Called, they start again."""

    def __init__(self) -> None:
        self._devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        self._numpy: Any = sys.modules.get("numpy")
        self._start = self._next()
        self._first, *_ = self._start

    def __call__(self) -> None:
        of_torch, of_python, of_numpy = self._start
        self._set_torch(of_torch)
        random.setstate(of_python)
        if self._numpy is not None:
            self._numpy.random.set_state(of_numpy)

    def torch_as_first(self) -> None:
        """Torch's start as they first did, whatever has been drawn since."""
        self._set_torch(self._first)

    def _set_torch(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)

    def draw(self) -> None:
        """From here on they are others."""
        self()
        for device in ("cpu", *map("cuda:{}".format, self._devices)):
            torch.rand(1, device=device)
        random.random()
        if self._numpy is not None:
            self._numpy.random.random()
        self._start = self._next()

    def go_on(self) -> None:
        """From here on they start with those that come next."""
        self._start = self._next()

    def are_drawn(self) -> bool:
        """Whether any have been drawn since they started."""
        (of_torch, of_python, of_numpy), (now, of_python_now, of_numpy_now) = self._start, self._next()
        same = all(map(torch.equal, of_torch, now)) and of_python == of_python_now
        return not (same and pickle.dumps(of_numpy) == pickle.dumps(of_numpy_now))  # arrays, in tuples or dicts

    def _next(self) -> tuple[list[Tensor], Any, Any]:
        of_torch = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]
        return of_torch, random.getstate(), None if self._numpy is None else self._numpy.random.get_state()


class SameAtEverySize(TorchDispatchMode):
    """Within it tensors of random numbers hold one number, of other shapes the same one, dropout drops nothing,
    permutations change nothing, and of weighted choices (``torch.multinomial``) those with a weight are taken that
    stand last: how many others are drawn changes nothing, and who may take what is padding does. Not so what Python
    and NumPy draw.

    Args:
        again: has random numbers start again.
    """

    def __init__(self, again: RandomNumbers):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.again = again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.removesuffix("_").removesuffix("_like") not in _DRAWS:
            return func(*args, **(kwargs or {}))
        self.again.torch_as_first()
        result = func(*args, **(kwargs or {}))
        if name in _NORMAL:
            mean, deviation = _of_normal(name, args, kwargs or {})
            return result.copy_(torch.as_tensor(mean + _DEVIATIONS * deviation))
        if name == "randperm":
            return result.copy_(torch.arange(len(result)))
        if name == "multinomial":
            return result.copy_(_last_with_a_weight(args[0], result.shape[-1]))
        if name == "native_dropout":
            x, p, train = args
            return (x / (1 - p) if train is not False and p < 1 else result[0]), result[1].fill_(p < 1)
        return result if not result.numel() else result.fill_(1 if "bernoulli" in name else result.flatten()[0])


_NORMAL = frozenset({"randn", "randn_like", "normal", "normal_"})
_DEVIATIONS = 0.6  # torch's first number of fewer than 16 is another one than that of more


def _of_normal(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The mean and the standard deviation, numbers or tensors."""
    if name not in ("normal", "normal_"):
        return 0.0, 1.0
    given = {**dict(zip(("mean", "std"), args[name == "normal_" :], strict=False)), **kwargs}
    return given.get("mean", 0.0), given.get("std", 1.0)


def _last_with_a_weight(weights: Tensor, number: int) -> Tensor:
    """So many choices, each once as long as there are others, the heavier and later ones first."""
    order = (weights * torch.arange(1, weights.shape[-1] + 1, device=weights.device)).argsort(
        dim=-1, descending=True, stable=True
    )
    possible = (weights > 0).sum(-1, keepdim=True).clamp(min=1)
    return order.gather(-1, torch.arange(number, device=order.device) % possible)


_DRAWS = frozenset(
    (
        *("bernoulli", "native_dropout", "rand", "randn", "randint", "normal", "uniform", "random", "exponential"),
        *("log_normal", "geometric", "cauchy", "poisson", "multinomial", "randperm"),
    )
)


@contextmanager
def same_random_numbers() -> Iterator[RandomNumbers]:
    """Nothing is left of what runs within it; what it gives starts all random numbers again."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with nothing_left_behind(), torch.random.fork_rng(devices=devices):
        yield RandomNumbers()
