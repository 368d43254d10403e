"""A factor against the gradients that it stands for."""

import torch

from dpfast.testing import relative_error


def ordinary(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def assert_stands_for(factor, exact):
    n = exact.shape[0]
    norms = exact.reshape(n, -1).norm(dim=1) if n else exact.new_zeros(0)
    assert factor.num_samples == n and factor.shape == exact.shape[1:]
    assert relative_error(factor.materialize(), exact) <= 1e-5
    assert relative_error(factor.materialize(scale=3.0), 3.0 * exact) <= 1e-5
    for form in (factor, factor.kept(), factor.materialized()):
        value, upper = form.sq_norm()
        assert relative_error(value.sqrt(), norms) <= 1e-5
        assert (upper.sqrt() >= norms).all()
        assert (upper.sqrt() <= norms * 1.001 + 1e-10).all()
        assert (upper >= value).all()
        c = torch.rand(n, generator=torch.Generator().manual_seed(0)).to(exact.device)
        summed = form.weighted_sum(c)
        assert summed.shape == factor.shape
        assert relative_error(summed, torch.einsum("n,n...->...", c.double(), exact)) <= 1e-5
