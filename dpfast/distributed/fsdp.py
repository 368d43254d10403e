"""FSDP2 (``fully_shard``): each rank keeps a part of every parameter, and of its clipped sum.

Norms need nothing from other ranks: FSDP gathers a unit's parameters for its forward and its backward, and each rank
takes the gradients of its own samples. FSDP scatters a unit's gradients as soon as its backward is over; clipped sums
are known at the end of the pass, so they go unit by unit then, in the order of the backward, each while the next one's
are computed: as many collectives as without privacy, and the full sums of two units alive at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpfast.distributed.agreement import DISAGREEMENT, agreement, ranks_agree
from dpfast.distributed.placements import extents, placed, ranks_sharing, sharding_axes
from dpfast.errors import StateError, UnsupportedModuleError
from dpfast.taps import in_backward

_LEAST_IN_FLIGHT = 2


class ShardedSums:
    """The clipped sums of a model whose parameters ``fully_shard`` has taken.

    Args:
        model: every trainable parameter of it belongs to an FSDP unit. own: gives a parameter's shard in the place of
            the whole one that stands there while a pass runs. root: the outermost unit, around the model or inside.

    Raises:
        UnsupportedModuleError: a trainable parameter is in no unit, or is sharded otherwise than in dimension 0 over
            one dimension of a mesh (and replicated over another one at most, and parted by tensor parallel over one).
    """

    by_unit = True

    def __init__(self, model: nn.Module, own: Callable[[nn.Parameter], nn.Parameter], root: nn.Module):
        self._model, self._own, self._root = model, own, root
        self._units = list(_units(model, own, root))
        self._held: dict[nn.Parameter, tuple[Tensor, Tensor, int]] = {}  # with p.grad, and its version then
        self._agreed: list[list[nn.Parameter]] | None = None  # what each unit's message has a place for, on all ranks

    def __reduce__(self) -> Any:
        return type(None), ()

    def is_of(self, module: nn.Module) -> bool:
        """Whether the units are still these."""
        return self._root is module

    @property
    def crosses(self) -> bool:
        """Whether the sums of this backward pass are to cross ranks. Raises StateError where FSDP was told so of a part
        of the units alone (``set_requires_gradient_sync(..., recurse=False)``)."""
        told = {group.reduce_grads for state in self._states() for group in _groups(state)}
        if len(told) > 1:
            raise StateError(
                "set_requires_gradient_sync was called on a part of the units; a step's clipped sums are reduced "
                "together: call it on the model"
            )
        return told != {False}

    @property
    def number(self) -> int:
        """Of ranks."""
        first: Any = next((p for unit in self._units for p in unit), None)
        return 1 if first is None else ranks_sharing(first)

    def _states(self) -> list[Any]:
        modules: set[Any] = {self._root, *self._model.modules()}
        return [module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)]

    def on_forward(self) -> None:
        """Raises StateError where an earlier backward pass has failed: FSDP would gather and reduce nothing from there
        on. And where other parameters than the model's stand in its units between forward and backward."""
        for state in self._states() if in_backward() is None else ():
            few = [g for g in _groups(state) if g.post_forward_mesh_info not in (None, g.mesh_info)]
            if few and state is not self._root._get_fsdp_state():  # type: ignore[operator]  # the root stays whole
                raise StateError(
                    "fully_shard(..., reshard_after_forward=a number of ranks) puts parameters of other shapes in the "
                    "model's place between forward and backward, whose gradients dpfast does not find; use "
                    "reshard_after_forward=True or False"
                )
            if state._state_ctx.post_backward_final_callback_queued:  # nothing public tells
                raise StateError(
                    "a backward pass of this FSDP2 model has failed, and FSDP2 does not recover: its parameters stay "
                    "gathered, on each rank its own. Build and shard the model anew and load the last checkpoint"
                )

    def hold(self, sums: Mapping[nn.Parameter, Tensor | None]) -> bool:
        """Keeps whole sums of this rank alone for the backward pass that will reduce them, in fp32 or fp64, and leaves
        zeros in ``p.grad``, which say by being there, and as they were, that they are kept. Of parameters that are not
        in this pass, what is kept stays."""
        for p, own in sums.items():
            total = [x for x in (self.held(p), own) if x is not None]
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if total:
                self._held[p] = total[0] if len(total) == 1 else total[0] + total[1], p.grad, p.grad._version
        return True

    def held(self, p: nn.Parameter) -> Tensor | None:
        """What is kept of it, once, unless somebody has set its gradient to None, or to zero."""
        kept, gradient, version = self._held.pop(p, (None, None, 0))
        return kept if gradient is not None and p.grad is gradient and gradient._version == version else None

    def put_anew(self, gradients: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """None are."""
        return {}

    def keep_promises(self, then: Callable[[], None]) -> None:
        """None were made."""
        then()

    def reduce(
        self,
        parameters: Sequence[nn.Parameter],
        total: Callable[[nn.Parameter], Tensor | None],
        settled: Callable[[nn.Parameter, Tensor], Tensor],
        then: Callable[[], None],
        *settings: object,
    ) -> None:
        """As :class:`dpfast.distributed.Sums` says; ``total`` is asked unit by unit in the order of the backward, and
        ``p.grad`` is this rank's part, a DTensor as the parameter.

        Ranks that do not train the same would send messages of other lengths, which no rank could read. So messages
        have places for what all ranks have agreed on before, by themselves in the first step: zeros for what has been
        frozen since, and what has been unfrozen goes by itself once all have agreed on it."""
        wanted = set(parameters)
        if not wanted.issubset(p for unit in self._units for p in unit):  # something has been unfrozen
            self._units = list(_units(self._model, self._own, self._root))
        names = {self._own(p): name for name, p in self._model.named_parameters()}
        units = [[p for p in unit if p in wanted] for unit in self._units]
        units = [unit for unit in units if unit]
        same = agreement(*settings, [[names.get(p) for p in unit] for unit in units])

        def own_total(p: nn.Parameter) -> Tensor | None:
            return total(p) if p in wanted else None

        if self._agreed is None and units:
            if not ranks_agree(_sum_over_ranks(same, units[0][0]), self.number):
                raise StateError(DISAGREEMENT)
            self._agreed = units
        landed, last = _carried(self._agreed or [], own_total, same)
        agree = None if last is None else ranks_agree(last, self.number)
        new = [[p for p in unit if p not in landed] for unit in units]
        changed = [list(map(id, unit)) for unit in self._agreed or []] != [list(map(id, unit)) for unit in units]
        if agree is not None and (changed or agree.device.type == "cpu") and not agree:
            raise StateError(DISAGREEMENT)
        if changed:
            landed.update(_carried([unit for unit in new if unit], own_total)[0])
            self._agreed = units
        p: Any
        for p, own in landed.items():
            if p not in wanted:
                continue
            self._held.pop(p, None)  # where it was given up
            if agree is not None and agree.device.type != "cpu":
                own = own.masked_fill(~agree.to(own.device), torch.nan)
            p.grad = placed(p, settled(p, own))
        then()


def _groups(state: Any) -> Sequence[Any]:
    """A unit's groups of parameters; nothing public has them. Where torch has them by another name, an AttributeError:
    that sums stay on their rank for now would be overlooked."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.8 has one


class _Flight(NamedTuple):
    """One unit's sums on their way: ``output`` is this rank's part when the work is done, which reads ``input``."""

    unit: list[Any]
    input: Tensor
    output: Tensor
    work: Any

    def land(self) -> dict[nn.Parameter, Tensor]:
        self.work.wait()
        if sharding_axes(self.unit[0]) == 2:
            dist.all_reduce(self.output, group=self.unit[0].device_mesh.get_group(0))
        parts, start = {}, 0
        for p in self.unit:
            local = p.to_local()
            parts[p] = self.output[start : start + local.numel()].view(local.shape)
            start += _padded(p)
        return parts


def _shape(p: Any) -> list[int]:
    """Of what FSDP shards: all of the parameter, or the part that tensor parallel leaves to this rank."""
    return [size for _, size in extents(p, range(sharding_axes(p), p.device_mesh.ndim))]


def _padded(p: Any) -> int:
    """Entries of a rank's part, the last ones of which may be shorter or empty."""
    rows, *rest = _shape(p)
    return -(-rows // p.device_mesh.size(sharding_axes(p) - 1)) * math.prod(rest)


def _sum_over_ranks(x: Tensor, p: Any) -> Tensor:
    """Over those that FSDP2 sums the parameter's gradient over."""
    x = x.to(p.device, copy=True)
    for axis in range(sharding_axes(p)):
        dist.all_reduce(x, group=p.device_mesh.get_group(axis))
    return x


def _carried(
    units: list[list[nn.Parameter]], total: Callable[[nn.Parameter], Tensor | None], more: Tensor | None = None
) -> tuple[dict[nn.Parameter, Tensor], Tensor | None]:
    """This rank's part of the sums over all ranks, and the sum of ``more``, where there is some and a unit to carry
    it."""
    flying: list[_Flight] = []
    landed: dict[nn.Parameter, Tensor] = {}
    for i, unit in enumerate(units):
        flying.append(_scattered(unit, total, more if i == len(units) - 1 else None))
        if len(flying) == _LEAST_IN_FLIGHT:
            landed.update(flying.pop(0).land())
    for flight in flying:
        landed.update(flight.land())
    return landed, None if more is None or not units else flight.output[-len(more) :]


def _scattered(unit: list[Any], total: Callable[[nn.Parameter], Tensor | None], more: Tensor | None) -> _Flight:
    mesh, axis = unit[0].device_mesh, sharding_axes(unit[0]) - 1
    ranks = mesh.size(axis)
    dtype = torch.float32
    for p in unit:
        dtype = torch.promote_types(dtype, p.dtype)
    sizes = list(map(_padded, unit))
    device = unit[0].device
    whole = torch.empty(ranks, sum(sizes) + (0 if more is None else len(more)), dtype=dtype, device=device)
    start = 0
    for p, size in zip(unit, sizes, strict=True):
        own = total(p)
        place = whole[:, start : start + size]
        if own is None:
            place.zero_()
        else:
            flat, more_rows = own.flatten(), ranks * size - own.numel()
            place.copy_((F.pad(flat, (0, more_rows)) if more_rows else flat).view(ranks, size))
        start += size
    if more is not None:
        whole[:, start:] = more
    output = whole.new_empty(whole.shape[1])
    work = dist.reduce_scatter_tensor(output, whole.view(-1), group=mesh.get_group(axis), async_op=True)
    return _Flight(unit, whole, output, work)


def _units(
    model: nn.Module, get: Callable[[nn.Parameter], nn.Parameter], root: nn.Module
) -> Iterator[list[nn.Parameter]]:
    """The trainable parameters of each unit, in the order of a backward pass."""
    of_unit: dict[int, list[nn.Parameter]] = {id(root): []}
    seen: set[nn.Parameter] = set()

    def visit(module: nn.Module, name: str, unit: int | None) -> None:
        if isinstance(module, FSDPModule):
            unit = id(module)
            of_unit.setdefault(unit, [])
        for own, whole in module._parameters.items():
            p = None if whole is None else get(whole)
            if p is not None and p.requires_grad and p not in seen:
                seen.add(p)
                _check(p, f"{name}.{own}".lstrip("."), unit)
                of_unit[unit].append(p)  # type: ignore[index]  # as checked
        for child, inner in module._modules.items():
            if inner is not None:
                visit(inner, f"{name}.{child}", unit)

    visit(model, "", id(root) if root not in set(model.modules()) else None)
    return reversed(of_unit.values())


def _check(p: Any, name: str, unit: int | None) -> None:
    if unit is None or not isinstance(p, DTensor):
        raise UnsupportedModuleError(
            f"parameter {name} {tuple(p.shape)} is trainable and in no unit of fully_shard; call fully_shard on the "
            "whole model as well, or freeze it"
        )
    axes = sharding_axes(p)
    sharded, parted = p.placements[axes - 1], p.placements[axes:]
    if getattr(sharded, "dim", None) != 0 or len(parted) > 1:
        raise UnsupportedModuleError(
            f"parameter {name} {tuple(p.shape)} has placements {p.placements}; clipped sums are reduced for Shard(0), "
            "or (Replicate(), Shard(0)), and one axis of tensor parallel beside. Leave out shard_placement_fn"
        )
