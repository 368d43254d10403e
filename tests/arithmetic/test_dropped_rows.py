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


@pytest.mark.parametrize("held", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("t", [1, 6])
@pytest.mark.parametrize(("d", "p"), [(5, 7), (7, 5)])
def test_sums_of_layers_alike(held, t, d, p):
    layers, c = 3, torch.tensor([0.5, 0.0, 1.0, 0.0])
    a, b = torch.randn(layers, 4, t, d), torch.randn(layers, 4, t, p)
    for x in (a, b):
        x[:, c == 0] = held
    expected = torch.einsum("n,lntp,lntd->lpd", c[c != 0].double(), *(x[:, c != 0].double() for x in (b, a)))
    found = reference.weighted_sums(a.flatten(0, 1), b.flatten(0, 1), c, layers)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
