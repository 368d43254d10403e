"""Row norms that bound errors are taken once a step of each tensor that layers saw, and outlive no step."""

import copy
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.arithmetic import RowNorms, row_norms, sums
from dpfast.modes import deferred
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

D, T, N = 64, 40, 8


class Block(nn.Module):
    """Llama's shape: q, k and v have one input, gate and up another."""

    def __init__(self, d=D, bias=False):
        super().__init__()
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (nn.Linear(d, d, bias=bias) for _ in range(7))

    def forward(self, x):
        h = torch.tanh(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        h = torch.tanh(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Checkpointed(nn.Module):
    """Two blocks, the second one and the first one again run a second time in the backward pass."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.second, self.use_reentrant = Block(), Block(bias=True), use_reentrant

    def forward(self, x):
        x = checkpoint(self.second, self.first(x), use_reentrant=self.use_reentrant)
        return checkpoint(self.first, x, use_reentrant=self.use_reentrant)


MODELS = {
    "block": Block,
    "with biases": lambda: Block(bias=True),
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "attention": lambda: nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.0, batch_first=True),
}
WRAPPERS = {
    "one pass": dpfast.GradSampleModuleFastGradientClipping,
    "per layer": lambda m: dpfast.GradSampleModuleFastGradientClipping(
        m, norm_clipper=dpfast.ConstantPerLayerClipper(0.1)
    ),
    "two passes": lambda m: dpfast.GradSampleModuleFastGradientClipping(m, passes=2),
}


def losses_of(model, x):
    return model(x).square().flatten(1).sum(1)


def sum_loss(model, x):
    return losses_of(model, x).sum()


def step(wrapped, x):
    """(norms, their bounds, gradients)"""
    losses = losses_of(wrapped, x)
    losses.mean().backward(retain_graph=getattr(wrapped, "passes", 1) == 2)
    if wrapped.passes == 2:
        wrapped.disable_hooks()
        (losses * wrapped.get_clipping_coef()).sum().backward()
        wrapped.enable_hooks()
    return wrapped._norms.value, wrapped._norms.upper, *(p.grad for p in wrapped.parameters())


@pytest.fixture
def taken(monkeypatch, reference_runs):
    """The shapes of what row norms are taken of."""
    shapes, take = [], sums.raw_row_norm
    monkeypatch.setattr(sums, "raw_row_norm", lambda x: shapes.append(tuple(x.shape)) or take(x))
    return shapes


@pytest.fixture
def never_shared(monkeypatch):
    def shares_nothing():
        monkeypatch.setattr(RowNorms, "once", lambda self, take, x, by: by(x))
        monkeypatch.setattr(RowNorms, "each", lambda self, take, tensors, together: together([(x,) for x in tensors]))

    return shares_nothing


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("n", [N, T])
def test_the_same_bits_as_without(model, wrapper, n, never_shared):
    model, x = MODELS[model](), torch.randn(n, T, D, requires_grad=True)
    shared = step(WRAPPERS[wrapper](copy.deepcopy(model)), x)
    never_shared()
    alone = step(WRAPPERS[wrapper](model), x)
    assert all(torch.equal(s, a) for s, a in zip(shared, alone, strict=True))


@pytest.mark.parametrize("model", ["with biases", "checkpointed, reentrant"])
def test_as_a_loop_over_samples(model):
    model, x = MODELS[model](), torch.randn(N, T, D, requires_grad=True)
    gradients = loop_over_samples(copy.deepcopy(model), sum_loss, x)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=0.5)
    step(wrapped, x)
    assert relative_error(wrapped.get_norm_sample(), norms_of(gradients)) <= 1e-5
    exact = clipped_sum(gradients, 0.5)
    found = torch.cat([model.get_parameter(name).grad.flatten() for name in exact])
    assert relative_error(found, torch.cat([x.flatten() for x in exact.values()])) <= 1e-4  # the slack of the norms


@pytest.mark.on_cpu  # on a GPU these layers, all alike, are taken together, and their rows as one tensor
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_share_its_row_norms(bias, taken, never_shared):
    """Of (q, k, v), o, (gate, up) and down; gradients of seven outputs, a bias's being that of its weight."""
    model, x = Block(bias=bias), torch.randn(N, T, D)
    step(dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(model)), x)
    of_all = [shape for shape in taken if shape[0] == N]  # what a recipe is learned from is one sample's
    assert len(of_all) == 4 + 7 and len(taken) - len(of_all) <= 2
    taken.clear()
    never_shared()
    step(dpfast.GradSampleModuleFastGradientClipping(model), x)
    assert len([shape for shape in taken if shape[0] == N]) >= 7 + 7  # a recipe takes the gradient's once for both


def test_a_bias_without_a_norm_takes_none(taken):
    """Per-sample gradients, and the second of two passes."""
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh())
    model[0].weight.requires_grad_(False)
    losses_of(dpfast.GradSampleModule(copy.deepcopy(model)), torch.randn(N, T, D)).mean().backward()
    assert taken == []
    step(dpfast.GradSampleModuleFastGradientClipping(model, passes=2), torch.randn(N, T, D))
    assert taken == [(N, T, D)]


def test_what_has_changed_or_lies_elsewhere_is_another_tensor():
    seen = []

    def take(x):
        seen.append(x)
        return torch.linalg.vector_norm(x, dim=-1)

    norms, x = RowNorms(), torch.randn(9, T, D)
    others = [x[1:], x[:-1], x[:, :, :-1], x.transpose(0, 1), x.double(), x.clone(), x.view(torch.int32).view(x.dtype)]
    same = [x, x.detach(), x.view(9, 1, T, D).flatten(1, 2), others.pop().detach()]
    with norms:
        for y in same:
            assert torch.equal(row_norms.taken_once(take, y), y.norm(dim=-1))
        assert len(seen) == 1
        for y in others:
            assert torch.equal(row_norms.taken_once(take, y), torch.linalg.vector_norm(y, dim=-1))
        assert len(seen) == 1 + len(others)
        x.mul_(2.0)
        assert torch.equal(row_norms.taken_once(take, x), torch.linalg.vector_norm(x, dim=-1))
        seen.clear()
        for i in range(50):  # the allocator gives the address of the one before
            y = torch.full((N, T, D), float(i))
            assert torch.equal(row_norms.taken_once(take, y), torch.linalg.vector_norm(y, dim=-1))
            del y
            seen.clear()


def test_no_tensor_lives_longer_and_nothing_is_shared_outside(taken):
    x = torch.randn(N, T, D)
    norms = RowNorms()
    with norms:
        sums.row_norm(x, once=True)
        with RowNorms():  # another model's step, within
            sums.row_norm(x, once=True)
        sums.row_norm(x, once=True)
    assert len(taken) == 2
    storage = StorageWeakRef(x.untyped_storage())
    del x
    assert storage.expired()


def living():
    gc.collect()
    return sum(type(x) is RowNorms for x in gc.get_objects())


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_outlives_a_step(fails):
    wrapped = dpfast.GradSampleModuleFastGradientClipping(Block())
    x = torch.randn(N, T, D, requires_grad=True)
    loss = losses_of(wrapped, x).mean()
    if fails:

        def fail(grad):
            raise RuntimeError("on the way")

        x.register_hook(fail)
        with pytest.raises(RuntimeError, match="on the way"):
            loss.backward()
    else:
        loss.backward()
    del loss
    assert living() == 0 and row_norms._here.entered == []


def test_steps_of_two_threads_share_nothing():
    """Two models that were given one input, at the same time."""
    x, found = torch.randn(N, T, D), {}
    models = [dpfast.GradSampleModuleFastGradientClipping(Block(bias=True)) for _ in range(2)]
    alone = [step(copy.deepcopy(m), x) for m in models]

    def run(i):
        for _ in range(3):
            models[i].zero_grad()
            found[i] = step(models[i], x)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert all(torch.equal(a, b) for a, b in zip(found[i], alone[i], strict=True))


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Three(nn.Module):
    """Three layers of one input."""

    def __init__(self, d, p):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, p), nn.Linear(d, p), nn.Linear(d, p)

    def forward(self, x):
        return self.q(x) * self.k(x) * self.v(x)


def test_launches_of_row_norms(launches, monkeypatch):
    """Gram norms: one of each tensor, biases included. Direct norms, written out or not: none of their own."""
    monkeypatch.setattr(deferred, "SMALL", {})  # else a GPU takes the three together
    step(dpfast.GradSampleModuleFastGradientClipping(Three(72, 416).to(DEVICE)), torch.randn(6, 40, 72, device=DEVICE))
    assert launches.count("_gram_norm_kernel") == 3
    assert launches.count("_row_sq_norm_kernel") == 1 + 3
    for passes in (1, 2):  # written out and kept; norms alone
        launches.clear()
        model = nn.Sequential(nn.Linear(72, 80, bias=False)).to(DEVICE)
        step(dpfast.GradSampleModuleFastGradientClipping(model, passes=passes), torch.randn(2, 40, 72, device=DEVICE))
        assert launches.count("_outer_kernel") == 1
        assert launches.count("_row_sq_norm_kernel") == 0
