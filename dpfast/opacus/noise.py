"""Gaussian noise, added to clipped sums in place: Opacus's own numbers, on all of a CPU's cores, or by a GPU's kernel.

torch's generator gives its numbers one after the other, on one core: with many of them noise can take longer than the
step that it is for. By blocks, each block of numbers has a generator of its own, whose whole state comes from a secret,
so they are drawn side by side and are the same with any number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from opacus.optimizers.optimizer import _generate_noise
from torch import Tensor

from dpfast.arithmetic import Noise
from dpfast.distributed import SharedSecret
from dpfast.trials import ONE_AT_A_TIME

WORTH_BLOCKS = 2**20
"""Numbers from which they are drawn by blocks: some 5 ms on one core. Fewer are Opacus's to the bit."""

_BLOCK = 2**18
"""Numbers that one generator gives, in about 0.7 ms; a new one takes 20 µs."""

_PIECE = 2**15
"""Numbers that are drawn and added at a time: they stay in a core's own cache and take no memory from step to step, and
torch would share more out among its threads, which are at work here already."""


def can_be_in_pieces(x: Tensor) -> bool:
    return type(x) is Tensor and x.dtype is torch.float32 and x.is_contiguous() and x.device.type == "cpu"


def can_be_together(x: Tensor) -> bool:
    return x.is_cuda and type(x) is Tensor


def are_worth_blocks(sums: Sequence[Tensor]) -> bool:
    """Whether their noise may be drawn by blocks, and is quicker so."""
    return sum(x.numel() for x in sums) >= WORTH_BLOCKS and all(map(can_be_in_pieces, sums))


def add_noise_in_order(x: Tensor, std: float, *, generator: Any, secure_mode: bool) -> None:
    """Adds Opacus's numbers, in the tensor's dtype (Opacus 1.5.4 draws fp32 whatever that is).

    On a CPU they are drawn in pieces: a piece of a multiple of 16 has the numbers that it has in the whole.
    """
    if secure_mode or std == 0 or not can_be_in_pieces(x):
        x.add_(_generate_noise(std, x, generator=generator, secure_mode=secure_mode).to(x.dtype))
        return
    if x.numel() <= _PIECE:
        x.add_(torch.empty_like(x).normal_(0.0, std, generator=generator))
        return
    # The last piece is longer, not shorter: numbers are drawn 16 at a time.
    whole = x.numel() // _PIECE * _PIECE
    flat = x.view(-1)
    noise = _space(min(flat.numel(), 2 * _PIECE))
    for start in range(0, whole, _PIECE):
        piece = flat[start : start + _PIECE] if start + _PIECE < whole else flat[start:]
        piece.add_(noise[: piece.numel()].normal_(0.0, std, generator=generator))


def add_noise_to_all(
    sums: Sequence[Tensor], std: float, *, generator: Any, secure_mode: bool, in_order: bool, divisor: float = 1.0
) -> bool:
    """Adds Gaussian noise to each.

    Args:
        in_order: Opacus's numbers everywhere. Else those of what is on a GPU are drawn where they are added, and for
            small parameters at once: a draw's calls take longer there than the numbers of most parameters do.
        divisor: as in :func:`add_noise_by_blocks`, where all are drawn so.

    Returns:
        Whether the noisy sums have been divided.
    """
    together: dict[Any, list[Tensor]] = {}
    apart: list[Tensor] = []
    for x in sums:
        if can_be_together(x) and not (in_order or std == 0):
            together.setdefault((x.dtype, x.device), []).append(x)
        else:
            apart.append(x)
    with ONE_AT_A_TIME if generator is None else nullcontext():
        for x in apart:
            add_noise_in_order(x, std, generator=generator, secure_mode=secure_mode)
        first = 0
        for of_one_kind in together.values():
            first = add_noise_together(
                of_one_kind, std, generator=generator, divisor=1.0 if apart else divisor, first=first
            )
    return not apart


def add_noise_together(
    sums: Sequence[Tensor], std: float, *, generator: Any, divisor: float = 1.0, first: int = 0
) -> int:
    """Of one dtype and device, divided on the way. Blocks have numbers from ``first`` to the one that is returned."""
    share, std = _shares(std, divisor)
    small: list[Tensor] = []
    large: list[Tensor] = []
    for x in sums:
        (small if x.numel() <= _SMALL else large).append(x)
    noise = Noise(sums[0], std, share, generator, first)
    for some in _up_to(small, _TOGETHER):
        beside = torch.cat([x.flatten() for x in some])
        noise.add_to(beside)
        parts = beside.split([x.numel() for x in some])
        torch._foreach_copy_(some, [part.view(x.shape) for part, x in zip(parts, some, strict=True)])
    for x in large:
        noise.add_to(x)
    return noise.next


def _shares(std: float, divisor: float) -> tuple[float, float]:
    """What sums are multiplied by, and the standard deviation of their noise: rounding 1 / divisor to fp32 must make no
    sum larger beside it."""
    return 1.0 / divisor, std / divisor * (1.0 if divisor == 1.0 else 1.0 + 2.0**-23)


def _up_to(sums: Sequence[Tensor], entries: int) -> list[list[Tensor]]:
    """In order, at least one tensor each, and more only up to so many entries."""
    found: list[list[Tensor]] = []
    total = 0
    for x in sums:
        if not found or total + x.numel() > entries:
            found.append([])
            total = 0
        found[-1].append(x)
        total += x.numel()
    return found


_SMALL = 2**18
"""Numbers up to which a launch of its own takes no less of a GPU than two copies do, and more of the host."""

_TOGETHER = 2**25
"""Numbers of small ones that are copied at a time: 128 MiB in fp32."""


def _space(numbers: int) -> Tensor:
    """Whatever the user's default dtype and device are: numbers drawn in 16 bits are few, and far apart."""
    return torch.empty(numbers, dtype=torch.float32, device="cpu")


def new_secret() -> SharedSecret:
    """From torch's default generator, so that ``torch.manual_seed`` decides it."""
    with ONE_AT_A_TIME:
        return SharedSecret(bytes(torch.randint(256, (32,), device="cpu").tolist()))


def digest(numbers: Sequence[object]) -> str:
    """Of what a step's noise follows from and, with them, of all steps before."""
    return hashlib.sha256(repr(numbers).encode()).hexdigest()


def add_noise_by_blocks(
    sums: Sequence[Tensor], std: float, generator: Callable[[int], torch.Generator], *, divisor: float = 1.0
) -> None:
    """Adds Gaussian noise of standard deviation ``std`` to contiguous fp32 tensors on a CPU.

    Args:
        generator: of a block, by number; blocks are counted along the entries of all tensors.
        divisor: what the noisy sums are divided by, which costs nothing here and a reading of all of them by itself.
    """
    share, std = _shares(std, divisor)
    blocks = list(enumerate(_blocks(sums)))
    threads = min(torch.get_num_threads(), len(blocks))

    def add(numbered: tuple[int, list[Tensor]]) -> None:
        number, pieces = numbered
        own, noise = generator(number), _space(_PIECE)
        for piece in pieces:
            numbers = noise if piece.numel() == _PIECE else noise[: piece.numel()]
            torch.add(numbers.normal_(0.0, std, generator=own), piece, alpha=share, out=piece)

    if threads <= 1:
        for block in blocks:
            add(block)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(add, blocks):  # raises what a thread has raised
            pass


def _blocks(sums: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors' entries in pieces, one-dimensional views, together as many a block."""
    found: list[list[Tensor]] = []
    room = 0
    for x in sums:
        flat, left = x.view(-1), x.numel()
        if 0 < left <= room and left <= _PIECE:  # most parameters, and nearly no numbers
            found[-1].append(flat)
            room -= left
            continue
        sizes, runs = [], []
        while left:
            if not room:
                found.append([])
                room = _BLOCK
            run = left if left < room else room
            whole, rest = divmod(run, _PIECE)
            sizes += [_PIECE] * whole + ([rest] if rest else [])
            runs.append((found[-1], len(sizes)))
            left, room = left - run, room - run
        pieces, start = flat.split(sizes), 0
        for block, end in runs:
            block += pieces[start:end]
            start = end
    return found
