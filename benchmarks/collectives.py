"""What a step sends to other ranks: collectives and bytes by kind, and what is computed while they are on their way."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}
"""Those of c10d, which DDP, FSDP2 and dpfast call, and the functional ones, which DTensor calls."""

OTHERS = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mkldnn_linear_pointwise", "_linear_pointwise", "linear", "addmv", "mv")
PATCHED = (
    "all_reduce",
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
"""Functions of torch.distributed, some of which are one another; absent in some versions."""


@dataclass
class Sent:
    """One collective: the bytes that this rank puts in, and whether a matrix product ran between its start and the
    wait for it."""

    kind: str
    bytes: int
    covered: bool = False
    done: bool = False


@dataclass
class Collectives:
    """Those of some code that ran under :meth:`watched`."""

    sent: list[Sent] = field(default_factory=list)
    in_flight: int = 0  # the most bytes that were on their way at one time
    exposed: float = 0.0  # seconds in which something was on its way, and this thread did not run
    _since: tuple[float, float] = (0.0, 0.0)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """What DDP's reducer waits for itself counts as waited for at the end."""
        before = {name: getattr(dist, name) for name in PATCHED if hasattr(dist, name)}
        for name, function in before.items():
            setattr(dist, name, self._telling(function))
        try:
            with _Watch(self):
                yield
        finally:
            for name, function in before.items():
                setattr(dist, name, function)
            self.wait(0, len(self.sent))

    def wait(self, start: int, end: int) -> None:
        """Those of these numbers have been waited for."""
        self._look()
        for one in self.sent[start:end]:
            one.done = True

    def _look(self) -> None:
        """What is on its way changes: until now it was what it is."""
        now = time.perf_counter(), time.thread_time()
        if any(not one.done for one in self.sent):
            self.exposed += (now[0] - self._since[0]) - (now[1] - self._since[1])
        self._since = now

    def compute(self) -> None:
        """A matrix product runs."""
        for one in self.sent:
            one.covered = one.covered or not one.done

    def start(self, kind: str, size: int) -> None:
        self._look()
        self.sent.append(Sent(kind, size))
        self.in_flight = max(self.in_flight, sum(one.bytes for one in self.sent if not one.done))

    def _telling(self, function: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            start = len(self.sent)
            work = function(*args, **options)
            end = len(self.sent)
            if work is None:
                self.wait(start, end)
            return None if work is None else _Work(work, lambda: self.wait(start, end))

        return call

    def table(self) -> dict[str, dict[str, int]]:
        """{kind: {"calls", "bytes", "exposed": bytes of those that nothing was computed beside}}."""
        found: dict[str, Counter[str]] = {}
        for one in self.sent:
            of = found.setdefault(one.kind, Counter(calls=0, bytes=0, exposed=0))
            of.update(calls=1, bytes=one.bytes, exposed=0 if one.covered else one.bytes)
        return {kind: dict(of) for kind, of in sorted(found.items())}


class _Work:
    """A collective's handle that tells when it is waited for."""

    def __init__(self, work: Any, tell: Callable[[], None]):
        self._work, self._tell = work, tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any) -> Any:
        answer = self._work.wait(*args)
        self._tell()
        return answer


class _Watch(TorchDispatchMode):
    def __init__(self, into: Collectives):
        super().__init__()
        self._into = into
        self._functional: dict[int, int] = {}  # a result's address: its number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # they send, and wait for, what they have to by operations that come here again
        namespace, name = func._schema.name.split("::")
        crosses = namespace in ("c10d", "_c10d_functional")
        if crosses and name in KINDS:
            self._into.start(KINDS[name], _given(name, args))
        elif crosses and name not in OTHERS:
            raise NotImplementedError(f"{func} is not counted; put it into KINDS")
        elif name in PRODUCTS:
            self._into.compute()
        result = func(*args, **(kwargs or {}))
        if namespace == "_c10d_functional" and name in KINDS:
            self._functional[result.data_ptr()] = len(self._into.sent) - 1
        elif crosses and name == "wait_tensor":
            number = self._functional.pop(args[0].data_ptr(), None)
            self._into.wait(*((number, number + 1) if number is not None else (0, 0)))
        return result


def _given(name: str, args: Any) -> int:
    """Bytes that a rank puts in; the ``_base_`` ones have their output in front."""
    given = args[1] if name.endswith("_base_") else args[0]
    return sum(x.nbytes for x in ([given] if isinstance(given, Tensor) else given))


def counted(run: Callable[[], object]) -> Collectives:
    """What ``run`` sends."""
    found = Collectives()
    with found.watched(), torch.autograd.set_multithreading_enabled(False):
        run()
    return found
