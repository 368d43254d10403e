"""Backward passes that ask for gradients of other tensors than the parameters: attacks, saliency, a loss's own."""

import pytest
import torch
from cases import assert_gradients
from released import in_two_passes
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import StateError
from dpfast.modes import held_by
from dpfast.opacus import DPOptimizerFast
from dpfast.testing import clipped_sum, loop_over_samples

N, D, C = 4, 6, 0.1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)
        self.features = None

    def forward(self, x, skip=False):
        if skip:
            return 3.0 * x
        self.features = torch.tanh(checkpoint(self.first, x, use_reentrant=False))
        return self.second(self.features)


def loss(model, x):
    return model(x).square().sum(1)


def wrap(passes=1):
    return dpfast.GradSampleModuleFastGradientClipping(Net(), max_grad_norm=C, passes=passes)


def of_the_input(model, x):
    torch.autograd.grad(loss(model, x).mean(), x)


def of_the_input_by_backward(model, x):
    loss(model, x).mean().backward(inputs=[x])


def of_a_layer(model, x):
    found = loss(model, x).mean()
    torch.autograd.grad(found, model.features)


def of_the_output(model, x):
    output = model(x)
    torch.autograd.grad(output.square().sum(), output)


def of_the_input_past_the_layers(model, x):
    torch.autograd.grad(model(x, skip=True).sum(), x)


OTHERS = [of_the_input, of_the_input_by_backward, of_a_layer, of_the_output, of_the_input_past_the_layers]


@pytest.mark.parametrize("ask", OTHERS)
def test_nothing_is_left(ask):
    """They were counted as backward passes of zeros, by which the sum was divided."""
    torch.manual_seed(1)
    model, x = wrap(), torch.randn(N, D)
    model.forbid_grad_accumulation()
    options = {"noise_multiplier": 0.0, "max_grad_norm": C, "expected_batch_size": 1}
    optimizer = DPOptimizerFast(torch.optim.SGD(model.parameters(), lr=0.0), **options)
    exact = clipped_sum(loop_over_samples(Net(), lambda m, x: loss(m, x).sum(), x), C)
    for times in (0, 2):
        for _ in range(times):
            ask(model, x.clone().requires_grad_())
            assert all(p.grad is None for p in model.parameters()) and held_by(model.parameters()) is None
        loss(model, x).mean().backward()
        norms = model.get_norm_sample()
        for _ in range(times):
            ask(model, x.clone().requires_grad_())
        assert torch.equal(model.get_norm_sample(), norms) and held_by(model.parameters()).passes == 1
        optimizer.step()
        assert_gradients({name: p.grad for name, p in model._module.named_parameters()}, exact)
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("ask", OTHERS)
def test_within_units_and_between_two_passes(ask):
    torch.manual_seed(1)
    x, ids = torch.randn(N, D), torch.tensor([0, 0, 1, 2])
    sums = []
    for asked in (False, True):
        model = wrap()
        with model.units(ids, 3):
            if asked:
                ask(model, x.clone().requires_grad_())
            loss(model, x).mean().backward()
        both = wrap(passes=2)
        found = loss(both, x)
        found.mean().backward(retain_graph=True)
        if asked:
            ask(both, x.clone().requires_grad_())
        factors = both.get_clipping_coef()
        if asked:
            ask(both, x.clone().requires_grad_())
        both.disable_hooks()
        (factors * found).sum().backward()
        both.enable_hooks()
        sums.append([p.grad for m in (model, both) for p in m.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*sums, strict=True))


@pytest.mark.parametrize("passes", [1, 2])
def test_backward_passes_that_find_zeros_count(passes):
    """Of no samples; of samples that no parameter is used for."""
    model = wrap(passes)
    cases = [(torch.randn(0, D), {})]
    if passes == 1:
        cases.append((torch.randn(N, D, requires_grad=True), {"skip": True}))
    for x, options in cases:
        model.zero_grad()
        found = model(x, **options).square().sum(1)
        in_two_passes(model, found) if passes == 2 else found.sum().backward()
        assert held_by(model.parameters()).passes == 1
        assert not any(p.grad.any() for p in model.parameters())


def test_a_second_pass_that_reaches_more_than_the_first_is_refused_all_the_same():
    model, x = wrap(passes=2), torch.randn(N, D)
    found, other = loss(model, x), loss(model, x)
    found.mean().backward(retain_graph=True)
    factors = model.get_clipping_coef()
    of_the_input(model, x.clone().requires_grad_())
    model.disable_hooks()
    with pytest.raises(StateError, match="would be added unclipped"):
        ((factors * found).sum() + other.sum()).backward()


@pytest.mark.parametrize("mode", ["grad_sample", "one pass", "two passes"])
def test_a_loss_of_the_batch_and_of_what_attacks_it(mode):
    """One graph gives the attack, and is gone through again beside that of the attacked batch."""
    torch.manual_seed(1)
    x = torch.randn(N, D)
    plain = Net()

    def attacked(model, x):
        x = x.clone().requires_grad_()
        clean = loss(model, x)
        (g,) = torch.autograd.grad(clean.sum(), x, retain_graph=True)
        return clean + loss(model, (x + 0.1 * g.sign()).detach())

    exact = loop_over_samples(plain, lambda m, x: attacked(m, x).sum(), x)
    if mode == "grad_sample":
        model = dpfast.GradSampleModule(Net(), loss_reduction="sum")
        for _ in range(2):  # uses are counted anew
            model.zero_grad()
            attacked(model, x).sum().backward()
        for name, g in exact.items():
            torch.testing.assert_close(model._module.get_parameter(name).grad_sample.double(), g, rtol=1e-4, atol=1e-5)
        return
    model = dpfast.GradSampleModuleFastGradientClipping(
        Net(), max_grad_norm=C, loss_reduction="sum", passes=1 if mode == "one pass" else 2
    )
    for _ in range(2):
        model.zero_grad()
        losses = attacked(model, x)
        in_two_passes(model, losses, "sum") if mode == "two passes" else losses.sum().backward()
    assert_gradients({name: p.grad for name, p in model._module.named_parameters()}, clipped_sum(exact, C))


def test_an_attack_whose_graph_is_gone_leaves_one_use():
    """So the layers of the step that follows are taken one by one, as without an attack."""
    model, x = wrap(), torch.randn(N, D).requires_grad_()
    seen = []
    of_the_input(model, x)
    model._tapped.observe = lambda record, parameter, factor: seen.append(record.is_only_use(parameter))
    found = loss(model, x.detach()).mean()
    found.backward()
    assert seen and all(seen)
