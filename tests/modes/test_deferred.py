"""Small layers that are alike wait for each other, and nothing but time comes of it."""

import threading

import pytest
import torch
from cases import clipped_as_told
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dpfast
from dpfast.errors import DpfastWarning, StateError
from dpfast.modes import deferred
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

N, T, D = 3, 5, 8


class Block(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D, bias=bias), nn.Linear(2 * D, D)
        self.last = nn.RMSNorm(D)

    def forward(self, x):
        return x + self.last(self.down(torch.tanh(self.up(self.norm(x)))))


def blocks(number=4, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(**options) for _ in range(number)), nn.Linear(D, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def losses(model, x):
    return model(x).square().flatten(1).sum(1)


def step(model, x, **options):
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=0.5, **options)
    losses(wrapped, x).mean().backward()
    return wrapped


@pytest.fixture
def waited(monkeypatch, reference_runs):
    """How many layers each call of a rule was for."""
    found, take = [], deferred.Deferred._take

    def watched(self, key):
        found.append(len(self._queues[key].records))
        take(self, key)

    monkeypatch.setattr(deferred.Deferred, "_take", watched)
    return found


@pytest.mark.parametrize("t", [T, N, D, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_a_loop_over_samples(t, dtype, waited):
    model, x = blocks().to(dtype), torch.randn(N, t, D).to(dtype)
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in exact.values()]).norm(dim=0)
    wrapped = step(model, x)
    assert sorted(waited) == [1, 4, 4, 4, 4]
    assert relative_error(wrapped.get_norm_sample(), norms) <= 1e-5
    assert (wrapped.norm_slack >= 0).all() and (wrapped.norm_slack <= 1e-4).all()
    sums = clipped_sum(exact, 0.5)
    for name, p in model.named_parameters():
        assert relative_error(p.grad, sums[name]) <= 1e-4, name
        assert p.grad.is_contiguous() and p.grad.shape == p.shape and p.grad.dtype == dtype


@pytest.mark.usefixtures("reference_runs")
@pytest.mark.parametrize("t", [T, 40])
def test_who_waits_changes_no_norm(t, monkeypatch):
    x = torch.randn(N, t, D)
    together = step(blocks(), x)
    monkeypatch.setattr(deferred, "AT_ONCE", {x.device.type: 2 * x.nbytes * 3})
    parted = step(blocks(), x)
    monkeypatch.setattr(deferred, "SMALL", {})
    alone = step(blocks(), x)
    for other in (parted, alone):
        assert all(map(torch.equal, other._norms, together._norms))  # fp64, to the last bit
        for p, q in zip(other.parameters(), together.parameters(), strict=True):
            assert relative_error(p.grad, q.grad) <= 1e-6


def test_a_samples_norm_does_not_depend_on_the_others():
    x = torch.randn(6, T, D)
    together = step(blocks(), x)
    for n in range(6):
        alone = step(blocks(), x[n : n + 1])
        # The loss's mean divides backprops by 1 and by 6; the norms are of the same gradients.
        assert relative_error(alone.get_norm_sample(), together.get_norm_sample()[n : n + 1]) <= 1e-6


@pytest.mark.parametrize(("t", "room"), [(T, deferred.ROOM), (2, 0)])  # gradients are kept; sums are made of inputs
def test_a_sample_that_is_not_finite_adds_nothing(t, room, monkeypatch):
    if not room:
        monkeypatch.setattr(deferred, "ROOM", room)
        monkeypatch.setenv("DPFAST_BACKEND", "reference")  # on a GPU it has no such room
    x = torch.randn(N, t, D)
    bad = x.clone()
    bad[1, 1, 3] = float("nan")
    with pytest.warns(DpfastWarning):
        wrapped = step(blocks(), bad)
        assert wrapped.nonfinite_samples == 1  # which a GPU tells when it is asked
    assert wrapped.get_clipping_coef()[1] == 0
    rest = step(blocks(), x[[0, 2]])
    for p, q in zip(wrapped.parameters(), rest.parameters(), strict=True):
        assert relative_error(p.grad, q.grad) <= 1e-5


def test_layers_of_which_other_parameters_are_trained_are_not_alike(waited):
    model, x = blocks(), torch.randn(N, T, D)
    model[0].up.bias.requires_grad_(False)
    model[1].up.weight.requires_grad_(False)
    model[1].norm.bias.requires_grad_(False)
    model[2].norm.eps = 0.1
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    step(model, x)
    assert sorted(waited) == [1, 1, 1, 1, 1, 2, 2, 4, 4]
    for name, total in clipped_sum(exact, 0.5).items():
        assert relative_error(model.get_parameter(name).grad, total) <= 1e-4, name


def test_layers_whose_parameters_stand_in_another_order():
    model, x = blocks().double(), torch.randn(N, T, D).double()
    norm = model[1].norm
    weight = norm.weight
    del norm.weight  # as torch.nn.utils.prune.remove does
    norm.weight = weight
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    step(model, x)
    for name, total in clipped_sum(exact, 0.5).items():
        assert relative_error(model.get_parameter(name).grad, total) <= 1e-6, name


def test_a_parameter_that_a_layer_has_under_two_names():
    model, x = blocks().double(), torch.randn(N, T, D).double()
    model[1].norm.bias = model[1].norm.weight
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    step(model, x)
    for name, total in clipped_sum(exact, 0.5).items():
        assert relative_error(model.get_parameter(name).grad, total) <= 1e-6, name


def test_sums_are_added_up_and_set_to_zero_one_by_one():
    model, x = blocks(), torch.randn(N, T, D)
    wrapped = step(model, x)
    once = [p.grad.clone() for p in model.parameters()]
    losses(wrapped, x).mean().backward()
    for p, total in zip(model.parameters(), once, strict=True):
        assert relative_error(p.grad, 2 * total) <= 1e-6
    model[0].up.weight.grad.zero_()
    assert (
        relative_error(
            model[1].up.weight.grad, 2 * dict(zip(model.parameters(), once, strict=True))[model[1].up.weight]
        )
        <= 1e-6
    )


def test_a_gradient_that_is_written_to_while_its_layer_waits_is_an_error():
    model, kept = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), []
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model)

    def write(grad):
        kept[0].mul_(2)

    def watch(hook):
        def on_forward(module, inputs, output):
            output.register_hook(hook)

        return on_forward

    handles = [model[1].register_forward_hook(watch(write)), model[2].register_forward_hook(watch(kept.append))]
    with pytest.raises(StateError, match="was written to while the backward"):
        losses(wrapped, torch.randn(N, D)).mean().backward()
    assert all(p.grad is None for p in model.parameters())
    for handle in handles:
        handle.remove()
    losses(wrapped, torch.randn(N, D)).mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_layer_that_two_threads_call_for_one_backward_pass():
    """Which was an error once."""
    model, x, y = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), torch.randn(N, D), torch.randn(N, D)
    exact = loop_over_samples(model, lambda m, x, y: (losses(m, x) + losses(m, y)).sum(), x, y)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    found = [losses(wrapped, x)]
    thread = threading.Thread(target=lambda: found.append(losses(wrapped, y)))
    thread.start()
    thread.join()
    (found[0] + found[1]).sum().backward()
    for name, expected in clipped_as_told(wrapped.get_clipping_coef(), exact, 1.0).items():
        assert relative_error(model.get_parameter(name).grad, expected) <= 1e-5, name


class Ops(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("reference_runs")
def test_a_tap_costs_few_ops():
    """Those of more blocks are those of their model, but for what their taps take."""
    more = {}
    for private in (False, True):
        counts = []
        for number in (2, 12):
            model, x = blocks(number), torch.randn(N, T, D)
            model = dpfast.GradSampleModuleFastGradientClipping(model) if private else model
            for _ in range(2):  # the forwards that are looked at
                losses(model, x).mean().backward()
                model.zero_grad()
            with Ops() as ops:
                losses(model, x).mean().backward()
            counts.append(ops.count)
        more[private] = counts[1] - counts[0]
    assert more[True] - more[False] <= 0  # a layer's sums of gradients, which are not taken, are as many


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_parameter_that_is_unfrozen_before_the_backward_pass(backend, monkeypatch):
    """Its layer is not alike the others then: the forward pass has caught nothing of it."""
    monkeypatch.setenv("DPFAST_BACKEND", backend)
    model, x = blocks(), torch.randn(N, T, D)
    model[1].up.weight.requires_grad_(False)
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    values = losses(wrapped, x)
    model[1].up.weight.requires_grad_(True)
    values.sum().backward()
    assert not model[1].up.weight.grad.any()
    for name, expected in clipped_as_told(wrapped.get_clipping_coef(), exact, 1.0).items():
        assert relative_error(model.get_parameter(name).grad, expected) <= 1e-5, name


def test_a_parameter_that_is_unfrozen_before_its_gradients_are_written():
    """They were NaN."""
    model, x = blocks(), torch.randn(N, T, D)
    model[1].up.weight.requires_grad_(False)
    wrapped = dpfast.GradSampleModule(model)
    values = losses(wrapped, x)
    model[1].up.weight.requires_grad_(True)
    values.sum().backward()
    assert not hasattr(model[1].up.weight, "grad_sample")
    assert all(p.grad_sample.isfinite().all() for p in model.parameters() if p is not model[1].up.weight)


def test_a_second_backward_pass_through_one_graph_gives_the_same():
    model, x = blocks(), torch.randn(N, T, D)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    loss = losses(wrapped, x).sum()
    loss.backward(retain_graph=True)
    once, norms = [p.grad.clone() for p in model.parameters()], wrapped.get_norm_sample()
    wrapped.zero_grad()
    loss.backward()
    assert torch.equal(norms, wrapped.get_norm_sample())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), once, strict=True))


@pytest.mark.on_cpu
@pytest.mark.parametrize("bias_alone", [False, True])
@pytest.mark.parametrize("shape", [(100, 300), (3, 5, 300)])
def test_a_large_layer_is_written_to_after_its_norm(shape, bias_alone):
    """Its sum is made at the end, of what the norm was taken of."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 4000 if len(shape) > 2 else 300))
    model[2].weight.requires_grad_(not bias_alone)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0)
    between = []

    def hold(module, inputs, output):
        inputs[0].register_hook(lambda grad: between.append((inputs[0], grad)))

    def write(module, inputs, output):
        def to_what_the_last_layer_saw(grad):
            with torch.no_grad():
                seen = kept[0] if bias_alone else between[0][0]
                seen.mul_(3.0)

        output.register_hook(to_what_the_last_layer_saw)

    model[2].register_forward_hook(hold)
    model[0].register_forward_hook(write)
    output, kept = wrapped(torch.randn(shape)), []
    output.register_hook(lambda grad: kept.append(grad))
    losses = output.square().flatten(1).sum(1)
    if bias_alone and len(shape) > 2:  # sums of rows are written afresh
        losses.mean().backward()
    else:
        with pytest.raises(StateError, match="was written to while the"):
            losses.mean().backward()


def test_a_rule_is_asked_once_for_batches_of_any_size(monkeypatch):
    """Poisson batches have another one at nearly every step."""
    monkeypatch.setattr(deferred, "_kinds", {})
    monkeypatch.setattr(deferred, "_recipes", {})
    asked, ask = [], deferred.Deferred._asked
    monkeypatch.setattr(deferred.Deferred, "_asked", lambda self, *of: asked.append(of) or ask(self, *of))
    model = nn.Sequential(nn.Linear(D, 400), nn.LayerNorm(400), nn.Linear(400, D), nn.Linear(D, D))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=0.1)
    for n in (5, 9, 1, 30, 31, 60):  # the last ones are large
        wrapped.zero_grad()
        losses(wrapped, torch.randn(n, T, D)).mean().backward()
        if n == 30:
            known = len(asked)
    assert len(asked) <= 2 * 4 and len(asked) - known <= 4
