"""A sample with coefficient 0 adds exactly nothing, copied with zeros in its place or left as it is."""

import pytest
import torch

from dpfast.arithmetic import reference


@pytest.mark.parametrize("held", [0.0, 3.0, 1e38, float("inf"), float("nan")])
@pytest.mark.parametrize(("d", "p"), [(5, 7), (7, 5), (300, 500)])
def test_sums(held, d, p):
    a, b = torch.randn(4, 6, d), torch.randn(4, 6, p)
    c = torch.tensor([0.5, 0.0, 1.0, 0.0])
    keep = c != 0
    for x in (a, b):
        x[~keep] = held
    before = a.clone(), b.clone()
    expected = torch.einsum("n,ntp,ntd->pd", c[keep].double(), b[keep].double(), a[keep].double())
    torch.testing.assert_close(reference.weighted_sum(a, b, c).double(), expected, rtol=1e-4, atol=1e-4)
    rows = reference.weighted_rows([a], c)
    torch.testing.assert_close(rows, torch.einsum("n,ntd->td", c[keep], a[keep]))
    assert all(torch.equal(x, y) or x.isnan().any() for x, y in zip((a, b), before, strict=True))
    zeros = reference.weighted_sum(a.masked_fill(~keep[:, None, None], 0.0), b, c)
    assert torch.equal(zeros, reference.weighted_sum(a, b, c)), "to the bit"
