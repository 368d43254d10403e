"""Whose gradient it is: within ``model.units(...)`` a unit's rows are clipped as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.distributed import part_of
from dpfast.errors import DpfastError, InputError, StateError, UnsupportedModuleError
from dpfast.factors import Factor, Runs, RunsInGraph, by_unit, folded
from dpfast.looks import Documents, Told
from dpfast.modes.answers import answer_of
from dpfast.modes.blocks import UNITS
from dpfast.modes.unit_rows import as_tokens
from dpfast.rules import functorch
from dpfast.taps import Activations, Record, Rows, Source, batch_in_front, taps_suspended, unfolded

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Units:
    """Whose each row is: what ``with model.units(...) as units`` gives.

    Attributes:
        ids: (N,), or of the tokens' shape, int64 on the CPU; -1: nobody's. num_units: U. per_unit: "sum" or "mean".
        counts: samples, or tokens, of each unit, (U,) int64 on the CPU.
    """

    def __init__(self, ids: Tensor, num_units: int, per_unit: str, batch_dim: int):
        _check(ids, num_units, per_unit)
        self.ids = ids.to("cpu", torch.int64, copy=True)  # the caller may write the next batch's into his
        self.num_units, self.per_unit = num_units, per_unit
        if self.ids.numel():
            least, most = int(self.ids.min()), int(self.ids.max())
            if least < -1 or most >= num_units:
                raise InputError(
                    f"ids go from {least} to {most}; units are numbered 0 to {num_units - 1} (num_units={num_units}), "
                    "and -1 is nobody's"
                )
        in_front = self.ids.movedim(batch_dim, 0) if self.of_tokens else self.ids
        runs = Runs(in_front.flatten(), num_units)
        self.shape, self.counts = in_front.shape, runs.counts
        self.runs: Runs | RunsInGraph = runs
        self.used, self.clipped = False, False
        self._told: Told | None = None
        self._look_at_new: Callable[[], Told] | None = None  # at the forward that runs
        self._unseen = False

    @property
    def of_tokens(self) -> bool:
        """Whether a sample may have tokens of several units."""
        return self.ids.dim() > 1

    def sums(self, values: Tensor) -> Tensor:
        """Those of each unit added up, with their gradient: losses (or masks) of samples or tokens, in the shape of
        ``ids``, -> (U,). Nobody's count for nothing.

        Raises:
            InputError: another shape.

        >>> units = Units(torch.tensor([[0, 0, 1, -1]]), 2, "sum", 0)
        >>> units.sums(torch.tensor([[1.0, 2.0, 4.0, 8.0]])) / units.counts
        tensor([1.5000, 4.0000])
        """
        if values.shape != self.ids.shape:
            raise InputError(f"values {tuple(values.shape)} must have the shape of ids, {tuple(self.ids.shape)}")
        ids = self.ids.to(values.device).flatten()
        total = values.new_zeros(self.num_units + 1)
        return total.index_add(0, ids.where(ids >= 0, self.num_units), values.flatten())[: self.num_units]

    def look(self, documents: Documents, inputs: Any) -> None:
        """A forward pass of the model begins: where units are of tokens, it is to be known whose rows are whose."""
        if self.of_tokens and self.ids.numel():
            self._told = documents.look(inputs, self.ids)
            self._look_at_new, self._unseen = partial(documents.look_at_new, inputs, self.ids), False

    def ran(self, tap: Any, rank: int | None) -> None:
        """A tap has run in the model's forward pass, on rows that were picked."""
        self._unseen = self._unseen or (self._told is not None and (id(tap), rank) not in self._told.layers)

    def start(self, batch_size: int | None, valid: Tensor | None, outputs: Sequence[Any] = ()) -> dict[int | str, str]:
        """The forward pass has come to its outputs. Returns what is wrong with them, by number.

        Nobody's tokens have no part in a loss that is made of one in which they see several units' tokens: what came
        back from them to one unit would depend on another.

        Raises:
            InputError: it had another batch. StateError: a mask of samples beside ids.
        """
        if valid is not None:
            raise StateError("valid(mask) and units(ids) together: padding is nobody's, ids -1, within units(...)")
        if batch_size != self.shape[0]:
            raise InputError(
                f"ids {tuple(self.ids.shape)} for a batch of {batch_size}: give one for each sample, as many as "
                "the first tensor of the model's input has samples"
            )
        self.used = True
        if self._unseen and self._look_at_new is not None:
            self._told = self._look_at_new()
        self._look_at_new, self._unseen = None, False
        if self._told is None:
            return {}
        for number in self._told.of_nobody:
            if outputs[number].requires_grad:
                nobodys = self.ids.flatten().to(outputs[number].device) < 0
                outputs[number].register_hook(partial(_cleared, nobodys))
        return self._told.outputs

    def check_first(self) -> None:
        """Raises StateError where a backward pass has clipped them already."""
        if self.clipped:
            raise StateError(
                "a second backward pass within one units(...): each unit would be clipped twice, and move p.grad by up "
                "to 2C; add the losses up and call backward() once"
            )

    def untraced(self, record: Record, backprops: Any) -> str | None:
        """Why a layer's rows cannot be traced to units; None: they are the tokens."""
        unseen = "it did not run when the model was looked at"
        if record.picked is not None:
            record.picked.check()
        if self._told is None:
            return None if not self.ids.numel() else unseen
        key = id(record.tap), None if record.as_is else backprops[0].dim()
        elsewhere = "it runs in pieces, or its parameters come to the samples elsewhere, and not token by token"
        return self._told.layers.get(key, elsewhere if record.as_is else unseen)

    def of_rows(self, source: Source) -> Tensor:
        """The unit of each row that a layer picks rows out of, where these are the tokens."""
        order = source.tokens(self.shape)
        if order is None:
            raise UnsupportedModuleError(
                f"it gets rows that {source.layer} picks out of {(*source.shape, '...')}, which are not the tokens "
                f"of ids {tuple(self.ids.shape)} speak of; freeze it, or give ids (N,)"
            )
        return torch.empty_like(self.runs.ids).index_copy(0, order, self.runs.ids)

    def of_samples(self) -> list[int] | None:
        """The number of each sample's unit, as they come, where nobody's is one of its own; None: ids are of tokens."""
        if self.of_tokens:
            return None
        numbers: dict[int, int] = {}
        whose = [u if u >= 0 else self.num_units + i for i, u in enumerate(self.ids.tolist())]
        return [numbers.setdefault(u, len(numbers)) for u in whose]

    def scale(self, loss_reduction: str, device: torch.device) -> float | Tensor:
        """What a unit's share of the loss's gradient is multiplied with: a number, or one for each unit, (U,) fp64."""
        n = self.num_units if self.of_tokens else len(self.ids)
        times = float(n) if loss_reduction == "mean" else 1.0
        return times if self.per_unit == "sum" else times / self.counts.clamp(min=1).to(device, torch.float64)


class UnitsInGraph(Units):
    """Whose each sample is, in a step that is captured: ids (N,) have no values, and are checked where they have. What
    a unit's gradient is multiplied with is no part of the graph."""

    def __init__(self, ids: Tensor, num_units: int):
        self.ids, self.num_units, self.per_unit = ids, num_units, "sum"
        self.shape, self.runs = ids.shape, RunsInGraph(ids, num_units)
        self.used, self.clipped, self._told = False, False, None
        self._look_at_new, self._unseen = None, False

    def of_samples(self) -> None:
        """No numbers are there yet."""


def _cleared(tokens: Tensor, grad: Tensor | None) -> Tensor | None:
    """A gradient, (N, T, ...) or (N·T, ...), with zeros at some tokens."""
    if grad is None:  # it came to another output of the same operation
        return None
    rows = grad.reshape(len(tokens), -1)
    return rows.masked_fill(tokens.unsqueeze(1), 0.0).view(grad.shape)


def _check(ids: Any, num_units: Any, per_unit: str) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in _WHOLE or ids.dim() < 1:
        found = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(
            f"ids {found} must be a tensor of whole numbers (int64): the unit of each sample, (N,), or of each token"
        )
    if ids.device.type == "meta":
        raise InputError("ids are on the meta device, and have no numbers; give them on the CPU")
    if isinstance(num_units, bool) or not isinstance(num_units, int) or num_units < 0:
        raise InputError(f"num_units={num_units!r} must be a whole number: how many units there may be in the batch")
    if per_unit not in ("sum", "mean"):
        raise InputError(f"per_unit={per_unit!r} must be 'sum' (of a unit's gradients) or 'mean'")


def check_same(taps: Any, units: Units | None, of_step: Units | None) -> None:
    """Raises StateError where a forward pass had other units than the step, or than the block that its backward pass
    runs in."""
    if units is not of_step or not UNITS.are_of(taps.mode, units):
        raise StateError(
            "this backward pass goes through a forward pass with other units: call model and loss.backward() within "
            "one units(...), and each backward pass for one alone"
        )


class PerUnit(nn.Module):
    """The part of a mode that knows of units."""

    _tapped: Any
    loss_reduction: str
    passes: int
    needs_units = False  # whether a step outside of units(...) is an error: an engine draws units
    _of_what: tuple[object, ...] = ()  # what the last step has clipped, which ranks must have alike

    @contextmanager
    def units(self, ids: Tensor, num_units: int, per_unit: str = "sum") -> Iterator[Units]:
        """Within it the model's forward passes are of units: persons with several records, an image's augmentations.

        Maths:
            ``G_u = Σ_{n: ids[n] = u} g_n`` ("sum") or that over how many these are ("mean"; a unit without samples has
            0), clipped as a sample's is: ``p.grad = Σ_u c_u G_u``, ``c_u = min(1, C / ‖G_u‖)``. Norms, clip factors and
            ``norm_slack`` are (U,). With ``loss_reduction="mean"`` the loss is to be the mean over all N samples,
            nobody's too, and ``g_n`` is N times a sample's share of it; with units of tokens the mean over the U units,
            of ``units.sums(losses of tokens)``.

        Privacy:
            Neighbouring data sets differ by one unit with all its records. ``sensitivity`` is the most that adding or
            removing one unit moves ``p.grad``, however many records it has, if

            - all of a unit's records that the step takes are in this batch, under one number: a unit that stands in
              two backward passes (accumulation, physical batches, two ranks) is clipped twice. Ranks number their own
              units and do not compare them; ``UnitPoissonSampler`` gives each to one rank, whole;
            - no other unit's gradient depends on it: a sample touches one unit. A layer that mixes samples is refused
              as ever, and a row that is two units' (a message between two persons) has to be given to one of them,
              which then protects the other less, or to nobody;
            - the accountant's sample rate is the rate at which *units* are drawn.

        Args:
            ids: whole numbers in [-1, num_units), in any order, on any device (brought to the CPU): of each sample,
                (N,), or of the shape of the tokens, (N, T), where a sample has several units' (packed documents). -1:
                nobody's (padding), which adds exactly nothing to norms and sums.
            num_units: U; units may have no sample.
            per_unit: "sum" or "mean".

        Raises:
            InputError: ids of another length, shape or dtype, or out of range. StateError: two passes; within another
            units(...); a backward pass of a forward outside of it; no forward pass in it.

        >>> import dpfast
        >>> model = dpfast.GradSampleModuleFastGradientClipping(nn.Linear(3, 2, bias=False), loss_reduction="sum")
        >>> with model.units(torch.tensor([0, 1, 1, -1]), 2):
        ...     model(torch.ones(4, 3)).sum().backward()
        >>> model.get_norm_sample().square()
        tensor([ 6.0000, 24.0000])
        """
        if self.passes != 1:
            raise StateError("units(...) needs passes=1; losses (N,) cannot be weighted by units in a second pass")
        if self._tapped is None:
            raise StateError("units(...) needs hooks: call add_hooks() first")
        if UNITS.here(self) is not None:
            raise StateError("units(...) within units(...): one batch has one division into units")
        given = Units(ids, num_units, per_unit, self._tapped.batch_dim)
        with UNITS.within(self, given):
            yield given
        if not given.used:
            raise StateError("no forward pass of the model ran within units(...): call the model in it, through hooks")

    def _scale(self, step: Any) -> Any:
        """What gradients are multiplied with: a number, or one for each unit."""
        self._of_what = self.loss_reduction, None if step.units is None else step.units.per_unit
        if step.units is not None:
            device = next((p.device for p in self.parameters()), torch.device("cpu"))
            return step.units.scale(self.loss_reduction, device)
        if self.needs_units:
            raise StateError(
                "the engine draws units (user_of_record), and this step was not told whose its samples are: call model "
                "and loss.backward() within model.units(ids, num_units), or a unit would be clipped record by record"
            )
        return float(step.num_samples or 0) if self.loss_reduction == "mean" else 1.0


def factors_of(
    record: Record, activations: Activations, backprops: Any, *, force_functorch: bool
) -> Mapping[nn.Parameter, Factor]:
    """What a layer's rule answers, brought to samples, and to units where there are some; errors name the layer."""
    tap, rule, n, units = record.tap, record.rule, record.batch_size, record.units
    place, module = record.samples_in(activations, backprops), tap.module
    if not record.as_is and len(set(map(id, record.parameters))) < len(record.parameters):
        force_functorch = True  # one parameter under two names: a rule's dict has room for one of its factors
    part = part_of(tap.layer, module, activations, backprops, None if record.as_is else place)
    if part is not None:
        if units is not None and units.of_tokens:
            raise UnsupportedModuleError(
                f"{tap.layer} has parts of parameters (tensor parallel), and units of tokens are not known of them; "
                "give ids (N,) of samples, or take fully_shard or DistributedDataParallel"
            )
        module, activations, backprops = part.module, part.activations, part.backprops
    picked = record.picked
    if units is not None and units.of_tokens:
        activations, backprops = as_tokens(record, activations, backprops, place, units)
        if not record.as_is:
            rule = functorch.functorch if force_functorch or rule is None else rule
    elif not record.as_is:
        activations, backprops = batch_in_front(activations, backprops, place)
        if tap.folded and n is not None and picked is None and not (isinstance(place, Rows) and not place.together):
            activations, backprops = unfolded(activations, backprops, n)
        rule = functorch.functorch if force_functorch or rule is None else rule
    try:
        with taps_suspended():
            gradients = backprops[0] if len(backprops) == 1 else backprops
            assert rule is not None  # a piece always has one
            found = answer_of(rule, tap.layer, module, activations, gradients)
        if record.unread:  # NaNs stand for what a parameter that is trained since then would read
            found = {p: found[p] for p in record.parameters if p in found}
        if part is not None:
            found = part.factors(found, len(backprops[0]))
        of_tokens = units if units is not None and units.of_tokens else None
        if picked is not None:
            dim = place if isinstance(place, int) else 0
            x = next((x for x in activations if isinstance(x, Tensor)), None)
            constant = None if x is None or any(activations.followed) else x.shape
            found = {p: by_unit(f, picked.runs(of_tokens, n, f.num_samples, dim, constant)) for p, f in found.items()}
        elif of_tokens is not None:
            if record.as_is and any(f.num_samples != len(of_tokens.runs.ids) for f in found.values()):
                raise UnsupportedModuleError("it runs in pieces, and not token by token; freeze it, or give ids (N,)")
            found = {p: by_unit(f, of_tokens.runs) for p, f in found.items()}
        elif isinstance(place, Rows) and n is not None:
            found = {p: folded(f, n, rows_together=bool(place.together)) for p, f in found.items()}
        return (
            found if units is None or of_tokens is not None else {p: by_unit(f, units.runs) for p, f in found.items()}
        )
    except DpfastError as error:
        raise type(error)(f"{tap.layer}: {error}") from error
