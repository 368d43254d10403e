"""Whose rows are whose, where shapes cannot tell: one sample is exchanged, and what changes is that one's."""

import copy
import dataclasses
import random

import pytest
import torch
from torch import nn

import dpfast
from dpfast.errors import DpfastError, InputError, UnsupportedModuleError
from dpfast.taps.exchange import _Witness
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

T, D, C = 5, 6, 0.3


class Model(nn.Module):
    """What its subclasses compute between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.lin, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.between(torch.tanh(self.first(x)))))


class Together(Model):
    """(N·T, D)."""

    def between(self, x):
        return self.lin(x.flatten(0, 1)).unflatten(0, (-1, T))


class OverAndOver(Model):
    """(T·N, D)."""

    def between(self, x):
        return self.lin(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (T, -1)).transpose(0, 1)


class Windows(Model):
    """(N·3, 2, D): attention within windows of two, and a norm."""

    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.MultiheadAttention(D, 2, batch_first=True), nn.LayerNorm(D)

    def between(self, x):
        windows = torch.cat([x, x[:, :1]], 1).unflatten(1, (3, 2)).flatten(0, 1)
        windows = self.norm(windows + self.lin(windows, windows, windows, need_weights=False)[0])
        return windows.unflatten(0, (-1, 3)).flatten(1, 2)[:, :T]


class FoldedBehind(Model):
    """(T, N·3, 2), samples in front of parts in the second dimension."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def between(self, x):
        parts = x.transpose(0, 1).unflatten(2, (3, 2)).flatten(1, 2)
        return self.lin(parts).unflatten(1, (-1, 3)).flatten(2).transpose(0, 1)


class Frames(Model):
    """Images (T·N, 1, 2, 3), one a frame, a group norm behind the convolution."""

    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Conv2d(1, 2, 2, padding=1), nn.GroupNorm(1, 2)

    def between(self, x):
        frames = x.transpose(0, 1).reshape(-1, 1, 2, 3)
        return x + self.norm(self.lin(frames)).flatten(1)[:, :D].unflatten(0, (T, -1)).transpose(0, 1)


class RecurrentInRows(Model):
    """A time-first GRU over (2, N·T, 3), parts as time."""

    def __init__(self):
        super().__init__()
        self.lin = nn.GRU(3, 3)

    def between(self, x):
        out, _ = self.lin(x.flatten(0, 1).unflatten(1, (2, 3)).transpose(0, 1))
        return out.transpose(0, 1).flatten(1).unflatten(0, (-1, T))


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(D))

    def forward(self, x):
        return x * self.gain


class RowsWithoutRule(OverAndOver):
    def __init__(self):
        super().__init__()
        self.lin = Gain()


class Choices(Model):
    """Tokens (N·T,), in one row."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Embedding(9, D)

    def between(self, x):
        return x + self.lin((x.sum(2).abs() * 3).long().clamp(max=8).flatten()).unflatten(0, (-1, T))


class LooksAtValues(Together):
    """Cannot run on fake tensors."""

    def between(self, x):
        return super().between(x * float(x.isfinite().float().mean().item() == 1.0))


class DropsOut(Together):
    """The same numbers are dropped in every run."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def between(self, x):
        return super().between(x) + 0.0 * self.drop(x)


RIGHT = [
    Together, OverAndOver, Windows, FoldedBehind, Frames, RecurrentInRows, RowsWithoutRule, Choices, LooksAtValues,
    DropsOut,
]  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 3, T, D, 2 * T])
@pytest.mark.parametrize("make", RIGHT, ids=lambda m: m.__name__)
@pytest.mark.parametrize("mode", ["grad_sample", "one pass", "two passes"])
def test_rows_are_those_of_their_samples(make, n, mode):
    torch.manual_seed(0)
    model, x = make(), torch.randn(n, T, D)

    def losses(m, x):
        return torch.sin(3.0 * m(x)).flatten(1).sum(1)

    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    if mode == "grad_sample":
        losses(dpfast.GradSampleModule(model, loss_reduction="sum"), x).sum().backward()
        for name, p in model.named_parameters():
            assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name
        return
    wrapped = dpfast.GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=C, passes=1 + (mode == "two passes")
    )
    values = losses(wrapped, x)
    values.sum().backward(retain_graph=True)
    if mode == "two passes":
        wrapped.disable_hooks()
        (wrapped.get_clipping_coef() * values).sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
    for name, expected in clipped_sum(exact, C).items():
        assert relative_error(model.get_parameter(name).grad, expected) <= 1e-4, name


def test_batches_of_other_sizes_and_none_at_all():
    torch.manual_seed(0)
    model = OverAndOver()
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    for n in (0, 4, T, 1, 0, 7):
        x = torch.randn(n, T, D)
        wrapped.zero_grad()
        wrapped(x).square().sum().backward()
        assert wrapped.get_norm_sample().shape == (n,)
        if n:
            exact = loop_over_samples(model_of(wrapped), lambda m, x: m(x).square().sum(), x)
            assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


def model_of(wrapped):
    plain = OverAndOver()
    plain.load_state_dict(wrapped._module.state_dict())
    return plain


def test_a_sample_that_is_not_finite_stays_alone():
    torch.manual_seed(0)
    x = torch.randn(4, T, D)
    x[1] = float("nan")
    model = OverAndOver()
    exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x[[0, 2, 3]])
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=C)
    with pytest.warns(dpfast.errors.DpfastWarning):
        wrapped(x).square().sum().backward()
        for name, expected in clipped_sum(exact, C).items():
            assert relative_error(model.get_parameter(name).grad, expected) <= 1e-4, name
        wrapped(x).square().sum().backward()


# --- rows that are nobody's ---


class Centred(Model):
    """Of each sample, what it differs by from the batch's mean."""

    def between(self, x):
        return self.lin(x - x.mean(0))


class AttentionOverBatch(Model):
    """Positions for samples in an attention that takes the second dimension for these."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def between(self, x):
        y = x.transpose(0, 1)
        return self.lin((y @ y.transpose(1, 2)).softmax(2) @ y).transpose(0, 1)


class Neighbour(Model):
    """A sample sees the one before it."""

    def between(self, x):
        return self.lin(x + x.roll(1, 0))


class SeesTheFirst(Model):
    """All see the first."""

    def between(self, x):
        return self.lin(x + x[:1])


class MixedRows(Model):
    """(N·T, D), taken apart in another order than they came together."""

    def between(self, x):
        return self.lin(x.flatten(0, 1).unflatten(0, (T, -1)).transpose(0, 1))


class Turned(Model):
    """The samples in the opposite order."""

    def between(self, x):
        return self.lin(x.flip(0)).flip(0)


class InTheMiddle(Model):
    """Rows (T, N, 2 halves), in one dimension."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def between(self, x):
        y = self.lin(x.transpose(0, 1).unflatten(2, (2, 3)).flatten(0, 2))
        return y.unflatten(0, (T, -1, 2)).flatten(2).transpose(0, 1)


class Experts(Model):
    """Each token goes to one of two layers."""

    def __init__(self):
        super().__init__()
        self.lin = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def between(self, x):
        tokens, out = x.flatten(0, 1), torch.zeros(x.shape[0] * T, D, dtype=x.dtype)
        which = (tokens.sum(1) > 0).long()
        for i, lin in enumerate(self.lin):
            rows = (which == i).nonzero().squeeze(1)
            out = out.index_add(0, rows, lin(tokens[rows]))
        return out.unflatten(0, (-1, T))


REFUSED = {
    Centred: (UnsupportedModuleError, r"samples meet in lin \(Linear\)"),
    AttentionOverBatch: (UnsupportedModuleError, r"samples meet in lin \(Linear\)"),
    Neighbour: (UnsupportedModuleError, r"samples meet in lin \(Linear\)"),
    SeesTheFirst: (UnsupportedModuleError, r"samples meet in lin \(Linear\)"),
    MixedRows: (UnsupportedModuleError, r"samples meet in|another order"),
    Turned: (InputError, r"lin \(Linear\): its samples stand in another order than in the model's input"),
    InTheMiddle: (InputError, r"lin \(Linear\): its samples are folded into rows in an order that is neither"),
    Experts: (DpfastError, r"lin\.\d \(Linear\)"),
}


@pytest.mark.parametrize("n", [2, 3, 4, T, D])
@pytest.mark.parametrize("make", REFUSED, ids=lambda m: m.__name__)
@pytest.mark.parametrize("wrapper", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_rows_of_several_samples_are_refused_by_name(make, n, wrapper):
    torch.manual_seed(0)
    error, match = REFUSED[make]
    with pytest.raises(error, match=match):
        wrapper(make())(torch.randn(n, T, D)).square().sum().backward()


def test_similarities_of_all_pairs_are_refused_at_the_output():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(D, 4)

        def forward(self, x):
            y = self.lin(x)
            return {"embeddings": y, "similarities": y @ y.t()}

    x = torch.randn(4, D)
    for wrapper in (dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping):
        wrapped = wrapper(Pairs())
        with pytest.raises(UnsupportedModuleError, match=r"output 1 of the model, \(4, 4\)"):
            nn.functional.cross_entropy(wrapped(x)["similarities"], torch.arange(4)).backward()
        wrapped.zero_grad()
        wrapped(x)["embeddings"].square().sum().backward()


def test_a_loss_in_the_model_and_means_over_the_batch_are_no_outputs_that_mix():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(D, 3)

        def forward(self, x):
            y = self.lin(x)
            return y.square().mean(), y.mean(0)  # three classes, as many as samples are exchanged

    for output in (0, 1):
        wrapped = dpfast.GradSampleModule(WithLoss())
        wrapped(torch.randn(4, D))[output].sum().backward()


# --- once, and without a trace ---


@pytest.fixture
def runs(monkeypatch):
    """How often a layer has run on samples exchanged."""
    count = []
    run = _Witness.run
    monkeypatch.setattr(_Witness, "run", lambda self, *args: count.append(self.layer) or run(self, *args))
    return count


def test_it_is_done_once(runs):
    wrapped = dpfast.GradSampleModuleFastGradientClipping(Together())
    for n in (3, 4, 7, 1, 0, 3):
        wrapped(torch.randn(n, T, D)).sum().backward()
        assert len(runs) == 4 * 3  # one run, and one with each of three samples exchanged
    wrapped(torch.randn(T, T, D)).sum().backward()  # as long by accident
    assert len(runs) == 8 * 3
    wrapped(torch.randn(T, T, D)).sum().backward()
    assert len(runs) == 8 * 3


def test_nothing_is_left_behind():
    class Noisy(Together):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.drop, self.kept = nn.Dropout(0.5), None

        def between(self, x):
            self.calls += 1
            self.kept = self.drop(x)
            self.chance = random.random()
            return super().between(self.kept)

    model, seen = Noisy(), []
    model.lin.register_forward_hook(lambda m, args, out: seen.append(out))
    wrapped = dpfast.GradSampleModule(model)
    x = torch.randn(4, T, D)
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate(), x.clone(), copy.deepcopy(model.state_dict())
    wrapped._tapped._probe.look(((x,), {}), [x], 4)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert torch.equal(x, before[2]) and all(torch.equal(v, before[3][k]) for k, v in model.state_dict().items())
    assert not seen and model.kept is None and float(model.calls) == 0.0 and model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert wrapped._tapped._taps[1].places == {2: (0, True)}


# --- by hand ---


def test_layout_by_hand_outranks_what_is_found_out():
    torch.manual_seed(0)
    model, x = Turned(), torch.randn(4, T, D)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, layout={"lin": 0})
    wrapped(x).square().sum().backward()  # on the user's word


@pytest.mark.parametrize(
    ("make", "value"), [(Together, "N*k"), (OverAndOver, "k*N"), (LooksAtValues, "N*k"), (AttentionOverBatch, 1)]
)
def test_values_by_hand(make, value):
    torch.manual_seed(0)
    if make is AttentionOverBatch:
        make = type("TimeFirst", (Model,), {"between": lambda self, x: self.lin(x.transpose(0, 1)).transpose(0, 1)})
    model, x = make(), torch.randn(T, T, D)
    exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x)
    wrapped = dpfast.GradSampleModule(model, loss_reduction="sum", layout={"lin": value})
    wrapped(x).square().sum().backward()
    for name, p in model.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name


def test_what_is_given_wrongly():
    for layout, match in [
        ({"linn": 0}, r"'linn' is not the name of a layer .*'lin'"),
        ({"lin": "second"}, r"'lin' has 'second', and not a dimension"),
        ({"lin": -1}, r"'lin' has -1"),
        ({"lin": True}, r"'lin' has True"),
        ([("lin", 0)], "must be a dict"),
    ]:
        model = Together()
        for wrapper in (dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping):
            with pytest.raises(InputError, match=match):
                wrapper(model, layout=layout)
        with pytest.raises(InputError, match=match):
            dpfast.autograd_grad_sample.add_hooks(model, layout=layout)
        dpfast.GradSampleModule(model)  # nothing was left on it


@pytest.mark.parametrize(
    ("make", "value", "match"),
    [
        (Together, 0, r"lin \(Linear\): layout says samples in dimension 0, and its output \(20, 6\) of a batch of 4"),
        (Together, 3, r"lin \(Linear\): layout says samples in dimension 3"),
        (Choices, "shared", r"has samples: N\*k rows in dimension 0"),
    ],
)
def test_what_cannot_be_so(make, value, match):
    with pytest.raises(InputError, match=match):
        dpfast.GradSampleModule(make(), layout={"lin": value})(torch.randn(4, T, D))


def test_what_mixes_is_refused_whatever_is_said():
    with pytest.raises(UnsupportedModuleError, match="samples meet in lin"):
        dpfast.GradSampleModule(Centred(), layout={"lin": 0})(torch.randn(4, T, D)).sum().backward()


# --- inputs of all kinds ---


@dataclasses.dataclass
class Inputs:
    x: torch.Tensor


KINDS = {
    "keyword": lambda x: ((), {"x": x}),
    "dict": lambda x: (({"a": [x]},), {}),
    "nested": lambda x: (((x, (x.sum(2), None)),), {}),
    "object": lambda x: ((Inputs(x),), {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3, T])
def test_inputs_of_all_kinds(kind, n):
    class Takes(OverAndOver):
        def forward(self, x):
            if isinstance(x, Inputs):
                x = x.x
            while not isinstance(x, torch.Tensor):
                x = x["a"] if isinstance(x, dict) else x[0]
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Takes(), torch.randn(n, T, D)
    exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    args, kwargs = KINDS[kind](x)
    wrapped(*args, **kwargs).square().sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
