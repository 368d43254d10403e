"""Large layers under DDP are taken in turn, with the sums of one process; under FSDP2 sums are few at a time."""

import in_turn_worker
import pytest
import torch
from in_turn_worker import C, case, losses
from processes import run_ranks

from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(in_turn_worker.__file__, tmp_path_factory.mktemp("in_turn"))


@pytest.mark.parametrize(("inside", "taken"), [("DDP", [3, 3]), ("FSDP2", [])])
def test_the_sums_of_all_ranks_are_those_of_a_loop(ranks, inside, taken):
    exact = loop_over_samples(case()[0], lambda *of: losses(*of).sum(), *case()[1:])
    assert relative_error(torch.cat([rank[inside][1] for rank in ranks]), norms_of(exact)) <= 1e-5
    for grads, _, how_many in (rank[inside] for rank in ranks):
        assert how_many == taken
        for name, total in clipped_sum(exact, C).items():
            assert relative_error(grads[name], 2 * total) <= 1e-3, name


def test_a_write_on_one_rank_is_an_error_of_all(ranks):
    first, second = (rank["written"] for rank in ranks)
    assert "was written to while the backward pass went on" in second
    assert first.startswith("StateError") and "ranks" in first
