"""Kernels that give the same bits each time, for looks on a GPU.

There the backward passes of attention, of some convolutions and of sums by index add up in whatever order their threads
come, so two runs on the same samples differ, and a look would tell nothing. And which kernel attention takes depends on
the whole batch (a mask where somebody is padded): another sample would change the last bits of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpfast.taps import ATTENDED
from dpfast.trials.written_out import InParts


def attention_written_out() -> tuple[bool, bool]:
    """Whether looks write attention out, in the order to be tried: on a GPU first, and as it is where that holds too
    much; on a CPU as it is, and written out where samples meet, for there too a kernel may be another for a mask
    (torch 2.8 has none with ``enable_gqa``)."""
    return (True, False) if torch.cuda.is_initialized() else (False, True)


@contextmanager
def same_kernels(*, attention: bool) -> Iterator[None]:
    """Within it, what torch has a kernel for that adds up in one order takes that; what has none goes on as it was.

    The switches are the process's: to be entered within ``same_random_numbers``, which lets one thread look at a time
    and silences torch's warnings. Steps of other threads are as right as before, and slower.

    Args:
        attention: is computed with its scores written out, of the same numbers whatever the mask. The fused kernels add
            up in one order only where torch is to refuse all that do not, products of matrices among it. A part of the
            scores is there at a time (``written_out``), but those of ``nn.MultiheadAttention`` all are.
    """
    ATTENDED[0] = False
    if not torch.cuda.is_initialized():  # on a CPU kernels add up in one order
        with _written_out() if attention else nullcontext():
            yield
        return
    # Not by torch.use_deterministic_algorithms, which would have torch.compile compile otherwise.
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch._C._get_deterministic_fill_uninitialized_memory()
    with _written_out() if attention else nullcontext():
        try:
            if not before[0]:
                torch._C._set_deterministic_algorithms(True, warn_only=True)
            torch._C._set_deterministic_fill_uninitialized_memory(False)  # nobody reads it
            yield
        finally:
            torch._C._set_deterministic_fill_uninitialized_memory(filled)
            torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def _written_out() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH), InParts():
        yield
