"""Nearly all layers are tapped the plain way, and nothing but time comes of it."""

import pytest
import torch
from torch import nn

import dpfast
from dpfast.errors import StateError
from dpfast.taps import tap

N, T, D = 3, 5, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(11, D), nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False)

    def forward(self, words):
        x = self.up(self.norm(self.words(words)))
        x = x.relu_() if x.grad_fn is not None else x.relu()  # in place, on what the tap has passed on
        return self.down(x)


def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def plainly(monkeypatch):
    """The layers that went the plain way."""
    found, run = [], tap.caught_plainly

    def watched(of, own, x):
        output = run(of, own, x)
        if output is not None:
            found.append(of.name)
        return output

    monkeypatch.setattr(tap, "caught_plainly", watched)
    return found


def step(wrapped, words):
    wrapped(words).square().flatten(1).sum(1).mean().backward()
    return wrapped


def clipping():
    return dpfast.GradSampleModuleFastGradientClipping(model(), max_grad_norm=0.5)


@pytest.mark.parametrize("kind", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_gives_what_the_general_way_gives(kind, plainly, monkeypatch):
    words = torch.randint(0, 11, (N, T))
    one = step(kind(model()), words)
    assert plainly == ["words", "norm", "up", "down"]
    monkeypatch.setattr(tap, "caught_plainly", lambda *_: None)
    other = step(kind(model()), words)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
        if kind is dpfast.GradSampleModule:
            assert torch.equal(p.grad_sample, q.grad_sample)


def test_what_is_no_plain_call_goes_the_general_way(plainly):
    wrapped = clipping()
    inner = wrapped._module
    inner.forward = lambda words: inner.down(input=inner.up(inner.norm(inner.words(words[:, :1]))))
    step(wrapped, torch.randint(0, 11, (N, T)))
    assert plainly == ["norm", "up"]  # one index a sample may be a batch to expand; a keyword has to find its place


def test_a_rule_that_is_registered_later_is_seen(plainly):
    """The class is known from a run before."""
    wrapped, words = clipping(), torch.randint(0, 11, (N, T))
    step(wrapped, words)
    rule, asked = dpfast.taps.registry.RULES[nn.LayerNorm], []

    def watched(layer, activations, backprops):
        asked.append(layer)
        return rule(layer, activations, backprops)

    try:
        dpfast.register_rule(nn.LayerNorm)(watched)
        step(wrapped, words)
    finally:
        dpfast.register_rule(nn.LayerNorm, fresh=True)(rule)
    assert asked == [wrapped._module.norm]


def test_a_gradient_that_is_asked_for_alone_is_an_error():
    wrapped = clipping()
    loss = wrapped(torch.randint(0, 11, (N, T))).square().sum()
    with pytest.raises(StateError, match="leaves the private ones in them; for ordinary ones"):
        torch.autograd.grad(loss, wrapped._module.up.weight)


def test_what_is_kept_goes_through_saved_tensors():
    kept, came = [], []
    wrapped, words = clipping(), torch.randint(0, 11, (N, T))
    for _ in range(2):  # is looked at
        wrapped(words)
    wrapped._module.up.register_forward_pre_hook(lambda _, args: came.append(args[0].data_ptr()))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        output = wrapped(words)
    assert output.grad_fn is not None  # what is kept lives, so no two have one place
    assert kept.count(came[0]) == 1
