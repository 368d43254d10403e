"""``gradient_as_bucket_view=True`` trains as without: DDP's own tensors in p.grad lose no note, and keep no mark."""

import ddp_views_worker
import pytest
import torch
from ddp_views_worker import WAYS
from processes import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(ddp_views_worker.__file__, tmp_path_factory.mktemp("views"))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["outside", "inside"])
def test_trains_as_without_views(ranks, order, way, to_none, passes):
    for rank in ranks:
        without, with_views = rank[order, way, to_none, passes]
        assert not isinstance(without, str), without
        assert not isinstance(with_views, str), with_views
        torch.testing.assert_close(with_views[0], without[0], rtol=0.0, atol=1e-6)
        assert with_views[1] == without[1]
    assert torch.equal(*(rank[order, way, to_none, passes][1][0] for rank in ranks))


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_gradient_that_no_note_tells_of_is_refused_on_all_ranks(ranks, order):
    for rank in ranks:
        assert rank[order, "no note"].startswith("StateError"), rank[order, "no note"]


@pytest.mark.parametrize("when", ["before", "behind", "before the third"])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("order", ["outside", "inside"])
def test_sum_that_is_replaced_later_is_refused_on_all_ranks(ranks, order, views, when):
    """In the second pass DDP itself puts views of its buckets into p.grad; where somebody has replaced one, they had
    the notes of the last pass all the same."""
    for number, rank in enumerate(ranks):
        error = str(rank[order, "replaced", views, when])
        assert error.startswith("StateError"), error
        assert number or "p.grad of 1 of the 2 parameters" in error, error
