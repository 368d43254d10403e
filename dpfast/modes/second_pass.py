"""The second backward pass of two repeats the first, and the factors are applied where gradients are summed.

A factor in front of the loss goes through the whole backward pass: what rounds, underflows, cancels or is a hook of
somebody's on the way makes another gradient of it than the one whose norm was taken. So the gradients that the first
pass saw at the model's outputs take the place of the second's, what lies below is computed again as it was, and each
tap sums its samples with the factors, which leave out a sample with factor 0 whatever it holds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dpfast.distributed import is_shard, local
from dpfast.errors import StateError
from dpfast.modes.sketches import Sketches, entries
from dpfast.modes.units import Units
from dpfast.taps import Activations, Record, nodes_behind

_WEIGHTED = 0.5
"""How far the second pass's gradients at an output may be from the weighted first ones, over the whole batch. Nothing
is computed with them: they only tell that the loss is another one."""

_LEAST_WEIGHT = 2.0**-100
"""Samples whose factors are smaller are left out of that."""


_LEAST_SIZE = 2.0**-40
"""Of a norm whose squares do not underflow in fp32."""

_NOT_WEIGHTED = (
    "the second backward pass is not that of Σ_n c_n loss_n with the factors of get_clipping_coef() and the losses of "
    "the first: give (factors * losses).sum(), or take passes=1"
)

_NOT_REPEATED = (
    "{layer}: the second backward pass saw other activations or gradients than the first, whose norms were taken; let "
    "checkpoints preserve the random state (preserve_rng_state=True), make the model deterministic, compute the loss "
    "from what the model returns alone (not from tensors that it keeps), or take passes=1"
)


class Output:
    """One tensor of the model's output, and its gradient in the last first pass; lives as long as its graph."""

    def __init__(
        self,
        leaf: Tensor,
        batch_size: int | None,
        batch_dim: int,
        valid: Tensor | None,
        units: Units | None,
        graph: Any,
    ):
        # Not the tensor's own node, which holds what its gradient comes to, and so this.
        self._below = () if leaf.grad_fn is None else leaf.grad_fn.next_functions
        self.batch_size = batch_size
        self.graph = graph  # of its forward pass
        self.valid = valid
        self.batch_dim = batch_dim
        self.units = units
        self.grad: Tensor | None = None
        self.first: FirstPass | None = None

    def is_left_in_part(self) -> bool:
        """Whether the backward pass that runs leaves out something below it: only some tensors' gradients are asked for
        (``torch.autograd.grad``, ``inputs=``)."""
        for node in nodes_behind(node for node, _ in self._below):
            try:
                if not torch._C._will_engine_execute_node(node):
                    return True
            except RuntimeError:  # a leaf that is asked for
                return True
        return False


class Asked:
    """Whether a first pass's factors have been handed out. Records know this, not the pass, which knows them: in a
    cycle all that it has seen would stay until Python looks for cycles."""

    yes = False


class FirstPass:
    """What the second backward pass needs of the first.

    Attributes:
        weights: what each sample's share is summed with, c_n times N where the loss was a mean, (N,) fp64; empty until
            the pass is over. single: the same rounded towards zero, fp32.
        sensitivity: the clipper's.
        asked: whether the factors have been handed out, so that a second pass is to come; repeated: whether it has.
        uses: the counts (``Record.uses``) of the graph that it went through; later forwards have others.
    """

    def __init__(self) -> None:
        self.weights = self.single = torch.zeros(0, dtype=torch.float64)
        self.sensitivity = 0.0
        self.sketches = Sketches()
        self._asked, self.repeated = Asked(), False
        self.uses: object = None

    @property
    def asked(self) -> bool:
        return self._asked.yes

    @asked.setter
    def asked(self, yes: bool) -> None:
        self._asked.yes = yes

    def saw(self, record: Record, activations: Activations, backprops: tuple[Tensor, ...], *, whole: bool) -> None:
        """One use of a tap, as :meth:`Sketches.take` has it."""
        self.sketches.take(record, activations, backprops, whole=whole)
        record.seen_by = self._asked
        if record.uses is not None:
            self.uses = record.uses

    def is_weighted(self, output: Output, grad: Tensor) -> Tensor | None:
        """Whether ``grad`` is what factors in front of the loss make of the first pass's gradient at that output, (),
        on its device; None where it is at once seen to be, or has no dimension of samples."""
        dim, n, grad = output.batch_dim, len(self.weights), local(grad)
        if output.grad is None or grad.dim() <= dim or grad.shape[dim] != n or n == 0:
            return None
        before, now = entries(local(output.grad), dim), entries(grad, dim)
        if grad.is_cpu and grad.dtype.itemsize >= 4:  # most are, without a look at what underflows or is dropped
            expected = before * self.single.to(grad.dtype).view(-1, *[1] * (now.dim() - 1))
            size = float(torch.linalg.vector_norm(expected))
            if _LEAST_SIZE < size < math.inf and float(torch.dist(now, expected)) <= _WEIGHTED * size:
                return None
        weights = self.weights.to(grad.device).view(-1, *[1] * (now.dim() - 1))
        no_factor = weights < _LEAST_WEIGHT  # in fp32 it may be 0
        expected = (before * weights).masked_fill(no_factor, 0.0)
        found = now.double().masked_fill(no_factor, 0.0)
        # What underflow hides, in both passes.
        lost = (weights.norm() + len(weights) ** 0.5) * torch.finfo(grad.dtype).tiny * now[0].numel()
        # A first pass that sees nothing but zeros says nothing of the loss.
        return ((found - expected).norm() <= _WEIGHTED * expected.norm() + lost) | (expected == 0).all()


class SecondPass:
    """What the second backward pass has seen, beside what the first had.

    Attributes:
        is_weighted: whether its loss is the first's with factors, by the first output that it comes to, (); None where
            it is, or that has no samples.
    """

    def __init__(self, first: FirstPass, is_weighted: Tensor | None):
        self.first = first
        self.sketches = Sketches()
        self.is_weighted = is_weighted

    def saw(self, record: Record, activations: Activations, backprops: tuple[Tensor, ...], *, whole: bool) -> None:
        """As :meth:`FirstPass.saw`."""
        self.sketches.take(record, activations, backprops, whole=whole)

    def faults(self) -> tuple[list[str], Tensor]:
        """What may be wrong with it, and whether it is, (·,) on the weights' device."""
        layers, differ = self.sketches.differing(self.first.sketches, self.first.weights)
        messages = [_NOT_REPEATED.format(layer=layer) for layer in layers]
        if self.is_weighted is None:
            return messages, differ
        return [_NOT_WEIGHTED, *messages], torch.cat([~self.is_weighted.view(1).to(differ.device), differ])


def check_ordinary(record: Record, last: FirstPass | None) -> None:
    """Of a graph that gives a layer's ordinary gradients. Raises StateError where a second backward pass is to come and
    this one came past the model's outputs, or is not what the first was.

    Args:
        last: the model's last first pass.
    """
    if any(map(is_shard, record.parameters)):
        raise StateError(
            f"{record.tap.layer} holds DTensor parameters, of which a tapped graph gives no ordinary gradients; "
            "call remove_hooks() before the forward pass"
        )
    if isinstance(record.seen_by, Asked) and record.seen_by.yes:
        raise StateError(
            f"{record.tap.layer}: the second backward pass did not come through the model's outputs, so its "
            "samples could not be weighted; compute the loss from tensors that the model returns (in tuples, "
            "lists or dicts), or take passes=1"
        )
    if last is not None and last.asked and not (last.repeated and record.uses is not last.uses):
        raise StateError(
            f"{record.tap.layer}: the second backward pass reaches it, and the first, whose norms were taken, did not: "
            "its gradients would be added unclipped. Give both the same losses, or take passes=1; where ordinary "
            "gradients are wanted, call the model after disable_hooks()"
        )
