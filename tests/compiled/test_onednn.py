"""Large products of a captured graph are oneDNN's where that is faster, which torch's own compiler leaves to MKL."""

import copy

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import dpfast
from dpfast.arithmetic import products
from dpfast.compiled.onednn import multiply_by_onednn
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

by_onednn = torch.ops.dpfast.as_it_stands.default

pytestmark = pytest.mark.on_cpu


@pytest.fixture
def faster(monkeypatch):
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)


def captured(function, inputs):
    module = make_fx(function, tracing_mode="fake")(*inputs)
    multiply_by_onednn(module.graph)
    module.graph.lint()
    module.recompile()
    return module


SIZES = (64, 200), (300, 200), (300,)

TAKEN = {
    "a layer": lambda x, w, b: nn.functional.linear(x, w, b),
    "without a bias": lambda x, w, b: x @ w.t(),
    "of a transposed weight": lambda x, w, b: x @ w.t().contiguous(),
    "of a weight transposed by its dimensions": lambda x, w, b: x @ w.transpose(0, 1),
    "an input's gradient": lambda x, w, b: x.repeat(1, 2)[:, :300].contiguous() @ w,
    "a sum over the batch": lambda x, w, b: x.repeat(9, 1).t() @ w.repeat(2, 1)[:576],
    "and what follows in place": lambda x, w, b: (x @ w.t()).add_(1.0),
}

LEFT = {
    "small": lambda x, w, b: x[:4] @ w.t(),
    "a small sum over the batch": lambda x, w, b: x.t() @ w[:64],
    "an input with gaps": lambda x, w, b: x.repeat(1, 2)[:, :200] @ w.t(),
    "a sum over the batch that is added to": lambda x, w, b: torch.addmm(
        w.repeat(2, 1)[:200].repeat(1, 3), x.repeat(9, 1).t(), w.repeat(2, 3)[:576]
    ),
    "a sum over the batch of what has gaps": lambda x, w, b: x.repeat(9, 1).t() @ w.repeat(2, 2)[:576, :200],
    "fp64": lambda x, w, b: x.double() @ w.double().t(),
    "a bias of all": lambda x, w, b: torch.addmm(b.expand(64, 300), x, w.t()),
    "a bias that is weighted": lambda x, w, b: torch.addmm(b, x, w.t(), beta=0.5),
    "batches": lambda x, w, b: torch.bmm(x.expand(3, 64, 200), w.t().expand(3, 200, 300)),
}


@pytest.mark.parametrize("product", TAKEN.values(), ids=TAKEN)
def test_what_is_taken(faster, product):
    torch.manual_seed(0)
    inputs = [torch.randn(size) for size in SIZES]
    module = captured(product, inputs)
    assert len(module.graph.find_nodes(op="call_function", target=by_onednn)) == 1
    assert relative_error(module(*inputs), product(*inputs)) <= 1e-6


@pytest.mark.parametrize("product", LEFT.values(), ids=LEFT)
def test_what_is_left(faster, product):
    torch.manual_seed(0)
    inputs = [torch.randn(size) for size in SIZES]
    module = captured(product, inputs)
    assert not module.graph.find_nodes(op="call_function", target=by_onednn)
    assert torch.equal(module(*inputs), product(*inputs))


def test_nothing_where_torchs_own_is_as_fast(monkeypatch):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    assert not captured(TAKEN["a layer"], [torch.ones(size) for size in SIZES]).graph.find_nodes(
        op="call_function", target=by_onednn
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step(faster, backend):
    calls, call = [], products.as_it_stands
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(96, 200), nn.Tanh(), nn.Linear(200, 80))
    model, x = copy.deepcopy(plain), torch.randn(5, 40, 96)

    def losses(model, x):
        return model(x).square().flatten(1).sum(1)

    step = dpfast.compile_step(model, losses, max_grad_norm=0.5, batch_size=6, backend=backend)
    with torch.library._scoped_library("dpfast", "IMPL") as library:
        library.impl("as_it_stands", lambda *of: calls.append(of) or call(*of), "CPU", allow_override=True)
        for some in (x, x[:3], x):
            model.zero_grad()
            step(some)
    assert len(calls) >= 9  # both outputs and the gradient between them, three times
    exact = loop_over_samples(plain, lambda m, x: m(x).square().flatten(1).sum(1).sum(), x)
    for key, total in clipped_sum(exact, 0.5).items():
        assert relative_error(model.get_parameter(key).grad, total) <= 1e-4, key
    assert torch.allclose(step.norms.double(), norms_of(exact), rtol=1e-4)
