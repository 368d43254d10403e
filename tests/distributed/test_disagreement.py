"""Ranks that do not clip the same to the same: the same error on all of them, and no rank waits for another."""

import disagreement_worker
import pytest
import torch
from cases import Mlp, assert_gradients, mean_loss
from disagreement_worker import WRAPPERS, C
from processes import run_ranks

from dpfast.testing import clipped_sum, loop_over_samples


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(disagreement_worker.__file__, tmp_path_factory.mktemp("disagreement"))


def test_all_ranks_raise_the_same_error(ranks):
    of_all = [{what: error for what, error in rank.items() if isinstance(what, tuple)} for rank in ranks]
    assert len(of_all[0]) == 3 * 5 + 2 + 5 + 1
    for errors in of_all:
        assert errors == of_all[0]
        for what, error in errors.items():
            assert error is not None and error.startswith("StateError: ranks disagree"), (what, error)
    assert not any(rank[wrapper] for rank in ranks for wrapper in WRAPPERS), "a step without any disagreement"


def test_a_layer_that_all_ranks_unfreeze_and_freeze_again(ranks):
    """Its sums cross with the first step that trains it."""
    torch.manual_seed(0)
    model, x, y = Mlp(), torch.randn(6, 12), torch.randint(0, 5, (6,))
    for i, trains in enumerate((False, True, False)):
        model[0].requires_grad_(trains)
        samples = loop_over_samples(model, mean_loss, x, y)
        exact = {f"inner.{name}": len(ranks) * g for name, g in clipped_sum(samples, C).items()}
        for rank in ranks:
            assert not isinstance(rank["on all"], str), rank["on all"]
            assert_gradients(rank["on all"][i], exact)
