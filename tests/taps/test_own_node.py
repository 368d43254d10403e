"""A layer and its tap in one autograd node: what goes in and out is what torch's own nodes make of it, to the bit where
torch's own products are the fastest."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import dpfast
from dpfast.arithmetic import products
from dpfast.errors import UnsupportedModuleError
from dpfast.taps import own_node
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

N, T, D = 3, 5, 8


class Around(nn.Module):
    """Something in front of the layer that gradients go to, and something in place behind it."""

    def __init__(self, layer, rank=3):
        super().__init__()
        self.first, self.layer, self.rank = nn.Linear(D, D), layer, rank

    def forward(self, x):
        x = self.first(x)
        if self.rank == 4:
            x = x.unflatten(1, (T, 1))
        elif self.rank == 2:
            x = x[:, 0]
        return self.layer(x.transpose(1, 2) if self.rank == 0 else x).mul_(2.0).tanh_()


LAYERS = {
    "linear": (lambda: nn.Linear(D, 7), 3),
    "without a bias": (lambda: nn.Linear(D, 7, bias=False), 3),
    "of one position": (lambda: nn.Linear(D, 7), 2),
    "of four dimensions": (lambda: nn.Linear(D, 7), 4),
    "of a transposed input": (lambda: nn.Linear(T, 7), 0),
    "frozen weight": (lambda: frozen(nn.Linear(D, 7)), 3),
    "layer norm": (lambda: nn.LayerNorm(D), 3),
    "layer norm without a bias": (lambda: nn.LayerNorm(D, bias=False), 3),
    "group norm": (lambda: drawn(nn.GroupNorm(5, T)), 3),
    "group norm of four dimensions": (lambda: drawn(nn.GroupNorm(1, T)), 4),
    "group norm of one position": (lambda: drawn(nn.GroupNorm(2, D)), 2),
    "group norm with a frozen weight": (lambda: frozen(drawn(nn.GroupNorm(1, T))), 3),
    "group norm of part of the channels": (lambda: Part(drawn(nn.GroupNorm(2, 4))), 3),
}


class Part(nn.Module):
    """A layer on the last channels, which lie apart from sample to sample."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x[:, 1:])


def drawn(layer):
    for p in layer.parameters():
        nn.init.normal_(p)
    return layer


def frozen(layer):
    layer.weight.requires_grad_(False)
    return layer


@pytest.fixture
def nodes(monkeypatch):
    """How many layers ran in a node of their own."""
    found = []

    def watched(run):
        def forward(ctx, record, *rest):
            found.append(record.tap.name)
            return run(ctx, record, *rest)

        return staticmethod(forward)

    for cls in (own_node.LayerTap, own_node.StepTap):
        monkeypatch.setattr(cls, "forward", watched(cls.forward))
    return found


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_torchs(name, dtype, nodes):
    torch.manual_seed(0)
    build, rank = LAYERS[name]
    plain = Around(build(), rank).to(dtype)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(plain), max_grad_norm=0.1)
    x = torch.randn(N, T, D, dtype=dtype)
    outputs, gradients = [], []
    for model in (plain, wrapped):
        given = x.clone().requires_grad_()
        output = model(given)
        output.square().flatten(1).sum(1).mean().backward()
        outputs.append(output.detach())
        gradients.append(given.grad)
    assert {name.removesuffix(".layer") for name in nodes} == {"first", "layer"}
    assert torch.equal(*outputs) and torch.equal(*gradients)
    exact = loop_over_samples(plain, lambda m, x: m(x).square().flatten(1).sum(1).sum(), x)
    for key, total in clipped_sum(exact, 0.1).items():
        assert relative_error(wrapped._module.get_parameter(key).grad, total) <= 1e-4, key
    assert torch.allclose(wrapped.get_norm_sample().double(), norms_of(exact), rtol=1e-4)


def of_both(plain, wrapped, x):
    """The outputs of both models, and the gradients of their input."""
    outputs, gradients = [], []
    for model in (plain, wrapped):
        given = x.clone().requires_grad_()
        outputs.append(model(given))
        outputs[-1].square().flatten(1).sum(1).mean().backward()
        gradients.append(given.grad)
    return outputs, gradients


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 200, 300), (2048, 300), (4, 128, 4, 300)])
def test_large_layers_leave_a_place_for_others(shape, bias, nodes, monkeypatch):
    """glibc has to find an output's place again for a tensor of the same size, and more than that is asked for. On a
    GPU torch's own allocator does."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(300, 900, bias=bias), nn.ReLU(inplace=True), nn.Linear(900, 300, bias=bias))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(plain), max_grad_norm=0.1)
    x = torch.randn(shape)
    outputs, gradients = of_both(plain, wrapped, x)
    assert nodes == ["0", "2"]
    assert torch.equal(*outputs) and torch.equal(*gradients)
    room = [x.untyped_storage().nbytes() - x.nbytes for x in (outputs[1], gradients[1])]
    assert (room[1] > 64) == x.is_cpu and (room[0] > 64) == (x.is_cpu and bias and len(shape) < 4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 40, 300), (256, 300), (4, 16, 4, 300)])
def test_large_layers_go_by_onednn_where_it_is_faster(shape, bias, nodes, monkeypatch):
    if torch.ones(1).is_cuda or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("of a CPU with oneDNN")
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    calls, call = [], products.as_it_stands
    monkeypatch.setattr(products, "as_it_stands", lambda *of: calls.append(of) or call(*of))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(300, 200, bias=bias), nn.Tanh(), Conv1D(100, 200))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(plain), max_grad_norm=0.1)
    x = torch.randn(shape)
    outputs, gradients = of_both(plain, wrapped, x)
    assert nodes == ["0", "2"]
    assert len(calls) >= 4  # each layer's output and the gradient of its input, and what the norms take
    assert relative_error(outputs[1], outputs[0]) <= 1e-6 and relative_error(gradients[1], gradients[0]) <= 2e-6
    exact = loop_over_samples(plain, lambda m, x: m(x).square().flatten(1).sum(1).sum(), x)
    for key, total in clipped_sum(exact, 0.1).items():
        assert relative_error(wrapped._module.get_parameter(key).grad, total) <= 1e-4, key
    assert torch.allclose(wrapped.get_norm_sample().double(), norms_of(exact), rtol=1e-4)


def test_a_large_input_of_another_width_has_torchs_own_error():
    """Twice as wide, so that it could be taken for twice as many rows."""
    wrapped = dpfast.GradSampleModuleFastGradientClipping(nn.Sequential(nn.Linear(256, 768)))
    wrapped(torch.randn(16, 128, 256))
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(2048x512 and 256x768\)"):
        wrapped(torch.randn(16, 128, 512))


def test_a_group_norm_of_data_that_is_used_twice(nodes):
    """No gradient goes to its input the first time."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = drawn(nn.GroupNorm(5, T))

        def forward(self, x):
            return self.norm(torch.tanh(self.norm(x)))

    torch.manual_seed(0)
    plain, x = Twice(), torch.randn(N, T, D)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(plain), max_grad_norm=0.1)
    wrapped(x).square().flatten(1).sum(1).mean().backward()
    assert nodes == ["norm", "norm"]
    exact = loop_over_samples(plain, lambda m, x: m(x).square().flatten(1).sum(1).sum(), x)
    for key, total in clipped_sum(exact, 0.1).items():
        assert relative_error(wrapped._module.get_parameter(key).grad, total) <= 1e-4, key


@pytest.mark.filterwarnings("ignore:Written could not be run")
def test_an_input_that_is_written_to_before_the_backward_pass_is_an_error(nodes):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(D, D), nn.GroupNorm(2, D)

        def forward(self, x):
            x = self.first(x)
            y = self.norm(x)
            x.mul_(2.0)
            return y

    wrapped = dpfast.GradSampleModuleFastGradientClipping(Written())
    loss = wrapped(torch.randn(N, D)).square().sum(1).mean()
    assert nodes == ["first", "norm"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_embedding(nodes):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(11, D, padding_idx=2), nn.Linear(D, 3))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(plain), max_grad_norm=0.1)
    words = torch.randint(0, 11, (N, T))
    assert torch.equal(wrapped(words), plain(words)) and nodes == ["0", "1"]
    wrapped(words).square().flatten(1).sum(1).mean().backward()
    exact = loop_over_samples(plain, lambda m, x: m(x).square().flatten(1).sum(1).sum(), words)
    for key, total in clipped_sum(exact, 0.1).items():
        assert relative_error(wrapped._module.get_parameter(key).grad, total) <= 1e-4, key


def test_where_saved_tensors_have_hooks_layers_have_their_own_nodes(nodes):
    """A checkpoint's forward is repeated in the backward pass, and must save the same then."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            # Square, so that tensors could be taken for each other.
            self.a, self.b = nn.Linear(D, D), nn.Sequential(nn.GroupNorm(2, D), nn.Linear(D, D))

        def forward(self, x):
            return checkpoint(self.b, checkpoint(self.a, x, use_reentrant=False), use_reentrant=False)

    torch.manual_seed(0)
    plain, x = Checkpointed(), torch.randn(D, D)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(plain), max_grad_norm=0.1)
    wrapped(x).square().sum(1).mean().backward()
    assert not nodes
    exact = loop_over_samples(plain, lambda m, x: m(x).square().sum(1).sum(), x)
    for key, total in clipped_sum(exact, 0.1).items():
        assert relative_error(wrapped._module.get_parameter(key).grad, total) <= 1e-4, key


def test_a_weight_that_is_written_to_before_the_backward_pass_is_an_error():
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model)
    loss = wrapped(torch.randn(N, D)).square().sum(1).mean()
    with torch.no_grad():
        model[1].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Force(nn.Module):
    """A gradient by its input, in its own forward."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(D, D), nn.GroupNorm(2, D), nn.Linear(D, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energies = self.last(torch.tanh(self.norm(self.first(x))))
        return torch.autograd.grad(energies.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("cls", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
@pytest.mark.filterwarnings("ignore:Force could not be run")
def test_a_gradient_of_the_gradient_is_refused_by_name(cls, inside):
    torch.manual_seed(0)
    x = torch.randn(N, D, requires_grad=True)
    wrapped = cls(Force() if inside else nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1)))
    gradient = wrapped(x) if inside else torch.autograd.grad(wrapped(x).sum(), x, create_graph=True)[0]
    with pytest.raises(UnsupportedModuleError, match=r"^(first|0) .*the loss depends on .*create_graph"):
        gradient.square().sum(1).mean().backward()
    wrapped.zero_grad()
    if not inside:  # of which no gradient is taken
        (gradient,) = torch.autograd.grad(wrapped(x).sum(), x, create_graph=True)
        (wrapped(x).squeeze(1) + gradient.detach().square().sum(1)).mean().backward()
        assert all(p.grad is not None for p in wrapped.parameters())


@pytest.mark.parametrize("cls", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_several_gradients_at_once_with_a_graph_are_refused_by_name(cls):
    """The trace of a continuous flow: torch's older vmap cannot go through a node's copies."""
    x, ones = torch.randn(N, D, requires_grad=True), torch.eye(D).expand(N, D, D).transpose(0, 1)
    y = cls(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)))(x)
    with pytest.raises(UnsupportedModuleError, match=r"^2 \(Linear\): several gradients .*is_grads_batched"):
        torch.autograd.grad(y, x, ones, create_graph=True, is_grads_batched=True)


class Sensitive(nn.Module):
    """Weights features by how an energy changes with them: what comes to that layer, ones, depends on nothing."""

    def __init__(self, energy):
        super().__init__()
        self.first, self.energy, self.head = nn.Linear(D, D), energy, nn.Linear(D, 2)

    def forward(self, x):
        h = self.first(x)
        return self.head(h * torch.autograd.grad(self.energy(h).sum(), h, create_graph=True)[0])


ENERGIES = {
    "in one node": lambda: nn.Linear(D, 1),
    "of copies": lambda: nn.GroupNorm(2, D),
    "generic": lambda: nn.Sequential(nn.Unflatten(1, (D, 1)), nn.Conv1d(D, 2, 1)),
}


@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("name", ENERGIES)
@pytest.mark.parametrize("cls", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_a_gradient_of_a_sum_depends_on_the_parameters_too(cls, name, n):
    """Their part of it was missing, without a word."""
    torch.manual_seed(0)
    wrapped = cls(Sensitive(ENERGIES[name]()))
    with pytest.raises(UnsupportedModuleError, match=r"^energy.*the loss depends on .*create_graph"):
        wrapped(torch.randn(n, D)).square().sum(1).mean().backward()
    wrapped.zero_grad()
    for p in wrapped.energy.parameters():
        p.requires_grad_(False)
    wrapped(torch.randn(n, D)).square().sum(1).mean().backward()
