"""Where looks at losses end: in layers, in threads that number their own nodes, at the last backward pass."""

import concurrent.futures
import copy

import pytest
import torch
from kept_tensors import APART, MIX, C, D, K, N, Twice, assert_as_the_loop, given, network, wrapped
from torch import nn

import dpfast
from dpfast.errors import UnsupportedModuleError
from dpfast.modes import curvature
from dpfast.testing import clipped_sum, loop_over_samples, relative_error


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("gives", ["attribute", "output"])
def test_a_function_of_what_is_made_from_each_other(gives, mixes):
    """Autograd would run the model's layers on its way from one to the other."""
    model = network(gives)
    model.last = nn.Linear(7, 7)
    plain, module, x = copy.deepcopy(model), wrapped(model), torch.randn(N, D)

    def loss(m, x):
        h, y = given(m, x)
        return Twice.apply(h, 2.0, y.flip(0) if mixes else y).square().sum()

    if mixes:
        with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
            loss(module, x).backward()
        return
    assert_as_the_loop(module, plain, loss, x)


def in_a_thread(call):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("whose", ["forward", "loss", "both"])
@pytest.mark.parametrize("mixes", [False, True])
def test_threads_number_their_nodes_each_for_itself(whose, mixes):
    model = network()
    plain, module, x = copy.deepcopy(model), wrapped(model), torch.randn(N, D)

    def loss(m, x, run=in_a_thread):
        made = (run if whose == "forward" else lambda call: call())(lambda: given(m, x))
        how = MIX["spread"] if mixes else APART["features alone"]
        return (run if whose == "loss" else lambda call: call())(lambda: how(*made))

    made = in_a_thread(lambda: loss(module, x)) if whose == "both" else loss(module, x)
    if mixes:
        with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
            made.backward()
        return
    made.backward()
    exact = loop_over_samples(plain, lambda m, x: loss(m, x, lambda call: call()), x)
    for name, total in clipped_sum(exact, C).items():
        own = model.get_parameter(name).grad
        assert relative_error(torch.zeros_like(total) if own is None else own, total) < 1e-4


MADE = {
    "a number": lambda h: (h - h.mean(0)).square().mean().rsqrt(),
    "samples": lambda h: (h - h.mean(0)).tanh(),
}


@pytest.mark.parametrize("made", MADE)
def test_what_is_mixed_in_the_forward_pass_and_kept_elsewhere(made):
    """By a hook, so that no look at the model's attributes has seen what met in it."""
    module, seen = wrapped(network()), []
    module._module.middle.register_forward_hook(lambda m, args, h: seen.append(MADE[made](h)))
    y = module(torch.randn(N, D))
    with pytest.raises(UnsupportedModuleError, match=r"\(6, 7\), samples meet in the loss"):
        (y.square().sum() + 50 * seen[-1].square().sum()).backward()


@pytest.mark.parametrize("before", [{"inputs": True}, {"retain_graph": True}])
def test_backward_passes_of_another_forward_before_each_loss(before):
    """Attacks on inputs, losses that are balanced: the training's is looked at all the same, and refused each time."""
    module = wrapped(network())
    for _ in range(8):
        x = torch.randn(N, D, requires_grad=True)
        loss = given(module, x)[1].square().sum()
        loss.backward(**{**before, **({"inputs": [x]} if "inputs" in before else {})})
        module.zero_grad()
        with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
            MIX["spread"](*given(module, x.detach() + 0.1)).backward()


def test_gradients_at_inputs_alone_may_be_of_a_loss_that_mixes():
    """They reach no parameter."""
    module, x = wrapped(network()), torch.randn(N, D, requires_grad=True)
    MIX["spread"](*given(module, x)).backward(inputs=[x])
    assert x.grad is not None and all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("first", ["of inputs", "of another task"])
def test_a_backward_pass_before_the_loss(first):
    """It is not the last."""
    module, x = wrapped(network()), torch.randn(N, D, requires_grad=True)
    h, y = given(module, x)
    y.sum().backward(retain_graph=True, inputs=[x] if first == "of inputs" else None)
    module.zero_grad()
    with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
        MIX["spread"](h, y).backward()


def test_looks_end_where_graphs_are_always_kept(monkeypatch):
    looks, plainly = [], curvature.find_ends
    monkeypatch.setattr(curvature, "find_ends", lambda *a: looks.append(a[2]) or plainly(*a))
    counts = []
    for kept in (False, True):
        module = wrapped(network())
        for _ in range(40):
            module.zero_grad()
            given(module, torch.randn(N, D))[1].square().sum().backward(retain_graph=kept)
        counts.append(len(looks))
    assert 0 < counts[0] < 8
    assert counts[1] <= 5 * counts[0]


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
def test_a_wrapped_head_that_is_not_looked_at_any_more():
    """No look at the features goes through its layers."""
    head, model = nn.Linear(K, 2), network()
    plain, plain_head, module = copy.deepcopy(model), copy.deepcopy(head), wrapped(model)
    wrapped_head = wrapped(head)
    for _ in range(5):
        wrapped_head.zero_grad()
        wrapped_head(torch.randn(N, K)).square().sum().backward()

    def loss(m, of, x):
        h, y = given(m, x)
        return of(y).square().sum() + y.square().sum() + h.exp().sum()

    wrapped_head.zero_grad()
    x = torch.randn(N, D)
    exact = loop_over_samples(plain, lambda m, x: loss(m, copy.deepcopy(plain_head).to(x.dtype), x), x)
    loss(module, wrapped_head, x).backward()
    for name, total in clipped_sum(exact, C).items():
        assert relative_error(model.get_parameter(name).grad, total) < 1e-4


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("n", [2, N])  # as many as there are layers, as there are numbers in a state
@pytest.mark.parametrize("batch_first", [False, True])
def test_last_states_of_a_recurrent_layer(batch_first, n):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.last = nn.LSTM(D, N, num_layers=2, batch_first=batch_first), nn.Linear(N, K)

        def forward(self, x):
            h, (_, self.state) = self.lstm(x)
            return self.last(h)

    for dim in range(3):
        model = Recurrent()
        module = dpfast.GradSampleModule(model, batch_first=batch_first, loss_reduction="sum")
        y = module(torch.randn(n, n + 1, D) if batch_first else torch.randn(n + 1, n, D))
        loss = y.square().sum() + model.state.logsumexp(dim).sum()
        if dim == 1:
            with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
                loss.backward()
        else:
            loss.backward()


class Folds(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.layer, self.shape = nn.Linear(D, K), shape

    def forward(self, x):
        y = self.layer(x)
        return y.reshape(self.shape if len(x) > 1 else (-1, K))


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize(
    ("shape", "loss", "mixes"),
    [
        ((-1, 2 * K), lambda y: y.logsumexp(1).sum(), True),  # two samples in a row
        ((-1, 2 * K), lambda y: y.square().sum(), False),
        ((-1, K), lambda y: y.logsumexp(1).sum(), False),  # three rows a sample
        ((-1, K), lambda y: (y - y.mean(0)).square().mean(0).rsqrt().sum(), True),
        ((-1,), lambda y: y.std().log(), True),
        ((-1,), lambda y: y.exp().sum(), False),
    ],
)
def test_outputs_whose_rows_are_not_the_samples(shape, loss, mixes):
    """The loss is looked at from where the samples had a dimension of their own."""
    x = torch.randn((N, 3, D) if shape == (-1, K) else (N, D))
    model = Folds(shape)
    plain, module = copy.deepcopy(model), wrapped(model)
    for _ in range(3):
        seen, output = [], module(x)
        output.register_hook(seen.append)
        if mixes:
            with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
                loss(output).backward()
            assert not seen and all(p.grad is None for p in model.parameters())
            continue
        module.zero_grad()
        loss(output).backward()
        assert len(seen) == 1
        for name, total in clipped_sum(loop_over_samples(plain, lambda m, x: loss(m(x)), x), C).items():
            assert relative_error(model.get_parameter(name).grad, total) < 1e-4


class FoldsBefore(nn.Module):
    """Its last layer sees rows, a sample's together or one of each sample after the other."""

    def __init__(self, together, gives):
        super().__init__()
        self.first, self.layer = nn.Linear(D, 7), nn.Linear(7, K)
        self.together, self.gives = together, gives

    def forward(self, x):
        h = self.first(x).tanh()
        y = self.layer((h if self.together else h.transpose(0, 1)).reshape(-1, 7))
        if self.gives == "output":
            return y
        self.kept = y
        return h.sum(1)


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("gives", ["output", "attribute"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("length", [2, 3, N])
def test_outputs_of_a_last_layer_whose_rows_are_folded(length, together, gives, mixes):
    model = FoldsBefore(together, gives)
    plain, module, x = copy.deepcopy(model), wrapped(model), torch.randn(N, length, D)

    def loss(m, x):
        output = m(x)
        y = output if gives == "output" else getattr(m, "_module", m).kept
        by_sample = y.view(-1, length, K) if together else y.view(length, -1, K).transpose(0, 1)
        own = 0.0 if gives == "output" else output.square().sum()
        # Each position meets the one before, of its own sample or of another one.
        return own + y.logsumexp(1).sum() + (by_sample * by_sample.roll(1, 0 if mixes else 1)).sum()

    for _ in range(3):
        if mixes:
            with pytest.raises(UnsupportedModuleError, match=rf"\({N * length}, {K}\), samples meet in the loss"):
                loss(module, x).backward()
            continue
        assert_as_the_loop(module, plain, loss, x)
