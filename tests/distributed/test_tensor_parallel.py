"""Two and four processes on a CPU (gloo), each with a part of the parameters, against one that has the whole model."""

import re

import pytest
import torch
import tp_worker
from cases import assert_gradients
from processes import run_ranks
from torch.distributed.tensor import Replicate
from tp_worker import HOW, C, case, exact

from dpfast.testing import clipped_sum, norms_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(tp_worker.__file__, tmp_path_factory.mktemp("tp"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_ranks(tp_worker.__file__, tmp_path_factory.mktemp("tp"), ranks=4)


def assert_step(ranks, what, samples, times=1):
    norms = norms_of(samples)
    for rank in ranks:
        found = rank[what]
        assert not isinstance(found, str), found
        assert_gradients(found[0], {name: times * g for name, g in clipped_sum(samples, C).items()})
        assert torch.allclose(found[1].double(), norms, rtol=1e-5)
        assert torch.equal(found[2], ranks[0][what][2]), "clip factors"


@pytest.mark.parametrize("how", HOW)
def test_every_rank_has_its_part_of_the_clipped_sum(ranks, how):
    assert_step(ranks, how, exact())
    assert_step(ranks, (how, "N = T"), exact(n=8))
    assert_step(ranks, (how, "N = ranks"), exact(n=2))
    assert_step(ranks, (how, "two passes"), exact())
    assert_step(ranks, (how, "frozen"), exact(frozen=("norm", "q.weight", "o.bias", "n2")))


def test_four_ranks(four):
    for how in HOW:
        assert_step(four, how, exact())
    assert_step(four, ("positions", "N = ranks"), exact(n=4))
    assert_step(four, "few words", exact(vocabulary=3))
    assert_step(four, "tied, positions", exact(tied=True))
    assert_clipped_by_parameter(four, "positions")
    assert_noise(four)
    for rank in four:
        assert "called with different inputs" in rank["inputs"][0]


def assert_clipped_by_parameter(ranks, how):
    summed = {name: clipped_sum({name: g}, C)[name] for name, g in exact().items()}
    for rank in ranks:
        found = rank[how, "per layer"]
        assert not isinstance(found, str), found
        assert_gradients(found[0], summed)
        assert torch.equal(found[2], ranks[0][how, "per layer"][2])


@pytest.mark.parametrize("how", HOW)
def test_clipping_by_parameter(ranks, how):
    assert_clipped_by_parameter(ranks, how)


@pytest.mark.parametrize("how", HOW)
def test_what_dpfast_sends(ranks, how):
    """16 bytes a sample and 144 more to each rank; of norms on parts of the positions, their gradients."""
    n, numbers = 6, sum(p.numel() + 1 for name, p in case()[0].named_parameters() if "n1" in name or "n2" in name)
    for rank in ranks:
        sent = rank[how][4]
        assert sent["all_gather_into_tensor"] == 16 * n + 144
        final = 2 * (tp_worker.D + 1)
        assert sent.get("all_reduce", 0) == (4 * n * (numbers + final) if how == "positions" else 0)
        assert sent.keys() <= {"all_gather_into_tensor", "all_reduce"}


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("one", {"n": 1}),
        ("one word", {"vocabulary": 1}),  # of which the second rank has no row
        ("tied", {"tied": True}),
        ("tied, positions", {"tied": True}),
        ("padding", {"padding": 7}),
        ("rms", {"norm": torch.nn.RMSNorm}),
        ("materialized", {}),
        ("functorch", {}),
        ("checkpointed", {}),
    ],
)
def test_models_and_modes(ranks, what, options):
    assert_step(ranks, what, exact(**options))


def test_padding(ranks):
    samples = {name: g[:4] for name, g in exact().items()}
    for rank in ranks:
        assert not isinstance(rank["padded"], str), rank["padded"]
        assert_gradients(rank["padded"], clipped_sum(samples, C))


def test_without_zero_grad_sums_add_up(ranks):
    assert_step(ranks, "added up", exact(), times=3)
    assert_step(ranks, "zeroed", exact())


def test_placements_of_p_grad(ranks):
    """Those of the parameter."""
    placements = ranks[0]["positions"][3]
    assert str(placements["blocks.0.q.weight"]) == "(Shard(dim=0),)"
    assert str(placements["blocks.0.o.weight"]) == "(Shard(dim=1),)"
    assert placements["blocks.0.n1.weight"] == placements["blocks.0.o.bias"] == (Replicate(),)


def test_noise(ranks):
    assert_noise(ranks)


def assert_noise(ranks):
    """Replicas have the same and stay the same to the bit, parts have another; each step has its own."""
    found, replicas = ranks[0]["noise"]
    for rank in ranks:
        assert replicas.keys() == rank["noise"][1].keys()
        assert all(torch.equal(p, rank["noise"][1][name]) for name, p in replicas.items())
    steps = torch.stack([torch.cat([g.flatten() for g in step.values()]) for step in found])
    assert abs(steps.std() * 6 / (1e4 * C) - 1) < 0.03
    assert (torch.corrcoef(steps) - torch.eye(len(steps))).abs().max() < 0.3
    first = torch.cat([step["blocks.0.q.weight"].chunk(len(ranks))[0].flatten() for step in found])
    second = torch.cat([step["blocks.0.q.weight"].chunk(len(ranks))[1].flatten() for step in found])
    biases = torch.cat([step["blocks.0.o.bias"] for step in found])
    for one, two in ((first, second), (first[: len(biases)], biases), (second[: len(biases)], biases)):
        assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1]) < 0.25


def test_a_backward_pass_that_fails_leaves_nothing(ranks):
    for rank in ranks:
        error, untouched, gradients = rank["failing"]
        assert error == "ValueError: in the middle"
        assert untouched
        assert_gradients(gradients, clipped_sum(exact(), C))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("inputs", "StateError: ranks of one tensor parallel mesh were called with different inputs"),
        ("random", "StateError: parameters that each rank .* blocks.0.o.bias, .*random numbers differ"),
        ("threshold", "StateError: ranks disagree on what is clipped to what"),
        ("GradSampleModule", r"StateError: blocks.0.q \(Linear\) holds DTensor parameters"),
        ("placement", r"UnsupportedModuleError: blocks.0.up \(Linear\): .* weight S\(0\), bias R"),
    ],
)
def test_what_cannot_be_right_is_an_error_on_all_ranks(ranks, what, message):
    for rank in ranks:
        error, untouched = rank[what]
        assert re.search(message, error), error
        assert untouched


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("empty", "InputError: an empty batch"),
        ("without a secret", "StateError: .*must all add the same noise"),
        ("hooks off", "StateError: .*call remove_hooks"),
        ("DDP", "Error: .*DTensor"),
    ],
)
def test_what_cannot_work_is_refused(ranks, what, message):
    for rank in ranks:
        assert re.search(message, rank[what]), rank[what]
