"""Poisson batches over several ranks: one draw a step for all of them, dealt out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from dpfast.distributed.handed_out import HandedOut, Spans, joined, without
from dpfast.distributed.secret import SharedSecret
from dpfast.distributed.wrappers import in_process_group, number_of_ranks
from dpfast.errors import InputError, StateError


class PoissonBatches(Sampler[list[int]]):
    """Batch sampler: each step takes each sample independently with probability ``sample_rate``, and each sample that
    was taken goes to one rank.

    All ranks make the same draw from the shared secret and the step's number, so together they take exactly the batch
    that one process would. Their parts differ by one sample at most. A part may be empty, and is given all the same:
    every rank takes every step, or the others would wait for it for ever.

    Args:
        num_samples: of the data set. sample_rate: q, in (0, 1]. secret: the same on all ranks.
        steps: in one iteration; ``round(1 / sample_rate)`` if None (Opacus rounds down).
        rank, ranks: this rank's number and how many there are; of the default process group if None, if there is one.

    Attributes:
        step: of the next draw. Set it to go on where a run has stopped. (A loader whose workers fetch ahead is beyond
            what steps have taken; ``PrivateState`` knows of that.)

    Raises:
        InputError: ``sample_rate`` or ``num_samples`` out of range; on iterating, a ``DataLoader(in_order=False)``.
    """

    _step: int
    _last: int | None  # that a step has taken
    _iterations: list[HandedOut]  # that go on
    _left: Spans  # what those that are over were given since the last step

    def __init__(
        self,
        num_samples: int,
        sample_rate: float,
        secret: SharedSecret,
        *,
        steps: int | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ):
        if not 0.0 < sample_rate <= 1.0 or num_samples < 1:
            raise InputError(f"sample_rate={sample_rate} must be in (0, 1], and num_samples={num_samples} at least 1")
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.steps = round(1.0 / sample_rate) if steps is None else steps
        self.step = 0
        self._secret = secret
        self._rank = rank if rank is not None else dist.get_rank() if in_process_group() else 0
        self._ranks = number_of_ranks() if ranks is None else ranks

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        handed_out = HandedOut()
        try:
            for _ in range(self.steps):
                step, self._step = self._step, self._step + 1
                handed_out.note(step, sys._getframe(1))
                if handed_out not in self._iterations:
                    self._begin(handed_out)
                yield self.batch(step)
        finally:
            handed_out.ended = True

    @property
    def step(self) -> int:
        """The number of the next draw."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self._last, self._iterations, self._left = step, None, [], ()

    @property
    def draw(self) -> int:
        """The number of the draw that the loop's last batch is of: the one before ``step``, or an earlier one where
        workers fetch ahead; the highest where several were given since the last step."""
        given = self.given
        return given[-1][1] if given else self._step - 1 if self._last is None else self._last

    @property
    def given(self) -> Spans:
        """The numbers of all draws that loops were given since the last step. More than one where a loop has left some
        out, or somebody has looked at batches in between: of which of them the step is, the loop alone knows."""
        self._gather()
        return joined(self._left, (draw for iteration in self._iterations for draw in iteration.given()))

    @given.setter
    def given(self, given: Spans) -> None:
        self._left = given

    def of_step(self) -> tuple[Spans, int]:
        """What noise follows from: it has to be another one for another draw."""
        return self.given, self.draw

    def take(self, of_step: tuple[Spans, int] | None) -> tuple[Spans, int]:
        """A step has taken these; those of now if None."""
        of_step = self.of_step() if of_step is None else of_step
        given, self._last = of_step
        for iteration in self._iterations:
            iteration.take(given)
        self._left = without(self._left, given)
        return of_step

    @property
    def untaken(self) -> int:
        """The number of the first draw that no step has taken and that a loop has been given or will be."""
        self._gather()
        first = (iteration.first for iteration in self._iterations)
        return min((number for number in first if number is not None), default=self._step)

    def _begin(self, iteration: HandedOut) -> None:
        for other in self._iterations:
            other.is_over_for(iteration)
        self._gather()
        self._iterations.append(iteration)

    def _gather(self) -> None:
        """Keeps what iterations that are over were given, and no more of them."""
        over = [iteration for iteration in self._iterations if iteration.over]
        for iteration in over:
            self._left = joined(self._left, iteration.given())
            self._iterations.remove(iteration)

    def batch(self, step: int) -> list[int]:
        """This rank's part of one step's draw, as indices into the data set."""
        generator = self._secret.generator("sample", step)
        taken = torch.rand(self.num_samples, generator=generator, dtype=torch.float64) < self.sample_rate
        mine: list[int] = taken.nonzero().flatten()[self._rank :: self._ranks].tolist()
        return mine

    def __getstate__(self) -> dict[str, Any]:
        """No iteration goes on in a copy."""
        return {**vars(self), "_iterations": []}

    def must_agree(self) -> tuple[object, ...]:
        """What all ranks must have alike, or a sample could be in the parts of two of them."""
        of_draw = self.step, self.of_step()
        return self.num_samples, self.sample_rate, self.steps, *of_draw, self._ranks, self._secret.fingerprint()

    @property
    def drop_last(self) -> bool:
        """Only who would deal batches out once more asks for it (``accelerate.prepare`` on the loader).

        Raises:
            StateError: always.
        """
        raise StateError(
            "these Poisson batches have been dealt out to the ranks already; do not give their loader to "
            "accelerate.prepare() (or take its sampler into another one)"
        )
