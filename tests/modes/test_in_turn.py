"""Large linear layers on a CPU, sample by sample: norm, factor and clipped sum at once."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from in_turn import everything_in_turn
from torch import nn
from transformers.pytorch_utils import Conv1D
from workloads import WORKLOADS

import dpfast
from dpfast.arithmetic import cost, products
from dpfast.errors import DpfastWarning, StateError
from dpfast.factors import InTurn, OuterProduct, in_turn
from dpfast.modes.clippers import NormClipper
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

pytestmark = pytest.mark.on_cpu


class Model(nn.Module):
    """Layers that are wider or narrower behind, beside others; a layer used twice; a bias; one parameter unused."""

    def __init__(self, d=40, p=24):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, p), nn.Linear(p, d, bias=False)
        self.conv, self.twice, self.last = Conv1D(p, d), nn.Linear(p, p), nn.Linear(p, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = self.down(self.up(self.norm(x)).tanh())
        return self.last(self.twice(self.twice(self.conv(x)).tanh())).mean(1)


def step(model, x, y, *, reduction="mean", valid=None):
    if valid is None:
        output = model(x)
    else:
        with model.valid(valid):
            output = model(x)
    F.cross_entropy(output, y, reduction=reduction).backward()


def batch(n, t, d=40, dtype=torch.float32):
    return torch.randn(n, t, d, dtype=dtype), torch.randint(3, (n,))


def wrap(model, **options):
    return dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(model), **{"max_grad_norm": 0.3, **options})


def gradients(model):
    return {name: p.grad for name, p in model._module.named_parameters()}


def loop(model, x, y):
    return loop_over_samples(model, lambda m, x, y: F.cross_entropy(m(x), y), x, y)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def onednn(monkeypatch, is_faster):
    if is_faster and not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "onednn_is_faster", lambda: is_faster)
    monkeypatch.setattr(products, "_WORTH_ONEDNN", 2**12)


@pytest.mark.parametrize("n", [1, 3, 17])
@pytest.mark.parametrize("t", [1, 17, 300, 513])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_sums_of_a_loop_over_samples(n, t, reduction):
    model, (x, y) = Model(), batch(n, t)
    exact = loop(model, x, y)
    with everything_in_turn() as taken:
        wrapped = wrap(model, loss_reduction=reduction)
        step(wrapped, x, y, reduction=reduction)
    assert taken == [4]
    norms = norms_of(exact)
    assert relative_error(wrapped.get_norm_sample(), norms) <= 1e-5
    factors = wrapped.get_clipping_coef().double()
    assert (factors * norms <= 0.3).all()
    for name, total in clipped_sum(exact, 0.3).items():
        assert relative_error(gradients(wrapped)[name], total) <= 1e-3 or not total.any(), name
        weighted = torch.einsum("n,n...->...", factors, exact[name])
        assert relative_error(gradients(wrapped)[name], weighted) <= 1e-5 or not total.any(), name
    assert not gradients(wrapped)["unused.weight"].any()


@pytest.mark.parametrize("is_faster", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_of_a_sample_in_any_batch_and_with_any_threads(monkeypatch, threads, is_faster, dtype):
    onednn(monkeypatch, is_faster)
    a, b = torch.randn(5, 70, 130, dtype=dtype), torch.randn(5, 70, 200, dtype=dtype)
    pairs = [OuterProduct(a, b), OuterProduct(b, a)]

    def written(n):
        found = InTurn([OuterProduct(f.activations[n], f.backprops[n]) for f in pairs])
        norms = []
        for some in found.samples():
            norms.append(torch.cat(found.write(some)).T)
            found.add([0.5] * len(norms[-1]))
        return torch.cat(norms), found.totals()

    threads(1)
    norms, totals = written(slice(None))
    for number in (1, 2, 3):
        threads(number)
        again, same = written(slice(None))
        assert torch.equal(again, norms) and all(map(torch.equal, same, totals))
        for i in range(5):
            assert torch.equal(written(slice(i, i + 1))[0][0], norms[i])
        with monkeypatch.context() as patched:
            patched.setattr(in_turn, "AT_A_TIME", 2 * 2 * 130 * 200 * a.itemsize)
            assert len(list(InTurn(pairs).samples())) == 3
            again, same = written(slice(None))
            assert torch.equal(again, norms) and all(map(torch.equal, same, totals))
    exact = torch.einsum("ntp,ntd->pd", b.double(), a.double()) * 0.5
    assert relative_error(totals[0], exact) <= 1e-6 and relative_error(totals[1], exact.T) <= 1e-6
    assert all(total.is_contiguous() for total in totals)


@pytest.mark.parametrize("at_a_time", [1, 3, 100])
@pytest.mark.parametrize("clipper", [dpfast.AutomaticClipper(0.3), dpfast.ConstantFlatClipper(0.3)])
def test_how_many_are_written_at_a_time_changes_no_bit(monkeypatch, at_a_time, clipper):
    model, (x, y) = Model(), batch(7, 20)
    x[4] = float("nan")
    valid = torch.arange(7) != 1
    found, made = [], InTurn.__init__
    for number in (2, at_a_time):

        def of_so_many(self, factors, number=number):
            monkeypatch.setattr(in_turn, "AT_A_TIME", number * sum(4 * f.shape.numel() for f in factors))
            made(self, factors)

        monkeypatch.setattr(InTurn, "__init__", of_so_many)
        with everything_in_turn() as taken, pytest.warns(DpfastWarning):
            wrapped = wrap(model, norm_clipper=clipper)
            step(wrapped, x, y, valid=valid, reduction="sum")
        assert taken == [4]
        found.append([wrapped.get_clipping_coef(), *gradients(wrapped).values()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("clipper", [None, dpfast.AutomaticClipper(0.3), dpfast.ConstantFlatClipper(0.3)])
def test_padding_and_samples_that_are_not_finite_add_exactly_nothing(clipper):
    model, (x, y) = Model(), batch(6, 20)
    valid = torch.tensor([True, True, False, True, True, True])
    with everything_in_turn() as taken, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped, without = wrap(model, norm_clipper=clipper), wrap(model, norm_clipper=clipper)
        without(x)  # looked at
        x[2], x[4] = float("nan"), float("inf")
        step(wrapped, x, y, valid=valid, reduction="sum")
        x[2], x[4] = 0.0, 1.0
        rest = valid & (torch.arange(6) != 4)
        step(without, x, y, valid=rest, reduction="sum")
    assert taken == [4, 4]
    assert wrapped.nonfinite_samples == 1 and wrapped.get_clipping_coef()[[2, 4]].tolist() == [0.0, 0.0]
    assert torch.equal(wrapped.get_clipping_coef(), without.get_clipping_coef())
    for name, gradient in gradients(wrapped).items():
        assert torch.equal(gradient, gradients(without)[name]), name


def test_samples_that_are_all_dropped():
    model, (x, y) = Model(), batch(3, 20)
    with everything_in_turn() as taken:
        wrapped = wrap(model)
        step(wrapped, x, y, valid=torch.zeros(3, dtype=torch.bool))
        step(wrapped, x[:0], y[:0], reduction="sum")
    assert taken == [4, 0] and all(not g.any() for g in gradients(wrapped).values())


class MedianClipper(NormClipper):
    """Looks at the whole batch."""

    thresholds = torch.tensor([0.3])

    def calc_clipping_factors(self, norms):
        return [(norms[0].median() / norms[0]).clamp(max=1.0)]


class Doubled(dpfast.ConstantFlatClipper):
    """A subclass may do anything."""


@pytest.mark.parametrize("clipper", [MedianClipper(), Doubled(0.3), dpfast.ConstantPerLayerClipper(0.1)])
def test_clippers_of_others_see_the_whole_batch(clipper):
    model, (x, y) = Model(), batch(5, 20)
    with everything_in_turn() as taken:
        wrapped = wrap(model, norm_clipper=clipper)
        step(wrapped, x, y)
    other = wrap(model, norm_clipper=clipper)
    step(other, x, y)
    assert not taken and relative_error(wrapped.get_clipping_coef(), other.get_clipping_coef()) <= 1e-3


def test_passes_add_up_and_autocast_accumulates_in_fp32():
    model, (x, y) = Model(), batch(4, 30)
    with everything_in_turn() as taken:
        wrapped, once = wrap(model), wrap(model)
        with torch.autocast("cpu", torch.bfloat16):
            step(once, x, y)
            step(wrapped, x, y)
        step(wrapped, x, y)
    assert taken == [4, 4, 4]
    other = wrap(model)
    step(other, x, y)
    for name, gradient in gradients(wrapped).items():
        assert gradient.dtype is torch.float32
        total = gradients(once)[name] + gradients(other)[name]
        assert relative_error(gradient, total) <= 1e-3 or not total.any(), name


@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e15])
def test_bounds_of_gradients_that_cancel(scale):
    """b is the same at each position but for its sign, so that little of 200 outer products is left."""
    torch.manual_seed(0)
    a = torch.randn(6, 1, 50) + 1e-6 * torch.randn(6, 200, 50)
    b = torch.randn(6, 1, 70) * torch.where(torch.arange(200) % 2 == 0, 1.0, -1.0).view(1, -1, 1) * scale
    exact = torch.einsum("ntp,ntd->npd", b.double(), a.double()).flatten(1).norm(dim=1)
    with everything_in_turn():
        weight = torch.nn.Parameter(torch.zeros(70, 50))
        layer = nn.Linear(50, 70, bias=False)
        layer.weight = weight
        wrapped = wrap(layer, loss_reduction="sum", max_grad_norm=1.0)
        (wrapped(a) * b).sum().backward()
    assert (wrapped.get_clipping_coef().double() * exact <= 1.0).all()
    upper = wrapped._norms.upper.sqrt()
    assert (upper >= exact).all() and wrapped.norm_slack.min() >= 0.0


@pytest.mark.parametrize(("t", "d", "p"), [(64, 256, 256), (72, 220, 227), (85, 192, 192), (70, 240, 480)])
def test_how_many_samples_there_are_does_not_tell_the_way(t, d, p):
    """Of layers as they are, small ones among them: one sample of those would wait for others alike."""
    layers = [nn.Linear(d, p), nn.Tanh(), nn.Linear(p, d), nn.Tanh(), nn.Linear(d, p), nn.Linear(p, d)]
    model, x = nn.Sequential(*layers), torch.randn(6, t, d)

    def step(x):
        wrapped = wrap(model, loss_reduction="sum", max_grad_norm=1e-3)
        wrapped(x).square().sum().backward()
        return wrapped.get_clipping_coef(), wrapped._norms.value

    factors, norms = step(x)
    for n in (1, 2, 4):
        some, of_some = step(x[:n])
        # The layers' own products may differ in the last bits; the ways' bounds differ by 1e-5 and more.
        assert torch.allclose(some, factors[:n], rtol=1e-6) and torch.allclose(of_some, norms[:n], rtol=1e-6)


@pytest.mark.parametrize(
    ("p", "clipper"),
    [
        *((p, clipper) for p in (192, 300, 1024) for clipper in (None, dpfast.AutomaticClipper(0.3))),
        (1024, Doubled(0.3)),  # a Gram norm waits too; smaller gradients are kept
    ],
)
def test_what_is_written_to_while_it_waits_is_refused(p, clipper):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(256, p), nn.Linear(p, 256), nn.Linear(256, p)

        def forward(self, x):
            h = self.a(x)
            z = self.b(h) + x
            alias = z.detach()
            h.register_hook(lambda g: (alias.mul_(1.5), g)[1])
            return self.c(z)

    wrapped = wrap(Writes(), norm_clipper=clipper, loss_reduction="sum")
    with pytest.raises(StateError, match=r"c\.weight: its layer's input, .* was written to"):
        wrapped(torch.randn(4, 100, 256)).square().mean(1).sum().backward()
    assert all(p.grad is None for p in wrapped.parameters())


@pytest.mark.parametrize("kinds", ["six", "mixed", "small"])
@pytest.mark.parametrize("n", [1, 3])
def test_explain_names_the_layers_that_a_step_takes_in_turn(kinds, n):
    if kinds == "six":  # of which three are taken
        model, x = nn.Sequential(*[nn.Linear(*((768, 3072)[:: 1 - 2 * (i % 2)])) for i in range(6)]), (256, 768)
    elif kinds == "mixed":
        model = nn.Sequential(nn.Linear(256, 1024).double(), nn.Linear(256, 1024), nn.Linear(1024, 256))
        model[0].register_forward_hook(lambda module, inputs, output: output[..., :256].float())
        model[0].register_forward_pre_hook(lambda module, inputs: inputs[0].double())
        x = 128, 256
    else:
        model, x = nn.Sequential(*[nn.Linear(192, 192) for _ in range(4)]), (85, 192)
    x = torch.randn(n, *x)
    with everything_in_turn(as_it_is=True) as taken:
        wrapped = wrap(model, loss_reduction="sum")
        wrapped(x).sum().backward()
    explained = {use.parameter for use in dpfast.explain(copy.deepcopy(model), x).uses if use.way == "in turn"}
    names = [name for name, _ in model.named_parameters()]
    assert explained == {names[place] for place in taken.places[-1]} if taken else not explained
    assert len(explained) == {"six": 3, "mixed": 2, "small": 0}[kinds]


def sizes(*shapes, t=128):
    return [cost.Size(t, cost.norm_flops("gram", t, d, p), 4 * d * p, 4 * t * (d + p), "cpu") for d, p in shapes]


def test_what_is_taken_in_turn_follows_from_shapes():
    assert cost.in_turn(sizes((256, 1024), (1024, 256), (256, 1000))) == [True] * 3
    assert cost.in_turn(sizes((256, 1024), t=16)) == [False]  # the norm is cheaper than writing
    assert cost.in_turn(sizes((64, 64), (64, 96), t=64)) == [False] * 2  # calls take longer
    many = cost.in_turn(sizes(*[(768, 3072)] * 6, t=256))
    assert many == [True] * 3 + [False] * 3  # 9 MiB each, of 32
    assert cost.in_turn(sizes((768, 3072), (1024, 1024))) == [False] * 2  # more than a core's cache: bytes cost more
    assert cost.in_turn([]) == []


def test_what_waits_in_vain_is_kept():
    """More gradients than may be written at a time: those that are left are kept as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 768), nn.Linear(768, 256)).requires_grad_(True)
    x = torch.randn(2, 128, 256)
    taken, kept = [], []
    for limit in (cost.IN_TURN, 4 * 256 * 768, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cost, "IN_TURN", limit)
            with everything_in_turn(keep_ratio=cost.KEEP_RATIO) as found:
                wrapped = wrap(model)
                wrapped(x).square().mean().backward()
            taken += found
            kept.append([g.clone() for g in gradients(wrapped).values()])
    assert taken == [2, 1, 0]
    for other in kept[1:]:
        assert all(relative_error(x, y) <= 1e-6 for x, y in zip(other, kept[0], strict=True))


def test_a_gpt_takes_its_large_layers_in_turn():
    torch.manual_seed(0)
    workload = WORKLOADS["gpt"]
    model, inputs = workload.build(), tuple(x[:2] for x in workload.batch())
    with everything_in_turn(as_it_is=True) as taken:
        wrapped = wrap(model)
        workload.losses(wrapped, *inputs).mean().backward()
    assert taken == [13]  # up, down, qkv of four blocks, and the head
    assert wrapped.norm_slack.max() <= 1e-3
