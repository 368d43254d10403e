"""Accumulation over ranks with parameters that are frozen for some passes, or stepped by an optimizer of their own:
each has the sum of its own passes, once."""

import frozen_between_worker as worker
import pytest
from cases import assert_gradients
from frozen_between_worker import KINDS, RANKS, WAYS, C
from processes import run_ranks

from dpfast.testing import clipped_sum, loop_over_samples


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(worker.__file__, tmp_path_factory.mktemp("frozen"))


def exact(way):
    """({name: the clipped sum over all ranks}, {layer: passes})."""
    sums, passes = {}, dict.fromkeys(("0", "2"), 0)
    for seed, (_, frozen, cleared) in enumerate(WAYS[way]):
        for rank in range(RANKS):
            x, y = worker.data(seed, rank)
            samples = loop_over_samples(worker.net(), lambda m, x, y: worker.losses(m, x, y).sum(), x, y)
            trained = {name: g for name, g in samples.items() if name[0] != frozen}
            for name, total in clipped_sum(trained, C).items():
                sums[name] = sums.get(name, 0.0) + total
        passes = {layer: count + (layer != frozen) for layer, count in passes.items()}
        if cleared:
            passes[cleared] = 0
            sums = {name: total for name, total in sums.items() if name[0] != cleared}
    return sums, passes


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_each_layers_own_passes(ranks, kind, way, to_none):
    """They crossed ranks twice (DDP) or were dropped (FSDP2) beside others that had not crossed yet."""
    if kind == "views" and to_none:
        pytest.skip("torch: unused parameters whose gradients are views want zeros")
    sums, passes = exact(way)
    for rank in ranks:
        found = rank[kind, way, to_none]
        if (kind, way) == ("views", "in one that crosses"):  # DDP has put others in place of what was frozen
            assert str(found).startswith("StateError: p.grad of 2 of the 4 parameters, one 0.weight"), found
            continue
        assert not isinstance(found, str), found
        assert_gradients(found[0], sums)
        if to_none:  # else what was cleared may be counted: more passes, less of a step
            assert found[1] == {int(layer): count for layer, count in passes.items()}


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_sums_of_all_ranks_and_of_one_are_not_added_up(ranks, kind):
    """That other parameters hold this rank's alone is no excuse."""
    for rank in ranks:
        assert str(rank[kind, "mixed", False]).startswith("StateError: p.grad holds the sum of all ranks")
