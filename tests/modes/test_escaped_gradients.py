"""Nothing escapes: a gradient that does not come from a tap, in every mode."""

import pytest
import torch
from nodes_kept import Holding
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import DpfastWarning, EscapedGradientError
from dpfast.testing import loop_over_samples, relative_error

MODES = [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping]


class Tied(nn.Module):
    """One weight in three modules; ``escapes``: and in one more place."""

    def __init__(self, escapes=None, reentrant=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        for layer in self.layers:
            layer.weight = self.layers[0].weight
        self.escapes, self.reentrant = escapes, reentrant

    def block(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.cdist(x, self.layers[0].weight) if self.escapes == "last" else x

    def forward(self, x):
        if self.escapes == "first":
            x = torch.cdist(x, self.layers[0].weight)
        if self.reentrant is None:
            return self.layers[1](self.block(x))
        return self.layers[1](checkpoint(self.block, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("wrap", MODES)
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("escapes", ["first", "last"])
def test_one_use_more_of_a_tied_weight(wrap, reentrant, escapes):
    net = Tied(escapes, reentrant)
    model, x = wrap(net), torch.randn(3, 4, requires_grad=True)
    # Next to gradients of taps it is told by its values. On a GPU nobody waits for these: they come out as NaN.
    beside_others = reentrant is not True or escapes == "last"
    if x.is_cuda and beside_others and wrap is dpfast.GradSampleModule:
        with pytest.warns(DpfastWarning, match="a gradient reached a parameter of 1 steps past"):
            model(x).sum().backward()
            assert model._escaped.count == 1
        assert all(p.grad_sample.isnan().all() for p in net.parameters())
        return
    with pytest.raises(EscapedGradientError, match=r"layers\.0\.weight"):
        model(x).sum().backward()
    assert getattr(net.layers[0].weight, "grad_sample", None) is None


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_tied_weight(reentrant):
    net, x = Tied(reentrant=reentrant), torch.randn(3, 4, requires_grad=True)
    exact = loop_over_samples(Tied_like(net), lambda m, x: m(x).square().sum(), x.detach())
    model = dpfast.GradSampleModule(net, loss_reduction="sum")
    loss = model(x).square().sum() + model(x).square().sum()
    loss.backward()
    for name, p in net.named_parameters():
        assert relative_error(p.grad_sample, 2 * exact[name]) <= 1e-5, name
        assert relative_error(p.grad, 2 * exact[name].sum(0)) <= 1e-5, name


def Tied_like(net):
    fresh = Tied()
    fresh.load_state_dict(net.state_dict())
    return fresh


@pytest.mark.parametrize("wrap", MODES)
def test_a_penalty_on_the_weights(wrap):
    net = nn.Linear(4, 4)
    model, x = wrap(net), torch.randn(3, 4)
    with pytest.raises(EscapedGradientError, match=r"weight .* penalty"):
        (model(x).sum() + net.weight.norm()).backward()
    assert getattr(net.weight, "grad_sample", None) is None
    model(x).sum().backward()
    assert net.weight.grad is not None


def test_hooks_on_parameters_see_the_ordinary_gradient_once():
    """As in plain torch; hooks from before the model was wrapped, which may change it, too. So DDP works."""
    net, seen = nn.Linear(4, 2), []
    net.weight.register_hook(lambda g: g * 2)
    model = dpfast.GradSampleModule(net, loss_reduction="sum")
    net.weight.register_hook(lambda g: seen.append(g.clone()))
    net.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model(torch.randn(3, 4)).sum().backward()
    expected = 2 * net.weight.grad_sample.sum(0)
    assert len(seen) == 2 and all(relative_error(g, expected) < 1e-6 for g in seen)


@pytest.mark.parametrize("t", [1, 64])
def test_the_ordinary_gradient_of_large_layers(t):
    """It is a product of its own, or read from grad_sample: which of the two is a matter of cost."""
    net, x = nn.Linear(300, 200), torch.randn(5, t, 300)
    net(x).square().mean().backward()
    plain = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    dpfast.GradSampleModule(net)(x).square().mean().backward()
    for p, g in zip(net.parameters(), plain, strict=True):
        assert relative_error(p.grad, g) <= 1e-5


@pytest.mark.parametrize("wrap", MODES)
def test_a_step_ends_with_its_backward_pass(wrap, monkeypatch):
    """Which of several that are running a repeated forward belongs to (reentrant checkpoints) would not be certain."""
    engine = Holding(torch.autograd.Variable._execution_engine)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)
    model = wrap(Tied(reentrant=True))
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
        assert engine.held and not model._tapped._steps._running


@pytest.mark.parametrize("wrap", MODES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_ordinary_gradients_of_checkpointed_graphs_made_before(wrap, reentrant, times):
    torch.manual_seed(0)
    net, x = Tied(reentrant=reentrant), torch.randn(3, 4, requires_grad=True)
    plain = Tied_like(net)
    sum(plain(x).square().sum() for _ in range(times)).backward()
    model = wrap(net)
    loss = sum(model(x).square().sum() for _ in range(times))
    model.disable_hooks()
    loss.backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert relative_error(p.grad, q.grad) <= 1e-5 and getattr(p, "grad_sample", None) is None
    model.zero_grad()
    model.enable_hooks()
    model(x).sum().backward()  # and the next step is tapped
    assert model.hooks_enabled and len(model._tapped._steps._running) == 0
    if wrap is dpfast.GradSampleModule:
        assert all(p.grad_sample is not None for p in net.parameters())
