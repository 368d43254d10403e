"""Thin factors are taken together where kernels run: the same answers, in launches that do not grow with the layers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dpfast
from dpfast.arithmetic import ops
from dpfast.factors import Dense, OuterProduct, waiting

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEATURES, RANK = 72, 4


class LoRA(nn.Module):
    """A frozen layer and its low-rank correction."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES)
        self.frozen.requires_grad_(False)
        self.down = nn.Linear(FEATURES, RANK, bias=False)
        self.up = nn.Linear(RANK, FEATURES, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.frozen(x) + self.up(self.down(x)))


def step(layers, *, passes=1, batch=3, x=None):
    """The wrapped model after one backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(*(LoRA() for _ in range(layers))).to(DEVICE)
    x = torch.randn(batch, 20, FEATURES, device=DEVICE) if x is None else x
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, passes=passes, max_grad_norm=0.5)
    wrapped(x).square().sum((1, 2)).mean().backward()
    return wrapped


@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_of_eight_layers_launches_no_more_norms_than_one_of_two(launches, passes):
    step(2, passes=passes)
    few = list(launches)
    launches.clear()
    step(8, passes=passes)
    assert few == launches
    assert few.count("_grouped_norm_kernel") == 2, "one for the wide-to-thin factors, one for the thin-to-wide ones"


def test_small_layers_share_their_launches_too(launches):
    """One position a sample (an MLP) or few: norms of rank one and Gram norms, and biases."""
    counts = {}
    for layers, middle in ((2, ()), (6, ()), (2, (3,)), (6, (3,))):
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(70, 70), nn.Tanh()))).to(DEVICE)
        wrapped = dpfast.GradSampleModuleFastGradientClipping(model)
        launches.clear()
        wrapped(torch.randn(3, *middle, 70, device=DEVICE)).square().flatten(1).sum(1).mean().backward()
        counts[layers, middle] = [name for name in launches if "weighted" not in name]
    for middle in ((), (3,)):
        assert counts[2, middle] == counts[6, middle] != []


@pytest.mark.parametrize("passes", [1, 2])
def test_as_the_reference(monkeypatch, passes):
    monkeypatch.setenv("DPFAST_BACKEND", "reference")
    expected = step(3, passes=passes)
    monkeypatch.setenv("DPFAST_BACKEND", "triton")
    actual = step(3, passes=passes)
    torch.testing.assert_close(actual.get_norm_sample(), expected.get_norm_sample(), rtol=1e-5, atol=0)
    assert (actual.norm_slack < 1e-3).all()
    for p, q in zip(actual.parameters(), expected.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_no_more_waits_than_the_bound_and_the_bound_changes_no_bit(launches, monkeypatch):
    together = step(4)
    at_most = len(launches)
    bytes_of_a_factor = 3 * 20 * (FEATURES + RANK) * 4
    monkeypatch.setattr(waiting, "MAX_BYTES", 3 * bytes_of_a_factor)
    most, add = [0], waiting.Waiting.add

    def watched(self, factor, receive):
        add(self, factor, receive)
        most[0] = max(most[0], sum(f.nbytes for queue in self._queues.values() for f, _ in queue))

    monkeypatch.setattr(waiting.Waiting, "add", watched)
    launches.clear()
    parted = step(4)
    assert len(launches) > at_most
    assert 0 < most[0] <= waiting.MAX_BYTES
    assert torch.equal(parted.get_clipping_coef(), together.get_clipping_coef())
    for p, q in zip(parted.parameters(), together.parameters(), strict=True):
        assert p.grad is q.grad or torch.equal(p.grad, q.grad)


def test_a_sample_that_is_not_finite_is_dropped(kernels_run):
    x = torch.randn(3, 20, FEATURES, device=DEVICE)
    x[1, 7, 3] = float("nan")
    with pytest.warns(dpfast.errors.DpfastWarning):
        wrapped = step(2, x=x)
        assert wrapped.nonfinite_samples == 1  # which a GPU tells when it is asked
    assert wrapped.get_clipping_coef()[1] == 0
    assert all(p.grad.isfinite().all() for p in wrapped.parameters() if p.requires_grad)


def test_a_backward_pass_that_fails_leaves_nothing_behind(kernels_run):
    def fail(grad):
        raise ArithmeticError

    torch.manual_seed(0)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(nn.Sequential(LoRA(), LoRA()).to(DEVICE))
    x = torch.randn(3, 20, FEATURES, device=DEVICE)
    handle = wrapped._module[0].register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
    loss = wrapped(x).square().sum()
    handle.remove()
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert all(p.grad is None for p in wrapped.parameters())
    wrapped(x).square().sum((1, 2)).mean().backward()
    assert all(p.grad is not None for p in wrapped.parameters() if p.requires_grad)


def pairs(G, N, T, D, P, kind, dtype):
    """G (activations, backprops); "cancelling": the second half of the positions takes back nearly all of the first."""
    drawn = []
    for _ in range(G):
        a, b = torch.randn(N, T, D), torch.randn(N, T, P)
        if kind == "cancelling":
            half = T // 2
            a[:, half : 2 * half] = a[:, :half]
            b[:, half : 2 * half] = -b[:, :half] * (1 + 1e-6 * torch.randn(N, half, 1))
            a[:, 2 * half :] = 0
        if kind == "small":
            a, b = a * 1e-22, b * 1e-22
        if kind == "uneven":
            a, b = a * 1e-22, b * 1e16
        drawn.append((a.to(DEVICE, dtype), b.to(DEVICE, dtype)))
    return drawn


@settings(max_examples=40)
@given(
    G=st.integers(1, 4),
    N=st.integers(1, 3),
    T=st.integers(1, 60),
    wide=st.integers(1, 140),
    thin=st.integers(1, 20),
    swap=st.booleans(),
    kind=st.sampled_from(["ordinary", "cancelling", "small", "uneven"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_bounds_hold_and_bits_are_those_of_each_alone(G, N, T, wide, thin, swap, kind, dtype):
    D, P = (thin, wide) if swap else (wide, thin)
    drawn = pairs(G, N, T, D, P, kind, dtype)
    for (a, b), (norm, error, values) in zip(drawn, ops.grouped_direct(drawn, keep=True), strict=True):
        exact = torch.einsum("ntp,ntd->npd", b.double(), a.double())
        assert (norm.upper >= exact.square().sum((1, 2))).all()
        assert (error >= (values.double() - exact).flatten(1).norm(dim=1)).all()
        alone = ops.certified_sq_norm(a, b, way="direct", backend="triton")
        assert torch.equal(alone.value, norm.value)
        assert torch.equal(alone.upper, norm.upper)
        if kind == "ordinary" and T * thin < wide:
            assert (norm.upper <= 1.001 * norm.value).all()


def test_shapes_may_differ_within_one_call(kernels_run):
    drawn = pairs(2, 2, 30, 40, 5, "ordinary", torch.float32) + pairs(2, 3, 20, 6, 70, "ordinary", torch.bfloat16)
    mixed = [drawn[i] for i in (2, 0, 3, 1)]
    together = ops.grouped_direct(mixed)
    for (a, b), result in zip(mixed, together, strict=True):
        assert result.grad_sample is None
        assert torch.equal(result.norm.value, ops.grouped_direct([(a, b)])[0].norm.value)


def test_kept_alone_or_together(kernels_run):
    a, b = pairs(1, 3, 30, 80, 5, "ordinary", torch.bfloat16)[0]
    alone, received = OuterProduct(a, b).kept(), []
    queue = waiting.Waiting(keep=True)
    for _ in range(2):
        queue.add(OuterProduct(a, b), received.append)
    assert not received
    queue.take()
    for dense in received:
        assert torch.equal(dense.values, alone.values)
        assert torch.equal(dense.error, alone.error)
        assert all(map(torch.equal, dense.sq_norm(), alone.sq_norm()))
    from_values = Dense(alone.values, error=alone.error).sq_norm()
    torch.testing.assert_close(alone.sq_norm().value, from_values.value, rtol=1e-5, atol=0)


def test_only_thin_outer_products_that_are_used_up_wait(kernels_run, monkeypatch):
    thin = OuterProduct(torch.ones(2, 30, 80), torch.ones(2, 30, 4))
    short = OuterProduct(torch.ones(2, 1, 80), torch.ones(2, 1, 4))
    both_wide = OuterProduct(torch.ones(2, 30, 80), torch.ones(2, 30, 100))
    for keep in (True, False):
        wants = waiting.Waiting(keep=keep).wants
        assert wants(thin)
        assert not any(map(wants, (short, both_wide, Dense(torch.ones(2, 3)))))
    monkeypatch.setenv("DPFAST_BACKEND", "reference")
    assert not waiting.Waiting(keep=True).wants(thin)
