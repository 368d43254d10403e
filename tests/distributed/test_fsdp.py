"""Two processes on a CPU (gloo) with FSDP2, against one process that has the whole batch and the whole model."""

import re

import fsdp_worker
import pytest
import torch
from cases import assert_gradients
from fsdp_worker import SPLITS, C, N, case
from opacus_cases import opacus_example
from processes import run_ranks

from dpfast.testing import clipped_sum, loop_over_samples, norms_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(fsdp_worker.__file__, tmp_path_factory.mktemp("fsdp"))


def exact(tied=True, **how):
    model, x, y = case(tied, **how)
    return loop_over_samples(model, lambda m, a, b: fsdp_worker.losses(m, a, b).sum(), x, y)


def assert_step(ranks, what, samples, times=1, split="equal", tolerance=1e-5):
    norms = norms_of(samples)
    summed = {name: times * g for name, g in clipped_sum(samples, C).items()}
    parts = norms.split([SPLITS[split], N - SPLITS[split]])
    for rank, own in zip(ranks, parts, strict=True):
        found = rank[what]
        assert not isinstance(found, str), found
        assert_gradients(found[0], summed, tolerance)
        assert found[1].shape == own.shape
        assert torch.allclose(found[1].double(), own.double(), rtol=tolerance)


@pytest.mark.parametrize("order", ["before", "after", "around"])
def test_shards_of_the_clipped_sum_over_all_ranks(ranks, order):
    """Given to fully_shard before or after it is wrapped, or as what it is wrapped in."""
    assert_step(ranks, order, exact())
    assert_step(ranks, (order, "untied"), exact(tied=False))
    assert_step(ranks, (order, "two passes"), exact())
    assert_step(ranks, (order, "added up"), exact(), times=3)
    for rank in ranks:
        assert rank[order][2] == rank["plain"]  # collectives


def test_what_is_accumulated_without_sync_crosses_with_the_last_pass(ranks):
    """Gradients of a cycle that was given up are not among them."""
    for rank in ranks:
        for what in ("accumulated", *(("accumulated", how) for how in ("two passes", "to none", "in place"))):
            assert not isinstance(rank[what], str), rank[what]
            assert_gradients(rank[what][0], clipped_sum(exact(), C))
            assert "reduce_scatter" not in rank[what][1]


def test_after_a_backward_pass_that_failed(ranks):
    """FSDP2 goes on with what it had gathered then, and reduces nothing any more."""
    for rank in ranks:
        first, second, untouched = rank["failed"]
        assert first == "ValueError: in the middle"
        assert "FSDP2 does not recover" in second
        assert untouched


@pytest.mark.parametrize("split", SPLITS)
def test_unequal_and_empty_parts(ranks, split):
    assert_step(ranks, split, exact(), split=split)


@pytest.mark.parametrize("what", ["zeroed", "checkpointed", "kept whole", "offloaded", "one replica", "two replicas"])
def test_ways_of_sharding(ranks, what):
    assert_step(ranks, what, exact())
    if what == "kept whole":
        assert ranks[0][what][2] == ranks[0]["plain, kept whole"]


def test_what_is_unfrozen_between_steps_has_its_sums(ranks):
    for rank in ranks:
        assert not isinstance(rank["unfrozen later"], str), rank["unfrozen later"]
        assert_gradients(rank["unfrozen later"], clipped_sum(exact(), C))


def test_a_weight_that_is_used_functionally(ranks):
    assert_step(ranks, "functional", exact(block=fsdp_worker.Functional))


def test_bf16_copies_of_fp32_parameters(ranks):
    assert_step(ranks, "bf16", exact(), tolerance=0.03)


def test_clipping_by_parameter(ranks):
    summed = {name: clipped_sum({name: g}, C)[name] for name, g in exact().items()}
    for rank in ranks:
        assert_gradients(rank["per layer"][0], summed)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("escaping", r"EscapedGradientError: .*blocks.1.out.weight \(6, 6\)"),
        ("blocks alone", r"UnsupportedModuleError: parameter tokens.weight \(13, 6\) is trainable and in no unit"),
        ("without sync", "StateError: p.grad holds clipped gradients of this rank alone"),
        ("sync of a part", "StateError: set_requires_gradient_sync was called on a part"),
        ("further out", "StateError: a module around the model"),
        ("materialized", "StateError: .*GradSampleModule has no gradients of whole parameters"),
        ("another dimension", r"UnsupportedModuleError: .*Shard\(dim=1\)"),
    ],
)
def test_what_cannot_work_is_refused(ranks, what, message):
    for rank in ranks:
        assert isinstance(rank[what], str), f"no error: {what}"
        assert re.search(message, rank[what]), rank[what]


def test_ranks_that_disagree_all_raise(ranks):
    for rank in ranks:
        error, untouched = rank["disagreement"]
        assert "StateError: ranks disagree" in error
        assert untouched


@pytest.mark.parametrize("mode", ["dpfast", "dpfast_two_pass"])
def test_engine(ranks, mode):
    first, second = (rank["engine", mode] for rank in ranks)
    assert not isinstance(first, str), first
    model, x, y = opacus_example("mlp", 24)
    samples = loop_over_samples(model, lambda m, a, b: torch.nn.functional.cross_entropy(m(a), b), x, y)
    for taken, others, got in zip(first[1], second[1], first[2], strict=True):
        assert not set(taken) & set(others)
        batch = {name: g[[*taken, *others]] for name, g in samples.items()}
        assert_gradients(got, {name: g / 6 for name, g in clipped_sum(batch, C).items()})


@pytest.mark.parametrize("what", ["replicas", "shards"])
def test_noise(ranks, what):
    """Replicas have the same, shards another; each step has its own, of the right size."""
    first, second = (rank["noise", what] for rank in ranks)
    assert not isinstance(first, str), first
    steps = torch.stack([torch.cat([g.flatten() for g in step.values()]) for step in first[2]])
    assert abs(steps.std() * 6 / (1e4 * C) - 1) < 0.03
    assert (torch.corrcoef(steps) - torch.eye(len(steps))).abs().max() < 0.3
    halves = [weight.split(len(weight) // 2)[:2] for weight in first[2][0].values() if len(weight) % 2 == 0]
    upper, lower = (torch.cat([half[i].flatten() for half in halves]) for i in (0, 1))
    assert abs(torch.corrcoef(torch.stack([upper, lower]))[0, 1]) < 0.3
    for name, weight in first[0].items():
        assert torch.equal(weight, second[0][name]), name


def test_noise_of_both_modes(ranks):
    for mode in ("dpfast", "dpfast_two_pass"):
        found = ranks[0]["noise", mode]
        assert not isinstance(found, str), found
