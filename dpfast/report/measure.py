"""What a plain and a private step take, layer by layer, and what the private one would take in other ways.

Everything is measured here and now, nothing comes from constants: a prediction is the time of the step whose taps only
catch, plus what norms and clipped sums took by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpfast.arithmetic import cost
from dpfast.errors import InputError, StateError
from dpfast.factors import Factor
from dpfast.modes import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.report.layers import Layer, take_layers
from dpfast.report.memory import segments_between_marks
from dpfast.report.takes import IN_TURN, Caught, Held, Taken, Takes, Turns
from dpfast.report.timing import clock
from dpfast.taps import Record
from dpfast.trials import ONE_AT_A_TIME, put_back

Loss = Callable[[Any], Tensor]
M = TypeVar("M", bound=Caught)

ROUNDS = 3
WAYS = ("direct", "gram", "keep", IN_TURN)
_NOTHING_IS_CLIPPED = 1e30


@dataclass(frozen=True)
class Way:
    """Seconds of the norm and of the clipped sum, and bytes held from the one to the other."""

    norm: float
    sum: float
    held: int

    @classmethod
    def of(cls, times: Sequence[Taken]) -> Way:
        """The medians."""
        norm, clipped_sum = map(median, zip(*(taken.seconds for taken in times), strict=True))
        return cls(norm, clipped_sum, times[0].held)

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.norm + self.sum


@dataclass(frozen=True)
class Cost:
    """What one use of one parameter takes in each way that it has; ``unwritten``: the one where gradients are not."""

    layer: str
    parameter: str
    taken: str
    ways: Mapping[str, Way]
    size: cost.Size
    unwritten: str

    @property
    def way(self) -> Way:
        """The one taken."""
        return self.ways[self.taken]


@dataclass(frozen=True)
class Measured:
    """One batch of one model on one machine; seconds and bytes.

    Attributes:
        layers: in the order of the forward pass.
        costs: in the order of the backward pass.
        plain, private: whole steps (forward and backward; with clipping), as they took.
        two_passes: a private step with ``passes=2``, as it took; None where this model is refused there.
        caught: a step whose taps catch, and whose rules run, but which takes no norm and no sum.
        plain_peak, private_peak: the most bytes of tensors in them; predicted_peak: what was predicted.
    """

    layers: Sequence[Layer]
    costs: Sequence[Cost]
    plain: float
    caught: float
    private: float
    two_passes: float | None
    plain_peak: int
    private_peak: int
    predicted_peak: int
    num_samples: int
    device: str

    @property
    def predicted(self) -> float:
        """Seconds of the private step, by its parts."""
        return self.caught + sum(c.way.seconds for c in self.costs)


class Run:
    """Steps of a model on one batch. Gradients, random numbers, buffers and what forwards keep outside of modules are
    left as they were.

    Args:
        model: wrapped by dpfast or not.
        loss: gives one number for the model's output; None: the sum of its outputs.
    """

    STEPS = 5 + ROUNDS * (1 + len(WAYS))

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None):
        self._wrapped = model if isinstance(model, GradSampleModule) else None
        self.model = model._module if isinstance(model, GradSampleModule) else model
        self._args, self._kwargs, self._loss = args, kwargs, loss
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.held = [*self.model.parameters(), *self.model.buffers(), *tensors]
        self.device = "cuda" if any(x.is_cuda for x in self.held) else "cpu"
        self._now = clock(self.device)

    def measure(self, done: Callable[[], None] = lambda: None) -> Measured:
        """Takes some fifty steps; ``done`` is called after each of :attr:`STEPS` parts."""
        with self._left_as_it_was():
            self.seconds()
            plain = [self._twice() for _ in range(ROUNDS)]
            done()
            private: list[float] = []
            caught: list[float] = []
            takes: list[list[Taken]] = []
            with self._private_steps() as wrapped:
                names, in_turn = self._look(wrapped)
                for _ in range(ROUNDS):  # steps of both kinds in each: what slows the machine down slows both down
                    private.append(self._twice())
                    with _instead(wrapped, Caught()):
                        caught.append(self._twice())
                    done()
                    for way in WAYS:
                        with _instead(wrapped, Takes(self._now, way, in_turn)) as of_step:
                            self.seconds()
                        takes.append(of_step.uses)
                        done()
                private_peak = self._private_peak(wrapped)
                predicted_peak = self._predicted_peak(wrapped, in_turn)
            done()
            with self._dropped():
                layers = take_layers(self._forward, names, self._now, ROUNDS)
                done()
                two_passes = self._two_passes()
            done()
            plain += [self._twice() for _ in range(ROUNDS)]
            plain_peak = self._peak()
            done()
        return Measured(
            layers=layers,
            costs=self._costs(takes),
            plain=median(plain),
            caught=median(caught),
            private=median(private),
            two_passes=two_passes,
            plain_peak=plain_peak,
            private_peak=private_peak,
            predicted_peak=predicted_peak,
            num_samples=max((use.num_samples for use in takes[0]), default=0),
            device=self.device,
        )

    # --- steps ---

    def step(self) -> None:
        """Forward and backward; gradients stay."""
        self._total(self._forward()).backward()

    def _forward(self) -> Any:
        return self.model(*self._args, **self._kwargs)

    def _total(self, output: Any) -> Tensor:
        """The loss."""
        if self._loss is not None:
            total = self._loss(output)
            if not isinstance(total, Tensor) or total.dim() != 0:
                raise InputError("the loss is not one number; reduce it by mean or sum")
            return total
        return sum_of(output)

    def seconds(self) -> float:
        """Of a step; its gradients are dropped."""
        with self._dropped():
            start = self._now()
            self.step()
            found = self._now() - start
        return found

    def _twice(self) -> float:
        """Of the quicker of two: others can only have disturbed. So are all whole steps measured, that they compare."""
        return min(self.seconds(), self.seconds())

    def _peak(self) -> int:
        with self._dropped():
            found = segments_between_marks(lambda mark: self.step(), self.held, self.device)
        return max(most for _, most in found)

    @contextmanager
    def _dropped(self) -> Iterator[None]:
        """What steps leave within it: gradients, and what stands outside of modules (a loss whose graph is gone)."""
        with put_back(self.model, self._loss):
            yield
        self._clear()

    def _clear(self) -> None:
        for p in self.parameters:
            p.grad = None

    @contextmanager
    def _left_as_it_was(self) -> Iterator[None]:
        gradients = [p.grad for p in self.parameters]
        buffers = [(b, b.clone()) for b in self.model.buffers()]
        tapped = None if self._wrapped is None else self._wrapped._tapped
        self._clear()  # first: gradients that are there when taps go are nobody's from then on
        if tapped is not None:
            tapped.remove()
        try:
            with ONE_AT_A_TIME, torch.random.fork_rng(), torch.enable_grad():
                yield
        finally:
            for p, gradient in zip(self.parameters, gradients, strict=True):
                p.grad = gradient
            for b, before in buffers:
                b.copy_(before)
            if tapped is not None:
                tapped.add()

    def _options(self) -> dict[str, Any]:
        tapped = None if self._wrapped is None else self._wrapped._tapped
        if tapped is None:
            return {}
        return {
            "batch_first": tapped.batch_dim == 0,
            "force_functorch": tapped.force_functorch,
            "layout": tapped.layout,
        }

    @contextmanager
    def _private_steps(self) -> Iterator[GradSampleModuleFastGradientClipping]:
        """Within it steps are real private ones."""
        wrapped = GradSampleModuleFastGradientClipping(self.model, strict=False, **self._options())
        whole, self.model = self.model, wrapped
        try:
            yield wrapped
        finally:
            self.model = whole
            wrapped.remove_hooks()
            self._clear()

    def _two_passes(self) -> float | None:
        """Of a step with ``passes=2``. Nothing is clipped in it, so the second pass is the first once more and needs no
        loss of each sample."""
        wrapped = GradSampleModuleFastGradientClipping(
            self.model,
            strict=False,
            passes=2,
            loss_reduction="sum",
            max_grad_norm=_NOTHING_IS_CLIPPED,
            **self._options(),
        )
        found = []
        try:
            for _ in range(2 * ROUNDS + 1):
                start = self._now()
                output = wrapped(*self._args, **self._kwargs)
                outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
                gradients = torch.autograd.grad(self._total(output), outputs, retain_graph=True, materialize_grads=True)
                torch.autograd.backward(outputs, gradients, retain_graph=True)
                wrapped.get_clipping_coef()  # a second pass is to come
                wrapped.disable_hooks()
                torch.autograd.backward(outputs, gradients)
                wrapped.enable_hooks()
                found.append(self._now() - start)
                self._clear()
        except StateError:
            return None
        finally:
            wrapped.remove_hooks()
            self._clear()
        return median(map(min, zip(found[1::2], found[2::2], strict=True)))  # as _twice

    # --- ways of the private step ---

    def _look(self, wrapped: GradSampleModuleFastGradientClipping) -> tuple[dict[str, nn.Module], set[int]]:
        """The layers that taps are on, by name, and the uses taken in turn. Two steps whose samples are looked at: that
        is no part of a step."""
        found: dict[str, nn.Module] = {}
        turns = Turns(self.model.parameters())

        def observe(record: Record, parameter: nn.Parameter, factor: Factor) -> None:
            found[record.tap.layer] = record.tap.module
            turns.see(parameter, factor)

        self.seconds()
        with _instead(wrapped, Caught(), observe):
            self.seconds()
        return found, turns.taken

    def _costs(self, steps: Sequence[Sequence[Taken]]) -> list[Cost]:
        parameters = {p: name for name, p in self.model.named_parameters()}
        costs: list[Cost] = []
        for takes in zip(*steps, strict=True):  # of one use
            by_way: dict[str, list[Taken]] = {}
            for taken in takes:
                by_way.setdefault(taken.way, []).append(taken)
            ways = {way: Way.of(each) for way, each in by_way.items()}
            use = takes[-1]
            name = parameters.get(use.parameter, "?")
            costs.append(Cost(use.layer, name, use.taken, ways, use.size, use.unwritten or use.taken))
        return costs

    def _private_peak(self, wrapped: GradSampleModuleFastGradientClipping) -> int:
        wrapped._norms = wrapped._clip_factors = None  # the last step's are not this one's
        return self._peak()

    def _predicted_peak(self, wrapped: GradSampleModuleFastGradientClipping, in_turn: set[int]) -> int:
        """What tensors of the step would hold, plus what the factors would keep alive that this step lets go of."""
        held = Held(in_turn)
        with _instead(wrapped, held), self._dropped():
            segments = segments_between_marks(lambda mark: held.run(mark, self.step), self.held, self.device)
        return held.peak(segments, {p: i for i, p in enumerate(self.parameters)})


@contextmanager
def _instead(
    wrapped: GradSampleModuleFastGradientClipping, mode: M, observe: Callable[..., None] | None = None
) -> Iterator[M]:
    """What its taps catch goes elsewhere."""
    tapped = wrapped._tapped
    assert tapped is not None
    before, tapped.mode, tapped.observe = tapped.mode, mode, observe or getattr(mode, "observe", None)
    try:
        yield mode
    finally:
        tapped.mode, tapped.observe = before, None


def sum_of(output: Any) -> Tensor:
    """The sum of all that a model returns and that has a gradient."""
    outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not outputs:
        raise InputError("the model's output depends on no trainable parameter")
    total: Any = sum(x.float().sum() for x in outputs)
    return total
