"""Gradients of experts' weights against a loop over rows, and a sample's bits in whatever batch it stands."""

import pytest
import torch
from standing_for import assert_stands_for, ordinary

from dpfast.factors import Dense, OfExperts, OuterProduct, folded, merge
from dpfast.factors.runs import Runs

N, T, K, E, D, P = 4, 5, 2, 6, 9, 7
NEVER = 4  # the expert that nobody's row goes to


def routed(tokens, num_tokens, seed=0):
    """The expert and the token of each row, sorted by expert; expert 5 has one row."""
    g = torch.Generator().manual_seed(seed)
    experts = torch.randint(0, 4, (num_tokens * K,), generator=g)
    if num_tokens > 2:
        experts[3] = 5
    experts, order = experts.sort(stable=True)
    return experts, tokens[order // K], order


def a_factor(kind, num_tokens, rows=slice(None)):
    experts, tokens, order = routed(torch.arange(num_tokens), num_tokens)
    a = ordinary(num_tokens * K, 1, D, seed=1)[order]
    b = ordinary(num_tokens * K, 1, P, seed=2)[order]
    of_rows = OuterProduct(a, b) if kind == "weight" else Dense(b.squeeze(1))
    exact = torch.zeros(num_tokens, E, P, *((D,) if kind == "weight" else ()), dtype=torch.float64)
    for i, (expert, token) in enumerate(zip(experts.tolist(), tokens.tolist(), strict=True)):
        x, y = a[i, 0].double(), b[i, 0].double()
        exact[token, expert] += torch.outer(y, x) if kind == "weight" else y
    return OfExperts(of_rows, experts, E, Runs(tokens, num_tokens)), exact


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("together", [True, False])
def test_rows_of_tokens_become_samples(kind, together):
    factor, exact = a_factor(kind, N * T)
    assert_stands_for(factor, exact)
    parted = exact.unflatten(0, (N, T)) if together else exact.unflatten(0, (T, N)).transpose(0, 1)
    of_samples = folded(factor, N, rows_together=together)
    assert_stands_for(of_samples, parted.sum(1))
    assert not of_samples.materialize()[:, NEVER].any()
    assert (of_samples.materialize()[:, 5].flatten(1).any(1)).sum() == 1
    twice = merge([of_samples, Dense(2.0 * parted.sum(1).float())])
    assert_stands_for(twice, 3.0 * parted.sum(1))


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_rows_that_are_nobodys_add_nothing(kind):
    factor, exact = a_factor(kind, N * T)
    ids = torch.arange(N * T) // T - 1  # the first sample's are nobody's
    assert_stands_for(factor.by_unit(Runs(ids, N)), torch.cat([exact.unflatten(0, (N, T)).sum(1)[1:], exact[:1] * 0]))


def test_no_samples():
    factor, exact = a_factor("weight", 0)
    assert_stands_for(factor, exact)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_samples_bits_are_its_own(kind):
    """In the batch, and where the others' rows are nobody's: norm, bound and gradient."""
    factor, _ = a_factor(kind, N * T)
    batch = folded(factor, N, rows_together=True)
    for n in range(N):
        ids = torch.where(torch.arange(N * T) // T == n, 0, -1)
        alone = factor.by_unit(Runs(ids, 1))
        for one, all_of in zip(alone.sq_norm(), batch.sq_norm(), strict=True):
            assert torch.equal(one, all_of[n : n + 1])
        assert torch.equal(alone.materialize()[0], batch.materialize()[n])


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_sample(kind, what):
    factor, exact = a_factor(kind, N * T)
    mine = factor.runs.ids // T == 2
    of = factor.rows.backprops if kind == "weight" else factor.rows.values
    of[mine] = what
    samples = folded(factor, N, rows_together=True)
    assert samples.sq_norm().upper.isfinite().tolist() == [True, True, False, True]
    c = torch.tensor([1.0, 1.0, 0.0, 1.0])
    exact = exact.unflatten(0, (N, T)).sum(1)[[0, 1, 3]].sum(0)
    assert (samples.weighted_sum(c) - exact).norm() <= 1e-5 * exact.norm()
