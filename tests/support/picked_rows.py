"""A model that picks rows, in both modes, against a loop over samples."""

import copy

import torch

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.testing import loop_over_samples, norms_of, relative_error


def loss(model, x):
    return torch.sin(3.0 * model(x)).flatten(1).mean(1).sum()


def assert_right(model, *batches):
    """One wrapped model takes all batches."""
    samples = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    for x in batches:
        exact = loop_over_samples(model, loss, x)
        norms = norms_of(exact)
        samples.zero_grad()
        loss(samples, x).backward()
        for name, p in samples._module.named_parameters():
            found = torch.zeros_like(exact[name]) if p.grad_sample is None else p.grad_sample
            assert ((found - exact[name]).flatten(1).norm(dim=1) <= 1e-5 * norms).all(), name
        clipped = GradSampleModuleFastGradientClipping(
            copy.deepcopy(model), loss_reduction="sum", max_grad_norm=float(norms.median())
        )
        loss(clipped, x).backward()
        assert relative_error(clipped.get_norm_sample(), norms) <= 1e-5
        factors = clipped.get_clipping_coef().double()
        for name, p in clipped._module.named_parameters():
            total = torch.einsum("n,n...->...", factors, exact[name])
            assert (p.grad - total).norm() <= 1e-5 * norms.max(), name
