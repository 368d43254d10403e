"""Ranks that do not clip the same to the same: the same error on all of them, and no rank waits for another."""

import disagreement_worker
import pytest
import torch
from cases import Mlp, assert_gradients, mean_loss
from disagreement_worker import SECOND_PASSES, WRAPPERS, C
from processes import run_ranks

from dpfast.testing import clipped_sum, loop_over_samples


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(disagreement_worker.__file__, tmp_path_factory.mktemp("disagreement"))


def test_all_ranks_raise_the_same_error(ranks):
    def is_one(what):
        return isinstance(what, tuple) and len(what) == 2

    of_all = [{what: error for what, error in rank.items() if is_one(what)} for rank in ranks]
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


@pytest.mark.parametrize(("wrapper", "how"), SECOND_PASSES)
def test_a_rank_whose_second_pass_does_not_repeat_the_first(ranks, wrapper, how):
    """It says why, and the others do not wait for its sums."""
    (model, x, y), losses = disagreement_worker.case(wrapper), disagreement_worker.losses(wrapper)
    exact = clipped_sum(loop_over_samples(model, lambda *batch: losses(*batch).sum(), x, y), C)
    for i, rank in enumerate(ranks):
        assert not isinstance(rank[wrapper, how, "second pass"], str), rank[wrapper, how, "second pass"]
        error, untouched, after = rank[wrapper, how, "second pass"]
        wrong = "the second backward pass is not that of" if i == 0 else "ranks disagree"
        assert error is not None and error.startswith(f"StateError: {wrong}"), error
        assert untouched
        if wrapper != "FSDP2":
            assert_gradients(after, {name: g * (len(ranks) if wrapper == "DDP" else 1) for name, g in exact.items()})
