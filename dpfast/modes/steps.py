"""What one backward pass gathers, who receives it, and which pass a tap belongs to.

Everything that belongs to one backward pass lives in a :class:`Step`, which only autograd's end-of-backward callback
keeps alive: a pass that fails takes its step with it.
"""

from __future__ import annotations

import collections
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpfast.arithmetic import RowNorms, is_traced
from dpfast.errors import InputError, StateError
from dpfast.factors import Factor
from dpfast.modes.blocks import VALID
from dpfast.modes.deferred import Deferred
from dpfast.modes.second_pass import FirstPass, Output, SecondPass
from dpfast.modes.units import Units
from dpfast.taps import Record, in_backward

_count: Any = collections._count_elements  # type: ignore[attr-defined]  # what Counter.update does at last
_now = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]  # of autograd's nodes
_pass_here = torch._C._current_graph_task_id  # -1: no backward pass


class Step:
    """What one backward pass has gathered."""

    def __init__(
        self,
        of: Output | Record,
        *,
        units: Units | None = None,
        first: FirstPass | None = None,
        second: SecondPass | None = None,
        ordinary: bool = False,
    ) -> None:
        self.output = of if isinstance(of, Output) else None  # of the model's, at which it was opened
        self.batch_size = of.batch_size  # of the model's input; None: not known
        self.valid = of.valid  # (N,) bool, which samples are no padding; None: all
        self.units = units  # what is clipped, where that is not samples
        if units is not None:
            units.check_first()
        self.first = first  # where this is the first of two passes
        self.second = second  # where it is the second
        self.ordinary = ordinary  # hooks are off: the graph was tapped, and gives ordinary gradients
        self.repeats = False  # whether it runs forwards again (checkpointing), which may come out otherwise
        self.num_samples: int | None = None  # that the layers saw
        self.first_layer = ""
        self.started = False  # whether the mode has noted what is trained
        self.gathered: dict[nn.Parameter, Any] = {}
        self.waiting: Any = None  # what the mode takes together
        self.deferred: Deferred | None = None  # layers that wait for others alike, where the mode lets them
        self.row_norms = RowNorms()  # of what its layers saw
        self.given: dict[tuple[int | None, int], list[Tensor]] = {}  # by pass and parameter's id: ordinary gradients
        self.graphs: list[Graph] = []  # of the forward passes that it goes through
        self.is_new = True  # whether one of them is, or no layer has been reached
        self.sums_differ: list[Tensor] = []  # (), of gradients that came otherwise than they were given

    def comes_to(self, graph: Graph | None) -> None:
        """An output of that forward pass; whether the pass reaches a layer is not known yet."""
        if graph is not None and graph not in self.graphs:
            self.graphs.append(graph)
            self.is_new = True

    def goes_through(self, graph: Graph | None, has_left: Callable[[], bool]) -> None:
        """The pass has come to a layer of that forward pass.

        Args:
            has_left: whether what earlier backward passes have left is still there.

        Raises:
            StateError: one of these went through it too, and clipped it by itself.
        """
        if graph in self.graphs and not self.is_new:  # nearly always
            return
        self.comes_to(graph)
        if not self.is_new:
            return
        self.is_new = False
        if self.first is None and any(graph.is_clipped for graph in self.graphs) and has_left():
            raise StateError(
                "a second backward pass goes through one forward pass, and what the first has left is still there: "
                "each clips by itself, so a sample would count twice, by up to 2C. Add the losses up, "
                "(a + b).backward(), or step and model.zero_grad() between them"
            )

    def was_clipped(self) -> None:
        """The pass has left its answer."""
        for graph in self.graphs:
            graph.is_clipped = graph.is_clipped or self.first is None  # which leaves nothing yet
        if self.units is not None:
            self.units.clipped = True

    def asks_for_others(self) -> bool:
        """Whether no layer has been reached because gradients of other tensors alone are asked for (an attack on the
        inputs, a map of what counts in them)."""
        return self.num_samples is None and self.output is not None and self.output.is_left_in_part()

    def saw(self, num_samples: int, layer: str, dim: int) -> None:
        """A layer has had that many samples. Raises InputError where others have had another number."""
        if self.num_samples is None:
            self.num_samples, self.first_layer = num_samples, layer
        elif self.num_samples != num_samples:
            raise InputError(
                f"{layer} saw a batch of {num_samples} samples, {self.first_layer} one of {self.num_samples}: every "
                f"layer must see the same samples in dimension {dim} of its input; expand an input that the model "
                "broadcasts, or set batch_first"
            )

    def check_size(self, dim: int) -> None:
        """Raises InputError where its layers saw another number of samples than the model."""
        sizes = {self.batch_size, self.num_samples}
        if self.units is None and None not in sizes and len(sizes) > 1:
            raise InputError(
                f"{self.first_layer} saw a batch of {self.num_samples} samples, but the first tensor of the model's "
                f"input (without tensors, the first list) has {self.batch_size} in dimension {dim}: a layer must see "
                "each sample once, in that dimension (samples folded into positions, or split into several rows, would "
                "not be clipped as one); reshape before the layer, set batch_first, pass the model a tensor of the "
                "batch first, or say by layout={...: 'N*k'} that the layer has k rows a sample"
            )

    def defers(self, record: Record, activations: Tensor, backprops: Tensor) -> bool:
        """Whether a layer of one input and one output waits for others alike; then it does."""
        if self.deferred is None or not self.deferred.takes(record, activations, backprops):
            return False
        if backprops.shape[0] != self.num_samples:
            self.saw(backprops.shape[0], record.tap.layer, record.tap.batch_dim)
        return True

    def give(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A tap gives it to the parameter, in the pass that runs in this thread."""
        self.given.setdefault((in_backward(), id(parameter)), []).append(gradient)

    def came_as_given(self, parameter: nn.Parameter, gradient: Tensor) -> bool:
        """Whether what reaches the parameter is what taps gave: the very tensor, or the sum in the order of giving.
        Where telling would wait for the device, :attr:`sums_differ` has the answer."""
        given = self.given.pop((in_backward(), id(parameter)), None)
        if given is None:
            return False
        if len(given) == 1:
            return gradient is given[0]
        total = given[0]
        for more in given[1:]:
            total = total + more
        differ = ((gradient != total) & ~(gradient.isnan() & total.isnan())).any()
        if gradient.device.type == "cpu":
            return not bool(differ)
        self.sums_differ.append(differ)
        return True


class Mode(Protocol):
    """Which verb is called and when.

    Attributes:
        passes: 2 where a second backward pass repeats the first and sums.
        gives_gradients: whether ordinary gradients reach the parameters too.
    """

    passes: int
    gives_gradients: bool

    @property
    def defers(self) -> bool:
        """Whether small layers may wait for others alike until the pass ends."""

    def on_forward(self, inputs: Sequence[Tensor], call: tuple[Any, Any]) -> None:
        """A forward pass of the model begins, of these, in one of several processes; ``call``: its
        arguments, and those by name. Raises where that cannot be right."""

    def on_factor(self, step: Step, parameter: nn.Parameter, factor: Factor, only_use: bool) -> Tensor | None:
        """A use of the parameter has been differentiated; ``only_use``: the step has no other one. Returns its ordinary
        gradient, where that is wanted beside."""

    def has_left(self) -> bool:
        """Whether what earlier backward passes have left is still there."""

    def on_finish(self, step: Step) -> None:
        """The backward pass is over."""


class Graph:
    """Stands for what autograd keeps of one forward pass, and lives as long."""

    is_clipped = False  # whether a private backward pass has gone through it
    looked: Any = None  # what is to be known of it where its loss is to be looked at (``curvature.Looked``)

    def __init__(self) -> None:
        self.begun = _now()  # the number of its first node


class Steps:
    """The backward passes of one model that run now, by autograd's number of each, and the uses of its parameters that
    the next one will differentiate; ``last_first``: the last of them that was the first of two."""

    def __init__(self) -> None:
        self._running: dict[int, weakref.ref[Step]] = {}
        self._uses: Counter[int] = Counter()
        self._to_come: weakref.WeakSet[Graph] = weakref.WeakSet()  # those that no backward pass has come to
        self.last_first: FirstPass | None = None

    def here(self) -> Step | None:
        """The step of the backward pass that runs in this thread."""
        found = self._running.get(_pass_here())
        return None if found is None else found()

    def open(self, step: Step, finish: Callable[[Step], None]) -> Step:
        """Makes it that of the backward pass that runs in this thread; ``finish`` is called at its end."""
        number = _pass_here()
        running = self._running

        def ended(reference: weakref.ref[Step]) -> None:
            if running.get(number) is reference:
                del running[number]

        reference = running[number] = weakref.ref(step, ended)

        held = [step]  # what keeps the step alive

        # A GPU's thread may hold the callback for a while after backward() has returned. Were the step still with it,
        # so were autograd's nodes, which the next forward would get for its parameters, with the stream that they were
        # made on: a CUDA graph that is captured then would wait for that stream, which is an error.
        def at_end() -> None:
            try:
                finish(held.pop())
            finally:
                ended(reference)

        torch.autograd.Variable._execution_engine.queue_callback(at_end)
        return step

    def second(self) -> bool:
        """Whether the backward pass that runs in this thread is the second of two."""
        step = self._repeating_here()
        return step is not None and step.second is not None

    def through_taps(self) -> bool:
        """Whether hooks are off and the graph of the backward pass that runs in this thread was made with taps."""
        step = self._repeating_here()
        return step is not None and (step.second is not None or step.ordinary)

    def _repeating_here(self) -> Step | None:
        if not self._running or in_backward() is None:
            return None
        return self.repeating(in_backward())

    def repeating(self, backward: int | None) -> Step | None:
        """The step whose backward pass, of that number or with it nested inside, repeats a forward (checkpointing);
        None where that is not certain."""
        found = self._running.get(-1 if backward is None else backward)
        step = None if found is None else found()
        if step is not None:
            return step
        running = {step for reference in list(self._running.values()) if (step := reference()) is not None}
        return running.pop() if len(running) == 1 else None

    def graph(self) -> Graph | None:
        """Of a forward pass that begins; None where autograd keeps nothing of it, or where it is repeated."""
        if not torch.is_grad_enabled() or in_backward() is not None:
            return None
        graph = Graph()
        self._to_come.add(graph)
        return graph

    def came_to(self, graph: Graph | None) -> None:
        """A backward pass has come to one of its outputs."""
        if graph is not None:
            self._to_come.discard(graph)

    def count_uses(self, parameters: Sequence[nn.Parameter]) -> Counter[int]:
        """Counts a use of each parameter (by id) since the last step; forwards that no backward followed may be counted
        too, so a larger count than 1 is an upper bound. Of a forward pass that a step has left out, and whose graph is
        still there, they go on counting: the next one may go through it together with later ones."""
        uses = self._uses  # another thread may end a step meanwhile
        _count(uses, map(id, parameters))
        return uses

    def ended(self, step: Step) -> bool:
        """A step is over. Returns whether that was a private backward pass."""
        of_others = not step.ordinary and step.asks_for_others()
        if of_others and _keeps_graph():  # an attack on inputs, in front of a loss of both
            self._to_come.update(step.graphs)
        if not self._to_come:
            self._uses = Counter()
        if step.ordinary or of_others:
            return False
        if step.first is not None:
            self.last_first = step.first
        return True


def _keeps_graph() -> bool:
    """Whether the backward pass that runs in this thread leaves its graph to later ones (``retain_graph=True``)."""
    keeps: Any = torch._C._autograd._get_current_graph_task_keep_graph
    return bool(keeps())


def check_own(own: Mapping[nn.Parameter, Any], parameters: Iterable[nn.Parameter]) -> None:
    """Raises StateError where taps have caught gradients of parameters that are not the model's (any more): something
    has taken other tensors' place for the time of the pass, and what was caught would be lost."""
    others = [p for p in parameters if p not in own]
    if others:
        raise StateError(
            f"{len(others)} parameters of this backward pass are not the model's, one {tuple(others[0].shape)}: "
            "they were swapped while it ran (fully_shard? a parametrization?), and their gradients would be lost; "
            "unshard the model, or use DistributedDataParallel"
        )


def check_mask(valid: object) -> None:
    """Raises InputError where it is no tensor."""
    if valid is not None and not isinstance(valid, Tensor):
        raise InputError(
            f"valid is a {type(valid).__name__}; it must be a tensor, bool, with one entry a sample: True for samples, "
            "False for padding (torch.as_tensor(mask))"
        )


def check_valid(valid: Tensor, n: int) -> None:
    """Raises InputError where it is not (n,) bool."""
    check_mask(valid)
    if valid.shape != (n,) or valid.dtype is not torch.bool:
        raise InputError(
            f"valid {tuple(valid.shape)} ({valid.dtype}) must be bool and have one entry a sample, ({n},): True for "
            "samples, False for padding"
        )


def own_copy(valid: Tensor | None) -> Tensor | None:
    """The mask of a forward pass, into which the caller may write the next one's."""
    return valid if valid is None or is_traced() else valid.clone()


def check_same_mask(mode: object, valid: Tensor | None, of_step: Tensor | None) -> None:
    """Raises StateError where a forward pass had another mask than the step, or none and its backward pass is within a
    block that gives one."""
    if valid is None and not VALID.are_of(mode, None):
        raise StateError(
            "this backward pass is within valid(...) and goes through a forward pass that was outside, so its padding "
            "would count as samples: call the model within it, with model.valid(mask): output = model(x)"
        )
    if valid is of_step:  # nearly always
        return
    if valid is None or of_step is None or not torch.equal(valid.cpu(), of_step.cpu()):
        raise StateError(
            "this backward pass goes through forward passes with other masks, valid(...): which samples are padding "
            "must be the same in all of them; take a backward pass for each"
        )
