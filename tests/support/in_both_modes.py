"""A model's gradients in both modes, one step after the other, against those of a loop over samples."""

import copy

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

C = 0.3


def check(model, *batches):
    """The loss is the sum of what the model gives."""
    samples = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    clipping = GradSampleModuleFastGradientClipping(copy.deepcopy(model), max_grad_norm=C, loss_reduction="sum")
    for x in batches:
        exact = loop_over_samples(model, lambda m, x: m(x).sum(), x)
        summed, size = clipped_sum(exact, C), float(norms_of(exact).norm()) + 1e-30
        for wrapped in (samples, clipping):
            wrapped.zero_grad()
            wrapped(x).sum().backward()
        for name, gradients in exact.items():
            by_sample = samples._module.get_parameter(name).grad_sample
            assert by_sample is None or by_sample.shape == gradients.shape
            found = gradients.new_zeros(()) if by_sample is None else by_sample  # one that is not used
            assert float((found - gradients).norm()) <= 1e-5 * size, name
            if len(x):
                assert float((clipping._module.get_parameter(name).grad - summed[name]).norm()) <= 1e-4 * size, name
        if len(x):
            assert relative_error(clipping.get_norm_sample(), norms_of(exact)) <= 1e-5
