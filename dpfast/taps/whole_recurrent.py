"""Recurrent layers of a copy's forward, past the modes that see each operation: on a CPU torch makes them of some at
each time, thousands in a look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import _VF, Tensor, nn
from torch.overrides import TorchFunctionMode

from dpfast.taps.inputs import tensors_in

_RECURRENT = frozenset((_VF.lstm, _VF.gru, _VF.rnn_tanh, _VF.rnn_relu))


class WholeRecurrent(TorchFunctionMode):
    """Within it they run so. They write to no parameter; those that draw random numbers, which are made the same for
    other batches, are seen as before."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RECURRENT and not kwargs and _draws_nothing(args) and _are_plain(args):
            with torch._C._DisableTorchDispatch():
                return func(*args)
        return func(*args, **(kwargs or {}))


def _draws_nothing(args: Sequence[Any]) -> bool:
    packed = isinstance(args[1], Tensor) and args[1].dtype == torch.int64  # sizes of batches
    dropout, training = args[-3:-1] if packed else args[-4:-2]
    return not (dropout and training)


def _are_plain(args: Sequence[Any]) -> bool:
    return all(type(x) in (Tensor, nn.Parameter) for x in tensors_in(args))
