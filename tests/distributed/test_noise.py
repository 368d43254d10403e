"""Noise of a rank's part, without any ranks."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Shard

from dpfast.distributed import SharedSecret, add_noise, noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placements", [(Shard(0),), (Shard(1),), (Shard(0), Shard(1))])
def test_a_shard_s_noise_is_rounded_with_the_sum(monkeypatch, placements, dtype):
    """Numbers rounded to 16 bits before they are added would show what they were added to."""
    shape, mesh = (12, 50), (2, 2)[: len(placements)]
    grid = SimpleNamespace(ndim=len(mesh), size=mesh.__getitem__, get_local_rank=lambda axis: 1)
    places = {place.dim for place in placements}
    own = torch.full([size // 2 if dim in places else size for dim, size in enumerate(shape)], 1.7, dtype=dtype)
    before = own.double()
    monkeypatch.setattr(noise, "local", lambda grad: own)
    grad = SimpleNamespace(shape=torch.Size(shape), placements=placements, device_mesh=grid)
    add_noise(grad, 0.5, lambda block: torch.Generator().manual_seed(block))
    first = placements[0].dim
    drawn = torch.empty(600).normal_(0.0, 0.5, generator=torch.Generator().manual_seed(0)).double()
    drawn = drawn.view(shape) if first == 0 else drawn.view(shape[::-1]).T
    for dim in places:
        drawn = drawn.chunk(2, dim)[1]
    exact = before + drawn
    assert ((own.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6).all()


def test_a_generators_whole_state_is_of_the_secret():
    """MT19937's 624 words; one that has drawn nothing."""
    secret = bytes(range(32))
    made = SharedSecret(secret).generator("noise", 3)
    stream = hashlib.shake_256(secret + repr(("noise", 3)).encode()).digest(4 * 624)
    words = [int.from_bytes(stream[4 * i : 4 * i + 4], "little") for i in range(624)]
    assert made.get_state()[24 : 24 + 8 * 624].view(torch.int64).tolist() == words
    seeded = torch.Generator().manual_seed(5)
    state = seeded.get_state()
    state[24 : 24 + 8 * 624] = torch.tensor(words).view(torch.uint8)
    seeded.set_state(state)
    drawn = [torch.empty(33).normal_(generator=of) for of in (made, seeded)]
    assert torch.equal(*drawn) and drawn[0].unique().numel() == 33
