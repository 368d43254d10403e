"""One captured step, compiled, and whether it is still that of the model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dpfast.arithmetic import exact_arithmetic, exact_convolutions
from dpfast.compiled.pins import leave_pins_to_inductor
from dpfast.compiled.plain import plain
from dpfast.compiled.replay import Replay
from dpfast.errors import BackendError, StateError
from dpfast.looks import looks_again_at
from dpfast.modes import is_taken_unrounded

if TYPE_CHECKING:
    from dpfast.compiled.capture import Captured


class Own(NamedTuple):
    """What a model consists of, each once, in the order of ``modules()``, ``parameters()`` and ``buffers()``.

    Attributes:
        again: modules and parameters that stand in several places, as tied weights do: the number of the module, and
            the identity of what has come again.
    """

    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    buffers: list[Tensor]
    again: list[int]

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Those of now."""
        return list(compress(self.parameters, map(_is_trained, self.parameters)))

    @classmethod
    def of(cls, model: nn.Module) -> Own:
        """In one walk: torch's own three take longer than a small step."""
        own = cls([], [], [], [])
        seen: set[int] = set()
        waiting: list[nn.Module | None] = [model]
        while waiting:
            module = waiting.pop()
            if module is None:
                continue
            if id(module) in seen:
                own.again.extend((len(own.modules), id(module)))
                continue
            seen.add(id(module))
            own.modules.append(module)
            for found, tensors in ((own.parameters, module._parameters), (own.buffers, module._buffers)):
                for x in tensors.values():
                    if x is None:
                        continue
                    if id(x) in seen:
                        if found is own.parameters:  # buffers are others at any time (.to())
                            own.again.extend((len(own.modules), id(x)))
                    else:
                        seen.add(id(x))
                        found.append(x)  # type: ignore[arg-type]  # of either kind
            if module._modules:
                waiting.extend(reversed(module._modules.values()))
        return own


class Walked:
    """What a model consists of, found anew where its modules hold others than they did."""

    def __init__(self, model: nn.Module):
        self._own = Own.of(model)
        self._held = self._holds()

    def own(self, model: nn.Module) -> Own:
        """The same object for as long as nothing is another."""
        if self._own.modules[0] is not model or self._held != self._holds():
            self.__init__(model)  # type: ignore[misc]  # all that it is, is anew
        return self._own

    def _holds(self) -> list[list[int]]:
        """Ids of the modules' own modules, parameters and buffers, which :attr:`_own` keeps alive; no line of Python
        for each."""
        modules = self._own.modules
        return [list(map(id, chain.from_iterable(map(dict.values, map(of, modules))))) for of in _KINDS]


_KINDS = tuple(map(attrgetter, ("_modules", "_parameters", "_buffers")))
_is_trained: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # torch's stubs have a bool


class Graph:
    """A captured step.

    Args:
        captured: of this model, own. backend: torch.compile's.
        places: where its layers have their samples. settled: whether another batch would tell no more of that.
        start: when the capture began.
    """

    def __init__(self, captured: Captured, own: Own, backend: str, *, places: Any, settled: bool, start: float):
        self.places, self.settled = places, settled
        self.apart = False  # whether losses of several samples were seen, each its own sample's
        self._runs = 0  # on batches of several, since then
        self._looks = 3  # batches that are asked once more
        self.of, self.counts = captured.of, captured.counts
        self._in_bf16 = any(p.dtype is torch.bfloat16 for p in captured.of)
        self._others = captured.others
        self._others_were = list(map(_looks, self._others))
        self._wrapped = any(map(is_traceable_wrapper_subclass, (*own.parameters, *own.buffers, *self._others)))
        self._backend = backend
        self._own = own
        self._taken = f"{len(captured.graph.graph.nodes)} operations captured in {time.perf_counter() - start:.1f} s"
        self._captured: Any = captured.graph  # until it is compiled
        self._compiled: Callable[..., Sequence[Tensor]] | None = None
        self._replay: Replay | None = None  # on a GPU

    def is_looked_at_again(self) -> bool:
        """Whether one more batch is one to look at, for what the first did not show."""
        self._runs += 1
        return looks_again_at(self._runs)

    def seen_again(self, settled: bool) -> Graph:
        """Another batch has told nothing else of where samples are."""
        self._looks -= 1
        self.settled = settled or self._looks == 0
        return self

    def check_model(self, own: Own) -> None:
        """Raises StateError where modules or parameters are not those that were captured, or stand elsewhere (weights
        that are tied, or no longer)."""
        if own is self._own:  # nearly always
            return
        same_modules = _same(self._own.modules, own.modules)
        same_parameters = _same(self._own.parameters, own.parameters)
        if not (same_modules and same_parameters and self._own.again == own.again):
            what = "modules" if not same_modules else "parameters" if not same_parameters else "ties of its parameters"
            raise StateError(
                f"the model has other {what} than when its step was captured; make a new one with dpfast.compile_step"
            )

    def run(self, own: Own, inputs: Sequence[Tensor], *, alone: bool) -> Sequence[Tensor]:
        """The sums of :attr:`of`, norms, factors and what these were measured from, see ``Captured``.

        Args:
            inputs: the batch's tensors, what it is told of the samples, and C.
            alone: the sums are all that the gradients will be: those of bf16 may be rounded to it.

        Raises:
            BackendError: torch.compile cannot compile here. StateError: tensors that modules hold were changed.
        """
        if self._others_were != list(map(_looks, self._others)):  # which no key can have: they are found by capturing
            raise StateError(
                "a tensor that is an attribute of a module, and no buffer, has another shape, dtype or device than "
                "when the step was captured, or is trained since; make a new one with dpfast.compile_step"
            )
        state = [*own.parameters, *own.buffers, *self._others]
        if self._wrapped:
            state = plain(state)
        # Under the switches that its operations were captured under, which a graph does not hold: autocast's roundings
        # are operations in it, and would be taken again, of norms and sums too.
        with exact_convolutions(), exact_arithmetic():
            if self._replay is not None:
                return self._replay(state, inputs, self._rounded() if alone and self._in_bf16 else ())
            if self._compiled is not None:
                return self._compiled(*state, *inputs)
            return self._compiled_for([*state, *inputs])(*state, *inputs)

    def _rounded(self) -> list[torch.dtype | None]:
        """What sums may be rounded to where they are copied: to fp16 they are towards zero, which no copy does."""
        return [p.dtype if p.dtype is torch.bfloat16 and not is_taken_unrounded(p) else None for p in self.of]

    def _compiled_for(self, inputs: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
        """What the backend makes of it, asked as torch.compile asks it. Without torch.compile, which would trace the
        graph once more and stand before each run of it: what it would look at then,
        tensor by tensor, the key of the step's captures says already."""
        say = self._backend == "inductor"
        if say:
            leave_pins_to_inductor()
            print(
                f"dpfast: {self._taken}; compiling, which torch keeps on disk", end=" ... ", file=sys.stderr, flush=True
            )
        start = time.perf_counter()
        try:
            compiled = _compiled(self._captured, self._backend, inputs)
        except Exception as error:
            if say:
                print("not here", file=sys.stderr)
            said = next(iter(str(error).splitlines()), type(error).__name__)
            needs = ""
            if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                needs = (
                    "Inductor needs a C++ compiler on a CPU (g++ or clang++, or CXX=its path) and backend='aot_eager' "
                    "none; "
                )
            raise BackendError(
                f"torch.compile's backend {self._backend!r} cannot compile here: {said}. {needs}"
                "GradSampleModuleFastGradientClipping is the same step without a graph"
            ) from error
        if say:
            print(f"{time.perf_counter() - start:.1f} s", file=sys.stderr)
        self._compiled, self._captured = compiled, None
        # A replay runs no Python, so clippers are not asked in one: it has C, and makes its factors itself.
        if say and self.counts and len(devices := {x.device for x in inputs}) == 1 and devices.pop().type == "cuda":
            self._replay = Replay(compiled)
        return compiled


def _compiled(graph: Any, backend: Any, inputs: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """By one of torch.compile's backends, which is given what torch.compile gives it: tensors without values, of fixed
    shapes, and a record of what shapes depend on, without which nothing is found on disk."""
    from torch._dynamo import lookup_backend  # which takes a while to import
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fakes = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with tracing(TracingContext(fakes)):
        compile_: Any = lookup_backend(backend) if isinstance(backend, str) else backend
        # Detached, because a parameter's gradient may be of another dtype, and is no matter here.
        found: Callable[..., Sequence[Tensor]] = compile_(
            graph, [fakes.from_tensor(x.detach(), static_shapes=True) for x in inputs]
        )
    return found


def _same(before: Sequence[object], now: Sequence[object]) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


def _looks(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad
