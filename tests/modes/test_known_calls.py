"""What kernels do for a layer of a kind that is known takes few lines of Python: much of a GPU's step is the host's."""

import pytest
import torch
from calls_made import calls_of
from torch import nn

import dpfast
from dpfast.arithmetic import cost, kernel_calls, row_norms
from dpfast.arithmetic.kernel_norms import import_kernels
from dpfast.factors import OuterProduct
from dpfast.kernels import _partials, _repeat, _tiles
from dpfast.modes import deferred
from dpfast.modes.nonfinite_samples import DroppedSamples
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

N, T, D = 3, 4, 16
C = 0.5


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setenv("DPFAST_BACKEND", "triton")
    monkeypatch.setattr(import_kernels()[0], "groups", lambda t, d, p: False)
    monkeypatch.setattr(_repeat, "_DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr(deferred, "SMALL", {})
    monkeypatch.setattr(deferred, "_recipes", {})
    monkeypatch.setattr(deferred, "_kinds", {})
    monkeypatch.setattr(row_norms, "_FROM", {})


@pytest.fixture(params=["gram", "direct"])
def way(request, monkeypatch):
    """Of norms; gradients are kept where it is the direct one."""
    monkeypatch.setattr(cost, "norm_way", lambda t, d, p, device=None: request.param if t > 1 else "rank_one")
    monkeypatch.setattr(cost, "keeps", lambda *of, **also: request.param == "direct")
    return request.param


class Shares(nn.Module):
    """Layers of one kind, of which some have one input, and some one gradient."""

    def __init__(self, layers=4, bias=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=bias) for _ in range(layers))
        self.head = nn.Linear(D, 5)

    def forward(self, x):
        for one, other in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + one(x) + other(x)
        return self.head(x)


def losses(model, x):
    return model(x).square().flatten(1).sum(1)


def wrapped_after(model, *inputs):
    """After a step on each; and of each its norms, their bounds and its sums."""
    wrapped, found = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C), []
    for x in inputs:
        wrapped.zero_grad()
        losses(wrapped, x).mean().backward()
        grads = [p.grad.clone() for p in wrapped.parameters()]
        found.append([wrapped.get_norm_sample(), wrapped.norm_slack, *grads])
    return wrapped, found


def model_of(seed=0, **of):
    torch.manual_seed(seed)
    return Shares(**of)


def batch(seed, n=N):
    return torch.randn(n, T, D, generator=torch.Generator().manual_seed(seed))


def test_the_same_bits_as_without(way, monkeypatch):
    inputs = [batch(1), batch(2), batch(3, 2), batch(4), batch(5, 1)]
    _, found = wrapped_after(model_of(), *inputs)
    monkeypatch.setattr(deferred.KernelRecipe, "learned", classmethod(lambda cls, *of: None))
    monkeypatch.setattr(deferred, "_recipes", {})
    monkeypatch.setattr(deferred, "_kinds", {})
    _, alone = wrapped_after(model_of(), *inputs)
    for of_step, without in zip(found, alone, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(of_step, without, strict=True))


def test_as_a_loop_over_samples(way):
    inputs = [batch(1), batch(2), batch(3, 2)]
    model = model_of()
    _, found = wrapped_after(model, *inputs)
    for x, (norms, slack, *grads) in zip(inputs, found, strict=True):
        exact = loop_over_samples(model_of().double(), lambda m, x: losses(m, x).sum(), x.double())
        of_all = torch.stack([g.flatten(1).norm(dim=1) for g in exact.values()]).norm(dim=0)
        assert relative_error(norms, of_all) <= 1e-5 and (slack >= 0).all()
        sums = clipped_sum(exact, C)
        for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
            assert relative_error(grad, sums[name]) <= 1e-4, name


def test_sums_of_two_passes_add_up(way):
    """What stands in p.grad already goes the general way."""
    wrapped, ((*_, a), (*_, b)) = wrapped_after(model_of(), batch(1), batch(2))
    wrapped.zero_grad()
    for x in (batch(1), batch(2)):
        losses(wrapped, x).mean().backward()
    torch.testing.assert_close([*wrapped.parameters()][-1].grad, a + b)


@pytest.mark.parametrize(
    "coefficients",
    [
        lambda: torch.ones(N - 1),
        lambda: torch.ones(N, dtype=torch.float64),
        lambda: torch.ones(2 * N)[::2],
        lambda: torch.ones(N, device="meta"),
    ],
    ids=["too few", "fp64", "strided", "elsewhere"],
)
def test_coefficients_that_a_launch_may_not_read_go_the_general_way(coefficients):
    """A launch reads as many as there are samples, at their address, whatever stands there."""
    coefficients, values = coefficients(), torch.ones(N, 4, 5)
    assert kernel_calls.are_plain(torch.ones(N), values)
    assert not kernel_calls.are_plain(coefficients, values)
    factor = OuterProduct.of_rows(torch.ones(N, T, D), torch.ones(N, T, D), Refused())
    if coefficients.device != values.device:
        return
    if len(coefficients) == N:
        assert torch.equal(factor.weighted_sum(coefficients), N * T * torch.ones(D, D))
    else:
        with pytest.raises((dpfast.errors.InputError, RuntimeError, ValueError)):
            factor.weighted_sum(coefficients)


class Refused:
    excess = 0.0

    def weighted_sum(self, *of):
        raise AssertionError("these are not plain")


def test_gram_norms_of_a_kind_are_taken_together(monkeypatch):
    """Of four layers, whose inputs are two tensors and their gradients two: a row's norms are taken once."""
    monkeypatch.setattr(cost, "norm_way", lambda *of: "gram")
    monkeypatch.setattr(cost, "keeps", lambda *of, **also: False)
    wrapped, _ = wrapped_after(model_of(bias=False), batch(1))
    kinds, launches = [], []
    unfinished, each = kernel_calls.PairCalls.unfinished, import_kernels()[0].Like.each

    def noted(self, pairs):
        kinds.append(len(pairs))
        return unfinished(self, pairs)

    def counted(self, calls):
        calls = [*calls]
        launches.extend([self._launcher.__name__] * len(calls))
        return each(self, calls)

    monkeypatch.setattr(kernel_calls.PairCalls, "unfinished", noted)
    monkeypatch.setattr(import_kernels()[0].Like, "each", counted)
    losses(wrapped, batch(2)).mean().backward()
    assert sorted(kinds) == [1, 4]
    assert launches.count("gram_partials") == 4 + 1
    assert launches.count("row_norm") == (2 + 2) + (1 + 1)


MOST = {"gram": 360, "direct": 320}
"""Calls of Python and of C that a layer more adds to a step, a launch itself not counted."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted where kernels are interpreted and launches left out")
def test_a_layer_takes_few_calls(way, monkeypatch):
    monkeypatch.setattr(_repeat, "_start", lambda *of, **also: None)
    monkeypatch.setattr(_partials, "launch", lambda *of, **also: None)
    monkeypatch.setattr(_tiles, "sum_splits", lambda *of: 1)  # as of a large layer
    monkeypatch.setattr(DroppedSamples, "add", lambda *of: None)  # without launches norms are what memory held
    import_kernels()[0].weighted_sum.known.clear()
    few, many = (calls_of_a_step(layers) for layers in (4, 12))
    assert (many - few) / 8 <= MOST[way]


def calls_of_a_step(layers):
    wrapped, _ = wrapped_after(model_of(layers=layers), batch(1), batch(2))
    wrapped.zero_grad()
    return calls_of(lambda: losses(wrapped, batch(3)).mean().backward())
