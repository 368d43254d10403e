"""Samples that meet in the backward pass alone, where gradients at layers' first outputs do not show it: at states and
attention's weights, on autograd's own nodes, at what a forward makes of its parameters, under autocast."""

import pytest
import torch
import torch.nn.functional as F
from own_backwards import BatchMean
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

D, H, T, N = 6, 8, 5, 4


def by_all(g):
    return 3.0 * g * g.norm()


def by_sample(g):
    """Of gradients with samples in dimension 0 or, of states, 1."""
    return 2.0 * g


class Recurrent(nn.Module):
    """Of sequences, or of packed ones, which end where zeros begin; classified by its last state."""

    def __init__(self, kind, hook, *, which=0, with_output=False, packed=False, **options):
        super().__init__()
        self.rnn = getattr(nn, kind)(D, H, batch_first=True, **options)
        self.head, self.hook, self.which, self.with_output = nn.Linear(H, 3), hook, which, with_output
        self.packed = packed

    def forward(self, x):
        if self.packed:
            lengths = (x != 0).any(2).sum(1)
            x = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, states = self.rnn(x)
        state = (states if isinstance(states, tuple) else (states,))[self.which]
        if state.requires_grad:
            state.register_hook(self.hook)
        return self.head(state[-1] + (output.mean(1) if self.with_output else 0.0))


class Cell(nn.Module):
    def __init__(self, hook):
        super().__init__()
        self.cell, self.head, self.hook = nn.LSTMCell(D, H), nn.Linear(H, 3), hook

    def forward(self, x):
        h, c = self.cell(x[:, 0])
        if c.requires_grad:
            c.register_hook(self.hook)
        return self.head(h) + self.head(c)


class Attention(nn.Module):
    """Its weights are an output of the model as well."""

    def __init__(self, hook, **options):
        super().__init__()
        self.attention, self.hook, self.options = nn.MultiheadAttention(D, 2, batch_first=True), hook, options

    def forward(self, x):
        y, weights = self.attention(x, x, x, **self.options)
        if weights.requires_grad:
            weights.register_hook(self.hook)
        return torch.cat([y.flatten(1), weights.flatten(1)], 1)


class Pair(nn.Module):
    """A layer of somebody's own with two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(D, H)) for _ in range(2))

    def forward(self, x):
        return x @ self.first, torch.tanh(x @ self.second)


class OfLinear(nn.Linear):
    """A subclass whose output is a dict."""

    def forward(self, x):
        y = super().forward(x)
        return {"y": y, "other": torch.tanh(2.0 * y)}


class TwoOutputs(nn.Module):
    def __init__(self, layer, hook):
        super().__init__()
        self.layer, self.head, self.hook = layer, nn.Linear(H, 3), hook

    def forward(self, x):
        one, other = found.values() if isinstance(found := self.layer(x), dict) else found
        if other.requires_grad:
            other.register_hook(self.hook)
        return self.head(one + other)


BESIDE = {
    **{kind: lambda hook, kind=kind: Recurrent(kind, hook) for kind in ("LSTM", "GRU", "RNN")},
    "LSTM's c": lambda hook: Recurrent("LSTM", hook, which=1),
    "both outputs": lambda hook: Recurrent("LSTM", hook, with_output=True),
    "both directions": lambda hook: Recurrent("GRU", hook, bidirectional=True, num_layers=2),
    "packed": lambda hook: Recurrent("LSTM", hook, packed=True),
    "LSTMCell": Cell,
    "attention's weights": Attention,
    "of each head": lambda hook: Attention(hook, average_attn_weights=False),
    "a pair": lambda hook: TwoOutputs(Pair(), hook),
    "a dict": lambda hook: TwoOutputs(OfLinear(D, H), hook),
}
RECORDS = ("LSTMCell", "a dict")  # whose second output is on the way from the first: a hook there scales both, alone


def losses(model, x):
    return model(x).flatten(1).square().sum(1)


def padded():
    """Sequences of 3, 5, 2 and 4."""
    return torch.randn(N, T, D) * (torch.arange(T) < torch.tensor([3, 5, 2, 4])[:, None])[..., None]


def refused(model, x=None, wrapper=dpfast.GradSampleModuleFastGradientClipping, named=r"^\w[\w.]* \("):
    wrapped = wrapper(model, loss_reduction="sum")
    with pytest.raises(
        UnsupportedModuleError, match=named + r".*meet in the backward pass.*make it look at each sample"
    ):
        losses(wrapped, torch.randn(N, T, D) if x is None else x).sum().backward()


def right(model, x=None):
    x = torch.randn(N, T, D) if x is None else x
    exact = norms_of(loop_over_samples(model, lambda m, x: losses(m, x).sum(), x))
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    losses(wrapped, x).sum().backward()
    assert relative_error(wrapped.get_norm_sample(), exact) <= 1e-5


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("wrapper", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_outputs_beside_the_first_are_looked_at(name, wrapper):
    torch.manual_seed(0)
    refused(BESIDE[name](by_all), padded(), wrapper=wrapper)


@pytest.mark.parametrize("name", BESIDE)
def test_hooks_there_that_look_at_each_sample_are_right(name):
    torch.manual_seed(0)
    right(BESIDE[name]((lambda g: None) if name in RECORDS else by_sample), padded())


def test_a_weight_that_a_layer_gives_beside_has_no_samples():
    """As many rows as three samples, and a gradient of all of them."""

    class WithTable(nn.Linear):
        def forward(self, x):
            return super().forward(x), torch.arange(3 * H, dtype=x.dtype).view(3, H).requires_grad_() * 1.0

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = WithTable(D, H), nn.Linear(H, 3)

        def forward(self, x):
            y, table = self.layer(x)
            return self.head(torch.tanh(y)) + (y @ table.T)

    right(Model())


# --- nodes ---


def before_node(h):
    h.grad_fn.register_prehook(lambda grads: tuple(map(by_all, grads)))


def of_several(h):
    register_multi_grad_hook((h,), lambda grads: grads[0].mul_(3.0 * grads[0].norm()))


class OnNodes(nn.Module):
    def __init__(self, first, hang, last=False):
        super().__init__()
        self.first, self.head, self.hang, self.last = first, nn.Linear(H, 3), hang, last

    def forward(self, x):
        h = self.first(x)
        if h.requires_grad and not self.last:
            self.hang(h)
        y = self.head(torch.tanh(h))
        if y.requires_grad and self.last:
            self.hang(y)
        return y


@pytest.mark.parametrize("hang", [before_node, of_several])
@pytest.mark.parametrize("last", [False, True])
def test_hooks_of_nodes_that_mix_are_refused(hang, last):
    torch.manual_seed(0)
    refused(OnNodes(nn.Linear(D, H), hang, last), named="^head" if last else "^first")
    refused(OnNodes(nn.Embedding(11, H), hang, last), torch.randint(0, 11, (N, T)), named="^head" if last else "^first")


def test_hooks_of_nodes_that_do_not_are_right():
    torch.manual_seed(0)
    seen = []

    def hang(h):
        h.retain_grad()
        h.grad_fn.register_prehook(lambda grads: seen.append(float(grads[0].norm())))
        h.grad_fn.register_prehook(lambda grads: (2.0 * grads[0],))
        register_multi_grad_hook((h,), lambda grads: seen.append(len(grads)))

    right(OnNodes(nn.Linear(D, H), hang))
    right(OnNodes(nn.Linear(D, H), hang, last=True))
    assert seen


# --- products with parameters ---


class InItsOwnForward(nn.Module):
    """A hook on what it makes of another layer's parameters and of samples."""

    def __init__(self, hook):
        super().__init__()
        self.layer, self.hook = nn.Linear(D, H), hook

    def forward(self, x):
        h = F.linear(x, self.layer.weight, self.layer.bias)
        if h.requires_grad:
            h.register_hook(self.hook)
        return torch.tanh(h)


class OfItsOwn(nn.Module):
    def __init__(self, hook):
        super().__init__()
        self.weight, self.hook = nn.Parameter(torch.randn(D, H)), hook

    def forward(self, x):
        h = x @ self.weight
        if h.requires_grad:
            h.register_hook(self.hook)
        return torch.tanh(h)


class ByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, H))

    def forward(self, x):
        return torch.tanh(BatchMean.apply(x @ self.weight))


def test_products_with_parameters_are_looked_at():
    torch.manual_seed(0)
    refused(InItsOwnForward(by_all), named=r"^layer \(Linear\): what linear makes")
    right(InItsOwnForward(by_sample))
    right(OfItsOwn(by_sample))
    right(OfItsOwn(by_all))  # taken sample by sample, each with a hook of its own


def test_functions_on_products_with_parameters_that_mix_are_refused():
    torch.manual_seed(0)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(ByFunction(), loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match="ByFunction"):
        losses(wrapped, torch.randn(N, T, D)).sum().backward()


# --- checkpoints and autocast ---


class Checkpointed(nn.Module):
    def __init__(self, hang, reentrant):
        super().__init__()
        self.first, self.head, self.hang, self.reentrant = nn.Linear(D, H), nn.Linear(H, 3), hang, reentrant

    def between(self, x):
        h = self.first(x)
        if h.requires_grad:
            self.hang(h)
        return torch.tanh(h)

    def forward(self, x):
        return self.head(checkpoint(self.between, x.detach().requires_grad_(), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_first_layers_in_checkpoints_are_looked_at(reentrant):
    torch.manual_seed(0)
    refused(Checkpointed(before_node, reentrant), named="^first")
    refused(Checkpointed(lambda h: h.register_hook(by_all), reentrant), named="^first")
    right(Checkpointed(lambda h: h.register_hook(by_sample), reentrant))


class UnderAutocast(nn.Module):
    """Mixes there alone."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(D, H), nn.Linear(H, 3)

    def forward(self, x):
        h = self.first(x)
        if torch.is_autocast_enabled("cpu") and h.requires_grad:
            h.register_hook(by_all)
        return self.head(torch.tanh(h))


@pytest.mark.parametrize("seed", range(6))
def test_a_pass_under_autocast_is_of_another_kind(seed):
    torch.manual_seed(seed)
    model, x = UnderAutocast(), torch.randn(N, T, D)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    losses(wrapped, x).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        values = losses(wrapped, x)
    with pytest.raises(UnsupportedModuleError, match=r"^first .*meet in the backward pass"):
        values.sum().backward()
