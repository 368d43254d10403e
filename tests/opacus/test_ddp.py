"""PrivacyEngine on a model in DistributedDataParallel: two processes on a CPU (gloo), against one."""

import re

import ddp_engine_worker
import pytest
import torch
from cases import assert_gradients
from ddp_engine_worker import BATCH, STEPS, C, N
from opacus_cases import opacus_example
from processes import run_ranks

from dpfast.testing import clipped_sum, loop_over_samples

pytestmark = pytest.mark.on_cpu


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(ddp_engine_worker.__file__, tmp_path_factory.mktemp("ddp"))


def both(ranks, what):
    for rank in ranks:
        assert not isinstance(rank[what], str), rank[what]
    return ranks[0][what], ranks[1][what]


@pytest.mark.parametrize("mode", ["dpfast", "dpfast_two_pass", "per layer"])
def test_each_step_is_that_of_one_process_on_both_parts(ranks, mode):
    first, second = both(ranks, mode)
    model, x, y = opacus_example("mlp", N)
    samples = loop_over_samples(model, lambda m, a, b: torch.nn.functional.cross_entropy(m(a), b), x, y)
    assert len(first[1]) == STEPS
    for taken, others, got, same in zip(first[1], second[1], first[2], second[2], strict=True):
        assert not set(taken) & set(others)
        assert abs(len(taken) - len(others)) <= 1
        batch = {name: g[[*taken, *others]] for name, g in samples.items()}
        exact = (
            {name: clipped_sum({name: g}, C)[name] for name, g in batch.items()}
            if mode == "per layer"
            else clipped_sum(batch, C)
        )
        assert_gradients(got, {name: gradient / BATCH for name, gradient in exact.items()})
        assert all(torch.equal(got[name], same[name]) for name in exact)


@pytest.mark.parametrize("what", ["noise", "noise, two passes", "seeded", "large noise"])
def test_replicas_stay_equal_to_the_bit(ranks, what):
    first, second = both(ranks, what)
    for name, weight in first[0].items():
        assert torch.equal(weight, second[0][name]), name
    assert first[1] != second[1]  # on samples of their own


def test_noise_has_the_standard_deviation_it_should(ranks):
    gradients = both(ranks, "large noise")[0][2]
    steps = torch.stack([torch.cat([g.flatten() for g in step.values()]) for step in gradients])
    assert abs(steps.std() * BATCH / (1e4 * C) - 1) < 0.02  # 48 steps of 365 entries
    assert steps.std(0).min() * BATCH / (1e4 * C) > 0.5  # another draw in each step
    correlation = torch.corrcoef(steps)
    assert (correlation - torch.eye(len(steps))).abs().max() < 0.3


def test_a_seed_repeats_a_run_and_no_seed_does_not(ranks):
    seeded, again = ranks[0]["seeded"], ranks[0]["seeded again"]
    assert seeded[1] == again[1]
    assert all(torch.equal(seeded[0][name], again[0][name]) for name in seeded[0])
    assert ranks[0]["noise"][1] != seeded[1]


def test_an_optimizer_of_its_own(ranks):
    first, second = both(ranks, "standalone")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(g.any() for g in first.values())


def test_two_optimizers_of_one_secret_add_different_noise(ranks):
    for one, other in both(ranks, "one secret for two"):
        assert not any(torch.equal(one[name], other[name]) for name in one)


def test_a_module_that_is_private_already_still_has_batches_dealt_out(ranks):
    (first, size), (second, same) = both(ranks, "private again")
    assert size == same == BATCH
    for taken, others in zip(first, second, strict=True):
        assert not set(taken) & set(others)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no secret", "StateError: p.grad holds the sum over 2 ranks, which must all add the same noise"),
        ("no_sync", "StateError: p.grad holds clipped gradients of this rank alone"),
        ("past DDP", "StateError: p.grad holds clipped gradients of this rank alone, and the optimizer shares"),
        ("secrets differ", "StateError: ranks disagree"),
        ("noise differs", "StateError: ranks disagree"),
        ("looked at", "StateError: ranks disagree"),
        ("rates differ", "StateError: ranks disagree"),
        ("group of one", "InputError: the model sums over 1 of 2 ranks"),
        ("dealt out again", "StateError: these Poisson batches have been dealt out"),
        ("memory manager", "StateError: ranks disagree"),
        ("materialize", "UnsupportedModuleError: .*DistributedDataParallel"),
    ],
)
def test_nothing_is_silent(ranks, what, message):
    for rank in ranks:
        assert isinstance(rank[what], str)
        assert re.search(message, rank[what]), rank[what]
