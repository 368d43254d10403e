"""Opacus's Poisson draws: each from numbers of its own, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from dpfast.trials import ONE_AT_A_TIME


class Draws(UniformWithReplacementSampler):
    """What is drawn from torch's own generator while another thread looks at a model, which sets that back, would be
    drawn once more.

    Attributes:
        drawn: how many batches, by whoever goes through the loader.
    """

    drawn = 0

    def __iter__(self) -> Iterator[list[int]]:
        draws = super().__iter__()
        while True:
            with ONE_AT_A_TIME:
                draw = next(draws, None)
            if draw is None:
                return
            self.drawn += 1
            yield draw


def as_draws(loader: Any) -> None:
    """Makes its sampler one of these, where it is Opacus's."""
    if type(loader.batch_sampler) is UniformWithReplacementSampler:
        loader.batch_sampler.__class__ = Draws


def draws_of(loader: Any) -> Draws | None:
    """Those that its batches are, where that is known."""
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if isinstance(sampler, Draws) else None
