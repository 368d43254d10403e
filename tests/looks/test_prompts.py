"""Rows that a model learns for all samples (a prompt, inducing points) go through layers whose forward runs in pieces,
before they meet the samples."""

import contextlib
import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast
from dpfast.errors import DpfastError, InputError
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

T, D, C = 5, 8, 0.3


def attention(**options):
    return nn.MultiheadAttention(D, 2, **{"batch_first": True, **options})


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=True, **options)


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", dpfast.errors.DpfastWarning)
        yield


def itself(layer, p):
    return layer(p, p, p, need_weights=False)[0]


def others(layer, p):
    return layer(p[:, 1:], p.cos(), p.sin())[0]


def time_first(layer, p):
    return itself(layer, p.transpose(0, 1)).transpose(0, 1)


def as_rows(layer, p):
    return layer(p.transpose(1, 2)).transpose(1, 2)


def alone(layer, p):
    return layer(p)


LAYERS = {
    "attention": (attention, itself),
    "attention to others": (attention, others),
    "attention of other widths": (lambda: attention(kdim=D, vdim=D, add_bias_kv=True, add_zero_attn=True), others),
    "attention, time first": (lambda: attention(batch_first=False), time_first),
    "encoder layer": (encoder_layer, alone),
    "encoder": (lambda: nn.TransformerEncoder(encoder_layer(norm_first=True), 2, enable_nested_tensor=False), alone),
    "group norm": (lambda: nn.GroupNorm(2, D), as_rows),
}
MODES = {
    "grad_sample": dpfast.GradSampleModule,
    "one pass": lambda m, **more: dpfast.GradSampleModuleFastGradientClipping(m, max_grad_norm=C, **more),
    "two passes": lambda m, **more: dpfast.GradSampleModuleFastGradientClipping(m, max_grad_norm=C, passes=2, **more),
}


class Prompted(nn.Module):
    """A prompt that an encoder reads, in front of each sample.

    Attributes:
        both: the encoder reads the samples too.
    """

    def __init__(self, make, way, both=False):
        super().__init__()
        self.prompt, self.encoder, self.way, self.both = nn.Embedding(T, D), make(), way, both
        self.mid, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x):
        prompt = self.way(self.encoder, self.prompt(torch.arange(T))[None])
        x = self.way(self.encoder, x) if self.both else x
        return self.head(torch.tanh(self.mid(torch.cat([prompt.expand(len(x), -1, -1), x], 1))).mean(1))


class Rows(nn.Module):
    """Several rows (P, C, T) that a model learns, which a layer takes for its batch.

    Attributes:
        layer: one that knows channels by their dimension.
    """

    def __init__(self, make, p):
        super().__init__()
        self.rows, self.layer, self.head = nn.Parameter(torch.randn(p, 4, 6)), make(), nn.Linear(D, 3)
        for parameter in self.layer.parameters():
            nn.init.normal_(parameter)

    def forward(self, x):
        more = torch.sin(self.layer(self.rows)).cumsum(0).cumsum(1)
        return self.head(x.sum(1) * more.sum())


def losses(model, x):
    return torch.sin(3.0 * model(x)).sum(1)


def check(mode, model, x):
    exact = loop_over_samples(copy.deepcopy(model), lambda m, x: losses(m, x).sum(), x)
    exact = {name: g for name, g in exact.items() if model.get_parameter(name).requires_grad}
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
    sums = clipped_sum(exact, C)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert p.grad is None
        elif mode == "grad_sample":
            assert relative_error(p.grad_sample, exact[name]) <= 1e-6, name
        elif len(x):
            assert relative_error(p.grad, sums[name]) <= 1e-6, name
    if mode != "grad_sample" and len(x):
        assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("n", [0, 1, 3, T])
def test_it_is_trained(layer, mode, n):
    torch.manual_seed(0)
    check(mode, Prompted(*LAYERS[layer]).double(), torch.randn(n, 4, D).double())


@pytest.mark.parametrize("layer", LAYERS)
def test_it_reads_samples_too(layer):
    torch.manual_seed(0)
    check("one pass", Prompted(*LAYERS[layer], both=True).double(), torch.randn(3, T, D).double())


@pytest.mark.parametrize("layer", [*LAYERS, "LSTM"])
def test_it_is_frozen(layer):
    """The text encoder of a CLIP whose prompts are learned (CoOp)."""
    torch.manual_seed(0)
    make, way = LAYERS.get(layer, (lambda: nn.LSTM(D, D, batch_first=True), lambda lstm, p: lstm(p)[0]))
    model = Prompted(make, way).double()
    model.encoder.requires_grad_(False)
    check("one pass", model, torch.randn(3, 4, D).double())


COUNTING = {
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm1d(4, affine=True),
    "convolution": lambda: nn.Conv1d(4, 4, 3),
    "grouped convolution": lambda: nn.Conv1d(4, 2, 3, groups=2),
    "transposed convolution": lambda: nn.ConvTranspose1d(4, 2, 3),
    "linear": lambda: nn.Linear(6, 5),
    "layer norm": lambda: nn.LayerNorm((4, 6)),
}


@pytest.mark.parametrize("mode", ["grad_sample", "one pass"])
@pytest.mark.parametrize("layer", COUNTING)
@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_rows_are_a_layer_s_batch(layer, mode, n, p):
    """Where there were as many as channels, each sample's were taken for its channels, and gradients were wrong."""
    torch.manual_seed(0)
    with no_warnings():
        check(mode, Rows(COUNTING[layer], p).double(), torch.randn(n, 4, D).double())


class Cast(Prompted):
    """What the prompt is made with is in 16 bits, and not followed."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            prompt = torch.tanh(self.prompt.weight @ self.mid.weight)[None].to(x.dtype)
        prompt = self.way(self.encoder, prompt)
        x = self.way(self.encoder, x) if self.both else x
        return self.head(torch.tanh(self.mid(torch.cat([prompt.expand(len(x), -1, -1), x], 1))).mean(1))


@pytest.mark.parametrize("make", [Prompted, Cast])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer != "group norm"])
@pytest.mark.parametrize("n", [T, T - 1, 3])
def test_16_bits_are_right_or_refused(layer, n, both, make):
    """As many rows as samples were taken for these, with a warning."""
    torch.manual_seed(0)
    model, x = make(*LAYERS[layer], both=both), torch.randn(n, T, D)

    def summed(model, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=make is Prompted):
            return losses(model, x).sum()

    exact = loop_over_samples(copy.deepcopy(model), summed, x)
    wrapped = dpfast.GradSampleModule(model, loss_reduction="sum")
    try:
        summed(wrapped, x).backward()
    except DpfastError:
        return
    for name, p in model.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 0.1, name


class TwoTowers(nn.Module):
    """A learned context goes through a trained tower of its own, and is compared with each sample, as CLIP does."""

    def __init__(self, tower):
        super().__init__()
        self.context, self.scale = nn.Parameter(torch.randn(3, T, D)), nn.Parameter(torch.tensor(0.5))
        self.tower, self.image = tower(), nn.Linear(D, D)

    def forward(self, x):
        classes = F.normalize(self.tower(self.context).mean(1), dim=-1)
        return self.scale.exp() * F.normalize(self.image(x), dim=-1) @ classes.t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tower", [encoder_layer, lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.GELU())])
def test_a_tower_without_samples(tower, dtype):
    """In 16 bits it was refused; a number times those, which are 16 bits too, was none of what is followed."""
    torch.manual_seed(0)
    model = TwoTowers(tower)
    for n in (3, 5):
        x = torch.randn(n, D)
        exact = loop_over_samples(copy.deepcopy(model), lambda m, x: losses(m, x).sum(), x)
        wrapped = dpfast.GradSampleModule(model, loss_reduction="sum")
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            output = wrapped(x)
        torch.sin(3.0 * output.float()).sum().backward()
        for name, p in model.named_parameters():
            assert relative_error(p.grad_sample, exact[name]) <= (1e-5 if dtype == torch.float32 else 0.1), name
        wrapped.zero_grad()
        wrapped.to_standard_module()


@pytest.mark.parametrize("n", [3, 5])
def test_a_tower_of_what_is_not_followed(n):
    """As many rows as samples were taken for these, with a warning."""

    class Other(TwoTowers):
        def forward(self, x):
            return torch.hypot(super().forward(x), self.scale)  # for which there is no rule

    wrapped = dpfast.GradSampleModule(Other(lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D))))
    with pytest.raises(InputError, match=r"tower\.[01].*the same whatever the batch"):
        losses(wrapped, torch.randn(n, D)).mean().backward()


def test_it_is_compiled():
    torch.manual_seed(0)
    model = Prompted(*LAYERS["encoder layer"]).double()
    x = torch.randn(3, 4, D).double()
    exact = clipped_sum(loop_over_samples(copy.deepcopy(model), lambda m, x: losses(m, x).sum(), x), C)
    dpfast.compile_step(model, losses, max_grad_norm=C, batch_size=4)(x)
    for name, p in model.named_parameters():
        assert relative_error(p.grad, exact[name]) <= 1e-6, name


def test_a_recurrent_layer_wants_it_by_sample():
    """Its error offered a line that changed nothing."""
    model = Prompted(lambda: nn.LSTM(D, D, batch_first=True), lambda lstm, p: lstm(p)[0])
    x = torch.randn(3, 4, D)
    with pytest.raises(InputError, match="expand to the batch what the model broadcasts") as told:
        losses(dpfast.GradSampleModule(model, loss_reduction="sum"), x).sum().backward()
    assert "layout" not in str(told.value).partition("(docs/")[0]
