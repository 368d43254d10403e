"""The tap: checkpointing, reuse, failures, threads, and that nothing is left behind."""

import copy
import gc
import logging
import pickle
import sys
import threading
import weakref

import pytest
import torch
from cases import Mlp, clipped_as_told, example, mean_loss, sum_loss
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import StateError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

C = 0.5


def wrap(model, **options):
    return dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, **options)


def assert_clipped(model, exact):
    for name, p in model.named_parameters():
        assert relative_error(p.grad, exact[name]) <= 1e-5, name


class Checkpointed(nn.Module):
    """Blocks that are checkpointed each, and once more two by two, so that passes nest."""

    def __init__(self, reentrant, nested):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 5)
        self.reentrant, self.nested = reentrant, nested

    def block(self, i, x):
        if self.reentrant is None:
            return self.blocks[i](x)
        return checkpoint(self.blocks[i], x, use_reentrant=self.reentrant)

    def pair(self, x, i):
        return self.block(i + 1, self.block(i, x))

    def forward(self, x):
        x = self.first(x)
        for i in (0, 2):
            if self.nested and self.reentrant is not None:
                x = checkpoint(self.pair, x, i, use_reentrant=self.reentrant)
            else:
                x = self.pair(x, i)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("passes", [1, 0])
def test_activation_checkpointing(reentrant, nested, passes):
    model = Checkpointed(reentrant, nested)
    plain = Checkpointed(None, nested)
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(5, 6), torch.randint(0, 5, (5,))
    gradients = loop_over_samples(plain, sum_loss, x, y)
    if passes:
        mean_loss(wrap(model), x, y).backward()
        assert_clipped(model, clipped_sum(gradients, C))
    else:
        mean_loss(dpfast.GradSampleModule(model), x, y).backward()
        for name, p in model.named_parameters():
            assert relative_error(p.grad_sample, gradients[name]) <= 1e-5


def test_checkpointing_keeps_no_activations():
    """What a tap keeps goes through autograd's saved tensors, so a checkpoint drops it."""
    kept = {}
    for reentrant in (None, False):
        torch.manual_seed(0)
        wrapped, x = wrap(Checkpointed(reentrant, False)), torch.randn(5, 6)
        for _ in range(2):  # is looked at
            wrapped(x)
        counted = kept[reentrant] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=counted: kept.append(t.numel()) or t, lambda t: t):
            wrapped(x)
        assert wrapped.hooks_enabled
    assert 0 < sum(kept[False]) < sum(kept[None])


def test_reentrant_checkpoint_around_the_whole_model_is_refused():
    model, x, y = example("mlp")
    wrapped = wrap(model)
    with pytest.raises(StateError, match="use_reentrant=False"):
        checkpoint(wrapped, x.requires_grad_(), use_reentrant=True).sum().backward()
    x = x.detach()
    mean_loss(wrapped, x, y).backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("name", ["mlp", "transformer", "recurrent"])
def test_another_checkpoint_around_the_whole_model(name):
    """From the first pass on: what is run to look at the model saves nothing that the checkpoint would count."""
    model, x, y = example(name)
    exact = clipped_sum(loop_over_samples(model, sum_loss, x, y), C)
    wrapped = wrap(model)
    for _ in range(3):
        mean_loss(lambda x: checkpoint(wrapped, x, use_reentrant=False), x, y).backward()
        assert_clipped(model, exact)
        wrapped.zero_grad()


def test_retain_graph_gives_the_same_twice():
    model, x, y = example("transformer")
    wrapped = wrap(model)
    loss = mean_loss(wrapped, x, y)
    loss.backward(retain_graph=True)
    first = {n: p.grad.clone() for n, p in model.named_parameters()}
    wrapped.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, first[name])


def test_model_called_twice_in_one_backward():
    model, x, y = example("mlp")
    other = torch.randn_like(x)

    def loss(m, x, other, y):
        return sum_loss(m, x, y) + sum_loss(m, other, y)

    gradients = loop_over_samples(model, loss, x, other, y)
    wrapped = wrap(model, loss_reduction="sum")
    loss(wrapped, x, other, y).backward()
    assert_clipped(model, clipped_as_told(wrapped.get_clipping_coef(), gradients, C))


def test_gradients_of_inputs_alone_leave_parameters_alone():
    model, x, y = example("mlp")
    wrapped = wrap(model)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(mean_loss(wrapped, x, y), x)
    assert grad.abs().sum() > 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_gradients_of_parameters_are_refused_where_taps_cannot_leave_them():
    model, x, y = example("mlp")
    wrapped = wrap(model)
    with pytest.raises(StateError, match=r"Linear\): torch.autograd.grad\(\) cannot give .* loss.backward\(\) leaves"):
        torch.autograd.grad(mean_loss(wrapped, x, y), list(model.parameters()))
    mean_loss(wrapped, x, y).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_in_place_activations_after_a_layer():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Embedding(9, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 5)])

        def forward(self, x):
            for layer in self.layers:
                x = torch.relu_(layer(x))
            return x.mean(1)

    model, x, y = InPlace(), torch.randint(0, 9, (4, 3)), torch.randint(0, 5, (4,))
    gradients = loop_over_samples(model, sum_loss, x, y)
    wrapped = wrap(model)
    mean_loss(wrapped, x, y).backward()
    assert_clipped(model, clipped_as_told(wrapped.get_clipping_coef(), gradients, C))


# --- nothing of a step survives into the next ---


def one_step(wrapped, x, y):
    wrapped.zero_grad()
    mean_loss(wrapped, x, y).backward()
    return [p.grad.clone() for p in wrapped.parameters()], wrapped.get_norm_sample()


def assert_same_step(wrapped, x, y, expected):
    grads, norms = one_step(wrapped, x, y)
    assert torch.equal(norms, expected[1])
    assert all(torch.equal(g, e) for g, e in zip(grads, expected[0], strict=True))


@pytest.mark.parametrize("disturb", ["forward", "eval", "no_grad", "backward_fails", "forward_fails", "other_model"])
def test_isolation(disturb):
    model, x, y = example("transformer")
    wrapped = wrap(model)
    expected = one_step(wrapped, x, y)
    if disturb == "forward":
        wrapped(x[:3])
    elif disturb == "eval":
        wrapped.eval()
        wrapped(x[:3])
        wrapped.train()
    elif disturb == "no_grad":
        with torch.no_grad():
            wrapped(x[:3])
    elif disturb == "backward_fails":
        handle = model.norm.register_full_backward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("on purpose")))
        out = wrapped(x[:3])
        with pytest.raises(RuntimeError, match="on purpose"):
            out.sum().backward()
        handle.remove()
    elif disturb == "forward_fails":
        handle = model.head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("on purpose")))
        with pytest.raises(RuntimeError, match="on purpose"):
            wrapped(x)
        handle.remove()
        if x.device.type == "cpu":  # on a GPU an index out of range is the end of the process's work there
            with pytest.raises(IndexError):
                wrapped(torch.full_like(x, 99))
    else:
        other, ox, oy = example("transformer")
        mean_loss(wrap(other), ox, oy).backward()
    assert all(isinstance(p, nn.Parameter) for m in model.modules() for p in m._parameters.values() if p is not None)
    assert_same_step(wrapped, x, y, expected)


def test_interrupt_in_a_layers_forward_puts_parameters_back():
    class Slow(nn.Linear):
        def forward(self, x):
            raise KeyboardInterrupt

    model = nn.Sequential(Slow(3, 3))
    with pytest.raises(KeyboardInterrupt):
        wrap(model)(torch.ones(2, 3))
    assert isinstance(model[0].weight, nn.Parameter)


def test_a_failed_backward_frees_its_tensors():
    model, x, y = example("mlp")
    wrapped = wrap(model)
    model[2].register_full_backward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("on purpose")))
    with pytest.raises(RuntimeError, match="on purpose"):
        mean_loss(wrapped, x, y).backward()
    gc.collect()
    assert len(wrapped._tapped._steps._running) == 0


def test_wrapping_makes_no_uncollectable_garbage():
    wrapped = wrap(Mlp())
    reference = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("shared", [False, True])
def test_threads(shared):
    """Two threads that train: each its own model, or both one model with gradients taken in turn."""
    model, x, y = example("transformer")
    expected = one_step(wrap(copy.deepcopy(model)), x, y)
    models = [wrap(model)] * 2 if shared else [wrap(copy.deepcopy(model)) for _ in range(2)]
    turn, problems = threading.Lock(), []

    def train(wrapped):
        try:
            for _ in range(10):
                if shared:
                    wrapped(x[:4])  # forward passes may overlap
                    with turn:
                        assert_same_step(wrapped, x, y, expected)
                else:
                    assert_same_step(wrapped, x, y, expected)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=train, args=(m,)) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_looks_of_threads_leave_the_process_as_it_was():
    """Its garbage collector, random numbers and logging: of two that met there, one set back what the other had set."""
    models = [nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 2)) for _ in range(15)]
    before, interval = torch.get_rng_state(), sys.getswitchinterval()

    def look(models):
        for model in models:
            dpfast.GradSampleModule(model.eval())(torch.ones(5, 3))

    threads = [threading.Thread(target=look, args=(models[i::3],)) for i in range(3)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert gc.isenabled()
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled
    assert torch.equal(torch.get_rng_state(), before)


def test_copies_are_independent():
    model, x, y = example("transformer")
    wrapped = wrap(model)
    expected = one_step(wrapped, x, y)
    wrapped.zero_grad()
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1.0)
        assert_same_step(other, x, y, expected)
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(dpfast.DpfastError, match="without being clipped"):
            sum(p.square().sum() for p in other.parameters()).backward()
