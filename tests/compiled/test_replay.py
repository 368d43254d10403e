"""On a GPU the compiled step is one CUDA graph from its third run on."""

import contextlib
import copy
import warnings

import pytest
import torch
from small_steps import Mlp, check, mlp_batch, square_losses
from torch import nn

import dpfast
from dpfast.compiled.replay import Replay
from dpfast.errors import DpfastWarning
from dpfast.modes.clippers import ConstantPerLayerClipper


def replays(step):
    return [g._replay for g in step._graphs.values() if g._replay is not None and g._replay._graph is not None]


def on_gpu():
    return torch.zeros(0).is_cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_step_is_that_of_its_batch_threshold_and_parameters(dtype):
    torch.manual_seed(0)
    net = Mlp().to(dtype)

    def batch(n):
        return [x.to(dtype) if x.is_floating_point() else x for x in mlp_batch(n)]

    step = dpfast.compile_step(net, square_losses, max_grad_norm=0.5, batch_size=6)
    eager_net = copy.deepcopy(net)
    eager = dpfast.GradSampleModuleFastGradientClipping(eager_net, max_grad_norm=0.5, loss_reduction="sum")
    kept = []
    for i, n in enumerate((6, 6, 4, 6, 1, 6, 5, 6)):
        for net_, p in zip((net, eager_net), (1.0, 1.0), strict=True):
            with torch.no_grad():
                for q in net_.parameters():
                    q.mul_(0.9 * p)
        step.max_grad_norm = eager.max_grad_norm = 0.5 / (i + 1)
        some = batch(n)
        net.zero_grad()
        eager.zero_grad()
        step(*some)
        square_losses(eager, *some).sum().backward()
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        for p, q in zip(net.parameters(), eager_net.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance * 0.1)
        torch.testing.assert_close(step.clip_factors, eager.get_clipping_coef(), rtol=tolerance, atol=0)
        kept.append([(p.grad, p.grad.clone()) for p in net.parameters()])
    assert all(torch.equal(grad, then) for of_step in kept for grad, then in of_step), "a later step wrote to them"
    assert bool(replays(step)) == on_gpu()


def test_what_is_left_in_a_gradient_is_added_to():
    torch.manual_seed(0)
    net = Mlp()
    step = dpfast.compile_step(net, square_losses, max_grad_norm=0.5, batch_size=4)
    alone = []
    batches = [mlp_batch(4) for _ in range(6)]
    for some in batches:
        net.zero_grad()
        step(*some)
        alone.append([p.grad.clone() for p in net.parameters()])
    net.zero_grad()
    for some in batches:
        step(*some)
    for p, *of in zip(net.parameters(), *alone, strict=True):
        torch.testing.assert_close(p.grad, sum(of))
    large = [torch.cat([b[i] for b in batches]) for i in range(2)]
    net.zero_grad()
    step(*large)  # in parts
    for p, *of in zip(net.parameters(), *alone, strict=True):
        torch.testing.assert_close(p.grad, sum(of))


def test_parameters_that_stand_elsewhere():
    torch.manual_seed(0)
    net = Mlp()
    step = dpfast.compile_step(net, square_losses, max_grad_norm=0.5, batch_size=4)
    for _ in range(9):
        for p in net.parameters():
            p.data = 0.9 * p.data
        net.zero_grad()
        check(step, net, square_losses, mlp_batch(4))


def test_samples_that_are_dropped_are_counted_in_a_replay():
    torch.manual_seed(0)
    net = Mlp()
    step = dpfast.compile_step(net, square_losses, max_grad_norm=0.5, batch_size=4)
    for _ in range(4):
        net.zero_grad()
        step(*mlp_batch(4))
    x, y = mlp_batch(4)
    x[1] = torch.nan
    net.zero_grad()
    with pytest.warns(DpfastWarning, match="inf or NaN"):
        step(x, y)
        assert step.dropped == 1
        assert step._mode._dropped.count == 1
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_dropout_is_drawn_anew():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    x = torch.randn(4, 8)
    step = dpfast.compile_step(net, lambda model, x: model(x).squeeze(1), max_grad_norm=9.0, batch_size=4)
    seen = []
    for _ in range(6):
        net.zero_grad()
        step(x)
        seen.append(net[2].weight.grad.clone())
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_clippers_are_asked_in_each_step():
    """A replay would not."""
    torch.manual_seed(0)
    net = Mlp()
    limits = [1.0] * len(list(net.parameters()))
    step = dpfast.compile_step(
        net,
        square_losses,
        max_grad_norm=0.5,
        batch_size=4,
        norm_clipper=ConstantPerLayerClipper(limits),
        backend="inductor",
    )
    for i in range(5):
        step.norm_clipper = ConstantPerLayerClipper([x / (i + 1) for x in limits])
        net.zero_grad()
        step(*mlp_batch(4))
        for p in net.parameters():
            assert p.grad.norm() <= 4.0 / (i + 1) * (1 + 1e-5)
    assert not replays(step)


class Recorded:
    """Of torch.cuda: what a captured call has done is done again by `replay`, at the same addresses."""

    def __init__(self):
        self.call = None

    def replay(self):
        run, given, results = self.call
        for own, x in zip(results, run(*given), strict=True):
            own.copy_(x)


@pytest.fixture
def recorded(monkeypatch):
    """torch.cuda on a CPU; calls of the function that is captured."""
    calls = []
    now = []

    @contextlib.contextmanager
    def graph(it, capture_error_mode):
        assert capture_error_mode == "thread_local"
        now.append(it)
        try:
            yield
        finally:
            now.pop()

    def run(w, x):
        results = [w * x, (w + x).double()]
        if now:
            results = [torch.full_like(r, torch.nan) for r in results]  # nothing runs while it is captured
            now[-1].call = (lambda *given: [given[0] * given[1], (given[0] + given[1]).double()]), (w, x), results
        calls.append(bool(now))
        return results

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Replay(run), calls


@pytest.mark.on_cpu
def test_is_captured_once_and_gives_results_of_its_own(recorded):
    replay, calls = recorded
    w, kept = torch.tensor(2.0), []
    for i in range(6):
        product, total = replay([w], [torch.tensor(float(i))])
        kept.append((product, total))
        assert product == 2.0 * i and total == 2.0 + i and total.dtype is torch.float64
    assert calls == [False, False, True]
    assert [float(product) for product, _ in kept] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


@pytest.mark.on_cpu
def test_is_captured_anew_where_the_state_stands_elsewhere_and_then_no_more(recorded):
    replay, calls = recorded
    held = [torch.tensor(float(i)) for i in range(9)]
    for i, w in enumerate(held):
        product, _ = replay([w], [torch.tensor(3.0)])
        assert product == 3.0 * i
    assert calls == [False, False, True, True, True, False, False, False, False]
    assert replay([held[-1]], [torch.tensor(3.0)])[0] == 24.0


@pytest.mark.on_cpu
def test_what_cannot_be_captured_runs_as_it_is(recorded, monkeypatch):
    replay, calls = recorded

    @contextlib.contextmanager
    def graph(it, capture_error_mode):
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(5):
            assert replay([torch.tensor(2.0)], [torch.tensor(float(i))])[0] == 2.0 * i
    assert [str(w.message) for w in said if w.category is DpfastWarning] == [
        "the compiled step does not go into a CUDA graph: operation not permitted when stream is capturing. Its "
        "kernels are started one by one, as before"
    ]
    assert len(calls) == 6


@pytest.mark.on_cpu
def test_in_a_graph_of_somebody_elses_it_runs_as_it_is(recorded, monkeypatch):
    replay, calls = recorded
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(5):
        replay([torch.tensor(2.0)], [torch.tensor(1.0)])
    assert calls == [False] * 5
