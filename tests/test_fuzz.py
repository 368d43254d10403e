"""The two promises, on cases drawn to break them: 300 of each here, 10,000 of each with `make fuzz`.

1. Whatever a sample holds, the exact norm of its clipped gradient is at most C.
2. Whatever the model and the batch, one sample more or less moves the clipped sum by at most C.
"""

import contextlib

import hypothesis.strategies as st
import torch
from cases import MODELS, exact_norms, hostile
from hypothesis import given
from in_turn import everything_in_turn

import dpfast
from dpfast.arithmetic import finished, reference_norms
from dpfast.factors import Dense, InTurn, Lookup, OuterProduct, row_sum
from dpfast.modes.clippers import ConstantFlatClipper, clip_factors


@given(
    t=st.integers(1, 512),
    d=st.integers(1, 48),
    p=st.integers(1, 48),
    exponents=st.tuples(st.floats(-20, 15), st.floats(-20, 15)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    constant_side=st.booleans(),
    c=st.floats(-10, 10).map(lambda e: 10.0**e),
    seed=st.integers(0, 10**6),
)
def test_no_clipped_sample_exceeds_c(t, d, p, exponents, dtype, constant_side, c, seed):
    a = hostile(2, t, d, 10.0 ** exponents[0], dtype, seed)
    b = hostile(2, t, p, 10.0 ** exponents[1], dtype, seed + 1)
    if constant_side:  # b the same at each position: the pairs of a cancel against each other
        b = b[:, :1].expand_as(b)
    a, b = (torch.nan_to_num(x, nan=0.0) for x in (a, b))
    finite = torch.isfinite(a).all() and torch.isfinite(b).all()
    exact = exact_norms(a, b) if finite else None
    factors = {
        "direct": reference_norms.direct_sq_norm(a, b).upper,
        "gram": reference_norms.gram_sq_norm(a, b).upper,
        "kept": OuterProduct(a, b).materialized().sq_norm().upper,
        "in turn": in_turn_upper(OuterProduct(a, b)),
    }
    if t == 1:
        factors["rank_one"] = reference_norms.rank_one_sq_norm(a, b).upper
    for name, upper in factors.items():
        clip = clip_factors(ConstantFlatClipper(c), [upper.sqrt()])[0].float().double()
        if finite:
            assert (clip * exact <= c).all(), name
        else:
            assert (clip[~torch.isfinite(upper)] == 0).all(), name
    if finite:
        sums = b.double().sum(1).norm(dim=1)
        assert (row_sum(b).sq_norm().upper.sqrt() >= sums).all()
        assert (Dense(b).sq_norm().upper.sqrt() >= b.double().flatten(1).norm(dim=1)).all()
        table = torch.randint(0, 3, (2, t), generator=torch.Generator().manual_seed(seed))
        rows = torch.einsum("ntv,ntp->nvp", torch.nn.functional.one_hot(table, 3).double(), b.double())
        assert (Lookup(table, b, 3).sq_norm().upper.sqrt() >= rows.flatten(1).norm(dim=1)).all()


def in_turn_upper(product):
    found = InTurn([product])
    return torch.cat([finished(found.write(some)).upper for some in found.samples()])


MAGNITUDES = st.floats(-4, 4).map(lambda e: 10.0**e)


def clipped_sum_of(model, x, y, weights, c):
    """(Σ_n c_n g_n as one vector, the norms) of the weighted loss Σ_n w_n loss_n."""
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=c)
    losses = torch.nn.functional.cross_entropy(wrapped(x), y, reduction="none")
    (weights * losses).sum().backward()
    total = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    wrapped.zero_grad()
    wrapped.to_standard_module()
    return total


@given(
    name=st.sampled_from(sorted(MODELS)),
    n=st.integers(1, 6),
    which=st.integers(0, 5),
    c=MAGNITUDES,
    inputs=MAGNITUDES,
    parameters=st.floats(-2, 2).map(lambda e: 10.0**e),
    weight=MAGNITUDES,
    double=st.booleans(),
    twins=st.booleans(),
    in_turn=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_one_sample_moves_the_sum_by_at_most_c(
    name, n, which, c, inputs, parameters, weight, double, twins, in_turn, seed
):
    with everything_in_turn() if in_turn else contextlib.nullcontext():
        moves_the_sum_by_at_most_c(name, n, which, c, inputs, parameters, weight, double, twins, seed)


def moves_the_sum_by_at_most_c(name, n, which, c, inputs, parameters, weight, double, twins, seed):
    build, batch = MODELS[name]
    torch.manual_seed(seed)
    model, x, y = build(), batch(n), torch.randint(0, 5, (n,))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(parameters)
    if x.is_floating_point():
        x = x * inputs
    if twins:  # all samples alike, so that their gradients point the same way
        x, y = x[:1].expand_as(x).contiguous(), y[:1].expand_as(y).contiguous()
    which %= n
    weights = torch.ones(n)
    weights[which] = weight
    if double:
        model, weights = model.double(), weights.double()
        x = x.double() if x.is_floating_point() else x
        others = [i for i in range(n) if i != which]
        without = clipped_sum_of(model, x[others], y[others], weights[others], c)
        margin = 1e-9
    else:
        # In fp32 a batch of another size rounds its own matrix products differently, so the sample stays and
        # its loss counts nothing. The margin covers the rounding of the two sums.
        none = weights.clone()
        none[which] = 0.0
        without = clipped_sum_of(model, x, y, none, c)
        margin = 1e-5
    moved = (clipped_sum_of(model, x, y, weights, c) - without).norm()
    assert moved <= c * (1.0 + margin * n)
