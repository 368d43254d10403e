"""A step never waits for the device: nothing reads a tensor's values back to the host.

Without a GPU: tensors of the meta device have no values, so whatever would read one raises. With one: torch's own trap,
and a step captured in a CUDA graph.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import Mlp, Tied, Transformer
from torch import nn

import dpfast
from dpfast.modes.nonfinite_samples import DroppedSamples
from dpfast.testing import relative_error

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Images(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3, stride=2),
            nn.Flatten(),
            nn.Linear(36, 5),
        )


def tokens(n=6, t=9):
    return torch.randint(0, 30, (n, t))


MODELS = {
    "transformer": (Transformer, tokens),
    "tied": (Tied, tokens),
    "mlp": (Mlp, lambda: torch.randn(6, 12)),
    "images": (Images, lambda: torch.randn(6, 3, 8, 8)),
}
WRAPPERS = {
    "materialize": dpfast.GradSampleModule,
    "one pass": dpfast.GradSampleModuleFastGradientClipping,
    "per layer": lambda m: dpfast.GradSampleModuleFastGradientClipping(
        m, norm_clipper=dpfast.ConstantPerLayerClipper(0.1)
    ),
    "two passes": lambda m: dpfast.GradSampleModuleFastGradientClipping(m, passes=2),
}


def step(wrapped, x, y):
    losses = F.cross_entropy(wrapped(x).flatten(1), y, reduction="none")
    losses.mean().backward(retain_graph=isinstance(wrapped, dpfast.GradSampleModuleFastGradientClipping))
    if getattr(wrapped, "passes", 1) == 2:
        wrapped.zero_grad()
        wrapped.disable_hooks()
        (losses * wrapped.get_clipping_coef()).sum().backward()
        wrapped.enable_hooks()


@pytest.mark.filterwarnings("ignore:dpfast takes the reference backend on meta")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("model", MODELS)
def test_no_value_is_read(model, wrapper, monkeypatch):
    # Its count travels to the host behind the step and is read when it has arrived (tests/test_nonfinite_samples.py).
    monkeypatch.setattr(DroppedSamples, "add", lambda self, norms: None)
    make, inputs = MODELS[model]
    wrapped = WRAPPERS[wrapper](make().to("meta"))
    for _ in range(2):
        step(wrapped, inputs().to("meta"), torch.zeros(6, dtype=torch.long, device="meta"))
        for p in wrapped.parameters():
            left = p.grad_sample if wrapper == "materialize" else p.grad
            assert left.device.type == "meta" and left.shape[-p.dim() :] == p.shape
        wrapped.zero_grad()


def test_the_trap_springs():
    with pytest.raises(RuntimeError, match="meta"):
        bool(torch.ones(1, device="meta").any())


@needs_cuda
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("model", MODELS)
def test_no_value_is_read_on_a_gpu(model, wrapper):
    make, inputs = MODELS[model]
    wrapped, x, y = WRAPPERS[wrapper](make().cuda()), inputs().cuda(), torch.zeros(6, dtype=torch.long, device="cuda")
    step(wrapped, x, y)
    wrapped.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(wrapped, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@pytest.mark.parametrize("model", MODELS)
def test_a_step_in_a_cuda_graph(model):
    make, inputs = MODELS[model]
    original = make().cuda()
    x, y = inputs().cuda(), torch.zeros(6, dtype=torch.long, device="cuda")
    plain = WRAPPERS["one pass"](copy.deepcopy(original))
    captured = WRAPPERS["one pass"](original)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            captured.zero_grad(set_to_none=True)
            step(captured, x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    captured.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step(captured, x, y)
    x.copy_(inputs())
    graph.replay()
    step(plain, x, y)
    for (name, p), q in zip(captured.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(p.grad, q.grad) <= 1e-5, name
