"""What optimizers of different ranks must have alike, or noise would be too small for what is released, or the same for
two sums."""

import agreement_worker
import pytest
import torch
from agreement_worker import OF_RANKS
from processes import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(agreement_worker.__file__, tmp_path_factory.mktemp("agreement"))


@pytest.mark.parametrize("what", OF_RANKS)
def test_opacus_s_workers_divide_by_the_same(ranks, what):
    """Each divides its own sum; with two passes of the first worker the noise was half of what it should be."""
    for rank in ranks:
        if what == "the same":
            assert rank[what] is None
        else:
            assert str(rank[what]).startswith("StateError: ranks disagree"), rank[what]


@pytest.mark.parametrize("optimizer", ["DPOptimizerFast", "OnePassOptimizer"])
def test_passes_under_no_sync_are_clipped_to_the_same(ranks, optimizer):
    """Else one rank alone raised, or replicas had the same noise in two sizes."""
    for rank in ranks:
        assert str(rank["no_sync", optimizer]).startswith("StateError: ranks disagree"), rank["no_sync", optimizer]


def test_trainings_of_two_groups_do_not_share_their_noise(ranks):
    for rank in ranks:
        assert str(rank["one secret"]).startswith("StateError: p.grad holds the sum over 1 ranks"), rank["one secret"]
    first, second = (rank["secrets"] for rank in ranks)
    assert torch.corrcoef(torch.stack((first, second)))[0, 1].abs() < 0.5 and first.norm() > 0.1
