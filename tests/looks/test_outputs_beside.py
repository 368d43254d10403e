"""Samples that meet in the backward pass alone, where gradients at layers' first outputs do not show it: at states and
attention's weights, on autograd's own nodes, at what a forward makes of its parameters, under autocast."""

import pytest
import torch
import torch.nn.functional as F
from outputs_beside import BESIDE, RECORDS, D, H, N, T, by_all, by_sample, losses, padded, refused, right
from own_backwards import BatchMean
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import UnsupportedModuleError

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")  # nothing is taken on trust


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
