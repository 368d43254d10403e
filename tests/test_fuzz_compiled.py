"""The first promise in captured steps, on batches drawn to break it: 300 here, 10,000 with `make fuzz`, which compiles
by Inductor too.

Every layer is linear in its parameters and backprops are given, so exact gradients are known whatever the forward
rounds: each kind is captured once, on either side of what sums are cut at, and meets other data, masks and limits.
"""

import functools
from contextlib import nullcontext
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import dpfast

pytestmark = pytest.mark.filterwarnings("ignore:.* of .* samples")

BACKENDS = ("aot_eager", "inductor") if settings().max_examples >= 10_000 else ("aot_eager",)
N = 3


class Twice(nn.Module):
    """One layer at two places of a sample."""

    def __init__(self, d, p):
        super().__init__()
        self.layer = nn.Linear(d, p)

    def forward(self, x):
        first, second = x.tensor_split(2, dim=1)
        return torch.cat([self.layer(first), 2.0 * self.layer(second)], dim=1)


class Tied(nn.Module):
    """One table as a lookup and as a head, of what does not depend on it."""

    def __init__(self, rows, width):
        super().__init__()
        self.table, self.head = nn.Embedding(rows, width), nn.Linear(width, rows, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        ramp = torch.arange(self.table.weight.shape[1], device=tokens.device) - 2
        seen = (tokens % 5 - 2).unsqueeze(-1) * (ramp % 3 - 1)  # small whole numbers
        return torch.cat([self.table(tokens), self.head(seen.to(self.table.weight.dtype))], dim=-1)


class Kind(NamedTuple):
    """What is captured: a layer for inputs (N, *shape), which are indices below ``indices`` where that is given."""

    build: object
    shape: tuple
    indices: int = 0
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    per_layer: bool = False
    num_units: int | None = None


KINDS = {
    "rank one": Kind(lambda: nn.Linear(1100, 5), (1100,)),
    "rank one, by parameter": Kind(lambda: nn.Linear(7, 5), (7,), per_layer=True),
    "Gram, blocks of features": Kind(lambda: nn.Linear(1030, 40), (6, 1030)),
    "Gram, blocks of outputs": Kind(lambda: nn.Linear(40, 513), (17, 40), dtype=torch.bfloat16),
    "Gram, tiles": Kind(lambda: nn.Linear(300, 280), (130, 300), autocast=True),
    "written": Kind(lambda: nn.Linear(16, 16), (20, 16), autocast=True),
    "written, blocks of positions": Kind(lambda: nn.Linear(6, 4), (600, 6)),
    "written, blocks of positions, by parameter": Kind(lambda: nn.Linear(6, 4), (257, 6), per_layer=True),
    "in pieces, blocks of positions": Kind(lambda: nn.Linear(150, 140), (300, 150), dtype=torch.bfloat16),
    "twice": Kind(lambda: Twice(30, 40), (21, 30)),
    "twice, by unit": Kind(lambda: Twice(30, 40), (21, 30), num_units=2),
    "positions, by unit": Kind(lambda: nn.Linear(6, 4), (300, 6), num_units=2),
    "convolution": Kind(lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2), (4, 11, 12), autocast=True),
    "convolution, blocks of rows": Kind(lambda: nn.Conv2d(5, 6, 3), (5, 40, 40)),
    "grouped": Kind(lambda: nn.Conv2d(8, 12, 3, groups=4), (8, 20, 20), dtype=torch.bfloat16),
    "depthwise": Kind(lambda: nn.Conv2d(8, 8, 5, padding=2, groups=8), (8, 20, 20)),
    "small table": Kind(lambda: nn.Embedding(10, 5), (300,), indices=10),
    "large table": Kind(lambda: nn.Embedding(4000, 6, padding_idx=3), (50,), indices=4000),
    "large table, by unit": Kind(lambda: nn.Embedding(4000, 6), (50,), indices=4000, num_units=2),
    "tied": Kind(lambda: Tied(60, 530), (17,), indices=60),
}


def given_backprops(model, x, backprops):
    return (model(x).float() * backprops.float()).flatten(1).sum(1)


@functools.cache
def captured(name, backend):
    kind = KINDS[name]
    torch.manual_seed(0)
    net = kind.build().to(kind.dtype)
    options = {"max_grad_norm": 1.0, "batch_size": N, "backend": backend, "num_units": kind.num_units}
    return net, dpfast.compile_step(net, given_backprops, **options)


def cancelling(x, generator):
    """Along the second dimension in pairs that differ in the last bits."""
    half = x[:, : x.shape[1] // 2]
    twin = -half * (1.0 + 2.0**-20 * torch.randn(half.shape, generator=generator))
    return torch.cat([half, twin, x[:, 2 * half.shape[1] :]], dim=1)


def batch_of(kind, net, n, cancels, exponents, seed):
    """(inputs, backprops), as autocast and the layer see them."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if kind.autocast else kind.dtype
    if kind.indices:
        x = torch.randint(min(kind.indices, 7) if cancels else kind.indices, (n, *kind.shape), generator=generator)
    else:
        x = torch.randn(n, *kind.shape, generator=generator) * 10.0 ** exponents[0]
        x = (cancelling(x, generator) if cancels else x).to(dtype).to(kind.dtype)
    with torch.no_grad():
        backprops = torch.randn(net(x).shape, generator=generator) * 10.0 ** exponents[1]
    if cancels:
        like_one = cancelling(backprops, generator) if kind.indices else backprops[:, :1].expand_as(backprops).clone()
        backprops = like_one if backprops.dim() > 2 else backprops
    return x, backprops.to(dtype).to(kind.dtype)


def exact_gradients(net, x, backprops):
    """Of each parameter, (n, P) in fp64."""
    exact = net.double()
    parameters, found = list(exact.parameters()), []
    for i in range(len(x)):
        x_i = x[i : i + 1].double() if x.is_floating_point() else x[i : i + 1]
        loss = (exact(x_i) * backprops[i : i + 1].double()).sum()
        found.append([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    return [torch.stack(of) for of in zip(*found, strict=True)]


EXPONENTS = st.floats(-20, 15)


@given(
    name=st.sampled_from(sorted(KINDS)),
    backend=st.sampled_from(BACKENDS),
    n=st.integers(1, 5),
    cancels=st.booleans(),
    exponents=st.tuples(EXPONENTS, EXPONENTS) | st.just((0.0, 0.0)),
    c=st.floats(-10, 10).map(lambda e: 10.0**e),
    relative=st.booleans(),
    wrong=st.sampled_from([None, float("inf"), float("nan")]),
    seed=st.integers(0, 10**6),
)
def test_no_clipped_sample_exceeds_c(name, backend, n, cancels, exponents, c, relative, wrong, seed):
    kind, (net, step) = KINDS[name], captured(name, backend)
    n = min(n, N) if kind.num_units else n  # others take several passes
    x, backprops = batch_of(kind, net, n, cancels, exponents, seed)
    exact = exact_gradients(kind.build(), x, backprops)
    generator = torch.Generator().manual_seed(seed)
    valid, whose = torch.rand(n, generator=generator) < 0.8, torch.arange(n)
    broken = torch.zeros(n, dtype=torch.bool)
    if wrong is not None:
        broken[seed % n] = True
        backprops[broken] = wrong
    options = {"valid": valid}
    if kind.num_units:
        whose = torch.randint(-1, kind.num_units, (n,), generator=generator)
        options["units"], whose = whose, whose.where(valid, -1)
        clipped = whose == torch.arange(kind.num_units)[:, None]  # (units, n)
    else:
        clipped = torch.eye(n, dtype=torch.bool)[valid]
    dropped = (clipped & broken).any(1)
    added = [clipped.double() @ g.masked_fill(broken[:, None], 0.0) for g in exact]
    norms = torch.stack([g.norm(dim=1) for g in added])
    norms = norms if kind.per_layer else norms.norm(dim=0, keepdim=True)
    if relative and (norms > 0).any():
        c = max(float(norms[norms > 0].median()), 1e-30)
    net.zero_grad()
    step.max_grad_norm = c
    step.norm_clipper = dpfast.ConstantPerLayerClipper([c] * len(exact)) if kind.per_layer else None
    with torch.autocast("cpu", torch.bfloat16) if kind.autocast else nullcontext():
        step(x, backprops, **options)
    factors = step.clip_factors.double() if kind.per_layer else step.clip_factors.double().unsqueeze(0)
    assert (factors * norms <= c).all()
    assert (factors[:, dropped] == 0).all()
    # What is in p.grad is what was clipped, as exact as sums are where nothing cancels.
    found = [p.grad.double().flatten() for p in net.parameters()]
    assert all(g.isfinite().all() for g in found)
    if not cancels:
        weights = factors if kind.per_layer else factors.expand(len(exact), -1)
        totals = [f @ g for f, g in zip(weights, added, strict=True)]
        size = sum(float((f * g.norm(dim=1)).sum()) for f, g in zip(weights, added, strict=True))
        off = torch.cat(found).sub(torch.cat(totals)).norm()
        assert off <= (1e-2 if kind.dtype is torch.bfloat16 else 1e-4) * size + 1e-30
