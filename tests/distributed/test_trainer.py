"""Hugging Face's Trainer and accelerate, which give the hooked model to DistributedDataParallel themselves."""

import re

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import trainer_worker
from cases import assert_gradients
from processes import run_ranks
from trainer_worker import RATE, C, N, build, mean_of_sequences, sequences

from dpfast.testing import clipped_sum, loop_over_samples


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(trainer_worker.__file__, tmp_path_factory.mktemp("trainer"))


def samples_of(weights=None):
    model = build()
    return loop_over_samples(model, lambda m, x: mean_of_sequences(m(input_ids=x), x), sequences())


@pytest.mark.parametrize("what", ["exact", "parts"])
def test_the_trainers_first_step_is_that_of_one_process(ranks, what):
    """``parts``: two batches a step, the first of them under ``no_sync``."""
    for rank in ranks:
        assert not isinstance(rank[what], str), rank[what]
    parts = 2 if what == "parts" else 1
    taken = [sample for rank in ranks for part in rank[what][0][:parts] for sample in part]
    batch = {name: g[taken] for name, g in samples_of().items()}
    exact = {name: g / (N * RATE * parts) for name, g in clipped_sum(batch, C).items()}
    for rank in ranks:
        assert_gradients({name: rank[what][1][0][name] for name in exact}, exact)


def test_replicas_stay_equal_to_the_bit(ranks):
    (first, _, weights), (second, _, others) = (rank["noise"] for rank in ranks)
    assert first != second
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert not torch.equal(
        weights["lm_head.weight" if "lm_head.weight" in weights else "transformer.wte.weight"],
        build().transformer.wte.weight,
    )


def test_accelerate(ranks):
    exact = {name: g / (N * RATE) for name, g in clipped_sum(samples_of(), C).items()}
    for rank in ranks:
        assert not isinstance(rank["accelerate"], str), rank["accelerate"]
        assert_gradients(rank["accelerate"], exact)


@pytest.mark.parametrize("what", ["no secret", "accelerate, no secret"])
def test_without_a_secret_the_error_says_what_to_pass(ranks, what):
    for rank in ranks:
        assert re.search(r"give the optimizer secret=dpfast.distributed.SharedSecret.agreed\(\)", str(rank[what]))
