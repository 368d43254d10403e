"""Norms of several kinds finished together: each as alone, in the order given; and what the bounds of each rest on."""

import pytest
import torch

from dpfast.arithmetic import StandardisedTerms, UnfinishedStandardised, finish, finished, unfinished_norm
from dpfast.arithmetic.reference_norms import unfinished_gram

N = 4


def gram(t, n=N):
    return unfinished_gram(torch.randn(n, t, 7), torch.randn(n, t, 9))


def standardised(inner, *, error=0.0, of=True):
    """Of channels from which J takes a little."""
    norm = finished(inner)
    taken, m, q = 0.1 * norm.value, norm.value.sqrt(), norm.value.sqrt()
    numbers = torch.stack([taken, m, q, torch.full_like(m, error), torch.ones_like(m)])
    terms = StandardisedTerms(1e-6, 1e-30, moments=1e-7, sums=1e-3, rounding=1e-6, stretch=1.5)
    return UnfinishedStandardised(inner, numbers, m if of else None, terms)


def test_together_as_alone():
    torch.manual_seed(0)
    parts = [
        gram(3),
        unfinished_norm([torch.randn(N, 11)]),
        standardised(gram(5)),
        gram(130),
        unfinished_norm([torch.randn(2 * N, 11)]),  # two layers
        standardised(unfinished_norm([torch.randn(N, 6)]), of=False),
        finished(gram(2)),
    ]
    together, row = finish(parts, N), 0
    for part in parts:
        alone = part if isinstance(part, tuple) and hasattr(part, "value") else finished(part)
        for start in range(0, len(alone.value), N):
            assert torch.equal(together.value[row], alone.value[start : start + N])
            assert torch.equal(together.upper[row], alone.upper[start : start + N])
            row += 1
    assert row == len(together.value)


@pytest.mark.parametrize("t", [1, 20, 129, 260])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e12])
def test_row_norms_from_diagonals_are_upper_bounds(t, scale):
    torch.manual_seed(t)
    a, b = torch.randn(3, t, 1030) * scale, torch.randn(3, t, 70)
    of_a, of_b = a.double().norm(dim=2), b.double().norm(dim=2)
    exact = [x.sum(1) for x in (of_a, of_b, of_a * of_b, of_a.square(), of_b.square())]
    for found, truth in zip(unfinished_gram(a, b).totals[4:], exact, strict=True):
        assert (found >= truth * (1.0 - 1e-14)).all()
        assert scale == 1e-20 or (found <= truth * 1.001).all()


def test_an_error_of_what_is_mapped_is_counted():
    torch.manual_seed(0)
    inner = unfinished_norm([torch.randn(N, 6)])
    without, with_error = (finished(standardised(inner, error=e, of=False)).upper.sqrt() for e in (0.0, 0.25))
    assert torch.allclose(with_error - without, torch.full_like(without, 1.5 * 0.25), rtol=1e-9)
