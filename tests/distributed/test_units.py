"""Units over two ranks (gloo), against a loop in one process that has all of them."""

import pytest
import torch
import units_worker
from cases import assert_gradients, sum_loss
from packed_cases import Packed, by_document, packed
from processes import run_ranks
from units_worker import ROWS, SPLITS, USERS, WRAPPERS, C, samples

from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(units_worker.__file__, tmp_path_factory.mktemp("units"))


def summed(gradients, ids, number):
    """By unit."""
    members = [[i for i, unit in enumerate(ids) if unit == u] for u in range(number)]
    return {name: torch.stack([g[some].sum(0) for some in members]) for name, g in gradients.items()}


@pytest.fixture(scope="module")
def exact():
    """{(what, per_unit): gradients of all units}."""
    users = summed(loop_over_samples(samples()[0], sum_loss, *samples()[1:]), USERS.tolist(), 5)
    torch.manual_seed(0)
    (_, _, ids, _), documents = packed()
    documents = by_document(Packed(), documents)
    found = {("samples", "sum"): users, ("tokens", "sum"): documents}
    for what, of, whose in (("samples", users, USERS), ("tokens", documents, ids)):
        counts = torch.bincount(whose[whose >= 0], minlength=5).clamp(min=1)
        found[what, "mean"] = {name: g / counts.view(-1, *[1] * (g.dim() - 1)) for name, g in of.items()}
    return found


def assert_step(ranks, what, of_units, of_rank):
    """Every rank has the clipped sum over all units, and norms of those that are its own."""
    assert not isinstance(ranks[0][what], str), ranks[0][what]
    norms = norms_of(of_units)
    for rank, own in zip(ranks, of_rank, strict=True):
        gradients, found = rank[what]
        assert_gradients(gradients, clipped_sum(of_units, C))
        mine = torch.zeros(len(norms), dtype=torch.float64)
        mine[own] = norms[own]
        assert relative_error(found, mine) <= 1e-5


USERS_OF = {split: [USERS[some][USERS[some] >= 0].unique() for some in parts] for split, parts in SPLITS.items()}
DOCUMENTS_OF = {"unequal": ([0, 1], [2, 3, 4]), "no rows": ([0, 1, 2, 3, 4], []), "nobody's": ([0, 1, 2, 3, 4], [])}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("split", SPLITS)
def test_units_of_samples(ranks, exact, wrapper, split):
    assert_step(ranks, (wrapper, "samples", split), exact["samples", "sum"], USERS_OF[split])


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("split", ROWS)
def test_units_of_packed_tokens(ranks, exact, wrapper, split):
    assert_step(ranks, (wrapper, "tokens", split), exact["tokens", "sum"], DOCUMENTS_OF[split])


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("per_unit", ["sum", "mean"])
def test_losses_that_are_means_over_a_ranks_own(ranks, exact, wrapper, per_unit):
    for what, of_rank in (("samples", USERS_OF), ("tokens", DOCUMENTS_OF)):
        assert_step(ranks, (wrapper, what, per_unit, "mean"), exact[what, per_unit], of_rank["unequal"])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_numbers_of_a_ranks_units_are_its_own(ranks, exact, wrapper):
    norms = norms_of(exact["samples", "sum"])
    for rank, users in zip(ranks, USERS_OF["unequal"], strict=True):
        gradients, found = rank[wrapper, "samples", "local"]
        assert_gradients(gradients, clipped_sum(exact["samples", "sum"], C))
        assert found.shape == (2,) and relative_error(found, norms[users]) <= 1e-5


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_documents_that_meet_are_refused(ranks, wrapper):
    """Under FSDP2 by a copy whose parameters are others: no rank has them all."""
    for rank in ranks:
        assert "units meet in it" in rank[wrapper, "tokens", "meet"]


def test_a_rank_that_clips_samples_beside_one_that_clips_units(ranks):
    for rank in ranks:
        assert rank["other settings"].startswith("StateError: ranks disagree")


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_the_engine_draws_units_for_all_ranks(ranks, wrapper):
    first, second = (rank[wrapper, "engine"] for rank in ranks)
    assert not isinstance(first, str), first
    model, x, y = units_worker.opacus_example("mlp", 24)
    users = torch.arange(24) % 9
    samples = loop_over_samples(model, lambda m, a, b: torch.nn.functional.cross_entropy(m(a), b), x, y)
    assert len(first[0]) == 2
    for taken, others, got in zip(first[0], second[0], first[1], strict=True):
        drawn = users[[*taken, *others]].unique().tolist()
        assert sorted([*taken, *others]) == [i for i, user in enumerate(users.tolist()) if user in drawn]
        assert not set(users[taken].tolist()) & set(users[others].tolist())
        of_units = {name: g[drawn] for name, g in summed(samples, users.tolist(), 9).items()}
        assert_gradients(got, {name: g / first[2] for name, g in clipped_sum(of_units, C).items()})
