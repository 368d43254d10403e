"""Poisson batches of units: persons are drawn, each with its records, not records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpfast.distributed.sampling import PoissonBatches
from dpfast.distributed.secret import SharedSecret
from dpfast.errors import InputError
from dpfast.factors import Runs


class UnitPoissonSampler(PoissonBatches):
    """Batch sampler: each step takes each unit independently with probability ``sample_rate``, and with it its records.

    The accountant's sample rate is this one: a unit's privacy loss is that of the Poisson-sampled Gaussian mechanism
    where all its records of a step are clipped as one (``model.units``), however many it has. On several ranks a unit
    goes to one of them, whole.

    Args:
        user_of_record: of each record of the data set, (num_records,): whole numbers, or a sequence of names, which
            are equal where the user is the same.
        sample_rate: q, in (0, 1].
        records_a_unit: the most that a step takes of a unit, drawn anew each time; None: all. It bounds time and
            memory; the privacy does not need it.
        steps: in one iteration; ``round(1 / sample_rate)`` if None.
        secret: where draws come from, the same on all ranks; a new one if None.
        rank, ranks: as in :class:`PoissonBatches`; 0 and 1 where there is no process group.

    Attributes:
        num_units: how many units there are. unit_of_record: their numbers, (num_records,) int64, in [0, num_units).
        step: of the next draw.

    Raises:
        InputError: no records; not one user for each, or one that is no name (NaN, a vector, an object that equals
            itself alone); ``sample_rate`` or ``records_a_unit`` out of range.

    >>> sampler = UnitPoissonSampler(["ann", "bob", "ann", "eve"], 1.0, secret=SharedSecret(bytes(32)))
    >>> next(iter(sampler)), sampler.num_units
    ([0, 2, 1, 3], 3)
    """

    def __init__(
        self,
        user_of_record: Tensor | Sequence[Any],
        sample_rate: float,
        *,
        records_a_unit: int | None = None,
        steps: int | None = None,
        secret: SharedSecret | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ):
        if records_a_unit is not None and records_a_unit < 1:
            raise InputError(f"records_a_unit={records_a_unit} must be at least 1, or None for all")
        self.unit_of_record, num_units = _numbered(user_of_record)
        if secret is None:
            secret = SharedSecret.agreed()
        super().__init__(
            num_units,
            sample_rate,
            secret,
            steps=steps,
            rank=rank,
            ranks=ranks,
        )
        self.num_units, self.records_a_unit = num_units, records_a_unit
        self._runs = Runs(self.unit_of_record, num_units)

    def batch(self, step: int) -> list[int]:
        """This rank's records of one step's draw, unit by unit, as indices into the data set."""
        found: list[int] = []
        order, offsets = self._runs.order, self._runs.offsets
        for unit in super().batch(step):
            records = order[offsets[unit] : offsets[unit + 1]]
            if self.records_a_unit is not None and len(records) > self.records_a_unit:
                generator = self._secret.generator("records", step, unit)  # on whichever rank the unit is
                some = torch.randperm(len(records), generator=generator)[: self.records_a_unit]
                records = records[some.sort().values]
            found += records.tolist()
        return found

    def must_agree(self) -> tuple[object, ...]:
        return (*super().must_agree(), self.records_a_unit)


def _numbered(user_of_record: Tensor | Sequence[Any]) -> tuple[Tensor, int]:
    """The units' numbers, in the order in which they first appear or, of a tensor, of their values."""
    if isinstance(user_of_record, Tensor):
        if user_of_record.dim() != 1 or user_of_record.is_floating_point():
            raise InputError(
                f"user_of_record {tuple(user_of_record.shape)} {user_of_record.dtype} must be (num_records,) "
                "whole numbers, or a sequence of names"
            )
        users, numbers = user_of_record.cpu().unique(return_inverse=True)
        count = len(users)
    else:
        seen: dict[Any, int] = {}
        numbers = torch.tensor([seen.setdefault(_name(user), len(seen)) for user in user_of_record], dtype=torch.int64)
        count = len(seen)
    if not count:
        raise InputError("user_of_record is empty: there are no records to draw units from")
    return numbers, count


def _name(user: Any) -> Any:
    """What is equal where the user is the same: a tensor equals itself alone in a dict, and each record would be of
    another user."""
    if getattr(user, "ndim", None) == 0:
        user = user.item()
    if isinstance(user, (tuple, frozenset)):
        return tuple(map(_name, user)) if isinstance(user, tuple) else frozenset(map(_name, user))
    kind: Any = type(user)
    by_identity = kind.__hash__ in (object.__hash__, Tensor.__hash__, None) or kind.__eq__ is object.__eq__
    by_identity = by_identity and user is not None
    if by_identity or user != user:  # NaN
        raise InputError(
            f"user_of_record has {str(user)[:80]} ({type(user).__name__}), which does not say that two records are of "
            "one user: give numbers or strings, which are equal where the user is the same"
        )
    return user
