"""Layouts by hand, losses that compare samples, and inputs of all kinds."""

import copy
import dataclasses
import functools

import pytest
import torch
from folding_models import (
    AttentionOverBatch,
    Centred,
    Choices,
    D,
    LooksAtValues,
    Model,
    OverAndOver,
    T,
    Together,
    Turned,
)
from torch import nn

import dpfast
from dpfast.errors import InputError, UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

# --- losses that compare samples ---


def test_similarities_of_all_pairs_are_refused_at_the_output():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(D, 4)

        def forward(self, x):
            y = self.lin(x)
            return {"embeddings": y, "similarities": torch.cdist(y, y)}

    x = torch.randn(4, D)
    for wrapper in (dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping):
        wrapped = wrapper(Pairs())
        with pytest.raises(UnsupportedModuleError, match=r"output 1 of the model, \(4, 4\)"):
            nn.functional.cross_entropy(wrapped(x)["similarities"], torch.arange(4)).backward()
        wrapped.zero_grad()
        wrapped(x)["embeddings"].square().sum().backward()


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, 4)

    def forward(self, x):
        return self.lin(x)


@pytest.mark.parametrize("similarities", [lambda y: y @ y.t(), lambda y: torch.einsum("nd,md->nm", y, y)])
@pytest.mark.parametrize("wrapper", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_similarities_of_all_pairs_are_refused_in_the_loss(similarities, wrapper):
    wrapped, x = wrapper(Embeds()), torch.randn(5, D)
    for _ in range(2):  # a refused loss is refused again
        with pytest.raises(
            UnsupportedModuleError, match=r"all pairs of the batch's 5 samples, \(5, 5\), .* lin \(Linear\)"
        ):
            nn.functional.cross_entropy(similarities(wrapped(x)), torch.arange(5)).backward()


def test_products_within_samples_are_no_pairs():
    """T = N = 4 = D."""
    wrapped = dpfast.GradSampleModule(Embeds())
    y = wrapped(torch.randn(4, 4, D))
    (y @ y.transpose(1, 2)).square().mean().backward()
    wrapped.zero_grad()
    (wrapped(torch.randn(4, D)) @ torch.randn(4, 4)).square().mean().backward()


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
        (Together, "k*N", r"was found to have N\*k rows in dimension 0; leave that line out"),
        (OverAndOver, "N*k", r"was found to have k\*N rows in dimension 0"),
    ],
)
def test_what_cannot_be_so(make, value, match):
    with pytest.raises(InputError, match=match):
        dpfast.GradSampleModule(make(), layout={"lin": value})(torch.randn(4, T, D))


@pytest.mark.parametrize("value", [1, 2])
def test_another_dimension_that_is_as_long_as_the_batch_is_not_believed(value):
    """N = T = D."""
    plain = type("Plain", (Model,), {"between": lambda self, x: self.lin(x)})()
    wrapped = dpfast.GradSampleModule(plain, layout={"lin": value})
    with pytest.raises(InputError, match="was found to have samples in dimension 0"):
        wrapped(torch.randn(D, D, D)).sum().backward()


def test_what_mixes_is_refused_whatever_is_said():
    with pytest.raises(UnsupportedModuleError, match="samples meet in lin"):
        dpfast.GradSampleModule(Centred(), layout={"lin": 0})(torch.randn(4, T, D)).sum().backward()


def test_explain_shows_it():
    found = {}
    for make in (Together, OverAndOver):
        told = dpfast.explain(make(), torch.randn(4, T, D))
        found[make] = {use.parameter: use.samples for use in told.uses}
        assert "samples" in str(told).splitlines()[0]
    assert found[Together]["lin.weight"] == "0: N*k" and found[OverAndOver]["lin.weight"] == "0: k*N"
    assert found[Together]["first.weight"] == "0"


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


class FoldedPositions(nn.Module):
    """A layer of positions alone, for all samples, folded.

    Attributes:
        apart: they meet no sample in the model.
    """

    def __init__(self, over_and_over=False, apart=False):
        super().__init__()
        self.table, self.lin = nn.Linear(1, 8), nn.Linear(8, 3)
        self.over_and_over, self.apart = over_and_over, apart

    def forward(self, x):
        n, t, _ = x.shape
        rows = torch.arange(t)
        rows = rows.repeat_interleave(n) if self.over_and_over else rows.repeat(n)
        rows = self.table(rows.unsqueeze(1).to(x.dtype))
        rows = rows.view(t, n, 8).transpose(0, 1) if self.over_and_over else rows.view(n, t, 8)
        return (self.lin(x), rows) if self.apart else self.lin(torch.tanh(x + rows)).mean(1)


class FoldedPairs(nn.Module):
    """Attention within pairs that are the same for all samples, folded."""

    def __init__(self, apart=False):
        super().__init__()
        self.attention, self.lin, self.apart = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3), apart

    def forward(self, x):
        n, t, _ = x.shape
        pairs = torch.arange(2 * t * 8).remainder(7).view(t, 2, 8).repeat(n, 1, 1).to(x.dtype)
        rows = self.attention(pairs, pairs, pairs)[0].sum(1).view(n, t, 8)
        return (self.lin(x), rows) if self.apart else self.lin(torch.tanh(x + rows)).mean(1)


def of_both(outputs):
    x, rows = outputs if isinstance(outputs, tuple) else (outputs, outputs)
    return (x.square().flatten(1).sum(1) * rows.square().flatten(1).sum(1)).sum()


FOLDED = [FoldedPositions, functools.partial(FoldedPositions, over_and_over=True), FoldedPairs]


@pytest.mark.parametrize("make", FOLDED, ids=["together", "over and over", "in pieces"])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_rows_that_are_the_same_for_all_samples(make, n):
    """Which is whose, gradients tell; it was to be said by hand."""
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(n, 5, 8).double()
    exact = loop_over_samples(copy.deepcopy(model), lambda m, x: of_both(m(x)), x)
    wrapped = dpfast.GradSampleModule(model, loss_reduction="sum")
    for _ in range(3):
        wrapped.zero_grad()
        of_both(wrapped(x)).backward()
    for name, p in model.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 1e-6, name


@pytest.mark.parametrize("make", [FoldedPositions, FoldedPairs])
def test_the_line_for_folded_rows_is_one_that_helps(make):
    """It said dimension 0, which is refused for these."""
    torch.manual_seed(0)
    model, x = make(apart=True).double(), torch.randn(3, 5, 8).double()
    layer = "table" if make is FoldedPositions else "attention"
    with pytest.raises(InputError, match=rf"layout=\{{'{layer}': 'N\*k'\}}"):
        of_both(dpfast.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")(x)).backward()
    exact = loop_over_samples(copy.deepcopy(model), lambda m, x: of_both(m(x)), x)
    wrapped = dpfast.GradSampleModule(model, loss_reduction="sum", layout={layer: "N*k"})
    of_both(wrapped(x)).backward()
    for name, p in model.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 1e-6, name


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(D, D), nn.Linear(D, 2)

    def forward(self, x):
        return self.head(self.rnn(x.transpose(0, 1))[0].mean(0))


def test_a_layer_that_knows_its_dimension_itself():
    """What was said of it was passed over."""
    for value in (0, "shared", "N*k"):
        with pytest.raises(InputError, match=r"rnn \(GRU\): layout says .*, and it has samples in dimension 1; leave"):
            dpfast.GradSampleModule(Recurrent(), layout={"rnn": value})(torch.randn(4, T, D))
    dpfast.GradSampleModule(Recurrent(), layout={"rnn": 1})(torch.randn(4, T, D)).sum().backward()
