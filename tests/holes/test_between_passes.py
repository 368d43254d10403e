"""What may happen between the two passes of ``passes=2``, and what is left of the last batch when a model is saved."""

import copy
import io
import pickle

import pytest
import torch
from released import gradients, in_two_passes, nothing_released
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import StateError
from dpfast.modes.sketches import entries
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

C = 0.1


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("n", [1, 4])
def test_a_parameter_that_is_frozen_before_its_gradient_comes(passes, n):
    """It gets none, as in torch; "its rule gives no gradient of it" was an error."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1))
    inputs = torch.randn(n, 4)
    exact = loop_over_samples(net, lambda m, x: m(x).sum(), inputs)
    model = GradSampleModuleFastGradientClipping(net, max_grad_norm=C, passes=passes)
    losses = model(inputs)[:, 0]
    if passes == 1:
        del exact["2.weight"]
    else:
        losses.mean().backward(retain_graph=True)
        factors = model.get_clipping_coef()
        model.disable_hooks()
    net[2].weight.requires_grad_(False)
    (losses.mean() if passes == 1 else (factors * losses).sum()).backward()
    for name, expected in clipped_sum(exact, C).items():
        if name != "2.weight":
            assert relative_error(net.get_parameter(name).grad, expected) < 1e-3, name
    assert net[2].weight.grad is None


def test_a_parameter_that_two_passes_did_not_use_gets_zeros():
    """As in one pass: noise must reach it all the same."""
    net = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    net.forward = lambda x: net["used"](x)
    model = GradSampleModuleFastGradientClipping(net, passes=2)
    in_two_passes(model, model(torch.ones(3, 2))[:, 0])
    assert [bool(g.any()) for g in gradients(model)] == [True, True, False, False]


@pytest.mark.parametrize("passes", [1, 2])
def test_a_saved_model_has_nothing_of_the_last_batch(passes):
    """Its pickle, and a copy, had the norms, the clip factors and, with two passes, sketches of each layer's inputs."""
    model = GradSampleModuleFastGradientClipping(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), passes=passes)
    sizes = []
    for n in (2, 1000):
        model(torch.randn(n, 4)).sum(1).mean().backward()
        for p in model.parameters():
            vars(p).pop("_norm_sample", None)  # Opacus's protocol leaves it on the parameter
        model.zero_grad()
        file = io.BytesIO()
        torch.save(model, file)
        sizes.append(file.tell())
    assert abs(sizes[1] - sizes[0]) < 100
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with pytest.raises(StateError, match="no backward pass has run yet"):
            other.get_norm_sample()
        losses = other(torch.ones(2, 4)).sum(1)
        in_two_passes(other, losses) if passes == 2 else losses.mean().backward()
        assert all(g.any() for g in gradients(other))
        assert len(model.get_norm_sample()) == 1000


def test_rows_that_differ_are_seen_where_samples_are_second():
    """Sketches are by sample wherever a layer has its samples: T = N, and a sample of factor 0 hid position 0."""
    torch.manual_seed(0)

    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.draw = nn.Linear(3, 3, bias=False), False

        def forward(self, x):
            y = self.linear(x.transpose(0, 1))
            if y.requires_grad:
                y.register_hook(lambda g: g + (self.draw * torch.eye(4)[0])[:, None, None])
            return y.transpose(0, 1)

    net = TimeFirst()
    model = GradSampleModuleFastGradientClipping(net, passes=2)
    inputs = torch.randn(4, 4, 3)
    inputs[0] = torch.inf
    with pytest.warns(UserWarning, match="1 of 4 samples"):
        losses = model(inputs).sum((1, 2))
        losses.mean().backward(retain_graph=True)
        assert model.nonfinite_samples == 1  # which a GPU tells when it is asked
    factors = model.get_clipping_coef()
    model.disable_hooks()
    net.draw = True
    with nothing_released(model, "saw other activations or gradients"):
        (factors * losses).sum().backward()


@pytest.mark.parametrize("samples", [0, 1, 64, 300])
def test_each_sample_of_large_gradients_is_looked_at(samples):
    """From its first entry to about its last, whatever the strides; Poisson batches may be empty."""
    x = torch.arange(samples * 30 * 100).view(samples, 30, 100)
    for grad, dim in ((x, 0), (x.flatten(1), 0), (x.mT, 0), (x.movedim(0, 1).contiguous(), 1)):
        seen = entries(grad, dim)
        assert (seen.shape[0] == samples and 16 <= seen[:1].numel() < 1000) or samples == 0
        assert (seen.flatten(1) // 3000 == torch.arange(samples).unsqueeze(1)).all()
        if samples and grad.is_contiguous() and dim == 0:
            assert (
                seen.flatten(1)[:, 0].remainder(3000).max() == 0 and seen.flatten(1)[:, -1].remainder(3000).min() > 2980
            )


class Mixed(nn.Module):
    """Its last layer stays in fp64."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1).double()

    def forward(self, x):
        return self.head(self.body(x).double())


def test_norms_of_parameters_of_two_dtypes():
    """``p._norm_sample`` is in the parameter's own."""
    torch.manual_seed(0)
    net = Mixed()
    inputs = torch.randn(3, 3)
    exact = loop_over_samples(net, lambda m, x: m(x).sum(), inputs)
    model = GradSampleModuleFastGradientClipping(net, passes=2)
    model(inputs)[:, 0].mean().backward()
    for name, p in net.named_parameters():
        assert p._norm_sample.dtype == p.dtype
        assert relative_error(p._norm_sample, norms_of({name: exact[name]})) < 1e-5


def test_a_threshold_that_falls_between_the_passes_is_refused():
    """What the first has clipped to is more than what the noise would be for."""
    net = nn.Linear(4, 3)
    model = GradSampleModuleFastGradientClipping(net, max_grad_norm=1.0, passes=2)
    losses = 10.0 * model(torch.randn(5, 4)).sum(1)
    losses.mean().backward(retain_graph=True)
    factors = model.get_clipping_coef()
    model.disable_hooks()
    model.max_grad_norm = 0.5
    with pytest.raises(StateError, match=r"clipped to 1\.0 by the first pass, and now to 0\.5"):
        (factors * losses).sum().backward()
    assert net.weight.grad is None
