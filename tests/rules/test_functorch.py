"""Layers without a rule: operations in place behind them, loops over samples where vmap cannot run, what is refused."""

import warnings

import pytest
import torch
from torch import nn

import dpfast
from dpfast.testing import check_rule, clipped_sum, loop_over_samples, norms_of, relative_error

X = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))


class Scale(nn.Module):
    """``function(w log(1 + |x|))``; xlog1py is no function that dpfast knows a parameter of its own to come to."""

    def __init__(self, function=lambda x: x):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 1.5]))
        self.function = function

    def forward(self, x):
        return self.function(torch.special.xlog1py(self.weight, x.abs()))


class InPlace(nn.Module):
    """Layers that are followed by operations in place."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x.relu_() if isinstance(x, torch.Tensor) else x[0].add_(x[1])
        return x


def _by_square(x):
    return Square.apply(x)


class Square(torch.autograd.Function):
    """A function of one's own, which vmap does not know."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        return 2.0 * ctx.saved_tensors[0] * grad


def _by_item(x):
    return x * float(torch.tensor(2.0).item()) if x.sum().item() == x.sum().item() else x


def _by_sparse(x):
    table = torch.eye(4, dtype=x.dtype).to_sparse() * 3.0
    return torch.sparse.mm(table, x.flatten(0, -2).T).T.reshape(x.shape)


def _by_branch(x):
    return x * 2.0 if x.shape[0] > 5 or not bool(torch.isnan(x).all()) else x


FUNCTIONS = {"autograd function": _by_square, "item": _by_item, "sparse": _by_sparse, "branch": _by_branch}


def _views(x):
    return x.transpose(1, 2)


def _several(x):
    return x, x * 2.0


@pytest.mark.parametrize("function", [lambda x: x + 0.0, torch.sin, _views, _several])
def test_operations_in_place_may_follow(function):
    check_rule(InPlace(Scale(function)), X, dtypes=(torch.float32, torch.float64))


@pytest.mark.parametrize("mode", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_what_a_layer_keeps_is_not_changed_unnoticed(mode):
    """As in the model alone, autograd refuses."""
    model = mode(nn.Sequential(nn.Linear(4, 4), InPlace(Scale(torch.tanh))))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(X).sum().backward()


def test_an_input_that_is_passed_on_stays_as_it_is():
    class Passes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x, torch.special.xlog1py(self.weight, x.abs())

    x = X.clone()
    model = dpfast.GradSampleModule(Passes(), loss_reduction="sum")
    same, scaled = model(x)
    assert not x.requires_grad and x.grad_fn is None
    same.mul_(2.0)
    assert torch.equal(x, X)
    (same.sum() + scaled.sum()).backward()
    assert torch.allclose(model._module.weight.grad_sample, torch.log1p(X.abs()).sum(1))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_loop_where_vmap_cannot_run(name):
    with pytest.warns(dpfast.errors.DpfastWarning, match=r"1 \(Scale\).*loop over samples"):
        dtypes = [torch.float32, torch.float64]
        dtypes += [] if name == "sparse" else [torch.bfloat16]  # whose sums torch rounds at every step
        check_rule(nn.Sequential(nn.Linear(4, 4), Scale(FUNCTIONS[name])), X, dtypes=dtypes)


def test_loop_is_announced_once():
    model = dpfast.GradSampleModule(Scale(_by_square))
    with pytest.warns(dpfast.errors.DpfastWarning, match="Scale"):
        model(X).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X[:3]).sum().backward()


@pytest.mark.parametrize("function", [lambda x: x, _by_square])
def test_sample_that_is_not_finite(function):
    x = X.clone()
    x[2, 1] = torch.nan
    model = dpfast.GradSampleModuleFastGradientClipping(Scale(function), max_grad_norm=1.0, loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(x).sum().backward()
    others = torch.cat([X[:2], X[3:]])
    exact = clipped_sum(loop_over_samples(Scale(function), lambda m, x: m(x).sum(), others), 1.0)
    assert relative_error(model._module.weight.grad, exact["weight"]) < 1e-5


@pytest.mark.parametrize("function", [lambda x: x - x.mean(0), lambda x: Square.apply(x) / x.max().item()])
def test_layers_that_mix_samples_are_refused(function):
    model = dpfast.GradSampleModule(Scale(function))
    with pytest.raises(
        dpfast.errors.UnsupportedModuleError, match=r"mixes them|depends on several samples|not its own"
    ):
        model(X).sum().backward()


@pytest.mark.parametrize("function", [nn.functional.dropout, lambda x: Square.apply(x) * torch.rand(())])
def test_layers_that_draw_random_numbers_are_refused(function):
    model = dpfast.GradSampleModule(Scale(function))
    with pytest.raises(dpfast.errors.UnsupportedModuleError, match="draws random numbers"):
        model(X).sum().backward()


def test_gradients_that_are_nothing_but_rounding_are_no_sign_of_mixing():
    class Softmax(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.scale = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(4))

        def forward(self, x, y):
            return Square.apply(torch.hypot(torch.softmax(torch.hypot(x, self.shift), -1), self.scale) * y)

    with pytest.warns(dpfast.errors.DpfastWarning):
        model = dpfast.GradSampleModule(Softmax(), loss_reduction="sum")
        model(X, X).sum().backward()
    exact = loop_over_samples(Softmax(), lambda m, x: m(x, x).sum(), X)
    size = norms_of(exact).norm()
    for name, p in model._module.named_parameters():
        assert (p.grad_sample - exact[name]).norm() <= 1e-5 * size
