"""Poisson batches over ranks, and the secret that they come from."""

import copy
import hashlib
import pickle
import random

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dpfast.distributed import PoissonBatches, SharedSecret
from dpfast.distributed.handed_out import is_in, joined, without
from dpfast.errors import InputError, StateError

SECRET = SharedSecret(bytes(range(32)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_parts_are_the_batch_of_one_process(ranks):
    one = PoissonBatches(101, 0.05, SECRET, rank=0, ranks=1, steps=200)
    parts = [list(PoissonBatches(101, 0.05, SECRET, rank=rank, ranks=ranks, steps=200)) for rank in range(ranks)]
    for whole, *of_step in zip(one, *parts, strict=True):
        assert sorted(index for part in of_step for index in part) == whole
        sizes = [len(part) for part in of_step]
        assert max(sizes) - min(sizes) <= 1
    assert any(not part for part in parts[-1]) == (ranks > 1)  # empty parts are given all the same


def test_each_sample_is_taken_independently_with_the_rate():
    batches = PoissonBatches(50, 0.3, SECRET, rank=0, ranks=1)
    taken = torch.zeros(4000, 50, dtype=torch.float64)
    for step in range(len(taken)):
        taken[step, batches.batch(step)] = 1.0
    assert (taken.mean(0) - 0.3).abs().max() < 5 * (0.3 * 0.7 / len(taken)) ** 0.5
    assert (torch.corrcoef(taken.T) - torch.eye(50)).abs().max() < 0.1


def test_goes_on_from_a_step():
    batches = PoissonBatches(40, 0.25, SECRET, rank=0, ranks=2)
    assert len(batches) == 4
    first, second = list(batches), list(batches)
    assert first != second
    again = PoissonBatches(40, 0.25, SECRET, rank=0, ranks=2)
    again.step = 4
    assert list(again) == second


def test_in_a_data_loader():
    data = TensorDataset(torch.arange(40))
    loader = DataLoader(data, batch_sampler=PoissonBatches(40, 0.5, SECRET, rank=1, ranks=2))
    batches = PoissonBatches(40, 0.5, SECRET, rank=1, ranks=2)
    assert [x.tolist() for (x,) in loader] == list(batches)


@pytest.mark.parametrize(("rate", "samples"), [(0.0, 5), (1.5, 5), (float("nan"), 5), (0.5, 0)])
def test_bad_input(rate, samples):
    with pytest.raises(InputError, match="sample_rate"):
        PoissonBatches(samples, rate, SECRET, rank=0, ranks=1)
    with pytest.raises(InputError, match="32 bytes"):
        SharedSecret(b"short")
    with pytest.raises(StateError, match="dealt out"):
        PoissonBatches(5, 0.5, SECRET, rank=0, ranks=1).drop_last  # noqa: B018  # a property that raises


def test_the_whole_secret_counts():
    """torch's seed has 32 bits of effect on a CPU; the state here has all of the secret's."""
    state = SECRET.generator("noise", 3).get_state()
    stream = hashlib.shake_256(bytes(range(32)) + repr(("noise", 3)).encode()).digest(4 * 624)
    words = torch.frombuffer(bytearray(stream), dtype=torch.int32).long() & 0xFFFFFFFF
    assert torch.equal(state[24 : 24 + 8 * 624].view(torch.int64), words)
    draws = [torch.randn(4, generator=SECRET.generator(*what)) for what in [("noise", 1), ("noise", 2), ("sample", 1)]]
    assert len({tuple(x.tolist()) for x in draws}) == 3
    assert torch.equal(torch.randn(4, generator=SECRET.generator("noise", 1)), draws[0])
    other = SharedSecret(bytes(range(31)) + b"\0")
    assert not torch.equal(torch.randn(4, generator=other.generator("noise", 1)), draws[0])


def test_draws_are_normal():
    x = torch.randn(200_000, generator=SECRET.generator("noise", 9), dtype=torch.float64)
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01
    assert abs((x**4).mean() - 3) < 0.1


def test_a_secret_shows_nothing():
    assert "\\x01" not in repr(SECRET) + repr(copy.deepcopy(SECRET))


def test_no_two_streams_are_the_same():
    """Two optimizers would add the same noise to two sums, and their difference would have none."""
    bytes_of_this_test = hashlib.sha256(b"no two streams").digest()
    first, other = SharedSecret(bytes_of_this_test), SharedSecret(bytes(32))
    streams = [first.new_stream(), first.new_stream()]
    secrets = [SharedSecret(bytes_of_this_test), copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    streams += [secret.new_stream() for secret in secrets]
    assert streams[0] == (0, 0) and len(set(streams)) == 5
    assert other.new_stream() == (0, 0)
    del first, secrets
    assert SharedSecret(bytes_of_this_test).new_stream() == (0, 0)  # a run that begins again


def test_a_run_goes_on_with_the_numbers_that_it_had():
    """Whichever of two is built first."""
    first, second = (SharedSecret(hashlib.sha256(b"goes on").digest()) for _ in range(2))
    first.go_on_as(1)
    assert first.new_stream() == (0, 1) and second.new_stream() == (0, 0)


def test_spans_are_sets_of_numbers():
    rng = random.Random(0)
    for _ in range(300):
        numbers, others, more = ([rng.randrange(12) for _ in range(rng.randrange(7))] for _ in range(3))
        spans, taken = joined((), numbers), joined((), others)
        assert joined(spans, more) == joined((), [*more, *numbers])
        left = without(joined(spans, more), taken)
        assert [n for n in range(12) if is_in(left, n)] == sorted({*numbers, *more} - {*others})
