"""Rows that are added where they belong."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dpfast.arithmetic import sums
from dpfast.factors import Lookup


class Named(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(50,), (50, 3)])
def test_rows_are_added(shape):
    places, rows = torch.randint(0, 7, (50,)), torch.randn(shape, dtype=torch.float64)
    total = torch.randn(7, *shape[1:], dtype=torch.float64)
    expected = total.clone()
    for place, row in zip(places.tolist(), rows, strict=True):
        expected[place] += row
    assert sums.add_rows(total, places, rows) is total
    assert torch.allclose(total, expected, rtol=1e-14, atol=1e-14)


def test_nothing_is_added_by_atomics_on_a_gpu():
    """Which device it is, an operation on tensors without values does not know: they go the GPU's way."""
    lookup = Lookup(torch.zeros(3, 5, dtype=torch.long, device="meta"), torch.ones(3, 5, 4, device="meta"), 100_000)
    with Named() as seen:
        lookup.materialize(2.0)
        lookup.segments()
        lookup.unfinished_of(None)
    assert not any(name.startswith(("index_add", "scatter")) for name in seen.names)
    assert any(name.startswith(("index_put", "_index_put")) for name in seen.names)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_adds_in_the_order_of_the_rows():
    places = torch.randint(0, 7, (5000,), device="cuda")
    rows = torch.randn(5000, 3, device="cuda")
    first = sums.add_rows(torch.zeros(7, 3, device="cuda"), places, rows)
    for _ in range(5):
        assert torch.equal(sums.add_rows(torch.zeros(7, 3, device="cuda"), places, rows), first)
    others = places != 3
    alone = sums.add_rows(torch.zeros(7, 3, device="cuda"), places[others], rows[others])
    assert torch.equal(alone[:3], first[:3]) and torch.equal(alone[4:], first[4:])
