"""Packed sequences: rows of samples that have ever fewer of them, a time step's together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from dpfast.taps.inputs import tensors_in


def packed_in(inputs: Iterable[Any]) -> PackedSequence | None:
    """The first of them that is one."""
    return next((x for x in inputs if isinstance(x, PackedSequence)), None)


def tensors_of_packed(output: Any) -> list[Tensor]:
    """The rows of the packed sequences in what a module gives."""
    parts = output if isinstance(output, tuple) and not isinstance(output, PackedSequence) else (output,)
    return [x.data for x in parts if isinstance(x, PackedSequence)]


def in_samples(packed: PackedSequence, data: Tensor) -> Tensor:
    """What is laid out as the sequence's rows (R, ...), by samples: (N, T, ...), zeros where one has ended. These are
    in the order that they had before torch sorted them, if it did."""
    return pad_packed_sequence(packed._replace(data=data), batch_first=True)[0]


def rows_of(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """Of each row (R,) the sample, in the same order, and the time."""
    sizes = packed.batch_sizes
    times = torch.arange(len(sizes)).repeat_interleave(sizes)
    samples = torch.arange(len(times)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    samples, times = samples.to(packed.data.device), times.to(packed.data.device)
    return samples if packed.sorted_indices is None else packed.sorted_indices[samples], times


def shapes_taken(module: Any, inputs: Any) -> list[torch.Size]:
    """Of the tensors that a module takes; of a packed sequence as many samples as it has, where the module has them."""
    packed = packed_in((*inputs[0], *inputs[1].values()))
    if packed is None:
        return [x.shape for x in tensors_in(inputs)]
    n = int(packed.batch_sizes[0])
    return [torch.Size((n,) if getattr(module, "batch_first", True) else (1, n))]


def with_data(output: Any, data: Tensor, by: Tensor) -> Any:
    """A module's output with other data in its packed sequences of these."""
    if isinstance(output, PackedSequence):
        return output._replace(data=by) if output.data is data else output
    return type(output)(with_data(x, data, by) for x in output) if type(output) in (tuple, list) else output
