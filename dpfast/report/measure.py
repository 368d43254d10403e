"""What a plain and a private step take, layer by layer, and what the private one would take in other ways.

Everything is measured here and now, nothing comes from constants: a prediction is the time of the step whose taps only
catch, plus what norms and clipped sums took by themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpfast.arithmetic import cost
from dpfast.errors import InputError, StateError
from dpfast.factors import Factor
from dpfast.modes import GradSampleModule, GradSampleModuleFastGradientClipping, TappedModel
from dpfast.report.memory import segments_between_marks
from dpfast.report.takes import IN_TURN, Caught, Held, Takes, Turns
from dpfast.report.timing import clock
from dpfast.taps import Record

Loss = Callable[[Any], Tensor]

ROUNDS = 3
WAYS = ("direct", "gram", "keep", IN_TURN)
_NOTHING_IS_CLIPPED = 1e30


@dataclass(frozen=True)
class Layer:
    """What a layer takes in the plain step, by itself: seconds, and bytes that autograd keeps for its backward."""

    name: str
    forward: float
    input_gradient: float
    weight_gradient: float
    saved: int


@dataclass(frozen=True)
class Way:
    """Seconds of the norm and of the clipped sum, and bytes held from the one to the other."""

    norm: float
    sum: float
    held: int

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
    """Steps of a model on one batch. Gradients, random numbers and buffers are left as they were.

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
        """Takes some forty steps; ``done`` is called after each of :attr:`STEPS` parts."""
        with self._left_as_it_was():
            plain = [self.seconds() for _ in range(ROUNDS + 1)][1:]
            done()
            with self._tapped() as tapped:
                names, in_turn = self._look(tapped)
                costs, caught, num_samples = self._costs(tapped, in_turn, done)
                predicted_peak = self._predicted_peak(tapped, in_turn)
            layers = self._layers(names)
            done()
            private, private_peak = self._private()
            done()
            two_passes = self._two_passes()
            done()
            plain += [self.seconds() for _ in range(ROUNDS)]
            plain_peak = self._peak()
            self._clear()
            done()
        return Measured(
            layers,
            costs,
            median(plain),
            caught,
            private,
            two_passes,
            plain_peak,
            private_peak,
            predicted_peak,
            num_samples,
            self.device,
        )

    # --- steps ---

    def step(self) -> None:
        """Forward and backward; gradients stay."""
        self._total(self.model(*self._args, **self._kwargs)).backward()

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
        start = self._now()
        self.step()
        found = self._now() - start
        self._clear()
        return found

    def _peak(self) -> int:
        found = segments_between_marks(lambda mark: self.step(), self.held, self.device)
        return max(most for _, most in found)

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
            with torch.random.fork_rng(), torch.enable_grad():
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
    def _tapped(self) -> Iterator[TappedModel]:
        tapped = TappedModel(self.model, Caught(), **self._options())
        tapped.add()
        try:
            yield tapped
        finally:
            tapped.remove()

    def _private(self) -> tuple[float, int]:
        """A real one."""
        wrapped = GradSampleModuleFastGradientClipping(self.model, strict=False, **self._options())
        whole, self.model = self.model, wrapped
        try:
            # The samples of the first two and the eighth are looked at, which is no part of a step.
            found = [self.seconds() for _ in range(2 * ROUNDS + 2)][2:]
            wrapped._norms = wrapped._clip_factors = None  # the last step's are not this one's
            peak = self._peak()
        finally:
            self.model = whole
            wrapped.remove_hooks()
            self._clear()
        return median(found), peak

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
            for _ in range(ROUNDS + 1):
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
        return median(found[1:])

    # --- layers of the plain step ---

    def _look(self, tapped: TappedModel) -> tuple[dict[str, nn.Module], set[int]]:
        """The layers that taps are on, by name, and the uses taken in turn; a first step learns where samples are."""
        found: dict[str, nn.Module] = {}
        turns = Turns(self.model.parameters())

        def observe(record: Record, parameter: nn.Parameter, factor: Factor) -> None:
            found[record.tap.layer] = record.tap.module
            turns.see(parameter, factor)

        tapped.observe = observe
        self.seconds()
        tapped.observe = None
        return found, turns.taken

    def _layers(self, names: Mapping[str, nn.Module]) -> list[Layer]:
        modules = {id(m): name for name, m in names.items()}
        inner = {id(m): any(id(c) in modules for c in m.modules() if c is not m) for m in names.values()}
        alone = {name: m for name, m in names.items() if not inner[id(m)]}  # a parent's time is its children's too
        found: dict[str, list[list[float]]] = {}
        saved: dict[str, int] = defaultdict(int)
        handles = []

        def hook(name: str) -> Callable[..., None]:
            def measure(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                times, nbytes = self._alone(module, args, kwargs)
                now[name].append(times)
                saved[name] = max(saved[name], nbytes)

            return measure

        for _ in range(ROUNDS):
            now: dict[str, list[list[float]]] = defaultdict(list)
            handles = [m.register_forward_hook(hook(name), with_kwargs=True) for name, m in alone.items()]
            try:
                self.model(*self._args, **self._kwargs)
            finally:
                for handle in handles:
                    handle.remove()
            for name, calls in now.items():
                found.setdefault(name, []).append([sum(x) for x in zip(*calls, strict=True)])
        layers = []
        for name, rounds in found.items():
            forward, input_gradient, weight_gradient = map(median, zip(*rounds, strict=True))
            layers.append(Layer(name, forward, input_gradient, weight_gradient, saved[name]))
        return layers

    def _alone(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[list[float], int]:
        """Seconds of a layer's forward, of the gradients of its inputs and of those of its parameters."""
        leaves, structure = tree_flatten((args, kwargs))
        leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(leaves, structure)
        inputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        own = {p.untyped_storage().data_ptr() for p in module.parameters()}
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            type(module).forward(module, *args, **kwargs)
        start = self._now()
        output = type(module).forward(module, *args, **kwargs)
        times = [self._now() - start]
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        gradients = [torch.randn_like(x) for x in outputs]
        for of in (inputs, [p for p in module.parameters() if p.requires_grad]):
            start = self._now()
            if of and outputs:
                torch.autograd.grad(outputs, of, gradients, retain_graph=True, allow_unused=True)
            times.append(self._now() - start)
        return times, sum(kept.values())

    # --- ways of the private step ---

    def _costs(self, tapped: TappedModel, in_turn: set[int], done: Callable[[], None]) -> tuple[list[Cost], float, int]:
        caught: list[float] = []
        found: list[dict[str, list[Way]]] = []
        parameters = {p: name for name, p in self.model.named_parameters()}
        takes = Takes(self._now, in_turn)
        for _ in range(ROUNDS):
            tapped.mode, tapped.observe = Caught(), None
            caught += [self.seconds(), self.seconds()]
            done()
            for way in WAYS:
                takes.begin(way)
                tapped.mode, tapped.observe = takes, takes.observe
                self.seconds()
                found = found or [defaultdict(list) for _ in takes.uses]
                for times, use in zip(found, takes.uses, strict=True):
                    times[use.way].append(Way(*use.seconds, use.held))
                done()
        costs: list[Cost] = []
        for times, use in zip(found, takes.uses, strict=True):
            ways = {
                way: Way(median(w.norm for w in each), median(w.sum for w in each), each[0].held)
                for way, each in times.items()
            }
            name = parameters.get(use.parameter, "?")
            costs.append(Cost(use.layer, name, use.taken, ways, use.size, use.unwritten or use.taken))
        tapped.mode, tapped.observe = Caught(), None
        return costs, median(caught), max((use.num_samples for use in takes.uses), default=0)

    def _predicted_peak(self, tapped: TappedModel, in_turn: set[int]) -> int:
        """What tensors of the step would hold, plus what the factors would keep alive that this step lets go of."""
        held = Held(in_turn)
        tapped.mode = held
        segments = segments_between_marks(lambda mark: held.run(mark, self.step), self.held, self.device)
        self._clear()
        return held.peak(segments, {p: i for i, p in enumerate(self.parameters)})


def sum_of(output: Any) -> Tensor:
    """The sum of all that a model returns and that has a gradient."""
    outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not outputs:
        raise InputError("the model's output depends on no trainable parameter")
    total: Any = sum(x.float().sum() for x in outputs)
    return total
