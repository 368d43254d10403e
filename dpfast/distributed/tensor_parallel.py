"""Tensor parallel: norms over a device mesh on which each rank has a part of the parameters and all of the samples.

Squared norms of parts, with their bounds, add up over the mesh; of what every rank has whole, the first rank's counts.
They go in one all-gather and are added in the order of ranks, so clip factors are the same everywhere to the bit, and
clipped sums need no collective: each rank has its part of them. Gradients that are themselves parts of a sum (a norm's
weight, where each rank sees a part of the positions) are summed before their norm, in one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpfast.arithmetic import SquaredNorm, bounds, smallest_normal
from dpfast.distributed.agreement import DISAGREEMENT, agreement
from dpfast.distributed.local_part import PartOfSum
from dpfast.distributed.placements import is_parted, sharding_axes
from dpfast.errors import InputError, StateError, UnsupportedModuleError
from dpfast.factors import Dense, Factor, merge

_SAMPLES_DIFFER = (
    "ranks of one tensor parallel mesh were called with different inputs, and each has a part of the parameters for "
    "all samples; give all of them the same batches (PoissonBatches(..., rank=0, ranks=1)); no gradient was released"
)
_REPLICAS_DIFFER = (
    "parameters that each rank of a tensor parallel mesh has whole have other gradients on other ranks: {names}. The "
    "ranks' random numbers differ (dropout), or such a layer sees a part of the positions, heads or features; seed all "
    "ranks alike, place the layer (SequenceParallel, ColwiseParallel), or freeze it; no gradient was released"
)


class TensorParallel:
    """The norms of a model whose parameters are parted over one axis of a device mesh.

    Args:
        model: may have DTensor parameters. own: gives a parameter's shard in the place of the one that stands there
            while a pass runs. sharded: whether FSDP2 has taken it, whose axes of the mesh come first.

    Attributes:
        number: of ranks; 0 where nothing is parted so.
        agreed: shape and dtype of the parameters whose gradients ranks send parts of, by name, as all of them know;
            None before their first pass.

    Raises:
        UnsupportedModuleError: parameters are on several meshes, or on several further axes of one.
    """

    def __init__(self, model: nn.Module, own: Callable[[nn.Parameter], nn.Parameter], *, sharded: bool):
        self._names = {own(p): name for name, p in model.named_parameters()}
        self._sharded, self.number = sharded, 0
        self._mesh: Any = None
        p: Any
        for p, name in self._names.items():
            axis = self._axis(p)
            if axis is None:
                continue
            if self._mesh is None:
                self._mesh, self._on, self.number = p.device_mesh, axis, int(p.device_mesh.size(axis))
            if p.device_mesh != self._mesh or p.device_mesh.ndim != axis + 1:
                raise UnsupportedModuleError(
                    f"parameter {name} {tuple(p.shape)} is placed as {p.placements} on {p.device_mesh}: tensor "
                    "parallel works on one axis of one mesh, alone or after FSDP2's (parallelize_module on a part of "
                    "the mesh, then fully_shard on the others), without DistributedDataParallel or another mesh"
                )
        self._inputs = torch.zeros((), dtype=torch.float64)
        self.agreed: dict[str, tuple[torch.Size, torch.dtype]] | None = None

    def _axis(self, p: Any) -> int | None:
        """Of the parameter's mesh, over which tensor parallel has parted or repeated it."""
        if not isinstance(p, DTensor):
            return None
        axis = sharding_axes(p) if self._sharded else 0
        return axis if p.device_mesh.ndim > axis else None

    def __reduce__(self) -> Any:
        return type(None), ()

    @property
    def _group(self) -> Any:
        return self._mesh.get_group(self._on)

    def on_forward(self, inputs: Iterable[Tensor]) -> None:
        """A forward pass of the model begins, of these.

        Raises:
            InputError: one has no entries; torch's DTensor never comes back from reshaping such a tensor.
        """
        inputs = list(inputs)
        if any(x.numel() == 0 for x in inputs):
            raise InputError(
                "an empty batch: torch's DTensor (tensor parallel) does not come back from reshaping one. Give it one "
                "sample of any numbers, within model.valid(torch.zeros(1, dtype=torch.bool)): padding adds nothing"
            )
        sums = [_checksum(x) for x in inputs]
        self._inputs = torch.stack([x.to(sums[0].device) for x in sums]).sum() if sums else self._inputs.new_zeros(())

    def sum_parts(
        self,
        factors: Mapping[nn.Parameter, list[Factor]],
        samples: int,
        *settings: object,
        again: bool = False,
        fault: str | None = None,
    ) -> None:
        """Puts whole gradients in the place of parts of sums. One all-reduce, of ``N · (numel + 1)`` numbers a
        parameter: of all that ranks have ever agreed on, so that a rank that no longer trains one sends no shorter
        message, but zeros, and learns of it as the others do (:meth:`over_mesh`).

        Args:
            samples: N, of this pass. settings: what all ranks must have alike. again: in the second of two passes: no
                other message follows there, so one number more a parameter tells who has a part, and one who has a
                fault. fault: what is wrong with this rank's second pass.

        Raises:
            StateError: on all ranks, where they come to train what they did not before and have other settings or
                train other parameters; or where some alone have parts of what they summed in the first of two passes,
                or one has a fault.

        Numerics:
            What the additions of k ranks round is at most ``γ(k) Σ_r |v_r|``, entry by entry; each rank's ``γ(k)‖v_r‖``
            travels with its error.
        """
        parts, places = {}, {}
        for p, some in factors.items():
            of_sum = [f for f in some if isinstance(f, PartOfSum)]
            if of_sum:
                name = self._names[p]
                parts[name], places[name] = merge(of_sum).materialized(), some
        mine = {name: (part.shape, part.values.dtype) for name, part in parts.items()}
        known = self.agreed is not None and mine.items() <= self.agreed.items()
        if not known and not again:
            self._agree(samples, settings)
            self.agreed = {**(self.agreed or {}), **mine}
        dtype, device, agreed = self._dtype_of_sums, self._device, self.agreed or {}
        if not agreed and not (again and device.type == "cpu"):  # nobody waits for a GPU to learn of a fault
            return
        gamma, columns = bounds.gamma(self.number, dtype), [torch.zeros(samples, 0, dtype=dtype, device=device)]
        for name, (shape, _) in agreed.items():
            if mine.get(name) != agreed[name]:
                columns.append(torch.zeros(samples, shape.numel() + 1, dtype=dtype, device=device))
                continue
            values, own = parts[name].values.flatten(1).to(dtype), parts[name].error
            error = gamma * values.double().norm(dim=1) + (0.0 if own is None else own)
            error = error * (1.0 + 2.0 * gamma + 2.0**-20) + smallest_normal(dtype)
            columns += [values, error.to(dtype).unsqueeze(1)]
        flat = torch.cat(columns, dim=1)
        # In no whole number of ranks is there half a fault.
        have = [*(float(known and name in parts) for name in agreed), 0.5 * (fault is not None)] if again else []
        message = torch.cat([flat.flatten(), torch.tensor(have, dtype=dtype, device=device)])
        dist.all_reduce(message, group=self._group)
        of_all = message[flat.numel() :]
        if again and ((of_all != 0) & (of_all != self.number)).any():
            raise StateError(fault or DISAGREEMENT)
        flat = message[: flat.numel()].view_as(flat)
        for name, (shape, _) in agreed.items():
            values, error, flat = flat.tensor_split([shape.numel(), shape.numel() + 1], dim=1)
            if name in parts:
                whole = Dense(values.reshape(-1, *shape), error=error.squeeze(1).double())
                places[name][:] = [whole, *(f for f in places[name] if not isinstance(f, PartOfSum))]

    @property
    def _dtype_of_sums(self) -> torch.dtype:
        dtype = torch.float32
        for _, of_part in (self.agreed or {}).values():
            dtype = torch.promote_types(dtype, of_part)
        return dtype

    @property
    def _device(self) -> torch.device:
        return next(iter(self._names)).device

    def _agree(self, samples: int, settings: tuple[object, ...]) -> None:
        """That all ranks train the same, in the first pass and where this rank would send what it never has. The other
        ranks may not, and are in an ordinary pass then: so the messages are as long as theirs, and unlike them.

        Raises:
            StateError: on all ranks, where it is not so.
        """
        same = agreement(*settings, "new", [name for p, name in self._names.items() if p.requires_grad])
        same = same.to(self._device)
        if self.agreed is not None:
            if self.agreed:
                numbers = sum(shape.numel() + 1 for shape, _ in self.agreed.values())
                nothing = torch.zeros(samples, numbers, dtype=self._dtype_of_sums, device=self._device)
                dist.all_reduce(nothing, group=self._group)
            same = torch.cat((same.new_zeros(2 * samples + 2), same)).double()
        every = self._gathered(same)
        if (every != every[0]).any():
            raise StateError(DISAGREEMENT)

    def is_part(self, factor: Factor) -> bool:
        """Whether its gradients are parts of a sum over ranks, of which no norm can be taken."""
        return isinstance(factor, PartOfSum)

    def _is_parted(self, p: nn.Parameter) -> bool:
        """Whether this rank has a part of its gradients alone."""
        axis = self._axis(p)
        return axis is not None and is_parted(p, slice(axis, None))

    def over_mesh(
        self,
        norms: Mapping[nn.Parameter, SquaredNorm | None],
        *settings: object,
        by_parameter: bool,
        whose: Tensor | None = None,
    ) -> list[SquaredNorm]:
        """Squared norms of whole gradients from those of this rank's parts: of each parameter, or of all together. One
        all-gather of two fp64 numbers a sample, and 18 more, by which ranks see that they agree; by parameter, another
        one of two numbers a sample and parameter.

        Args:
            norms: (N,) each; None for what the step has not used. settings: what all ranks must have alike. whose:
                the samples are (units), or whether they are anybody's, which they must have alike too.

        Raises:
            StateError: on all ranks, where they were called with other inputs, have other settings, or other gradients
                of what each of them has whole. On a GPU, where nobody waits but by parameter, norms are NaN then.
        """
        used = {p: norm for p, norm in norms.items() if norm is not None}
        some = next((norm.value for norm in used.values()), torch.zeros(0, dtype=torch.float64))
        nothing = torch.zeros_like(some).expand(2, -1)
        uppers = {p: norm.upper.to(some.device) for p, norm in used.items() if not self._is_parted(p)}
        first = self._mesh.get_local_rank(self._on) == 0
        mine = [
            torch.stack((norm.value, norm.upper)).to(some.device)
            if norm is not None and (first or p not in uppers)
            else nothing
            for p, norm in norms.items()
        ]
        own = torch.stack(mine) if mine else nothing.unsqueeze(0)
        same = agreement(*settings, by_parameter, [self._names.get(p) for p in norms]).to(some.device)
        replicas = torch.stack([upper.sum() for upper in uppers.values()]).sum() if uppers else some.new_zeros(())
        inputs = self._inputs.to(some.device)
        inputs = inputs if whose is None else inputs + _checksum(whose).to(some.device)
        checks = torch.cat((torch.stack((inputs, replicas)), same.double()))
        together = own.sum(0, keepdim=True)
        parts = self._gathered(torch.cat((together.flatten(), checks)))
        bits = parts[:, together.numel() :].contiguous().view(torch.int64)  # of numbers that may be NaN
        differ = (bits != bits[0]).any(0)
        if (by_parameter or differ.device.type == "cpu") and differ.any():
            self._refuse(differ.tolist(), uppers)
        if by_parameter:  # whose message has one length on all ranks, as is known by now
            total = self._gathered(own.flatten()).view(self.number, *own.shape).sum(0)
        else:
            total = parts[:, : together.numel()].view(self.number, *together.shape).sum(0)
        value, upper = total.masked_fill(differ.any(), torch.nan).unbind(1)
        upper = upper * bounds.fp64_slop(len(mine) + self.number, 2)
        return [SquaredNorm(v, u) for v, u in zip(value, upper, strict=True)]

    def _gathered(self, message: Tensor) -> Tensor:
        """Every rank's, a row each."""
        every = message.new_empty(self.number * len(message))
        dist.all_gather_into_tensor(every, message, group=self._group)
        return every.view(self.number, -1)

    def _refuse(self, differ: list[bool], uppers: Mapping[nn.Parameter, Tensor]) -> None:
        samples, _, *settings = differ
        if any(settings):
            raise StateError(DISAGREEMENT)
        if samples:
            raise StateError(_SAMPLES_DIFFER)
        own = {self._names.get(p, "?"): upper.tolist() for p, upper in uppers.items()}
        every: list[Any] = [None] * self.number
        dist.all_gather_object(every, own, group=self._group)
        names = [name for name in own if any(repr(other.get(name)) != repr(own[name]) for other in every)]
        raise StateError(_REPLICAS_DIFFER.format(names=", ".join(names[:5])))


def _checksum(x: Tensor) -> Tensor:
    """A number that tells inputs, and orders of their samples, apart; 0 of a DTensor, which may have parts of them."""
    if isinstance(x, DTensor):
        return torch.zeros((), dtype=torch.float64)
    flat = x.detach().flatten().double()
    return flat @ torch.arange(1.0, len(flat) + 1.0, dtype=torch.float64, device=x.device).sqrt()
