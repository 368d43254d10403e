"""A step never waits for the device: nothing reads a tensor's values back to the host.

Without a GPU: tensors of the meta device have no values, so whatever would read one raises. With one: torch's own trap,
and a step captured in a CUDA graph.
"""

import copy
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import Mlp
from nodes_kept import Holding, kept, noted
from whole_steps import MODELS, WRAPPERS, step

from dpfast.arithmetic import stream_here
from dpfast.errors import DpfastWarning
from dpfast.looks import Probe, called
from dpfast.modes.nonfinite_samples import DroppedSamples

WORKER = str(Path(__file__).parents[1] / "support" / "capture_worker.py")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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


@pytest.mark.filterwarnings("ignore:dpfast takes the reference backend on meta")
@pytest.mark.parametrize("model", MODELS)
def test_what_an_empty_batch_leaves_stands_where_the_model_does(model, monkeypatch):
    monkeypatch.setattr(DroppedSamples, "add", lambda self, norms: None)
    make, inputs = MODELS[model]
    wrapped = WRAPPERS["one pass"](make().to("meta"))
    step(wrapped, inputs()[:0].to("meta"), torch.zeros(0, dtype=torch.long, device="meta"))
    for left in (wrapped.get_norm_sample(), wrapped.get_clipping_coef(), wrapped.norm_slack):
        assert left.device.type == "meta" and left.shape == (0,)


def test_the_trap_springs():
    with pytest.raises(RuntimeError, match="meta"):
        bool(torch.ones(1, device="meta").any())


@needs_cuda
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("model", MODELS)
def test_no_value_is_read_on_a_gpu(model, wrapper):
    make, inputs = MODELS[model]
    wrapped, x, y = WRAPPERS[wrapper](make().cuda()), inputs().cuda(), torch.zeros(6, dtype=torch.long, device="cuda")
    for _ in range(2):  # which are looked at
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
    done = subprocess.run([sys.executable, WORKER, model], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_cuda
def test_a_whole_step_with_its_noise_in_a_cuda_graph():
    pytest.importorskip("opacus")
    done = subprocess.run([sys.executable, WORKER.replace("capture", "graph")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model", ["transformer", "mlp"])
def test_a_step_that_is_captured_is_not_looked_at(model, monkeypatch):
    """A look reads values, which a capture does not survive. It comes with the next step outside."""
    make, inputs = MODELS[model]
    wrapped, x, y = WRAPPERS["one pass"](make()), inputs(), torch.zeros(6, dtype=torch.long)
    step(wrapped, x, y)
    looks, again = [], Probe._look_again
    monkeypatch.setattr(Probe, "_look_again", lambda self, *args, **kw: looks.append(args) or again(self, *args, **kw))
    monkeypatch.setattr(called, "in_cuda_graph", lambda: True)
    step(wrapped, x, y)
    assert not looks
    monkeypatch.setattr(called, "in_cuda_graph", lambda: False)
    step(wrapped, x, y)
    assert len(looks) == 1


def test_what_a_tap_keeps_of_a_stream_can_be_copied(monkeypatch):
    """Every look copies the taps, and one that could not was taken on trust."""
    addresses = {0: 7, 1: 7}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", addresses.__getitem__, raising=False)
    here = stream_here(torch.device("cuda", 0))
    assert copy.deepcopy(here) == here == stream_here(torch.device("cuda", 0))
    assert here != stream_here(torch.device("cuda", 1))
    addresses[0] = 8
    assert here != stream_here(torch.device("cuda", 0))


class OncePerPass(torch.autograd.Function):
    """Whose backward looks cannot run."""

    runs = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if not OncePerPass.runs:
            raise RuntimeError("a look")
        return grad


class CopiedOnce(Mlp):
    def __deepcopy__(self, memo):
        raise TypeError("a second copy")


def test_a_look_that_fails_keeps_no_graph():
    """Its error would keep the callers' frames, so the step's nodes, for whose stream no later capture may wait."""
    model = Mlp()
    wrapped, x, y = WRAPPERS["one pass"](model), torch.randn(6, 12), torch.zeros(6, dtype=torch.long)
    step(wrapped, x, y)
    model.__class__ = CopiedOnce

    def again():
        losses = F.cross_entropy(wrapped(x), y, reduction="none")
        losses.mean().backward(retain_graph=True)
        return weakref.ref(losses)

    gc.disable()
    try:
        with pytest.warns(DpfastWarning, match="a second copy"):
            assert again()() is None
    finally:
        gc.enable()


def test_a_look_whose_backward_pass_fails_keeps_no_graph(monkeypatch):
    """Likewise."""
    monkeypatch.setattr(OncePerPass, "runs", False)
    model, x, y = Mlp(), torch.randn(6, 12), torch.zeros(6, dtype=torch.long)
    model[1].register_forward_hook(lambda module, args, output: OncePerPass.apply(output))
    wrapped = WRAPPERS["one pass"](model)

    def first():
        losses = F.cross_entropy(wrapped(x), y, reduction="none")
        OncePerPass.runs = True
        losses.mean().backward(retain_graph=True)
        return weakref.ref(losses)

    gc.disable()
    try:
        with pytest.warns(DpfastWarning, match="more than one backward pass through it fails, RuntimeError: a look"):
            assert first()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("model", MODELS)
def test_a_step_keeps_no_node(model, wrapper, monkeypatch):
    """Not even while a thread of autograd's holds what it has called back, nor until cycles are freed."""
    make, inputs = MODELS[model]
    wrapped, x, y = WRAPPERS[wrapper](make()), inputs(), torch.zeros(6, dtype=torch.long)
    engine = Holding(torch.autograd.Variable._execution_engine)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)
    gc.disable()
    try:
        for _ in range(3):
            wrapped.zero_grad(set_to_none=True)
            with noted(wrapped):
                step(wrapped, x, y)
            assert not kept(wrapped)
    finally:
        gc.enable()
    assert len(engine.held) >= 3


def test_what_a_first_pass_has_seen_goes_with_the_next_step():
    """Without a search for cycles, which is for what Python alone can lose: these may be 8 MB of a GPU a step."""
    wrapped, y, seen = WRAPPERS["two passes"](Mlp()), torch.zeros(6, dtype=torch.long), []

    def see(grad):
        seen.append(weakref.ref(grad))

    step(wrapped, torch.randn(6, 12), y)
    handle = wrapped._module[0].register_forward_hook(lambda module, args, output: output.register_hook(see) and None)
    gc.disable()
    try:
        step(wrapped, torch.randn(6, 12), y)
        handle.remove()
        step(wrapped, torch.randn(6, 12), y)
        assert seen and not any(grad() is not None for grad in seen)
    finally:
        gc.enable()
