"""What is proven of the eager step holds of its graph, also as Inductor compiles it."""

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from cases import MODELS, exact_norms, hostile
from hypothesis import given, settings
from small_steps import Mlp, check, mlp_batch, square_losses
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import dpfast
from dpfast.arithmetic import capturing, reference_norms, towards_zero
from dpfast.factors import Lookup, OuterProduct, row_sum


def products(model, x, scale):
    """Backprops are ``scale`` itself, so that the exact gradient is known."""
    return (model(x).float() * scale.float()).sum((1, 2))


def hostile_batch(t, exponent, seed, dtype, constant_side):
    a = hostile(3, t, 40, 10.0**exponent, dtype, seed)
    b = hostile(3, t, 24, 1.0, dtype, seed + 1)
    return a, b[:, :1].expand_as(b).contiguous() if constant_side else b


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("t", [1, 70])
def test_no_sample_exceeds_c_on_inputs_that_cancel(backend, dtype, t):
    if backend == "inductor" and t == 1:
        pytest.skip("compiling takes long; test_inductor_sums_what_was_measured has T = 1")
    torch.manual_seed(0)
    net = nn.Linear(40, 24, bias=False).to(dtype)
    step = dpfast.compile_step(net, products, max_grad_norm=1.0, batch_size=3, backend=backend)
    for seed, exponent in enumerate((-18, -4, 0, 6, 15)):
        for constant_side in (False, True):
            a, b = hostile_batch(t, exponent, seed, dtype, constant_side)
            exact = exact_norms(a, b)
            for limit in (1e-6, 1.0, 1e3):
                net.zero_grad()
                step.max_grad_norm = limit
                step(a, b)
                fits = exact.isfinite() & (step.clip_factors > 0)
                assert (step.clip_factors.double()[fits] * exact[fits] <= limit).all(), (exponent, limit)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("t", "d", "p"), [(70, 40, 24), (3, 600, 40), (5, 4, 3)])
def test_a_step_within_autocast_takes_norms_and_sums_in_fp32(backend, t, d, p):
    """What autocast rounds is in the graph, which may run within it."""
    torch.manual_seed(0)
    net, (a, b) = nn.Linear(d, p, bias=False), (torch.randn(3, t, k).bfloat16().float() for k in (d, p))
    exact = exact_norms(a, b)
    limit = float(exact.min()) / 2
    step = dpfast.compile_step(net, products, max_grad_norm=limit, batch_size=3, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            net.zero_grad()
            step(a, b)
    factors = step.clip_factors.double()
    assert (factors * exact <= limit).all() and (factors * exact >= limit * (1.0 - 1e-3)).all()
    total = torch.einsum("n,ntp,ntd->pd", factors, b.double(), a.double())
    assert (net.weight.grad - total).norm() <= 1e-5 * total.norm()


def test_inductor_sums_what_was_measured():
    """One graph for all sizes of batches; what norms read is what is summed, in memory and not computed again."""
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    net = Mlp()
    step = dpfast.compile_step(net, square_losses, max_grad_norm=0.5, batch_size=5)
    _, (code, *_) = run_and_get_code(step, *mlp_batch(5))
    assert "dpfast.pinned" not in code, "32 bits are not copied"
    calls = ("dpfast.clip", "empty_strided_cpu(", "reinterpret_tensor(")
    found = [code.count(name) for name in calls]
    assert found[0] == 0 and sum(found[1:]) <= 40, f"of small steps these take the time, and grow in number: {found}"
    for n in (5, 3, 0, 1, 7):
        check(step, net, square_losses, mlp_batch(n))
    batch = mlp_batch(5)
    for limit in (0.5, 1e-40, 3e-44, 1e-50, 1e-300, 1e3):  # of which fp32 has all bits, some, one and none; no factor
        net.zero_grad()
        step.max_grad_norm = limit
        step(*batch)
        ((_, factors, measured, _),) = step._parts
        (exact,) = dpfast.modes.clippers.clip_factors(dpfast.ConstantFlatClipper(limit), [measured[0]])
        assert (factors == towards_zero(exact, torch.float32)).all(), "the eager step's bits, as Inductor makes them"
        assert (factors.double() <= exact).all() and (factors.nextafter(torch.tensor(9.0)).double() > exact).all()
    assert len(step._graphs) == 1


def of_every_size():
    """Both signs; normal and subnormal numbers of fp32, more and less than it has, ties, and what is no number."""
    torch.manual_seed(0)
    x = torch.linspace(-1030, 130, 20001, dtype=torch.float64).exp2() * (1.0 + torch.rand(20001, dtype=torch.float64))
    edges = [0.0, 1.0, 2.0**-126, 2.0**-149, 2.0**-150, 1.5 * 2.0**-149, 1.0 + 2.0**-24, 3.4028235677973366e38]
    edges += [torch.finfo(torch.float32).max, torch.inf, torch.nan, -(2.0**-150)]
    return torch.cat([x, -x, torch.tensor(edges, dtype=torch.float64)])


def test_what_is_cut_off_in_a_graph_is_what_is_rounded_off_outside():
    """A compiler may take a rounding that is undone again for none."""
    x = of_every_size()

    def rounded(x):
        with capturing():
            return towards_zero(x, torch.float32)

    graph = make_fx(rounded)(x)
    *_, rounding, _ = graph.graph.nodes
    kinds = [node.target for node in graph.graph.nodes if node.target is torch.ops.aten._to_copy.default]
    assert rounding.target is torch.ops.aten._to_copy.default and len(kinds) == 1, "what it gives is not asked again"
    torch.testing.assert_close(graph(x), towards_zero(x, torch.float32), rtol=0, atol=0, equal_nan=True)
    finite = x.isfinite()
    assert (graph(x).double().abs() <= x.abs())[finite].all()


def test_other_clippers_are_asked_outside_of_the_graph():
    """Whatever they do, by the eager step's code; each kind has a graph of its own."""
    torch.manual_seed(0)
    net, batch = Mlp(), mlp_batch(5)
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    class Half(dpfast.NormClipper):
        thresholds = torch.tensor([0.5])

        def calc_clipping_factors(self, norms):
            assert type(norms[0]) is torch.Tensor and len(norms) == 1
            return [torch.full_like(norm, 0.5) for norm in norms]

    step = dpfast.compile_step(net, square_losses, max_grad_norm=0.5, batch_size=5, backend=backend)
    for clipper, in_graph in ((None, True), (Half(), False), (dpfast.ConstantFlatClipper(0.5), False), (None, True)):
        net.zero_grad()
        step.norm_clipper = clipper
        step(*batch)
        ((_, factors, measured, _),) = step._parts
        of = dpfast.ConstantFlatClipper(0.5) if clipper is None else clipper
        (exact,) = dpfast.modes.clippers.clip_factors(of, [measured[0]])
        assert (factors == towards_zero(exact, torch.float32)).all()
        assert in_graph or "dpfast.clip.default" in graphs[-1]
    assert len(graphs) == 3 and "dpfast.clip.default" not in graphs[0]


def test_dropped_samples_are_counted_once():
    net, (x, y) = Mlp(), mlp_batch(5)
    x[1], x[4] = torch.nan, torch.inf
    step = dpfast.compile_step(net, square_losses, max_grad_norm=0.5, batch_size=3, backend="eager")
    with pytest.warns(dpfast.errors.DpfastWarning, match="1 of 3 samples"):
        step(x, y)
    assert step.dropped == 2 and step._mode._dropped.count == 2
    assert all(p.grad.isfinite().all() for p in net.parameters())


MAGNITUDES = st.floats(-3, 3).map(lambda e: 10.0**e)
STEPS: dict = {}


def weighted_losses(model, x, y, weights):
    return weights * F.cross_entropy(model(x), y, reduction="none")


@given(
    name=st.sampled_from(["mlp", "tied"]),
    n=st.integers(1, 6),
    which=st.integers(0, 5),
    c=MAGNITUDES,
    weight=MAGNITUDES,
    seed=st.integers(0, 10**6),
)
@settings(deadline=None)
def test_one_sample_moves_the_sum_by_at_most_c(name, n, which, c, weight, seed):
    build, inputs = MODELS[name]
    torch.manual_seed(seed)
    if name not in STEPS:
        net = build()
        options = {"max_grad_norm": 1.0, "batch_size": 4, "backend": "aot_eager"}
        STEPS[name] = net, dpfast.compile_step(net, weighted_losses, **options)
    net, step = STEPS[name]
    x, y, weights = inputs(n), torch.randint(0, 5, (n,)), torch.ones(n)
    weights[which % n] = weight

    def total(valid):
        net.zero_grad()
        step.max_grad_norm = c
        step(x, y, weights, valid=valid)
        return torch.cat([p.grad.double().flatten() for p in net.parameters()])

    everyone = torch.ones(n, dtype=torch.bool)
    others = everyone.clone()
    others[which % n] = False
    assert (total(everyone) - total(others)).norm() <= c * (1.0 + 1e-5 * n)


WAYS = {
    **reference_norms.SQ_NORMS,
    "kept": lambda a, b: OuterProduct(a, b).materialized().sq_norm(),
    "lookup": lambda a, b: Lookup(a[..., 0].abs().long() % 3, b, 3).sq_norm(),
    "rows": lambda a, b: row_sum(b).sq_norm(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("way", "t", "d", "p"),
    [
        *(("rank_one", 1, d, 5) for d in (1, 1023, 1024, 1025, 2049)),
        *((way, t, 5, 4) for way in ("direct", "kept", "lookup", "rows") for t in (2, 255, 256, 257, 513)),
        *(("gram", t, 9, 8) for t in (2, 15, 16, 17, 127, 128, 129, 257)),
        *(("gram", 3, d, p) for d, p in ((511, 4), (512, 513), (513, 1024), (1025, 2))),
        ("direct", 300, 1025, 3),
    ],
)
def test_bounds_hold_in_a_graph_on_either_side_of_every_block(way, t, d, p, dtype):
    """Each way by itself, whose inputs a whole step would have to be found for."""

    def norm(a, b):
        return tuple(WAYS[way](a, b))

    a, b = hostile(2, t, d, 1.0, dtype, 0), hostile(2, t, p, 1.0, dtype, 1)
    with capturing():
        graph = make_fx(norm, tracing_mode="fake")(a, b)
    for seed, exponent in enumerate((0, 0, -18, 6)):
        a, b = hostile(2, t, d, 10.0**exponent, dtype, seed), hostile(2, t, p, 1.0, dtype, seed + 1)
        if seed % 2:
            b = b[:, :1].expand_as(b).contiguous()
        of = {"lookup": F.one_hot(a[..., 0].abs().long() % 3, 3).double(), "rows": torch.ones(2, t, 1)}.get(way, a)
        exact, (value, upper) = exact_norms(of, b), graph(a, b)
        assert (upper.sqrt() >= exact).all()
        assert ((value.sqrt() - exact).abs() <= (upper.sqrt() - exact) + 1e-6 * exact).all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("t", "d", "p"),
    [
        (3, 1100, 40),  # Gram matrices, of features in blocks of 512
        (3, 40, 1100),
        (700, 5, 4),  # written gradients, of positions in blocks of 256
        (700, 150, 140),  # norms formed in pieces, of positions in blocks
    ],
)
def test_sums_in_blocks_have_every_block(backend, t, d, p):
    torch.manual_seed(0)
    net = nn.Linear(d, p)
    a, b = torch.randn(3, t, d), torch.randn(3, t, p)
    gradients = torch.einsum("ntp,ntd->npd", b.double(), a.double()).flatten(1), b.double().sum(1)
    exact = torch.cat(gradients, dim=1).norm(dim=1)
    limit = float(exact.median())
    step = dpfast.compile_step(net, products, max_grad_norm=limit, batch_size=3, backend=backend)
    step(a, b)
    torch.testing.assert_close(step.norms.double(), exact, rtol=1e-5, atol=0)
    assert (step.clip_factors.double() * exact <= limit).all()
    total = (step.clip_factors.double()[:, None] * torch.cat(gradients, dim=1)).sum(0)
    found = torch.cat([net.weight.grad.flatten(), net.bias.grad]).double()
    assert (found - total).norm() <= 1e-5 * total.norm()
