"""Two processes on a CPU (gloo) under DistributedDataParallel, against one process that has the whole batch."""

import re

import ddp_worker
import pytest
import torch
from ddp_worker import SPLITS, WAYS, C, N, case
from processes import run_ranks

from dpfast.testing import clipped_sum, loop_over_samples, relative_error

ORDERS = ("outside", "inside")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(ddp_worker.__file__, tmp_path_factory.mktemp("ddp"))


def summed_loss(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y, reduction="sum")


def exact_sum(kind, per_layer=False):
    model, x, y = case(kind)
    samples = loop_over_samples(model, summed_loss, x, y)
    if not per_layer:
        return clipped_sum(samples, C)
    return {name: clipped_sum({name: g}, C)[name] for name, g in samples.items()}


def assert_close(found, exact, most=1e-5):
    assert not isinstance(found, str), found
    assert found.keys() == exact.keys()
    for name, gradient in exact.items():
        assert relative_error(found[name], gradient) < most, name


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_every_rank_has_the_clipped_sum_over_all(ranks, order, way):
    exact = exact_sum("tied")
    for rank in ranks:
        assert not isinstance(rank[order, way], str), rank[order, way]
        gradients, samples, collectives = rank[order, way]
        assert_close(gradients, exact)
        assert samples == N // 2
        # The last bucket also carries 16 numbers of 4 bytes, by which ranks see that they clip to the same.
        plain = rank["plain"][way]
        assert collectives == {"calls": plain["calls"], "bytes": plain["bytes"] + 64}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulate", ["no_sync", "sync"])
def test_accumulation(ranks, order, way, accumulate):
    """Two backward passes a step; nothing is summed over ranks twice."""
    for rank in ranks:
        assert_close(rank[order, way, accumulate][0], exact_sum("tied"))


@pytest.mark.parametrize("order", ORDERS)
def test_a_rank_without_samples_keeps_count_of_its_passes(ranks, order):
    """Its sums are zeros, which DDP writes again behind the first of two passes."""
    for rank in ranks:
        assert_close(rank[order, "two passes, parts, empty"], exact_sum("mlp"))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_without_zero_grad_sums_add_up(ranks, order, way):
    for rank in ranks:
        assert_close(rank[order, way, "added up"][0], {name: 3 * g for name, g in exact_sum("mlp").items()})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_convolutions_in_channels_last(ranks, order, way):
    """DDP's buckets have entries in the order of the parameter's memory."""
    for rank in ranks:
        assert_close(rank[order, way, "channels last"][0], exact_sum("channels last"))


def test_a_parameter_frozen_since_ddp_was_made(ranks):
    model, x, y = case("mlp")
    model[0].weight.requires_grad = False
    exact = clipped_sum(loop_over_samples(model, summed_loss, x, y), C)
    for rank in ranks:
        assert_close(rank["frozen later"], exact)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("split", SPLITS)
def test_unequal_and_empty_parts(ranks, order, split):
    for number, rank in enumerate(ranks):
        gradients, samples, _ = rank[order, split]
        assert_close(gradients, exact_sum("transformer"))
        assert samples == (SPLITS[split], N - SPLITS[split])[number]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("what", "kind", "most"),
    [
        (("zeroed", 1), "mlp", 1e-5),
        (("zeroed", 2), "mlp", 1e-5),
        (("two passes",), "transformer", 1e-5),
        (("mean",), "mlp", 1e-5),
        (("fp64",), "mlp", 1e-6),
        (("bf16",), "mlp", 0.03),
    ],
)
def test_modes(ranks, order, what, kind, most):
    for rank in ranks:
        assert_close(rank[(order, *what)][0], exact_sum(kind), most)


@pytest.mark.parametrize("order", ORDERS)
def test_clipping_by_parameter(ranks, order):
    for rank in ranks:
        assert_close(rank[order, "per layer"][0], exact_sum("tied", per_layer=True))


def test_hooks_off_are_ddps_ordinary_gradients(ranks):
    model, x, y = case("mlp")
    summed_loss(model, x, y).backward()
    mean = {name: p.grad.double() / 2 for name, p in model.named_parameters()}
    for rank in ranks:
        before, behind, private = rank["hooks off"]
        assert_close(before, mean)
        assert_close(behind, mean)
        assert_close(private, exact_sum("mlp"))


@pytest.mark.parametrize("order", ORDERS)
def test_parameters_that_no_rank_used_have_zeros(ranks, order):
    for rank in ranks:
        gradients = rank[order, "unused, found"]
        assert any(g.any() for g in gradients.values())
        assert not any(g.any() for name, g in gradients.items() if "skipped" in name)


ERRORS = {
    "unused": "StateError: DistributedDataParallel does not wait for .*find_unused_parameters=True",
    "unused, two passes": "StateError: DistributedDataParallel does not wait for .*find_unused_parameters=True",
    "functional": "EscapedGradientError: .*skipped.weight",
    "materialized": "StateError: DistributedDataParallel leaves GradSampleModule wrong gradients",
    "static": "InputError: .*static_graph=True",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("what", ERRORS)
def test_nothing_is_silent(ranks, order, what):
    for rank in ranks:
        assert_error(rank[order, what], ERRORS[what])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (("mixed",), "StateError: p.grad holds the sum of all ranks"),
        (("past DDP first",), "StateError: p.grad holds a sum over 1 ranks, and this backward pass leaves one over 2"),
        (("past DDP then",), "StateError: p.grad holds a sum over 2 ranks, and this backward pass leaves one over 1"),
        (("passes differ",), "StateError: ranks disagree"),
        (("python reducer",), "InputError: .*python_reducer"),
        (("other trainable",), "InputError: DistributedDataParallel also trains module.b.weight"),
        (("hook",), "InputError: DistributedDataParallel has a communication hook"),
        (("nested",), r"StateError: 1 \(DistributedDataParallel\)"),
        (("joined",), "StateError: .*join"),
        *((("fsdp1", order, originals), "Error: ") for order in ORDERS for originals in (False, True)),
    ],
)
def test_what_cannot_work_is_refused(ranks, what, message):
    for rank in ranks:
        assert_error(rank[what[0] if len(what) == 1 else what], message)


def test_ranks_that_disagree_all_raise(ranks):
    for rank in ranks:
        error, untouched = rank["disagreement"]
        assert_error(error, "StateError: ranks disagree on what is clipped to what")
        assert untouched


def assert_error(found, message):
    assert isinstance(found, str), f"no error: {found}"
    assert re.search(message, found), found
