"""What has no samples: tables and parameters that a forward uses by itself are right, and nothing of them gets lost."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from own_backwards import AttentionInFull, BackwardInCheckpoint, BackwardOfSamples, OwnBackwards
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import EscapedGradientError, UnsupportedModuleError
from dpfast.testing import check_rule, clipped_sum, loop_over_samples, norms_of, relative_error

T, D, C = 5, 4, 0.3


class Positions(nn.Module):
    """nanoGPT's: (T,) positions."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(T + 2, D), nn.Linear(D, 2)

    def forward(self, x):
        return self.head(torch.tanh(x + self.table(torch.arange(x.shape[1]))))


class OwnPositions(nn.Embedding):
    """Makes the numbers (T,) itself (Blenderbot)."""

    def forward(self, shape):
        return super().forward(torch.arange(shape[1]))


class PositionsOfShape(Positions):
    """A table that is given a shape."""

    def __init__(self):
        super().__init__()
        self.table = OwnPositions(T + 2, D)

    def forward(self, x):
        return self.head(torch.tanh(x + self.table(x.shape)))


class BothWays(nn.Module):
    """Has a parameter that is not used, and gives samples first and second (XLNet)."""

    def __init__(self):
        super().__init__()
        self.lin, self.mask = nn.Linear(D, D), nn.Parameter(torch.randn(D))

    def forward(self, x):
        x = self.lin(x)
        return x, x.transpose(0, 1)


class NotUsed(Positions):
    """Takes the first of two outputs."""

    def __init__(self):
        super().__init__()
        self.body = BothWays()

    def forward(self, x):
        return super().forward(self.body(x)[0])


class Prompt(Positions):
    """PEFT's: (1, T) numbers, whose rows the model repeats for each sample."""

    def forward(self, x):
        rows = self.table(torch.arange(T).unsqueeze(0)).repeat(len(x), 1, 1)
        return self.head(torch.cat([rows, x + self.table(torch.arange(T).unsqueeze(0))], 1).tanh())


class TiedHead(nn.Module):
    """The head is the table, transposed."""

    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(7, D), nn.Linear(D, D)

    def forward(self, x):
        x = x + self.table(torch.arange(x.shape[1]))
        return torch.tanh(self.body(x)) @ self.table.weight.t()


class FusedBias(nn.Module):
    """A weight of a child, and a bias put together of parameters (BEiT)."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.q, self.v = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))

    def forward(self, x):
        return F.linear(x, self.qkv.weight, torch.cat((self.q, torch.zeros_like(self.v), self.v)))


class FreeParameters(nn.Module):
    """A class token, positions, a scale, a norm of its own."""

    def __init__(self):
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(T + 1, D))
        self.body, self.norm, self.scale = nn.Linear(D, D), RootMeanSquare(), nn.Parameter(torch.randn(D))

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return x + self.scale * self.norm(self.body(x))


class RootMeanSquare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Complex(nn.Module):
    """A diagonal of complex numbers beside real ones (S4D, LRU)."""

    def __init__(self):
        super().__init__()
        self.diagonal, self.gain = nn.Parameter(torch.randn(D, 2)), nn.Parameter(torch.rand(D))

    def forward(self, x):
        return torch.tanh(x * torch.view_as_complex(self.diagonal).exp().real) + x * self.gain


class AsOthersAre(nn.Module):
    """A parameter that takes dtype, device and shape from tensors with gradients (PEFT's BOFT)."""

    def __init__(self):
        super().__init__()
        self.lin, self.gain = nn.Linear(D, D), nn.Parameter(torch.rand(D))

    def forward(self, x):
        h = self.lin(x)
        gain = self.gain.tanh().to(h).type_as(h).view_as(self.lin.bias).reshape_as(self.lin.bias)
        return h * gain.expand_as(self.lin.weight)[0]


class RelativeBias(nn.Module):
    """One table of relative positions, permuted, added to in place by several layers (T5), which are checkpointed."""

    reentrant: bool | None = None

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2 * T, 2)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(D))

    def layer(self, layer, x, bias):
        heads = layer(x).unflatten(-1, (2, -1)).transpose(1, 2)
        scores = heads @ heads.mT
        scores += bias
        return (scores.softmax(-1) @ heads).transpose(1, 2).flatten(2) * self.scale

    def forward(self, x):
        places = torch.arange(x.shape[1])
        bias = self.table(places[:, None] - places + T).permute(2, 0, 1).unsqueeze(0)
        for layer in self.layers:
            x = self.layer(layer, x, bias) if self.reentrant is None else self.checkpointed(layer, x, bias)
        return x

    def checkpointed(self, layer, x, bias):
        return checkpoint(self.layer, layer, x, bias, use_reentrant=self.reentrant)


class RelativeBiasInCheckpoint(RelativeBias):
    reentrant = False


class ThroughLayers(nn.Module):
    """A table that goes through layers which see samples too, and is repeated by heads (DeBERTa)."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.key = nn.Embedding(3, D), nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        keys = self.key(self.norm(self.table.weight).unsqueeze(0))
        keys = keys.view(1, 3, 2, D // 2).transpose(1, 2).flatten(0, 1).repeat(len(x), 1, 1)
        queries = self.key(x).unflatten(-1, (2, D // 2)).transpose(1, 2).flatten(0, 1)
        return torch.bmm(queries, keys.mT).unflatten(0, (len(x), 2)).flatten(1)


class Products(nn.Module):
    """A weight in einsum, on either side of a product, in a convolution made of it, with detached parts."""

    def __init__(self):
        super().__init__()
        self.weight, self.conv = nn.Parameter(torch.randn(T, T)), nn.Conv1d(D, D, 3, padding=1, groups=2)
        self.vector = nn.Parameter(torch.randn(D))

    def forward(self, x):
        weight = self.conv.weight
        x = x + torch.tanh(x @ self.vector + self.vector @ x.cos().mT + x[:, 0].mv(self.vector)[:, None])[..., None]
        weight = (weight - weight.mean((1, 2), keepdim=True)) / weight.std((1, 2), keepdim=True).detach()
        y = F.conv1d(x.transpose(1, 2), weight, self.conv.bias, padding=1, groups=2).transpose(1, 2)
        return torch.einsum("ntd,st->nsd", y, self.weight) + self.weight @ y.sin() + (y.mT @ self.weight).mT


MODELS = [
    *(AsOthersAre, Complex),
    *(Positions, PositionsOfShape, NotUsed, Prompt, TiedHead, FusedBias, FreeParameters),
    *(RelativeBias, RelativeBiasInCheckpoint, ThroughLayers, Products, OwnBackwards, AttentionInFull),
]
MODES = {
    "grad_sample": dpfast.GradSampleModule,
    "one pass": lambda m, **more: dpfast.GradSampleModuleFastGradientClipping(m, max_grad_norm=C, **more),
    "two passes": lambda m, **more: dpfast.GradSampleModuleFastGradientClipping(m, max_grad_norm=C, passes=2, **more),
}


def losses(model, x):
    return torch.sin(3.0 * model(x)).flatten(1).sum(1)


def check(make, mode, x):
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    plain.reentrant = None
    exact = loop_over_samples(plain, lambda m, x: losses(m, x).sum(), x)
    wrapped = MODES[mode](model, loss_reduction="sum")
    for _ in range(2):  # the second finds everything learned
        wrapped.zero_grad()
        wrapped.enable_hooks()
        values = losses(wrapped, x)
        values.sum().backward(retain_graph=True)
        if mode == "two passes":
            wrapped.zero_grad()
            wrapped.disable_hooks()
            (wrapped.get_clipping_coef() * values).sum().backward()
    size = float(norms_of(exact).norm()) + 1e-30
    sums = {k: g.sum(0) for k, g in exact.items()} if mode == "grad_sample" else clipped_sum(exact, C)
    for name, p in model.named_parameters():
        if mode == "grad_sample" and p.grad_sample is None:  # not used
            assert p.grad is None and not exact[name].any() and name == "body.mask"
            continue
        if mode == "grad_sample":
            assert p.grad_sample.shape == exact[name].shape
            assert float((p.grad_sample - exact[name]).norm()) <= 1e-5 * size, name
        if len(x):
            assert float((p.grad - sums[name]).norm()) <= 1e-4 * size, name
    if mode != "grad_sample" and len(x):
        assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


@pytest.mark.parametrize("n", [0, 1, 2, 3, T])
@pytest.mark.parametrize("make", MODELS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_right_for_every_batch(make, mode, n):
    check(make, mode, torch.randn(n, T, D))


@pytest.mark.parametrize("make", MODELS, ids=lambda m: m.__name__)
def test_a_sample_that_is_not_finite_harms_no_other(make):
    torch.manual_seed(0)
    model, x = make(), torch.randn(3, T, D)
    exact = {k: g[:2] for k, g in loop_over_samples(model, lambda m, x: losses(m, x).sum(), x).items()}
    x[2, 0, 0] = float("nan")
    wrapped = MODES["one pass"](model, loss_reduction="sum")
    with pytest.warns(dpfast.errors.DpfastWarning):
        losses(wrapped, x).sum().backward()
        assert wrapped.nonfinite_samples == 1  # of a GPU known when it is asked for
    for name, expected in clipped_sum(exact, C).items():
        assert relative_error(model.get_parameter(name).grad, expected) <= 1e-4, name


def test_frozen_parameters_are_left_out():
    model, x = RelativeBias(), torch.randn(3, T, D)
    model.table.weight.requires_grad_(False)
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    wrapped = MODES["one pass"](model, loss_reduction="sum")
    losses(wrapped, x).sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
    assert model.table.weight.grad is None


def test_the_forward_is_not_expanded():
    """What a table gives is looked up once, and its copies take no memory."""
    model = Positions()
    sizes = []
    model.table.register_forward_hook(lambda module, args, out: sizes.append(out.shape))
    wrapped = MODES["one pass"](model)
    for _ in range(2):
        losses(wrapped, torch.randn(3, T, D)).sum().backward()
    assert sizes == [(T, D)] * 2


# --- nothing gets lost ---


class Keeps(Positions):
    def forward(self, x):
        self.kept = self.table(torch.arange(x.shape[1]))
        return self.head(x + self.kept)


class Distances(Positions):
    """A function that has no rule."""

    def forward(self, x):
        return torch.cdist(x, self.table.weight)


class Penalty(Positions):
    def forward(self, x):
        return super().forward(x).sum() + self.head.weight.square().sum()


class OfTheirMean(Positions):
    def forward(self, x):
        return self.head(x) + self.head(x.mean(0))


LOST = {
    BackwardInCheckpoint: (lambda m, out: out.sum(), r": a gradient reached a parameter"),
    Keeps: (lambda m, out: out.sum() + m.kept.square().sum(), r"table \(Embedding\): a gradient"),
    Distances: (lambda m, out: out.sum(), r"parameter table\.weight"),
    Penalty: (lambda m, out: out, r"parameter head\.weight"),
    OfTheirMean: (lambda m, out: out.sum(), "each of its entries depends on several samples"),
}


@pytest.mark.filterwarnings("ignore::dpfast.errors.DpfastWarning")  # it takes a loop
def test_a_function_with_a_backward_of_its_own_that_samples_go_through_too():
    torch.manual_seed(0)
    check_rule(BackwardOfSamples(), torch.randn(3, T, D), dtypes=(torch.float64,))


@pytest.mark.parametrize("make", LOST, ids=lambda m: m.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_parted_by_samples_is_an_error(make, mode):
    loss, message = LOST[make]
    model = make()
    wrapped = MODES[mode](model)
    with pytest.raises((EscapedGradientError, UnsupportedModuleError), match=message):
        loss(model, wrapped(torch.randn(3, T, D))).backward()
    assert all(getattr(p, "grad_sample", None) is None for p in model.parameters())


def test_another_way_than_was_learned_is_an_error():
    """A forward that takes another branch in earnest than on fake tensors."""

    class Branches(Positions):
        def forward(self, x):
            rows = self.table(torch.arange(x.shape[1]))
            return self.head(x + (rows if torch.compiler.is_compiling() or not armed else rows.exp()))

    armed, model = [], Branches()
    wrapped = MODES["one pass"](model)
    wrapped(torch.randn(3, T, D)).sum().backward()
    armed.append(True)
    with pytest.raises(EscapedGradientError, match=r"table \(Embedding\)"):
        wrapped(torch.randn(3, T, D)).sum().backward()


def test_outside_of_the_model_parameters_are_themselves():
    model = TiedHead()
    wrapped = MODES["one pass"](model)
    losses(wrapped, torch.randn(3, T, D)).sum().backward()
    assert model.table.weight is dict(model.named_parameters())["table.weight"]
    twin = copy.deepcopy(wrapped)
    losses(twin, torch.randn(2, T, D)).sum().backward()
    assert twin.get_norm_sample().shape == (2,)
    assert model.table.weight.grad is not None and type(wrapped.to_standard_module().table.weight) is nn.Parameter


def test_where_all_tensors_share_attributes_with_what_is_made_of_them(monkeypatch):
    """As importing fastai has it: what is noted of a parameter stood on it then, as if the model kept that."""
    as_subclass = torch._C.TensorBase.as_subclass

    def with_attributes(x, cls):
        made = as_subclass(x, cls)
        made.__dict__ = x.__dict__
        return made

    monkeypatch.setattr(torch.Tensor, "as_subclass", with_attributes, raising=False)
    monkeypatch.setattr("dpfast.looks.exchange.carried", None)  # which is asked where something is kept
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dpfast.GradSampleModule(FreeParameters())(torch.randn(3, T, D)).mean().backward()
