"""Random numbers that all ranks agree on, from a secret that they share and a counter."""

from __future__ import annotations

import gc
import hashlib
import os
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from dpfast.errors import InputError

_BYTES = 32
_STATE_WORDS = 624
_BEFORE_THE_WORDS = 24
"""Of a CPU generator's state: its seed and two counters, then MT19937's words in 64 bits each."""

_giving: WeakSet[SharedSecret] = WeakSet()
"""Those that have given numbers of streams, as long as they live."""


class SharedSecret:
    """A secret of 256 bits; whoever knows it knows the noise. Never print, log or store it.

    Random numbers come from generators that are seeded with all of it and with what they are for, so ranks that ask for
    the same get the same, whatever else they have drawn; nothing but a step number has to be kept to go on.

    Args:
        secret: 32 bytes, the same on all ranks; :meth:`agreed` makes one.

    Attributes:
        ranks: how many have agreed on it; an optimizer refuses it for a sum over another number of them. None: unknown.

    Raises:
        InputError: another length.
    """

    def __init__(self, secret: bytes):
        if len(secret) != _BYTES:
            raise InputError(f"a secret has {_BYTES} bytes, not {len(secret)}; SharedSecret.agreed() makes one")
        self._secret = bytes(secret)
        self._streams = 0  # that it has given
        self._among: int | None = None  # its number among secrets of the same bytes, once it gives one
        self.ranks: int | None = None

    def __repr__(self) -> str:
        return "SharedSecret(...)"

    def __getstate__(self) -> dict[str, Any]:
        """A copy is another secret of the same bytes."""
        return {**vars(self), "_among": None}

    def new_stream(self) -> tuple[int, int]:
        """Two numbers that no other optimizer of this process has: two with one secret add different noise, and so do
        two with secrets of the same bytes that live at the same time. (Where the first is gone, its run begins again:
        the same numbers, as on every rank.)"""
        if self._among is None:
            taken = self._numbers_of_others()
            if taken:
                gc.collect()  # what a cycle alone keeps is gone on all ranks alike
                taken = self._numbers_of_others()
            self.go_on_as(next(number for number in count() if number not in taken))
        self._streams += 1
        return self._streams - 1, self._among  # type: ignore[return-value]  # as set

    def go_on_as(self, among: int) -> None:
        """Its second number from now on: a run goes on that had it."""
        self._among = among
        _giving.add(self)

    def _numbers_of_others(self) -> set[int | None]:
        return {other._among for other in _giving if other is not self and other._secret == self._secret}

    def fingerprint(self) -> str:
        """Tells secrets apart and says nothing else of them."""
        return hashlib.sha256(b"fingerprint" + self._secret).hexdigest()

    @classmethod
    def agreed(cls, generator: torch.Generator | None = None, group: Any = None) -> SharedSecret:
        """The first rank's, sent to all of ``group``; from the operating system, or from that rank's ``generator``
        where a run must be repeatable. Trainings in groups of their own need secrets of their own: with one for all
        they would add the same noise to different sums."""
        if generator is None:
            secret = os.urandom(_BYTES)
        else:
            device = generator.device
            secret = bytes(torch.randint(256, (_BYTES,), generator=generator, device=device).tolist())
        if dist.is_available() and dist.is_initialized():
            box = [secret]
            dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
            made = cls(box[0])
            made.ranks = dist.get_world_size(group)
            return made
        return cls(secret)

    def generator(self, *what: object, device: torch.device | str = "cpu") -> torch.Generator:
        """A new generator for ``what``, by its ``repr``: on a CPU its whole state comes from the secret (a seed has 32
        bits of effect there), on a GPU a seed of 63 bits does."""
        label = repr(what).encode()
        stream = hashlib.shake_256(self._secret + label).digest(4 * _STATE_WORDS)
        generator = torch.Generator(device)
        if generator.device.type != "cpu":
            return generator.manual_seed(int.from_bytes(stream[:8], "little") >> 1)
        state = generator.get_state()  # of one that has drawn nothing
        words = state[_BEFORE_THE_WORDS : _BEFORE_THE_WORDS + 8 * _STATE_WORDS].view(torch.int64)
        words.copy_(torch.frombuffer(bytearray(stream), dtype=torch.uint32))
        return generator.set_state(state)
