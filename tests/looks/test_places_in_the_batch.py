"""A sample's gradient may not change with its place in the batch: without one sample all behind it stand elsewhere."""

import math
import random

import pytest
import torch
from torch import nn

import dpfast
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, separable_loss

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")

D = 6
MOVED = "changes with the sample's place in the batch"


class PositionalEncoding(nn.Module):
    """As in PyTorch's tutorial on transformers: of (T, N, D), by the first dimension."""

    def __init__(self, learned=False):
        super().__init__()
        angle = torch.arange(40)[:, None] * torch.exp(torch.arange(0, D, 2) * (-math.log(10000.0) / D))
        table = torch.zeros(40, 1, D)
        table[:, 0, 0::2], table[:, 0, 1::2] = angle.sin(), angle.cos()
        self.pe = nn.Parameter(table) if learned else nn.Buffer(table)

    def forward(self, x):
        return x + self.pe[: x.size(0)]


class Encoder(nn.Module):
    def __init__(self, batch_first, learned=False):
        super().__init__()
        self.positions, self.first, self.head = PositionalEncoding(learned), nn.Linear(D, D), nn.Linear(D, 3)
        self.attention, self.time = nn.MultiheadAttention(D, 2, batch_first=batch_first), int(batch_first)

    def forward(self, x):
        x = self.positions(self.first(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x.mean(self.time))


class Between(nn.Module):
    def __init__(self, way, classes=3):
        super().__init__()
        self.first, self.last, self.way = nn.Linear(D, D), nn.Linear(D, classes), way

    def forward(self, x):
        return self.way(self, torch.tanh(self.first(x)))


def numbers(x):
    return torch.arange(len(x), device=x.device, dtype=x.dtype).view(-1, *[1] * (x.dim() - 1))


class Keeps(nn.Module):
    """The last sample's state, in an attribute from which a loss is made."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        self.state = h[-1]
        return self.last(h)


WRONG = {
    "scaled": lambda m, h: m.last(h * (1 + numbers(h))),
    "shifted": lambda m, h: m.last(h + 0.01 * numbers(h)),
    "the first one twice": lambda m, h: m.last(torch.cat([2 * h[:1], h[1:]])),
    "the last one without gradients": lambda m, h: m.last(torch.cat([h[:-1], h[-1:].detach()])),
    "every second": lambda m, h: m.last(torch.where(numbers(h) % 2 == 0, h, h.detach())),
    "halves": lambda m, h: m.last(torch.cat([h[: (len(h) + 1) // 2], -h[(len(h) + 1) // 2 :]])),
    "a schedule along the batch": lambda m, h: m.last(h) * torch.linspace(0.1, 1.0, len(h))[:, None],
    "a loss of weights by place": lambda m, h: (m.last(h).square().sum(1) * (1 + numbers(h)[:, 0])).sum(),
}


def batch(n=6):
    return torch.randn(n, D)


def loss(model, *inputs):
    out = model(*inputs)
    return torch.sin(3.0 * out).sum() if out.dim() else out


def step(model, *inputs, **how):
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=0.3, loss_reduction="sum", **how)
    loss(wrapped, *inputs).backward()
    return wrapped


@pytest.mark.parametrize("way", WRONG)
@pytest.mark.parametrize("n", [2, 3, 6, 20])
def test_what_changes_with_the_place_is_refused(way, n):
    with pytest.raises(UnsupportedModuleError, match=MOVED):
        step(Between(WRONG[way]), batch(n))


COUNTED = {
    "a scale by the batch": lambda m, h: m.last(h / len(h)),
    "outputs by the batch": lambda m, h: m.last(h) / len(h),
    "attention's scale of the wrong dimension": lambda m, h: m.last(torch.softmax(h * len(h) ** -0.5, 1) * h),
    "of even batches": lambda m, h: m.last(h * (1 + len(h) // 2)),
    "a loss by the root of the number": lambda m, h: m.last(h).square().sum() / len(h) ** 0.5,
    "a mean loss of what is scaled": lambda m, h: m.last(h / len(h)).square().sum(1).mean(),
    "a loss of each by the root of the number": lambda m, h: m.last(h).square().sum(1) / len(h) ** 0.5,
}


@pytest.mark.parametrize("way", COUNTED)
@pytest.mark.parametrize("n", [2, 3, 6, 20])
def test_what_changes_with_the_number_of_samples_is_refused(way, n):
    with pytest.raises(UnsupportedModuleError, match="changes with how many samples there are"):
        step(Between(COUNTED[way]), batch(n))


@pytest.mark.parametrize("way", WRONG)
def test_after_a_batch_of_one(way):
    wrapped = dpfast.GradSampleModuleFastGradientClipping(Between(WRONG[way]), max_grad_norm=0.3, loss_reduction="sum")
    loss(wrapped, batch(1)).backward()
    wrapped.zero_grad()
    with pytest.raises(UnsupportedModuleError, match=MOVED):
        loss(wrapped, batch()).backward()


@pytest.mark.parametrize("way", ["shifted", "every second", "a scale by the batch", "outputs by the batch"])
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2), (1, 2)])
def test_of_two_as_there_are_samples_in_a_look(way, shape):
    """Two classes, two positions."""
    way, classes = (WRONG | COUNTED)[way], torch.Size(shape).numel()
    model = Between(lambda m, h: way(m, h).view(-1, *shape), classes)
    with pytest.raises(UnsupportedModuleError, match=r"changes with (the sample's place|how many samples)"):
        step(model, batch())


@pytest.mark.parametrize("way", ["shifted", "a scale by the batch"])
def test_beside_an_output_that_mixes(way):
    """Which nobody uses."""
    way = (WRONG | COUNTED)[way]
    right = (lambda y: y, lambda y: y.square().sum(1) / len(y), lambda y: y.square().mean(), lambda y: y.square().sum())
    model = Between(lambda m, h: ((y := m.last(h)) - y.mean(0), way(m, h), *(f(y) for f in right)))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=0.3, loss_reduction="sum")
    for i in range(len(right)):
        wrapped.zero_grad()
        y = wrapped(batch())[2 + i]
        (y.sin().sum() if y.dim() > 1 else y.sum()).backward()
    for i, message in ((1, "changes with (the sample's place|how many samples)"), (0, "several samples|another")):
        with pytest.raises(UnsupportedModuleError, match=message):
            wrapped(batch())[i].sin().sum().backward()
        wrapped.zero_grad()


@pytest.mark.parametrize("way", [lambda h: h / len(h), lambda h: 0.1 * h + numbers(h)])
def test_where_the_forward_says_in_what_it_runs(way):
    """Switch Transformers' router moves its own parameters to fp32, which in fp64 is a write to them."""
    with pytest.raises(UnsupportedModuleError, match="changes with"):
        step(Between(lambda m, h: m.last.to(torch.float32)(way(h).float())), batch())


@pytest.mark.parametrize("way", ["shifted", "a schedule along the batch", "a scale by the batch"])
def test_what_begins_late(way):
    """A later look sees it, in the second pass or the eighth."""
    way, right = (WRONG | COUNTED)[way], Between(lambda m, h: m.last(h))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(right, max_grad_norm=0.3, loss_reduction="sum")
    loss(wrapped, batch()).backward()
    right.way = way
    with pytest.raises(UnsupportedModuleError, match="changes with"):
        for _ in range(7):
            wrapped.zero_grad()
            loss(wrapped, batch()).backward()


@pytest.mark.parametrize("learned", [False, True])
def test_positions_along_the_batch_instead_of_time(learned):
    x = torch.randn(6, 5, D)
    if learned:
        with pytest.raises(dpfast.errors.DpfastError):  # by its own parameter, which all samples must share
            step(Encoder(batch_first=True, learned=True), x)
    else:
        with pytest.raises(UnsupportedModuleError, match=f"{MOVED}.*batch_first=False"):
            step(Encoder(batch_first=True), x)


@pytest.mark.parametrize("learned", [False, True])
def test_positions_along_time_are_right(learned):
    model, x = Encoder(batch_first=False, learned=learned), torch.randn(5, 6, D)
    norms = norms_of(loop_over_samples(model, separable_loss, x, batch_dim=1))
    found = step(model, x, batch_first=False).get_norm_sample()
    assert torch.allclose(found.double(), norms.double(), rtol=1e-5)


def test_what_is_kept_of_the_last_sample():
    wrapped = dpfast.GradSampleModuleFastGradientClipping(Keeps(), max_grad_norm=0.3, loss_reduction="sum")
    wrapped(batch())
    with pytest.raises(UnsupportedModuleError, match=MOVED):
        wrapped._module.state.sum().backward()


def test_behind_a_weight_that_is_zeros():
    """It lets nothing through now; after the first step it will."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gate, self.last = nn.Linear(D, D), nn.Linear(D, D, bias=False), nn.Linear(D, 3)
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.last.weight)

        def forward(self, x):
            h = torch.tanh(self.first(x))
            return self.last(h + self.gate(h * numbers(h)))

    with pytest.raises(UnsupportedModuleError, match=MOVED):
        step(Gated(), batch())


def test_samples_of_an_array():
    class OfArrays(Between):
        def forward(self, rows):
            return super().forward(torch.tensor(rows))

    with pytest.raises(UnsupportedModuleError, match=MOVED):
        step(OfArrays(WRONG["scaled"]), batch().numpy())


class InSingle(nn.Module):
    """Its own code says fp32, so it does not run in fp64."""

    def __init__(self, scale):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(D, D), nn.Linear(D, 3), scale

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.float())) * (1 + self.scale * numbers(x.float())))


def test_a_model_that_runs_in_no_other_dtype():
    with pytest.raises(UnsupportedModuleError, match=MOVED):
        step(InSingle(1.0), batch())
    step(InSingle(1e-4), batch())  # may be roundings of an ill-conditioned layer


class Conditioned(nn.Module):
    """Badly: a norm over next to nothing makes everything of roundings in fp32."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x):
        h = self.first(x).tanh() + 300.0
        h = h - h.mean(1, keepdim=True)
        return self.last(nn.functional.layer_norm(1e-6 * h, (64,), eps=1e-30))


RANDOM = {
    "dropout": lambda m, h: m.last(nn.functional.dropout(h, 0.5)),
    "noise": lambda m, h: m.last(h + torch.randn_like(h)),
    "noise of fewer than 16 numbers a sample": lambda m, h: m.last(
        h * (1 + torch.randn(len(h), 10).sum(1, keepdim=True))
    ),
    "noise of a deviation": lambda m, h: m.last(
        h + torch.normal(h.detach(), 0.5) + torch.empty(len(h), 10).normal_()[:, :D]
    ),
    "noise of another layout": lambda m, h: m.last(h + torch.randn_like(h.t().contiguous().t())),
    "layers left out": lambda m, h: m.last(h * torch.bernoulli(torch.full((len(h), 1), 0.5))),
    "an order for each sample": lambda m, h: m.last(torch.stack([row[torch.randperm(D)] for row in h])),
    "dropout, and an order for each sample": lambda m, h: m.last(
        torch.stack([row[torch.randperm(D)] for row in nn.functional.dropout(h, 0.5)])
    ),
    "Python's numbers for each sample": lambda m, h: m.last(torch.stack([row * random.random() for row in h])),
}


@pytest.mark.parametrize("way", RANDOM)
def test_random_numbers_are_no_place(way):
    step(Between(RANDOM[way]), batch())


WRONG_BESIDE_RANDOM = {
    "a scale by the batch": lambda m, h: m.last(torch.randn_like(h) * h / len(h)),
    "shifted": lambda m, h: m.last(nn.functional.dropout(h, 0.5) + torch.randn_like(h) + 0.01 * numbers(h)),
    "a mean and a sum": lambda m, h: m.last(h + torch.rand_like(h)).square().mean() + h.square().sum(),
    "in some order": lambda m, h: m.last(h[:, torch.randperm(D)] * (1 + numbers(h))),
}


@pytest.mark.parametrize("way", WRONG_BESIDE_RANDOM)
def test_random_numbers_hide_nothing(way):
    with pytest.raises(UnsupportedModuleError, match=r"changes with (the sample's place|how many samples)"):
        step(Between(WRONG_BESIDE_RANDOM[way]), batch())


RIGHT = {
    "a row of each": lambda m, h: m.last(h[torch.arange(len(h)), None].squeeze(1)),
    "sorted and put back": lambda m, h: m.last(h[h[:, 0].argsort()])[h[:, 0].argsort().argsort()],
    "a mean": lambda m, h: m.last(h).square().sum(1) / len(h),
    "a mean loss": lambda m, h: m.last(h).square().sum(1).mean(),
    "squeezed": lambda m, h: m.last(h).sum(1, keepdim=True).squeeze(),
    "all of it squeezed": lambda m, h: m.last(h[None].squeeze()),
}


@pytest.mark.filterwarnings("ignore::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("way", RIGHT)
def test_what_only_counts_places(way):
    step(Between(RIGHT[way]), batch())


def test_what_roundings_alone_move():
    step(Conditioned(), torch.randn(6, 64))
