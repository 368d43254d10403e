"""Two processes on a CPU (gloo) with models of transformers that are parted by their own plan, against one process."""

import re

import pytest
import torch
import tp_plan_worker
from cases import assert_gradients
from processes import run_ranks
from tp_plan_worker import case, losses
from tp_worker import C

from dpfast.testing import clipped_sum, loop_over_samples, norms_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(tp_plan_worker.__file__, tmp_path_factory.mktemp("plan"))


@pytest.mark.parametrize(
    ("what", "name", "options"),
    [
        ("Llama", "Llama", {}),
        ("Qwen2", "Qwen2", {}),  # biases of the columns
        ("Qwen3", "Qwen3", {}),  # norms of each rank's own heads
        ("two passes", "Llama", {}),
        ("tied", "Llama", {"tie_word_embeddings": True}),
        ("biases", "Llama", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_models_that_are_loaded_with_their_plan(ranks, what, name, options):
    model, x = case(name, **options)
    samples = loop_over_samples(model, lambda m, a: losses(m, a).sum(), x)
    for rank in ranks:
        assert not isinstance(rank[what], str), rank[what]
        gradients, norms, factors, same = rank[what]
        assert_gradients(gradients, clipped_sum(samples, C))
        assert torch.allclose(norms.double(), norms_of(samples), rtol=1e-5)
        assert torch.equal(factors, ranks[0][what][2])
        assert same


def test_without_hooks_the_plan_is_as_it_was(ranks):
    model, x = case("Qwen3")
    losses(model, x).sum().backward()
    for rank in ranks:
        gradients, parts = rank["taken off"]
        assert parts > 10
        assert_gradients(gradients, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("Mixtral", r"UnsupportedModuleError: .*mlp.experts .*\(MixtralExperts\)"),
        ("plain parts", r"StateError: model.layers.0.mlp.up_proj \(Linear\) has parts .* plain tensors"),
    ],
)
def test_what_is_refused(ranks, what, message):
    for rank in ranks:
        assert isinstance(rank[what], str), f"no error: {what}"
        assert re.search(message, rank[what]), rank[what]
