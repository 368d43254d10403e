"""The rule of convolutions that standardise their weight, against a loop over samples: Hugging Face's own class."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.factors import PatchProduct
from dpfast.factors.standardised import Standardised
from dpfast.taps import Meeting, find_forward
from dpfast.testing import check_rule, loop_over_samples

modeling_bit = pytest.importorskip("transformers.models.bit.modeling_bit")


def layer(*sizes, **options):
    torch.manual_seed(0)
    made = modeling_bit.WeightStandardizedConv2d(*sizes, **options)
    with torch.no_grad():
        made.weight += 0.3
    return made


CASES = {
    "kept": (lambda: layer(4, 6, 3, padding=1), (4, 12, 12)),
    "not kept": (lambda: layer(12, 40, 3, padding=1), (12, 4, 4)),
    "padded by itself": (lambda: layer(4, 6, 3, stride=2, bias=True), (4, 11, 14)),
    "groups": (lambda: layer(8, 24, 3, padding=0, groups=2, bias=True), (8, 7, 7)),
    "1x1": (lambda: layer(70, 90, 1, padding=0), (70, 4, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(name):
    make, shape = CASES[name]
    assert find_forward(make()) is not None
    # Standardised weights make outputs of 9 here, through whose sine the layer's own gradients are 1e-5 off in fp32.
    check_rule(make(), 0.1 * torch.randn(5, *shape))


@pytest.mark.parametrize("name", CASES)
def test_the_output_has_the_layers_bits_and_nothing_is_followed(name, monkeypatch):
    make, shape = CASES[name]
    own, x = make(), torch.randn(5, *shape)
    expected = own(x)
    monkeypatch.setattr(Meeting, "__init__", None)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(own, max_grad_norm=1.0)
    output = wrapped(x)
    assert torch.equal(output, expected)
    output.square().mean().backward()


def norms_of(model, x, losses=lambda m, x: m(x).square().sum()):
    truth = loop_over_samples(model, losses, x, dtype=torch.float64)
    return sum(g.flatten(1).square().sum(1) for g in truth.values()).sqrt()


class Recomputed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(self.inner(x))


class Frames(nn.Module):
    """Two rows a sample."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(torch.stack((x, 0.5 * x), 1).flatten(0, 1))
        return y.unflatten(0, (len(x), 2)).sum(1)


BLOCKS = {
    "checkpoint": lambda inner: Recomputed(inner, False),
    "reentrant checkpoint": lambda inner: Recomputed(inner, True),
    "twice": Twice,
    "frames": Frames,
    "in place behind": lambda inner: nn.Sequential(inner, nn.ReLU(inplace=True)),
}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("sizes", [(8, 8, 12), (40, 40, 4)], ids=["kept", "not kept"])
def test_where_it_stands(sizes, block, passes):
    model = BLOCKS[block](layer(*sizes[:2], 3, padding=1, bias=True))
    x = torch.randn(8, sizes[0], sizes[2], sizes[2], requires_grad=True)  # as many samples as channels, too
    norms = norms_of(model.inner if isinstance(model, Recomputed) else model, x.detach())
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, loss_reduction="sum", passes=passes)
    for _ in range(3):
        losses = wrapped(x).square().flatten(1).sum(1)
        losses.sum().backward(retain_graph=passes == 2)
        if passes == 2:
            factors = wrapped.get_clipping_coef()
            wrapped.zero_grad()
            wrapped.disable_hooks()
            (factors * losses).sum().backward()
            wrapped.enable_hooks()
        assert torch.allclose(wrapped.get_norm_sample().double(), norms, rtol=1e-4)
        upper = wrapped.get_norm_sample().double() * (1 + wrapped.norm_slack)
        assert (upper >= norms * (1 - 1e-9)).all()
        wrapped.zero_grad()


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_of_what_is_trained_alone(frozen):
    model = nn.Sequential(layer(4, 6, 3, padding=1, bias=True))
    getattr(model[0], frozen).requires_grad_(False)
    x = torch.randn(5, 4, 6, 6)
    norms = norms_of(model, x)
    wrapped = dpfast.GradSampleModule(model, loss_reduction="sum")
    wrapped(x).square().sum().backward()
    (trained,) = (p for p in model.parameters() if p.requires_grad)
    assert getattr(model[0], frozen).grad is None
    assert torch.allclose(trained.grad_sample.flatten(1).norm(dim=1).double(), norms, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_of_other_dtypes(dtype):
    model = nn.Sequential(layer(4, 6, 3, padding=1)).to(dtype)
    x = torch.randn(5, 4, 6, 6, dtype=dtype)
    norms = norms_of(model, x)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, loss_reduction="sum")
    wrapped(x).square().sum().backward()
    assert torch.allclose(wrapped.get_norm_sample().double(), norms, rtol=0.05 if dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("write", [lambda y: y.mul_(10.0), lambda y: y.copy_(y.flip(1))], ids=["scaled", "moved"])
def test_an_output_that_is_written_to_uncounted(write):
    class Behind(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer(12, 40, 3, padding=1)

        def forward(self, x):
            y = self.inner(x)
            write(y.data)
            return y

    model, x, weights = Behind(), torch.randn(5, 12, 4, 4), torch.randn(40, 4, 4)
    norms = norms_of(model, x, lambda m, x: (m(x) * weights.to(x.dtype)).sum())
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, loss_reduction="sum")
    (wrapped(x) * weights).sum().backward()
    assert torch.allclose(wrapped.get_norm_sample().double(), norms, rtol=1e-4)


def test_a_subclass_with_a_forward_of_its_own_is_followed_as_before():
    class Doubled(modeling_bit.WeightStandardizedConv2d):
        def forward(self, x):
            return 2.0 * super().forward(x)

    torch.manual_seed(0)
    model = Doubled(4, 6, 3, padding=1)
    assert find_forward(model) is None
    check_rule(model, torch.randn(5, 4, 6, 6))


@pytest.mark.on_cpu
def test_its_norm_is_that_of_the_factor():
    """Where the convolution's own output is at hand, and where no gradient is written."""
    own, x = layer(12, 40, 3, padding=1), torch.randn(5, 12, 4, 4)
    caught = {}
    wrapped = dpfast.GradSampleModuleFastGradientClipping(nn.Sequential(own), max_grad_norm=1.0, loss_reduction="sum")
    wrapped._tapped.observe = lambda record, p, factor: caught.update({p: factor})
    wrapped(x).square().sum().backward()
    factor = caught[own.weight]
    assert isinstance(factor, Standardised) and isinstance(factor.factor, PatchProduct)
    assert factor._with_normal is not None and not factor.keeps
