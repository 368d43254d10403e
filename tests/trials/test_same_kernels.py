"""On a GPU, kernels that add up in another order each time: looks take others, and where there are none say what they
could not see. The switches of a GPU are there on a CPU too."""

import contextlib
import random

import pytest
import torch
import torch.nn.functional as F
from noted import Noted
from own_backwards import BatchMean
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from two_linears import D, N, Net, clipping, step

from dpfast.errors import DpfastWarning, UnsupportedModuleError

pytestmark = [pytest.mark.on_cpu, pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")]

NUMBERS = random.Random(0)  # which no look starts again


def switches():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


IN_A_LOOK = (True, True, False, False, False, True)


FORWARDS, BACKWARDS, KERNELS = Noted(), Noted(), Noted()


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    for noted in (FORWARDS, BACKWARDS, KERNELS):
        noted.clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


class Notes(Net):
    """The switches in its forward and backward passes, and the kernels of its attention."""

    def forward(self, x):
        y = self.first(x)
        if y.requires_grad and not isinstance(y, FakeTensor):
            FORWARDS.note(switches())
            y.register_hook(lambda _: BACKWARDS.note(switches()))
        return self.last(torch.tanh(y))


class Attends(nn.Module):
    """With scores written out that fit in the memory or do not."""

    def __init__(self, *, mixing=False, fits=True):
        super().__init__()
        self.qkv, self.last, self.mixing, self.fits = nn.Linear(D, 3 * D), nn.Linear(D, D), mixing, fits

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        if not (self.fits or torch.backends.cuda.flash_sdp_enabled() or isinstance(q, FakeTensor)):
            raise torch.OutOfMemoryError("scores")
        y = F.scaled_dot_product_attention(q, k, v)
        if y.grad_fn is not None:
            KERNELS.note(type(y.grad_fn).__name__)
        y = y.squeeze(1)
        return self.last(BatchMean.apply(y) if self.mixing else y)


@pytest.mark.parametrize("before", [None, "warn", "strict", "flash"])
def test_the_switches_of_a_look_are_set_back(as_on_a_gpu, before):
    with contextlib.ExitStack() as there:
        if before == "flash":
            there.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
        elif before is not None:
            there.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True, warn_only=before == "warn")
        own, in_looks = switches(), (True, before != "strict", *IN_A_LOOK[2:])
        step(clipping(Notes()), torch.randn(N, D))
        assert set(FORWARDS.all()) == set(BACKWARDS.all()) == {own, in_looks}
        assert switches() == own


def test_the_switches_are_set_back_where_a_look_fails(as_on_a_gpu):
    class Fails(Net):
        def forward(self, x):
            if switches() == IN_A_LOOK:
                raise ValueError("on purpose")
            return self.last(self.first(x))

    own = switches()
    with pytest.warns(DpfastWarning, match="it fails, ValueError: on purpose"):
        step(clipping(Fails()), torch.randn(N, D))
    assert switches() == own


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize("fits", [True, False])
def test_attention_is_looked_at_with_its_scores_written_out_where_they_fit(as_on_a_gpu, mixing, fits):
    refused = pytest.raises(UnsupportedModuleError, match="changes with a sample that is not its own")
    with refused if mixing else contextlib.nullcontext():
        step(clipping(Attends(mixing=mixing, fits=fits)), torch.randn(N, 5, D))
    *in_looks, own = KERNELS.all()
    assert (set(in_looks) == {own}) != fits  # the last are the step's own


class Checkpointed(Attends):
    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_attention_in_a_checkpoint_is_looked_at_too(as_on_a_gpu, mixing, reentrant):
    """Which runs again in the backward pass, and must save there what it saved in the forward pass."""
    model = Checkpointed(mixing=mixing)
    model.reentrant = reentrant
    refused = pytest.raises(UnsupportedModuleError, match="changes with a sample that is not its own")
    with refused if mixing else contextlib.nullcontext():
        step(clipping(model), torch.randn(N, 5, D))


class Unsteady(torch.autograd.Function):
    """What atomic sums make of a gradient: other last bits each time."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1.0 + 1e-4 * NUMBERS.random())


class Sums(Net):
    def __init__(self, mixing, dtype):
        super().__init__()
        self.mixing = mixing
        self.to(dtype)

    def forward(self, x):
        h = Unsteady.apply(self.first(x))
        if self.mixing == "forward":
            h = h - h.mean(0)
        return self.last(torch.tanh(BatchMean.apply(h) if self.mixing == "backward" else h))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_that_gradients_alone_differ_from_run_to_run_is_said(dtype):
    NUMBERS.seed(0)  # of others it may look as if samples met
    with pytest.warns(DpfastWarning, match="the gradients of two runs on the same samples differ"):
        step(clipping(Sums(None, dtype)), torch.randn(N, D, dtype=dtype))


@pytest.mark.parametrize("mixing", ["forward", "backward"])
def test_samples_that_meet_are_found_beside_unsteady_sums(mixing):
    with pytest.raises(UnsupportedModuleError, match=r"depends on several samples|not its own"):
        step(clipping(Sums(mixing, torch.float32)), torch.randn(N, D))
