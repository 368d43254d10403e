"""Of layers too large to wait for each other, as most are on a GPU, small gradients are worked on at once."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dpfast
from dpfast.factors import stacked
from dpfast.modes import deferred

pytestmark = pytest.mark.on_cpu
N, D = 3, 6


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def step(layers, dtype):
    """The wrapped model after steps, and the calls of the last backward pass."""
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(D, D), nn.LayerNorm(D))]
    model = nn.Sequential(*parts).to(dtype)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=0.5)
    x = torch.randn(N, 4, D).to(dtype)
    for _ in range(3):
        wrapped.zero_grad()
        loss = wrapped(x).float().square().sum((1, 2)).mean()
        with Counted() as counted:
            loss.backward()
    return wrapped, counted.calls


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setattr(deferred, "_likeness", lambda *of: None)
    monkeypatch.setattr(stacked, "STACKED", {"cpu": 2**20})


def test_norms_are_taken_once_a_shape(large, monkeypatch):
    together, calls = step(6, torch.float32)
    monkeypatch.setattr(stacked, "STACKED", {})
    alone, calls_alone = step(6, torch.float32)
    # Six weights, of whose rows the norms' norms are taken, and eighteen vectors, of one shape each.
    assert calls_alone.count("linalg_vector_norm") - calls.count("linalg_vector_norm") == (6 * 2 + 18) - (2 + 1)
    assert torch.equal(together.get_norm_sample(), alone.get_norm_sample())
    for p, q in zip(together.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_sums_are_rounded_at_once(large):
    """To fp16 towards zero, which takes several calls."""
    _, few = step(2, torch.float16)
    _, many = step(6, torch.float16)
    assert few.count("gt") == many.count("gt") > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_as_one_by_one(large, monkeypatch, dtype):
    together, _ = step(3, dtype)
    monkeypatch.setattr("dpfast.modes.gathered._SMALL", 0)
    alone, _ = step(3, dtype)
    for p, q in zip(together.parameters(), alone.parameters(), strict=True):
        assert p.grad.dtype is dtype
        assert torch.equal(p.grad, q.grad)
