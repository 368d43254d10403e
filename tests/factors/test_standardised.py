"""Convolutions whose weight is standardised by channels: against autograd in fp64, a sample at a time."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.factors import Dense, PatchProduct, standardised
from dpfast.factors.standardised import Standardised
from dpfast.taps import Activations, find_rule
from dpfast.testing import check_rule, loop_over_samples


class StdConv(nn.Conv2d):
    """As timm's StdConv2d and Hugging Face's BitConv compute it."""

    def standardised(self):
        rows = self.weight.reshape(1, self.out_channels, -1)
        return F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)

    def forward(self, x):
        return F.conv2d(x, self.standardised(), self.bias, self.stride, self.padding, self.dilation, self.groups)


CASES = {  # layer, image: kept, not kept, in groups, of rows of three entries
    "kept": (lambda: StdConv(4, 6, 3, padding=1), (4, 12, 12)),
    "not kept": (lambda: StdConv(12, 40, 3, padding=1, bias=False), (12, 4, 4)),
    "groups": (lambda: StdConv(8, 24, 3, groups=2, stride=2), (8, 7, 7)),
    "1x1": (lambda: StdConv(70, 90, 1), (70, 4, 4)),
    "1x1, kept": (lambda: StdConv(128, 160, 1, bias=False), (128, 15, 16)),
    "one position": (lambda: StdConv(70, 9, 3, bias=False), (70, 3, 3)),
    "three entries": (lambda: StdConv(3, 5, 1), (3, 6, 6)),
}


def own_factor(layer, x, backprops, *, seen=False):
    """Its factor; ``seen``: with what the convolution gave."""
    value = layer.standardised()
    inner = find_rule(nn.Conv2d(1, 1, 1))(layer, Activations([x]), backprops)[layer.weight]
    assert isinstance(inner, PatchProduct)
    if seen:
        inner.output = F.conv2d(x, value.detach(), None, layer.stride, layer.padding, layer.dilation, layer.groups)
    factor = standardised(inner, value, layer.weight)
    assert isinstance(factor, Standardised)
    return factor


def exact(layer, x, backprops):
    layer, found = copy.deepcopy(layer).double(), []
    for x_n, b_n in zip(x.double(), backprops.double(), strict=True):
        found.append(torch.autograd.grad(layer(x_n[None]), layer.weight, b_n[None])[0])
    return torch.stack(found)


def case(name, n=5, mean=0.5):
    make, shape = CASES[name]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(n, *shape) + mean
    return layer, x, torch.randn_like(layer(x)) + 0.5


@pytest.mark.parametrize("seen", [False, True], ids=["", "output at hand"])
@pytest.mark.parametrize("mean", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("name", CASES)
def test_verbs(name, mean, seen):
    layer, x, backprops = case(name, mean=mean)
    factor, truth = own_factor(layer, x, backprops, seen=seen), exact(layer, x, backprops)
    assert (factor.kept() is factor) == (name in ("not kept", "1x1", "one position"))
    size = truth.flatten(1).norm(dim=1)
    coefficients = torch.tensor([1.0, 0.5, 0.0, 2.0, 0.1])
    total = (truth * coefficients.double().view(-1, 1, 1, 1, 1)).sum(0)
    for form in (factor, factor.kept()):
        value, upper = form.sq_norm()
        before = own_factor(layer, x, backprops).factor.sq_norm().upper.sqrt()  # a bright image: most of it is its mean
        assert (upper.sqrt() >= size * (1 - 1e-12)).all()
        assert (upper.sqrt() - size <= 2e-3 * size + 5e-3 * before**2 / size.clamp(min=1e-30)).all()
        assert ((value.sqrt() - size).abs() <= 1e-5 * before**2 / size.clamp(min=1e-30)).all()
        dense = form.materialized()
        off = (dense.values.double() - truth).flatten(1).norm(dim=1)
        assert (off <= dense.error).all() and (dense.error <= 5e-3 * before).all()
        assert torch.equal(form.materialize(), dense.values)
        assert (form.weighted_sum(coefficients) - total).norm() <= 1e-5 * before.norm()


@pytest.mark.parametrize("name", CASES)
def test_one_samples_share_is_no_more_than_the_bound(name):
    layer, x, backprops = case(name)
    for form in (factor := own_factor(layer, x, backprops), factor.kept()):
        upper = form.sq_norm().upper.sqrt()
        for n in range(5):
            alone = torch.zeros(5)
            alone[n] = 1.0
            assert form.weighted_sum(alone).double().norm() <= upper[n]


@pytest.mark.on_cpu
@pytest.mark.parametrize("seen", [False, True], ids=["", "output at hand"])
@pytest.mark.parametrize("name", CASES)
def test_same_bits_in_every_batch(name, seen):
    layer, x, backprops = case(name, n=19)
    output, weight = layer(x) - layer.bias.view(-1, 1, 1) if layer.bias is not None else layer(x), layer.weight

    def of(samples):
        inner = find_rule(nn.Conv2d(1, 1, 1))(layer, Activations([x[samples]]), backprops[samples])[weight]
        inner.output = output[samples] if seen else None
        return standardised(inner, layer.standardised(), weight)

    factor = of(torch.arange(19))
    whole = [form.sq_norm() for form in (factor, factor.kept())]
    for n in (1, 2, 3, 8, 17):
        order = torch.randperm(len(x))[:n]
        part = of(order)
        for norms, form in zip(whole, (part, part.kept()), strict=True):
            for before, now in zip(norms, form.sq_norm(), strict=True):
                assert torch.equal(before[order], now), n


def test_a_sample_that_is_not_finite_has_no_finite_bound_and_no_neighbours():
    for name in ("kept", "not kept"):
        layer, x, backprops = case(name)
        before = own_factor(layer, x, backprops).kept().sq_norm().upper
        for bad in (float("nan"), float("inf"), 1e30):
            worse = x.clone()
            worse[2] = bad
            factor = own_factor(layer, worse, backprops).kept()
            upper = factor.sq_norm().upper
            assert not upper[2] < float("inf") or bad == 1e30
            assert torch.equal(upper[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
            assert factor.weighted_sum(torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])).isfinite().all()


@pytest.mark.parametrize(
    "value",
    [
        lambda w: F.batch_norm(w.reshape(1, 6, -1), torch.zeros(6), torch.ones(6)).reshape_as(w),
        lambda w: F.batch_norm(w.reshape(1, 6, -1), None, None, training=True).reshape_as(w) * 2.0,
        lambda w: F.batch_norm(w.transpose(0, 1).reshape(1, 6, -1), None, None, training=True).reshape_as(w),
        lambda w: F.batch_norm(w.reshape(2, 3, -1), None, None, training=True).reshape_as(w),
        lambda w: F.batch_norm(w.reshape(1, 6, -1), None, None, w[:, 0, 0, 0], training=True).reshape_as(w),
        lambda w: F.batch_norm((w * 3.0).reshape(1, 6, -1), None, None, training=True).reshape_as(w),
    ],
    ids=["statistics of others", "scaled", "transposed", "other rows", "with a gain of its own", "scaled before"],
)
def test_what_is_something_else_is_left_alone(value):
    w = torch.randn(6, 6, 3, 3, requires_grad=True)
    inner = PatchProduct(
        *(torch.randn(2, 6, 5, 5), torch.randn(2, 6, 3, 3)),
        kernel=(3, 3), stride=(1, 1), dilation=(1, 1), padding=(0, 0), groups=1,
    )  # fmt: skip
    assert standardised(inner, value(w), w) is None
    assert standardised(Dense(torch.randn(2, 6, 6, 3, 3)), w, w) is None


@pytest.mark.parametrize("name", ["kept", "not kept", "groups", "1x1"])
def test_layers(name):
    layer, x, _ = case(name)
    check_rule(layer, x)


class Block(nn.Module):
    """A convolution and what stands behind it."""

    def __init__(self, layer, behind=nn.Identity(), *, recompute=False):  # noqa: B008
        super().__init__()
        self.layer, self.behind, self.recompute = layer, behind, recompute

    def forward(self, x):
        def run(x):
            return self.behind(self.layer(x))

        return checkpoint(run, x, use_reentrant=False) if self.recompute else run(x)


class Uncounted(nn.Module):
    """Writes to its input so that torch does not count it."""

    def forward(self, x):
        x.data.clamp_(-0.1, 0.1)
        return x


@pytest.mark.on_cpu
@pytest.mark.parametrize(
    ("block", "at_hand"),
    [
        (lambda layer: Block(layer), True),
        (lambda layer: Block(layer, nn.GroupNorm(4, 40)), True),
        (lambda layer: Block(layer, nn.ReLU(inplace=True)), False),
        (lambda layer: Block(layer, Uncounted()), False),
        (lambda layer: Block(layer, recompute=True), False),
    ],
    ids=["alone", "group norm", "written to", "written to, not counted", "checkpoint"],
)
def test_the_forwards_own_output_saves_products_of_patches(block, at_hand, monkeypatch):
    """Where nobody wrote to it, and where holding it is not somebody else's affair; the norms are right everywhere."""
    taken, row_products = [], PatchProduct.row_products
    monkeypatch.setattr(PatchProduct, "row_products", lambda self, v: taken.append(v.shape) or row_products(self, v))
    layer, x, _ = case("not kept")
    model, x = block(layer), x.requires_grad_()
    truth = loop_over_samples(model, lambda m, x: m(x).square().sum(), x, dtype=torch.float64)
    norms = sum(g.flatten(1).square().sum(1) for g in truth.values()).sqrt()
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, loss_reduction="sum")
    for _ in range(2):
        loss = wrapped(x).square().sum()
        loss.backward(retain_graph=True)
        assert bool(taken) != at_hand
        upper = wrapped.get_norm_sample() * (1 + wrapped.norm_slack)
        assert (upper >= norms * (1 - 1e-6)).all() and (upper <= norms * (1 + 1e-3)).all()
        before = upper
        wrapped.zero_grad()
        loss.backward()  # of the same graph
        assert torch.equal(wrapped.get_norm_sample() * (1 + wrapped.norm_slack), before) and bool(taken) != at_hand
        wrapped.zero_grad()


@pytest.mark.on_cpu
def test_an_output_of_a_weight_that_is_not_standardised_alone_is_not_used(monkeypatch):
    layer, x, backprops = case("not kept")
    monkeypatch.setattr(PatchProduct, "row_products", None)
    own_factor(layer, x, backprops, seen=True).sq_norm()
    bias = torch.full((40,), 0.25)  # frozen, so autograd's graph does not tell of it
    layer.standardised = lambda: F.batch_norm(
        layer.weight.reshape(1, 40, -1), None, None, None, bias, training=True, momentum=0.0, eps=1e-6
    ).reshape_as(layer.weight)
    with pytest.raises(TypeError):
        own_factor(layer, x, backprops, seen=True).sq_norm()


def test_the_clipped_sum_goes_through_the_standardisation_once(monkeypatch):
    """Of a layer whose gradients are not kept; the map is not taken of samples."""
    seen, applied = [], Standardised._applied
    monkeypatch.setattr(Standardised, "_applied", lambda self, v: seen.append(v.shape) or applied(self, v))
    layer, x, _ = case("not kept")
    wrapped = dpfast.GradSampleModuleFastGradientClipping(nn.Sequential(layer), max_grad_norm=1.0, loss_reduction="sum")
    wrapped(x).square().sum().backward()
    assert seen == [layer.weight.shape]


class WrittenTo(StdConv):
    """Writes to its standardised weight so that torch does not count it."""

    def __init__(self, write, *sizes, **options):
        super().__init__(*sizes, **options)
        self.write = write

    def standardised(self):
        value = super().standardised()
        self.write(value.data)
        return value


@pytest.mark.parametrize(
    "write",
    [
        lambda v: v[:, 1:].mul_(3.0),
        lambda v: v.clamp_(-1.5, 1.5),
        lambda v: v.mul_(16.0).round_().div_(16.0),
        lambda v: v[:, :, 2, 2].zero_(),
    ],
    ids=["scaled", "clamped", "quantised", "masked"],
)
@pytest.mark.parametrize("sizes", [(4, 6, 12), (12, 40, 4)], ids=["kept", "not kept"])
def test_a_weight_that_is_written_to_uncounted(write, sizes):
    """Autograd's gradients go through what was standardised, not through what was written."""
    torch.manual_seed(0)
    model = nn.Sequential(WrittenTo(write, *sizes[:2], 3, padding=1, bias=False))
    x = torch.randn(5, sizes[0], sizes[2], sizes[2])
    weights = torch.randn(sizes[1], sizes[2], sizes[2])
    truth = loop_over_samples(model, lambda m, x: (m(x) * weights.to(x.dtype)).sum(), x, dtype=torch.float64)
    norms = truth["0.weight"].flatten(1).norm(dim=1)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, loss_reduction="sum")
    (wrapped(x) * weights).sum().backward()
    assert torch.allclose(wrapped.get_norm_sample().double(), norms, rtol=1e-4)
    clipped = (truth["0.weight"] / norms.view(-1, 1, 1, 1, 1)).sum(0)
    assert (wrapped._module[0].weight.grad - clipped).norm() <= 1e-3 * clipped.norm()


@pytest.mark.parametrize("name", ["kept", "not kept", "1x1"])
def test_channels_last(name):
    layer, x, _ = case(name)
    check_rule(layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last))


class Behind(nn.Module):
    """Writes to the output of a standardised convolution so that torch does not count it."""

    def __init__(self, write, *sizes, **options):
        super().__init__()
        self.layer, self.write = StdConv(*sizes, **options), write

    def forward(self, x):
        y = self.layer(x)
        if self.write is not None:
            self.write(y.data)
        return y


@pytest.mark.parametrize("spoilt", [None, torch.nan, torch.inf])
@pytest.mark.parametrize(
    "write",
    [lambda y: y.mul_(10.0), lambda y: y.copy_(y.flip(-1)), lambda y: y.copy_(y.flip(1)), lambda y: y.neg_()],
    ids=["scaled", "moved", "channels moved", "negated"],
)
def test_an_output_that_is_written_to_uncounted(write, spoilt):
    """The norm must not follow from it; nor may another sample's NaN hide the write."""
    torch.manual_seed(0)
    model = Behind(write, 12, 40, 3, padding=1, bias=False)
    x, weights = torch.randn(5, 12, 4, 8), torch.randn(40, 4, 8)
    if spoilt is not None:
        x[3] = spoilt
    truth = loop_over_samples(model, lambda m, x: (m(x) * weights.to(x.dtype)).sum(), x, dtype=torch.float64)
    norms = truth["layer.weight"].flatten(1).norm(dim=1)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, loss_reduction="sum")
    (wrapped(x) * weights).sum().backward()
    found, sound = wrapped.get_norm_sample().double(), norms.isfinite()
    assert torch.allclose(found[sound], norms[sound], rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_output_of_autocast_is_not_exact(dtype):
    """Its rounding made norms of gradients along the weight too small, and two dtypes met in one call."""
    torch.manual_seed(0)
    sizes = {"kernel_size": 3, "padding": 1, "bias": False}
    model = nn.Sequential(StdConv(3, 12, **sizes), StdConv(12, 40, **sizes))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, loss_reduction="sum")
    with torch.autocast("cpu", dtype):
        loss = wrapped(torch.randn(2, 3, 4, 4)).float().square().sum()
    loss.backward()
    model[1].weight.grad = None
    assert wrapped.get_norm_sample().isfinite().all() and model[0].weight.grad.norm() <= 2.0


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_of_channels_whose_sum_is_taken_after_the_norm(groups):
    torch.manual_seed(0)
    model = nn.Sequential(StdConv(16, 32, 3, padding=1, groups=groups))
    x = torch.randn(3, 16, 4, 4)
    truth = loop_over_samples(model, lambda m, x: m(x).square().sum(), x, dtype=torch.float64)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, loss_reduction="sum")
    wrapped(x).square().sum().backward()
    norms = sum(g.flatten(1).square().sum(1) for g in truth.values()).sqrt()
    assert torch.allclose(wrapped.get_norm_sample().double(), norms, rtol=1e-4)
