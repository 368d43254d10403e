"""What has no samples meets some: numbers made of parameters, ensembles, parameters that are returned."""

import copy

import pytest
import torch
from in_both_modes import C, check
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import EscapedGradientError, InputError, UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

T, D = 4, 4


COPIES = {
    "expand(n)": lambda s, n: s.expand(n),
    "expand((n,))": lambda s, n: s.expand((n,)),
    "expand(n, 1)": lambda s, n: s.expand(n, 1)[:, 0],
    "a row": lambda s, n: s.view(1).expand(n),
    "expand_as": lambda s, n: s.expand_as(torch.empty(n)),
    "broadcast_to": lambda s, n: torch.broadcast_to(s, (n,)),
    "repeat": lambda s, n: s.repeat(n),
    "* ones": lambda s, n: s * torch.ones(n),
}


class Flow(nn.Module):
    """Its loss has the logarithms of determinants, of a parameter of its own and of another module's weight."""

    def __init__(self, how):
        super().__init__()
        self.log_scale, self.first, self.how = nn.Parameter(torch.randn(D) / 4), nn.Linear(D, D), how

    def forward(self, x):
        z, copies = self.first(x) * self.log_scale.exp(), COPIES[self.how]
        log_det = copies(torch.linalg.slogdet(self.first.weight)[1], len(x))
        return z.square().sum(1) / 2 - copies(self.log_scale.sum(), len(x)) - log_det


class FlowOfAll(Flow):
    def forward(self, x):
        return super().forward(x) + COPIES[self.how](self.log_scale.sum() * self.first(x).mean(), len(x))


@pytest.mark.parametrize("n", [0, 1, 3, D])
@pytest.mark.parametrize("how", COPIES)
def test_copies_of_one_number(how, n):
    torch.manual_seed(0)
    check(Flow(how), torch.randn(n, D), torch.randn(3, D))


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("mode", [GradSampleModule, lambda m: GradSampleModuleFastGradientClipping(m, max_grad_norm=C)])
def test_copies_of_what_is_made_of_all_are_refused(how, mode):
    with pytest.raises((InputError, UnsupportedModuleError, EscapedGradientError)):
        mode(FlowOfAll(how))(torch.randn(3, D)).sum().backward()


ENSEMBLES = {
    "x @ w": lambda m, x: x @ m.weight,
    "a bias": lambda m, x: torch.matmul(x, m.weight) + m.bias,
    "bmm": lambda m, x: torch.bmm(x.expand(E, -1, -1), m.weight),
    "baddbmm": lambda m, x: torch.baddbmm(m.bias, x.expand(E, -1, -1), m.weight),
    "baddbmm, of samples": lambda m, x: torch.baddbmm(x[:, :2].cos(), x.expand(E, -1, -1), m.weight),
    "one after the other": lambda m, x: torch.baddbmm(m.bias, x.expand(E, -1, -1), m.weight).sin() @ m.head.mT,
    "einsum": lambda m, x: torch.einsum("nd,edp->enp", x, m.weight),
    "four dimensions": lambda m, x: (x @ m.weight.unflatten(0, (1, E))).squeeze(0),
    "the same for both": lambda m, x: torch.baddbmm(m.weight[:, :1], x.expand(E, -1, -1), m.weight),
}
E = 3


class Ensemble(nn.Module):
    """Its layers' weights are one parameter, and all see the same samples, which are the second dimension of (E, N)."""

    def __init__(self, how):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(E, D, 2)), nn.Parameter(torch.randn(E, 1, 2))
        self.head, self.how = nn.Parameter(torch.randn(E, 5, 2)), how

    def forward(self, x):
        return ENSEMBLES[self.how](self, x)


class Behind(nn.Module):
    """The ensemble's parameters are another module's."""

    def __init__(self, how, ensemble):
        super().__init__()
        self.first, self.ensemble, self.how = nn.Linear(D, D), ensemble, how

    def forward(self, x):
        return ENSEMBLES[self.how](self.ensemble, self.first(x).tanh())


class SamplesFirst(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        y = self.model(x)
        return torch.sin(3.0 * y.unflatten(1, (len(x), y.shape[1] // max(len(x), 1)))).transpose(0, 1)


@pytest.mark.parametrize("n", [0, 1, E])
@pytest.mark.parametrize("make", [Ensemble, lambda how: Behind(how, Ensemble(how))])
@pytest.mark.parametrize("how", ENSEMBLES)
def test_ensembles(how, make, n):
    torch.manual_seed(0)
    check(SamplesFirst(make(how)), torch.randn(n, D), torch.randn(D, D))


@pytest.mark.parametrize("how", ENSEMBLES)
@pytest.mark.parametrize("mode", [GradSampleModule, lambda m: GradSampleModuleFastGradientClipping(m, max_grad_norm=C)])
def test_samples_that_meet_in_an_ensemble_are_refused(how, mode):
    class OfAll(Ensemble):
        def forward(self, x):
            return super().forward(x).softmax(1)

    with pytest.raises((InputError, UnsupportedModuleError), match=r"several samples|not its own"):
        mode(SamplesFirst(OfAll(how)))(torch.randn(5, D)).square().sum().backward()


class Returned(nn.Module):
    """Weights of tasks, which it gives beside its output."""

    def __init__(self, size, how):
        super().__init__()
        self.lin, self.weights, self.how = nn.Linear(D, D), nn.Parameter(torch.randn(size) / 4), how

    def forward(self, x):
        return self.lin(x), self.how(self.weights, len(x))


class Sums(nn.Module):
    """Samples' losses of what a model returns."""

    def __init__(self, model, uses):
        super().__init__()
        self.model, self.uses = model, uses

    def forward(self, x):
        y, weights = self.model(x)
        return y.square() + weights.exp().sum(-1, keepdim=True) if self.uses else y.square()


ONE_FOR_ALL = {"as it is": lambda w, n: w, "made of it": lambda w, n: w.exp()}


@pytest.mark.parametrize("how", ONE_FOR_ALL)
@pytest.mark.parametrize("size", [(), (1,), (2,), (3,)])
def test_parameters_that_are_returned(size, how):
    torch.manual_seed(0)
    model = Returned(size, ONE_FOR_ALL[how])
    for mode in (GradSampleModule, lambda m: GradSampleModuleFastGradientClipping(m, max_grad_norm=C)):
        y, weights = mode(copy.deepcopy(model))(torch.randn(3, D))
        used = (y.square().sum(1, keepdim=True) * weights.exp()).sum()
        with pytest.raises((EscapedGradientError, UnsupportedModuleError), match=r"weights \(|x\.expand\(n"):
            used.backward()  # whose it is nobody could tell
    for n in (1, 2, 3):
        x = torch.randn(n, D)
        exact = loop_over_samples(model, lambda m, x: m(x)[0].square().sum(), x)
        clipping = GradSampleModuleFastGradientClipping(copy.deepcopy(model), max_grad_norm=C, loss_reduction="sum")
        clipping(x)[0].square().sum().backward()
        assert relative_error(clipping.get_norm_sample(), norms_of(exact)) <= 1e-5
        check(Sums(Returned(size, lambda w, n: w.expand(n, max(1, w.numel()))), uses=True), x)
        check(Sums(copy.deepcopy(model), uses=False), x)
        if size:  # within a model it goes on to where it meets the samples
            check(Sums(copy.deepcopy(model), uses=True), x)
