"""Tensor parallel: what one rank has of a layer whose parameters are DTensors.

A DTensor says itself where its entries are, so a layer's use is brought to where this rank's activations and backprops
give exactly this rank's part of every sample's gradient, and the layer's own rule makes factors of them:

- a weight parted by outputs (ColwiseParallel) takes all inputs and its own outputs' gradients;
- one parted by inputs (RowwiseParallel) its own inputs and all gradients, as does its bias, which every rank has whole;
- a table parted by rows takes the positions whose rows are its own;
- a layer that every rank has whole, and that sees a part of each sample's positions (SequenceParallel), gives a part of
  a sum over ranks.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dpfast.distributed.placements import extents
from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Dense, Factor, Runs, by_unit
from dpfast.rules import huggingface
from dpfast.taps import Activations, find_rule, sees_its_own_heads

WHOLE = Replicate()


class PartOfSum(Dense):
    """A part of every sample's gradient: what it is is the sum over ranks."""

    def by_unit(self, runs: Runs) -> PartOfSum:
        """Those of units are parts of sums as well."""
        of_units = by_unit(Dense(self.values, error=self.error), runs).materialized()
        return PartOfSum(of_units.values, error=of_units.error)


class LocalPart(NamedTuple):
    """One use of a layer.

    Attributes:
        module: stands in for the layer, with this rank's part of its parameters, as plain ones.
        activations, backprops: plain tensors.
        own: the layer's parameter of each plain one. empty: those of which this rank has no entry.
        summed: the gradients are parts of a sum over ranks.
    """

    module: nn.Module
    activations: Activations
    backprops: tuple[Tensor, ...]
    own: dict[nn.Parameter, nn.Parameter]
    empty: list[nn.Parameter]
    summed: bool

    def factors(self, found: Mapping[nn.Parameter, Factor], num_samples: int) -> dict[nn.Parameter, Factor]:
        """Of the layer's own parameters, from those of the plain ones."""
        factors: dict[nn.Parameter, Factor] = {}
        for p, factor in found.items():
            if self.summed:
                if type(factor) is not Dense:
                    raise UnsupportedModuleError(
                        f"its gradients of {tuple(p.shape)} would be summed over ranks, written out for each sample, "
                        "because each rank sees a part of the positions; shard the layer (ColwiseParallel, "
                        "RowwiseParallel), give it whole inputs, or freeze it"
                    )
                factor = PartOfSum(factor.values, error=factor.error)
            factors[self.own[p]] = factor
        for p in self.empty:
            factors[self.own[p]] = Dense(self.backprops[0].new_zeros(num_samples, *p.shape))
        return factors


def local_part(
    module: nn.Module, activations: Activations, backprops: tuple[Tensor, ...], samples: int | None
) -> LocalPart:
    """This rank's part of a use of the layer.

    Args:
        samples: the dimension that they are in, where they are in one alone.

    Raises:
        UnsupportedModuleError: a layer, or placements, whose gradients have no such parts.
    """
    if len(backprops) != 1 or module._modules:
        raise UnsupportedModuleError("it holds DTensors, and tensor parallel is known of single layers of one output")
    inputs, output, summed = _placed(module, activations, backprops[0], samples)
    layer = next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))  # whose copies are made anew
    stand_in: Any = object.__new__(layer)
    stand_in.__dict__.update(module.__dict__)
    stand_in.__dict__.pop("forward", None)
    stand_in._forward_pre_hooks, stand_in._forward_hooks = OrderedDict(), OrderedDict()
    stand_in._parameters, own, empty = {}, {}, []
    for name, p in module._parameters.items():
        if p is None:
            stand_in._parameters[name] = None
            continue
        plain = nn.Parameter(_plain(p), requires_grad=p.requires_grad)
        own[plain] = p
        if p.requires_grad and plain.numel() == 0 < p.numel():
            empty.append(plain)
            plain = nn.Parameter(_plain(p), requires_grad=False)
        stand_in._parameters[name] = plain
    activations = activations.map(lambda x: _plain(x, inputs))
    gradients = _plain(backprops[0], output)
    if isinstance(module, nn.Linear):
        stand_in.out_features, stand_in.in_features = stand_in.weight.shape
    if isinstance(module, nn.Embedding) and _place(module.weight) == Shard(0):
        activations[0], gradients = _own_rows(stand_in, module, activations[0], gradients)
    return LocalPart(stand_in, activations, (gradients,), own, empty, summed)


def _placed(
    module: nn.Module, activations: Activations, backprops: Tensor, samples: int | None
) -> tuple[Placement, Placement, bool]:
    """Where the inputs and the output's gradient must be, and whether the gradients are then parts of a sum."""
    places = {name: _place(p) for name, p in module._parameters.items() if p is not None}
    weight, bias = places.get("weight", WHOLE), places.get("bias")
    last = Shard(backprops.dim() - 1)
    if sees_its_own_heads(module):
        return WHOLE, WHOLE, True
    if all(place == WHOLE for place in places.values()):
        seen = {_place(x) for x in activations if isinstance(x, Tensor)}
        positions = [Shard(d) for d in range(backprops.dim() - _dims_of_a_position(module)) if d != samples]
        if seen <= {WHOLE}:
            return WHOLE, WHOLE, False
        for part in positions if samples is not None else ():
            if seen == {part}:
                return part, part, True
        what = f"each rank has all of its parameters, and its inputs are placed as {', '.join(map(str, seen))}"
    elif isinstance(module, nn.Linear) and weight == Shard(0) and bias in (None, Shard(0)):
        return WHOLE, last, False
    elif isinstance(module, nn.Linear) and weight == Shard(1) and bias in (None, WHOLE):
        return Shard(activations[0].dim() - 1), WHOLE, False
    elif isinstance(module, nn.Embedding) and weight in (Shard(0), Shard(1)):
        return WHOLE, WHOLE if weight == Shard(0) else last, False
    else:
        what = f"its parameters are placed as {', '.join(f'{name} {place}' for name, place in places.items())}"
    raise UnsupportedModuleError(
        f"{what}. Known are nn.Linear by outputs (ColwiseParallel) or inputs (RowwiseParallel), nn.Embedding by rows "
        "or columns, layers that each rank has whole, and of these LayerNorm and RMSNorm on parts of the positions "
        "(SequenceParallel); place the layer so, or freeze it"
    )


def _dims_of_a_position(module: nn.Module) -> int:
    """How many of the last dimensions the layer looks at together; all where that is not known."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return len(module.normalized_shape)
    return 1 if isinstance(module, nn.Linear) or find_rule(module) is huggingface.root_mean_square else sys.maxsize


def _place(x: Any) -> Placement:
    """Raises UnsupportedModuleError where it is on a mesh of several dimensions."""
    if not isinstance(x, DTensor):
        return WHOLE
    if len(x.placements) != 1:
        raise UnsupportedModuleError(
            f"{tuple(x.shape)} is placed as {x.placements}: on one dimension of a device mesh alone is it known whose "
            "gradients these are"
        )
    return x.placements[0]


def _plain(x: Any, place: Placement | None = None) -> Tensor:
    """This rank's part of ``x``, brought to ``place`` where it is not there. What is no DTensor is whole."""
    if not isinstance(x, DTensor) and place not in (None, WHOLE):
        raise UnsupportedModuleError(f"{tuple(x.shape)} is no DTensor, and would have to be {place}: freeze the layer")
    if isinstance(x, DTensor):
        if place is not None and _place(x) != place:
            x = x.redistribute(placements=[place])
        x = x.to_local()
        x = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
    return cast(Tensor, x.detach())


def _own_rows(stand_in: Any, table: Any, indices: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
    """Indices into this rank's rows, and the gradients with zeros where the row is another's."""
    first, rows = extents(table.weight)[0]
    stand_in.num_embeddings, padding = rows, table.padding_idx
    stand_in.padding_idx = padding - first if padding is not None and first <= padding < first + rows else None
    inside = (indices >= first) & (indices < first + rows)
    return (indices - first).clamp(0, max(0, rows - 1)), backprops.masked_fill(~inside.unsqueeze(-1), 0.0)
