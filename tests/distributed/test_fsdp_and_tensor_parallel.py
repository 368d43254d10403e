"""Four processes on a CPU (gloo): FSDP2 on one axis of the mesh, tensor parallel on the other, against one process."""

import re
from collections import Counter

import pytest
import torch
import tp_fsdp_worker
from cases import assert_gradients
from processes import run_ranks
from tp_fsdp_worker import FROZEN, SPLITS, UNITS
from tp_worker import HOW, C, exact

from dpfast.testing import clipped_sum, norms_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(tp_fsdp_worker.__file__, tmp_path_factory.mktemp("grid"), ranks=4)


def assert_step(ranks, what, samples, times=1, split="equal", tolerance=1e-5):
    summed = {name: times * g for name, g in clipped_sum(samples, C).items()}
    parts = norms_of(samples).split([SPLITS[split], 6 - SPLITS[split]])
    for number, rank in enumerate(ranks):
        found, own = rank[what], parts[number // 2]
        assert not isinstance(found, str), found
        assert_gradients(found[0], summed, tolerance)
        assert torch.equal(found[2], ranks[number // 2 * 2][what][2]), "clip factors of one row of the grid"
        if len(own):
            assert torch.allclose(found[1].double(), own, rtol=tolerance)
        else:
            assert found[1].tolist() == [0.0], "padding"


@pytest.mark.parametrize("how", HOW)
def test_each_rank_has_its_part_of_its_shard_of_the_clipped_sum(ranks, how):
    assert_step(ranks, how, exact())
    assert_step(ranks, (how, "two passes"), exact())
    summed = {name: clipped_sum({name: g}, C)[name] for name, g in exact().items()}
    for rank in ranks:
        assert_gradients(rank[how, "per layer"][0], summed)


@pytest.mark.parametrize("how", HOW)
def test_collectives(ranks, how):
    """FSDP2's own, one all-gather of norms, and one all-reduce where norms' gradients are of parts of the positions."""
    more = {"all_gather_into_tensor": 1, **({"all_reduce": 1} if how == "positions" else {})}
    for rank in ranks:
        assert rank[how][3] == Counter(rank[how, "plain"]) + Counter(more)


@pytest.mark.parametrize(
    ("what", "model"),
    [
        ("after", {}),
        ("around", {}),
        ("tied", {"tied": True}),
        ("few words", {"vocabulary": 3}),
        ("checkpointed", {}),
        ("copies", {}),
        ("layer by layer", {}),
        ("kept whole", {}),
        ("offloaded", {}),
    ],
)
def test_models_and_ways_of_sharding(ranks, what, model):
    assert_step(ranks, what, exact(**model))


@pytest.mark.parametrize("split", SPLITS)
def test_parts_of_the_batch(ranks, split):
    """In the place of no samples, one of padding."""
    assert_step(ranks, split, exact(), split=split)


@pytest.mark.parametrize("how", HOW)
def test_units_of_samples(ranks, how):
    """Each row of the grid has its own."""
    rows = []
    for own, ids in zip(_rows(exact()), UNITS.split(3), strict=True):
        rows.append({name: torch.stack([g[ids == unit].sum(0) for unit in range(3)]) for name, g in own.items()})
    one, other = (clipped_sum(row, C) for row in rows)
    for number, rank in enumerate(ranks):
        assert not isinstance(rank[how, "units"], str), rank[how, "units"]
        found, norms, factors = rank[how, "units"]
        assert_gradients(found, {name: one[name] + other[name] for name in one})
        assert torch.allclose(norms.double(), norms_of(rows[number // 2]), rtol=1e-5)
        assert torch.equal(factors, ranks[number // 2 * 2][how, "units"][2])


def _rows(samples):
    return ({name: g[:3] for name, g in samples.items()}, {name: g[3:] for name, g in samples.items()})


def test_bf16_copies_of_fp32_parameters(ranks):
    assert_step(ranks, "bf16", exact(), tolerance=0.03)


def test_several_passes(ranks):
    assert_step(ranks, "added up", exact(), times=3)
    for rank in ranks:
        assert not isinstance(rank["accumulated"], str), rank["accumulated"]
        assert_gradients(rank["accumulated"][0], clipped_sum(exact(), C))
        assert "reduce_scatter" not in rank["accumulated"][1]


def test_frozen_parameters(ranks):
    for rank in ranks:
        assert not isinstance(rank["frozen"], str), rank["frozen"]
        assert_gradients(rank["frozen"], clipped_sum(exact(frozen=FROZEN), C))


def test_noise(ranks):
    """What several ranks have is the same on them, to the bit; everything else is drawn for itself, each step anew."""
    found = ranks[0]["noise"][0]
    assert not isinstance(found, str), found
    steps = torch.stack([torch.cat([g.flatten() for g in step.values()]) for step in found])
    assert abs(steps.std() * 6 / (1e4 * C) - 1) < 0.03
    assert (torch.corrcoef(steps) - torch.eye(len(steps))).abs().max() < 0.3
    own = [rank["noise"][1] for rank in ranks]
    for first, second in ((0, 1), (2, 3)):
        for one, two in zip(own[first], own[second], strict=True):
            assert torch.equal(one["blocks.0.n1.weight"], two["blocks.0.n1.weight"])
            assert torch.equal(one["blocks.0.down.bias"], two["blocks.0.down.bias"])
    for name in ("blocks.0.q.weight", "blocks.0.o.weight"):  # by rows, and by rows and columns
        parts = torch.stack([torch.cat([step[name].flatten() for step in one]) for one in own])
        assert (torch.corrcoef(parts) - torch.eye(4)).abs().max() < 0.15


def test_a_run_goes_on_on_another_grid(ranks):
    """With the same batches and the same noise."""
    for rank in ranks:
        assert not isinstance(rank["resumed"], str), rank["resumed"]
    dealt = [ranks[0]["trained"][0], ranks[2]["trained"][0]]
    again = [rank["resumed"][0] for rank in ranks]
    for step in range(2):
        batch = sorted(sample for batches in dealt for sample in batches[step + 1])
        assert batch == sorted(sample for batches in again for sample in batches[step])
    for name, weight in ranks[0]["trained"][1].items():
        assert torch.allclose(weight, ranks[0]["resumed"][1][name], atol=1e-5), name


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("threshold of parts", "ranks disagree on what is clipped to what"),
        ("threshold of shards", "ranks disagree on what is clipped to what"),
        ("threshold of one", "ranks disagree on what is clipped to what"),
        ("one freezes", "ranks disagree on what is clipped to what"),
        ("a row freezes", "ranks disagree on what is clipped to what"),
        ("inputs", "called with different inputs"),
        ("random", "that each rank of a tensor parallel mesh has whole .* random numbers differ"),
    ],
)
def test_ranks_that_disagree_all_raise(ranks, what, message):
    for rank in ranks:
        error, untouched = rank[what]
        assert re.search(f"StateError: .*{message}", error), error
        assert untouched


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("GradSampleModule", "StateError: .*was given to fully_shard, and GradSampleModule has no gradients"),
        ("without a secret", "StateError: .*must all add the same noise"),
        ("resharded to a few", "StateError: fully_shard.*use reshard_after_forward=True or False"),
        ("engine", "InputError: the model sums over 2 of 4 ranks"),
    ],
)
def test_what_cannot_work_is_refused(ranks, what, message):
    for rank in ranks:
        assert isinstance(rank[what], str), f"no error: {what}"
        assert re.search(message, rank[what]), rank[what]
