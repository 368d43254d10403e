"""Convolutions and group norms on a CPU: each sample has its own numbers, and errors stay within what is said."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast
from dpfast.arithmetic import products
from dpfast.factors.ways import CHAIN, TOGETHER
from dpfast.rules import copies, functional
from dpfast.taps import Activations, find_rule
from dpfast.testing import loop_over_samples

CONVOLUTIONS = {
    "3x3": (lambda: nn.Conv2d(3, 32, 3, padding=1), (3, 12, 12)),
    "strided, dilated, leftovers": (lambda: nn.Conv2d(5, 7, 3, padding=2, stride=2, dilation=2), (5, 14, 11)),
    "few channels, large kernel": (lambda: nn.Conv2d(4, 20, 4, padding=1, stride=3), (4, 14, 12)),
    "few channels, a call each": (lambda: nn.Conv2d(3, 20, 7, padding=3, stride=2), (3, 18, 20)),
    "large, a call each": (lambda: nn.Conv2d(128, 128, 3, padding=1), (128, 5, 4)),
    "groups": (lambda: nn.Conv2d(8, 16, 3, padding=1, groups=4), (8, 9, 7)),
    "1x1": (lambda: nn.Conv2d(32, 16, 1), (32, 6, 6)),
    "1x1, strided, padded": (lambda: nn.Conv2d(18, 20, 1, stride=(2, 3), padding=(1, 0)), (18, 9, 70)),
    "1x1, large": (lambda: nn.Conv2d(128, 160, 1), (128, 15, 16)),
    "1x1, large, strided": (lambda: nn.Conv2d(128, 160, 1, stride=2, padding=1), (128, 31, 28)),
    "1x1, large, more positions than one call adds": (lambda: nn.Conv2d(64, 80, 1), (64, 40, 41)),
    "1x1, more positions than one call adds": (lambda: nn.Conv2d(6, 17, 1), (6, 47, 40)),
    "more positions than one call adds": (lambda: nn.Conv2d(4, 6, 3, padding=1), (4, 47, 40)),
    "one dimension, long": (lambda: nn.Conv1d(6, 8, 5, padding=2), (6, 3000)),
    "three dimensions": (lambda: nn.Conv3d(3, 4, 3, padding=1), (3, 5, 6, 7)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 7, padding=3, groups=6), (6, 14, 14)),
    "depthwise, strided, dilated": (
        lambda: nn.Conv2d(5, 5, (3, 4), stride=(2, 3), padding=(1, 2), dilation=(3, 2), groups=5),
        (5, 40, 160),
    ),
    "depthwise, one dimension, long": (lambda: nn.Conv1d(3, 3, 9, padding=4, groups=3), (3, 9_000)),
    "depthwise, three dimensions": (lambda: nn.Conv3d(3, 3, 5, padding=(2, 1, 0), groups=3), (3, 6, 7, 38)),
    "depthwise, transposed": (lambda: nn.ConvTranspose2d(4, 4, 5, stride=2, groups=4), (4, 17, 35)),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, dilation=2),
        (4, 7, 8),
    ),
}
NORMS = {
    "group norm": (lambda: nn.GroupNorm(2, 6), (6, 8, 9)),
    "prime number of positions": (lambda: nn.GroupNorm(3, 6), (6, 101)),
    "no positions at all": (lambda: nn.GroupNorm(2, 16), (16,)),
    "instance norm": (lambda: nn.InstanceNorm2d(5, affine=True), (5, 33, 32)),
}


def factors(layer, x, backprops):
    """{name: Dense} of the layer's own rule."""
    found = find_rule(layer)(layer, Activations([x]), backprops)
    return {name: found[p].materialized() for name, p in layer.named_parameters()}


def exact(layer, x, backprops):
    """The same from autograd in fp64, a sample at a time."""
    layer = copy.deepcopy(layer).double()
    grads = []
    for x_n, b_n in zip(x.double(), backprops.double(), strict=True):
        output = layer(x_n.unsqueeze(0))
        grads.append(torch.autograd.grad(output, list(layer.parameters()), b_n.unsqueeze(0)))
    return {
        name: torch.stack(g) for (name, _), g in zip(layer.named_parameters(), zip(*grads, strict=True), strict=True)
    }


def assert_within_stated_error(layer, x, backprops, looseness):
    found, truth = factors(layer, x, backprops), exact(layer, x, backprops)
    for name, values in truth.items():
        off = (found[name].values.double() - values).flatten(1).norm(dim=1)
        assert (off <= found[name].error).all(), name
        size = values.flatten(1).norm(dim=1)
        assert (found[name].error <= looseness * size).all(), (name, (found[name].error / size).max())


@pytest.mark.parametrize("case", [*CONVOLUTIONS, *NORMS])
def test_error_is_what_is_said(case):
    make, shape = {**CONVOLUTIONS, **NORMS}[case]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(5, *shape)
    backprops = torch.randn_like(layer(x)) + 0.5
    assert_within_stated_error(layer, x, backprops, looseness=5e-3)


@pytest.mark.parametrize("mean", [0.0, 30.0, 1e3])
@pytest.mark.parametrize("deviation", [0.0, 1e-3, 1.0])
def test_group_norm_of_bright_and_of_even_images(mean, deviation):
    """Sums of squares would cancel here; a blank image must not lose its sample. What fp32 keeps of x - mean is the
    floor: a few u·mean·rstd an entry, for as many entries as there are."""
    torch.manual_seed(0)
    layer, x = nn.GroupNorm(2, 6), mean + deviation * torch.randn(4, 6, 16, 16)
    backprops = torch.randn_like(x) + 0.5
    found, truth = factors(layer, x, backprops), exact(layer, x, backprops)
    rstd = (deviation**2 + layer.eps) ** -0.5
    for name, values in truth.items():
        off = (found[name].values.double() - values).flatten(1).norm(dim=1)
        floor = 2.0**-24 * mean * rstd * 16 * backprops.flatten(1).norm(dim=1)
        assert (off <= found[name].error).all(), name
        assert (found[name].error <= 1e-3 * values.flatten(1).norm(dim=1) + 5e-3 + 10 * floor).all(), name


@pytest.mark.parametrize("mean", [0.0, 30.0, 1e3])
@pytest.mark.parametrize("shape", [(6, 16, 16), (6, 101), (6,)])
def test_copies_of_a_group_norm(mean, shape):
    """The layer's own output, its input's gradient and the batch's summed gradients, bit by bit or nearly; a sample's
    gradient is as exact as the plain one, and the same in every batch."""
    torch.manual_seed(0)
    layer, x = nn.GroupNorm(2, 6), mean + torch.randn(5, *shape)
    torch.nn.init.normal_(layer.weight)
    backprops, plain_x = torch.randn_like(x), x.clone().requires_grad_()
    plain = layer(plain_x)
    by_hand = torch.autograd.grad(plain, [plain_x, layer.weight, layer.bias], backprops)
    truth = exact(layer, x, backprops)
    wrapped = dpfast.GradSampleModule(layer, loss_reduction="sum")

    def run(chosen):
        wrapped.zero_grad()
        own_x = x[chosen].requires_grad_()
        output = wrapped(own_x)
        output.backward(backprops[chosen])
        return output.detach(), own_x.grad, layer.weight.grad_sample, layer.bias.grad_sample

    output, of_x, of_weight, of_bias = run(torch.arange(5))
    assert torch.equal(output, plain) and torch.equal(of_x, by_hand[0])
    for of_samples, summed in ((of_weight, by_hand[1]), (of_bias, by_hand[2])):
        assert (of_samples.sum(0) - summed).norm() <= 1e-5 * (1.0 + mean) * summed.norm()
    assert (of_weight - truth["weight"]).norm() <= 1e-6 * (1.0 + mean) * truth["weight"].norm()
    for chosen in (torch.tensor([3]), torch.tensor([4, 0, 3])):
        for whole, part in zip((output, of_x, of_weight, of_bias), run(chosen), strict=True):
            assert torch.equal(part, whole[chosen])


@pytest.mark.on_cpu
@pytest.mark.parametrize(
    "change",
    [
        lambda layer, x: (layer.bfloat16(), x.bfloat16()),
        lambda layer, x: (layer, x.to(memory_format=torch.channels_last)),
    ],
    ids=["bf16", "channels last"],
)
def test_group_norm_that_has_no_copies(change):
    """Gradients are not rounded to 16 bits, and the output keeps its memory format."""
    torch.manual_seed(0)
    layer, x = change(nn.GroupNorm(2, 6), torch.randn(3, 6, 4, 5))
    backprops = torch.randn_like(x)
    truth = exact(layer, x, backprops)
    wrapped = dpfast.GradSampleModule(layer, loss_reduction="sum")
    output = wrapped(x.requires_grad_())  # torch crashes in channels last where x needs none
    assert output.is_contiguous(memory_format=torch.channels_last) == x.is_contiguous(memory_format=torch.channels_last)
    output.backward(backprops)
    for name, p in layer.named_parameters():
        assert (p.grad_sample.double() - truth[name]).norm() <= 1e-5 * truth[name].norm(), name


@pytest.mark.on_cpu
@pytest.mark.parametrize("case", [name for name in CONVOLUTIONS if name.startswith("1x1, large")])
def test_pixels_by_either_library(case, monkeypatch):
    """Kept gradients have the same bits in every batch, clipped sums are right and nothing of a dropped sample is in
    them, whoever multiplies."""
    make, shape = CONVOLUTIONS[case]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(5, *shape)
    backprops = torch.randn_like(layer(x))
    truth, c = exact(layer, x, backprops)["weight"], torch.tensor([1.0, 0.5, 0.0, 2.0, 0.1])
    clipped = truth.clone()
    x[2], clipped[2] = float("nan"), 0.0
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    for is_faster in (True, False) if has_onednn else (False,):
        monkeypatch.setattr(products, "onednn_is_faster", lambda is_faster=is_faster: is_faster)

        def of(some):
            return find_rule(layer)(layer, Activations([x[some]]), backprops[some])[layer.weight]

        whole = of(torch.arange(5))
        assert whole._sum_is_product == (is_faster and layer.stride == (1, 1))  # of many positions
        assert whole._one_by_one == (is_faster and "more positions" not in case)
        for some in (torch.arange(5), torch.tensor([0, 1, 3]), torch.tensor([4])):
            factor, total = of(some), (clipped[some] * c[some].double().view(-1, 1, 1, 1, 1)).sum(0)
            for form in (factor, factor.written()):
                assert (form.weighted_sum(c[some]) - total).norm() <= 1e-6 * total.norm()
            bits = factor.materialize()
            assert torch.equal(bits.nan_to_num(), whole.materialize()[some].nan_to_num())
            fine = some != 2
            assert (bits[fine] - truth[some][fine]).norm() <= 1e-6 * truth[some][fine].norm()


@pytest.mark.on_cpu
@pytest.mark.parametrize("layer", [nn.Conv2d(128, 128, 3, padding=1), nn.Conv2d(130, 128, 1, stride=2)], ids=str)
def test_clipped_sums_of_few_positions(layer):
    torch.manual_seed(0)
    x = torch.randn(5, layer.in_channels, 4, 4)
    backprops = torch.randn_like(layer(x))
    truth, c = exact(layer, x, backprops)["weight"], torch.tensor([1.0, 0.5, 0.0, 2.0, 0.1])
    x[2], truth[2] = float("nan"), 0.0
    for some in (torch.arange(5), torch.tensor([0, 1, 3]), torch.tensor([2])):
        factor = find_rule(layer)(layer, Activations([x[some]]), backprops[some])[layer.weight]
        assert factor._sum_is_product
        total = (truth[some] * c[some].double().view(-1, 1, 1, 1, 1)).sum(0)
        assert (factor.weighted_sum(c[some]) - total).norm() <= 1e-6 * total.norm()


class OwnGroupNorm(nn.GroupNorm):
    """As timm's GroupNormAct computes it."""

    def forward(self, x):
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps).relu_()


@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
@pytest.mark.parametrize("shape", [(6, 16, 16), (6, 101), (6, 1)])
def test_a_group_norm_used_as_a_function_has_the_bits_of_the_layer(shape, frozen, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(functional, "group_norm_rule", None)  # copies answer
    layer, x = OwnGroupNorm(2, 6), torch.randn(5, *shape)
    torch.nn.init.normal_(layer.weight)
    if frozen:
        getattr(layer, frozen).requires_grad_(False)
    found = []
    for own in (layer, nn.Sequential(as_layer := nn.GroupNorm(2, 6), nn.ReLU(inplace=True))):
        as_layer.load_state_dict(layer.state_dict())
        as_layer.weight.requires_grad_(frozen != "weight")
        as_layer.bias.requires_grad_(frozen != "bias")
        wrapped = dpfast.GradSampleModuleFastGradientClipping(own, max_grad_norm=1.0, loss_reduction="sum")
        own_x = x.clone().requires_grad_()
        wrapped(own_x).square().sum().backward()
        gradients = [p.grad for p in own.parameters() if p.requires_grad]
        found.append([own_x.grad, wrapped.get_norm_sample(), *gradients])
    for of_function, of_layer in zip(*found, strict=True):
        assert torch.equal(of_function, of_layer)


class OfHalfTheChannels(nn.Module):
    """What comes to the layer is contiguous where there is one sample."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.chunk(2, dim=1)[0])


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("cls", [nn.GroupNorm, OwnGroupNorm])
def test_a_group_norm_of_half_the_channels_has_the_same_bits_in_every_batch(cls, large):
    torch.manual_seed(0)
    layer, x, weights = cls(2, 6), torch.randn(9, 12, 7, 7) * (1e20 if large else 1.0), torch.randn(9, 6, 7, 7)

    def norms(some):
        wrapped = dpfast.GradSampleModuleFastGradientClipping(
            OfHalfTheChannels(copy.deepcopy(layer)), max_grad_norm=1e-3, loss_reduction="sum"
        )
        (wrapped(x[some]) * weights[some]).sum().backward()
        return torch.stack([wrapped.get_norm_sample(), wrapped.get_clipping_coef()])

    whole = norms(slice(None))
    said = OfHalfTheChannels(layer)(x).isfinite().all()
    assert whole.isfinite().all() == said
    assert said or large  # torch 2.8 makes NaN of such variances
    for i in range(9):
        torch.testing.assert_close(norms(slice(i, i + 1)), whole[:, i : i + 1], rtol=0.0, atol=0.0, equal_nan=True)
    if large:  # variances are inf in fp32
        return
    exact = loop_over_samples(
        OfHalfTheChannels(layer).double(), lambda m, x, w: (m(x) * w).sum(), x.double(), weights.double()
    )
    squares = sum(g.flatten(1).square().sum(1) for g in exact.values())
    torch.testing.assert_close(whole[0].double(), squares.sqrt(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("case", ["1x1", "1x1, more positions than one call adds", "depthwise"])
def test_error_is_what_is_said_of_channels_last(case):
    make, shape = CONVOLUTIONS[case]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(5, *shape).to(memory_format=torch.channels_last)
    backprops = (torch.randn_like(layer(x)) + 0.5).to(memory_format=torch.channels_last)
    assert_within_stated_error(layer, x, backprops, looseness=5e-3)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_same_bits_in_every_batch(case):
    make, shape = CONVOLUTIONS[case]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(2 * TOGETHER + 1, *shape)
    backprops = torch.randn_like(layer(x))
    whole = factors(layer, x, backprops)["weight"]
    for n in range(1, 2 * TOGETHER + 1):
        order = torch.randperm(len(x))[:n]
        part = factors(layer, x[order], backprops[order])["weight"]
        assert torch.equal(part.values, whole.values[order]), n
        assert torch.equal(part.error, whole.error[order]), n


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_sample_stays_alone(case, bad):
    make, shape = CONVOLUTIONS[case]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(TOGETHER, *shape)
    backprops = torch.randn_like(layer(x))
    before = factors(layer, x, backprops)["weight"]
    x[3, 0].fill_(bad)
    backprops[5, -1].fill_(bad)
    after = factors(layer, x, backprops)["weight"]
    others = [n for n in range(TOGETHER) if n not in (3, 5)]
    assert torch.equal(after.values[others], before.values[others])
    norms = after.sq_norm().upper
    assert norms[others].isfinite().all() and not norms[[3, 5]].isfinite().any()


def test_images_whose_squares_underflow():
    torch.manual_seed(0)
    layer, x = nn.Conv2d(3, 4, 3, bias=False), 1e-25 * torch.randn(2, 3, 9, 9)
    assert_within_stated_error(layer, x, 1e18 * torch.randn_like(layer(x)), looseness=float("inf"))


def test_long_sums_are_cut():
    layer = nn.Conv2d(4, 6, 3, padding=1)
    product = find_rule(layer)(layer, Activations([torch.randn(1, 4, 47, 40)]), torch.randn(1, 6, 47, 40))[layer.weight]
    assert product._ways.blocks == 2 and product._ways.block * 40 <= CHAIN


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_pixel_whose_strides_say_channels_last(n):
    """torch fails over it in fp64, where several samples are groups (wav2vec2's positions, of a sequence of one)."""
    torch.manual_seed(0)
    layer = nn.Conv1d(8, 8, 4, padding=2, groups=2).double()
    x, b = torch.randn(n, 1, 8, dtype=torch.float64).mT, torch.randn(n, 8, 2, dtype=torch.float64)
    assert x.stride() == (8, 1, 8)
    found, expected = factors(layer, x, b), factors(layer, torch.stack(list(x)), b)
    assert all(torch.allclose(found[name].values, expected[name].values) for name in expected)
    assert torch.allclose(
        find_rule(layer)(layer, Activations([x]), b)[layer.weight].weighted_sum(torch.ones(n)).double(),
        expected["weight"].values.sum(0),
    )


@pytest.mark.parametrize(("channels", "size"), [(1, (9, 8)), (3, (7, 7)), (20, (30, 40))])
@pytest.mark.parametrize(
    ("kernel", "geometry"), [(3, {}), (5, {"stride": 2}), (7, {"padding": 3}), (4, {"dilation": 2})]
)
def test_depthwise_bits_do_not_depend_on_the_batch(channels, size, kernel, geometry):
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, channels, kernel, groups=channels, **geometry)
    x = torch.randn(TOGETHER + 3, channels, *size)
    backprops = torch.randn_like(layer(x))
    whole = factors(layer, x, backprops)["weight"]
    for chosen in ([TOGETHER], [5, 0], [2, 3, 4], [*range(1, 9)], [*range(TOGETHER)]):
        part = factors(layer, x[chosen], backprops[chosen])["weight"]
        assert torch.equal(part.values, whole.values[chosen])
        assert torch.equal(part.sq_norm().upper, whole.sq_norm().upper[chosen])


def test_each_depthwise_channel_has_its_own_error():
    """Of channels as large as each other the error is smaller by the root of how many they are."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(64, 64, 5, groups=64, bias=False), torch.randn(2, 64, 12, 12)
    backprops = torch.randn_like(layer(x))
    product = find_rule(layer)(layer, Activations([x]), backprops)[layer.weight]
    of_all = torch.stack(product.norms()).prod(0)
    assert (product._norm_products() <= 1.1 * of_all / 8.0).all()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_clipped_sums_of_depthwise_kernels(memory_format):
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 6, 7, padding=3, stride=2, groups=6)
    x = torch.randn(4, 6, 15, 12).to(memory_format=memory_format)
    backprops, c = torch.randn_like(layer(x)), torch.tensor([1.0, 0.0, 0.5, 2.0])
    truth = (exact(layer, x, backprops)["weight"] * c.double().view(-1, 1, 1, 1, 1)).sum(0)
    x[1] = float("inf")
    factor = find_rule(layer)(layer, Activations([x]), backprops)[layer.weight]
    assert (factor.weighted_sum(c) - truth).norm() <= 1e-6 * truth.norm()


def test_an_operation_in_place_behind_a_group_norm_copies_no_gradient():
    x, (weight, bias) = torch.randn(3, 6, 4, 5), torch.ones(2, 18, requires_grad=True)
    output = copies.group_norm_as_one(x, 2, weight, bias, 1e-5).relu_()
    assert output.grad_fn.name() == "ReluBackward0"
    assert torch.equal(output, F.group_norm(x, 2, weight[:6], bias[:6], 1e-5).relu())
