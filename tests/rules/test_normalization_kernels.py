"""Layer and RMS norms where kernels run: the bound of the norm is one, and the numbers are the reference's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpfast import GradSampleModule
from dpfast.arithmetic import bounds, finished
from dpfast.rules import normalization
from dpfast.rules.normalization import layer_norm, torch_rms_norm
from dpfast.testing import loop_over_samples, relative_error

LAYERS = {
    "layer": lambda width, eps: nn.LayerNorm(width, eps=eps),
    "rms": lambda width, eps: nn.RMSNorm(width, eps=eps),
}
RULES = {"layer": layer_norm, "rms": torch_rms_norm}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """A CPU takes samples with few entries in fp64."""
    monkeypatch.setattr(normalization, "_FEW", 0)


def exact(layer, x, b):
    """Per-sample gradients of weight and bias in fp64."""
    x, b = x.double(), b.double()
    mean = x.mean(-1, keepdim=True) if isinstance(layer, nn.LayerNorm) else 0.0
    normalized = (x - mean) * ((x - mean).square().mean(-1, keepdim=True) + layer.eps).rsqrt()
    return {"weight": (b * normalized).sum(1), "bias": b.sum(1)}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("eps", [1e-5, 1e-8, 1e-30])
@pytest.mark.parametrize("offset", [0.0, 30.0, 3000.0])
def test_bounds_hold(kernels_run, launches, kind, dtype, eps, offset):
    for seed, (n, t, width) in enumerate([(3, 70, 33), (2, 1, 16), (2, 300, 8)]):
        torch.manual_seed(seed)
        layer = LAYERS[kind](width, eps)
        x = (torch.randn(n, t, width) + offset).to(dtype)
        b = torch.randn(n, t, width).to(dtype)
        if eps < 1e-6:  # where rows that are all the same are looked for
            x[0, 0] = 1.0 if kind == "layer" else 0.0
        b[-1] = b[-1].abs()  # one that does not cancel
        factors = RULES[kind](layer, (x,), b)
        for name, p in layer.named_parameters():
            norm, g = finished(factors[p].unfinished()), exact(layer, x, b)[name]
            size = g.norm(dim=1)
            known = norm.upper.isfinite()
            assert (norm.upper[known].sqrt() >= size[known]).all()
            error = (factors[p].values.double() - g).norm(dim=1)
            assert (error[known] <= (norm.upper[known].sqrt() - norm.value[known].sqrt()) + 1e-30).all()
            if offset == 0.0 and eps == 1e-5:
                assert known.all() and (norm.upper.sqrt() <= size * 1.01 + 1e-3).all()
    assert "_normalized_sum_kernel" in launches


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("size", [1.0, 1e-25])
def test_each_term_of_the_errors_counts(kernels_run, kind, size):
    """At the smaller size the squares of backprops are nothing in fp32: no norm is smaller for it."""
    n, t, width = 2, 9, 40
    layer, x, b = LAYERS[kind](width, 1e-5), torch.randn(n, t, width) + 20.0, torch.randn(n, t, width) * size
    wide = x.double()
    mean = wide.mean(-1) if kind == "layer" else torch.zeros(n, t, dtype=torch.float64)
    rstd = ((wide - mean.unsqueeze(-1)).square().mean(-1) + layer.eps).rsqrt()
    product = b.double() * (wide - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    of_row = (2.0 if kind == "layer" else 1.0) * bounds.gamma(width + 8, torch.float32) * (1.0 + mean.abs() * rstd)
    norms, norm_b, chain = product.norm(dim=2), b.double().norm(dim=2), 1.01 * bounds.gamma(t, torch.float32)
    expected = {"weight": (of_row * (norm_b + norms) + chain * norms).sum(1), "bias": chain * norm_b.sum(1)}
    factors = RULES[kind](layer, (x,), b)
    for name, p in layer.named_parameters():
        error = factors[p].error
        assert (error >= expected[name] * (1.0 - 1e-5)).all(), name
        assert size < 1.0 or (error <= expected[name] * (1.0 + 1e-5)).all(), name


@pytest.mark.parametrize("kind", LAYERS)
def test_the_references_numbers(monkeypatch, kind):
    layer, x, b = LAYERS[kind](40, 1e-5), torch.randn(3, 5, 7, 40), torch.randn(3, 5, 7, 40)
    found = {}
    for backend in ("triton", "reference"):
        monkeypatch.setenv("DPFAST_BACKEND", backend)
        found[backend] = [f.materialize() for f in RULES[kind](layer, (x,), b).values()]
    for kernel, reference in zip(*found.values(), strict=True):
        torch.testing.assert_close(kernel, reference, rtol=1e-5, atol=1e-5)


def test_what_kernels_do_not_take_goes_the_reference_s_way(kernels_run, launches):
    for layer, x in ((nn.LayerNorm(8200), torch.randn(2, 2, 8200)), (nn.LayerNorm((2, 3)), torch.randn(2, 4, 3, 2).mT)):
        factors = layer_norm(layer, (x,), torch.ones_like(x))
        assert [f.shape for f in factors.values()] == [p.shape for p in layer.parameters()]
    assert launches.count("_normalized_sum_kernel") == 1  # copied, and so taken; the other one is too wide


class Functional(nn.Module):
    """Norms as functions, of parameters of its own."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift, self.second = (nn.Parameter(torch.randn(24)) for _ in range(3))

    def forward(self, x):
        return F.rms_norm(F.layer_norm(x, (24,), self.scale, self.shift), (24,), self.second).tanh()


def test_norms_that_a_forward_uses_as_functions(kernels_run, launches):
    model, x = Functional(), torch.randn(3, 5, 24)
    exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    wrapped(x).square().sum().backward()
    assert "_normalized_sum_kernel" in launches
    for name, p in model.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name
