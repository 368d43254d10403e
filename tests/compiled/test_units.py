"""The compiled step where units are clipped, against a loop over samples whose gradients are added by unit."""

import copy
import warnings

import pytest
import torch
from small_steps import CASES, Mlp, mlp_batch, square_losses
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning, InputError, UnsupportedModuleError
from dpfast.modes.nonfinite_samples import DroppedSamples
from dpfast.testing import loop_over_samples, norms_of, relative_error

UNITS = 5
DRAWS = {
    "any order": [3, 0, 1, 0, 3, 3],
    "nobody's": [1, -1, 0, 1, -1, 3],
    "one unit": [4] * 6,
    "one each": [2, 1, 0, 4, 3],
    "one sample": [2],
    "nobody at all": [-1] * 4,
    "none": [],
}


class Convolution(nn.Module):
    """Factors that are neither products of rows nor lookups."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x.unsqueeze(1))


class Wide(nn.Module):
    """Samples' gradients are kept in none of its layers; one is used twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(80, 80), nn.Linear(80, 3)

    def forward(self, x):
        x = nn.functional.pad(x, (0, 74)).unsqueeze(1) * torch.linspace(0.5, 1.5, 3).view(3, 1)
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x))))).mean(1)


MODELS = {
    **CASES,
    "convolution": (Convolution, square_losses, mlp_batch),
    "wide": (Wide, square_losses, mlp_batch),
}


def by_unit(net, losses, batch, ids, how):
    of_samples = loop_over_samples(net, lambda model, *batch: losses(model, *batch).sum(), *batch)
    found = {}
    for name, g in of_samples.items():
        total = g.new_zeros(UNITS, *g.shape[1:])
        for row, unit in zip(g, ids, strict=True):
            if unit >= 0:
                total[unit] += row / (ids.count(unit) if how == "mean" else 1)
        found[name] = total
    return found


def check(step, net, losses, batch, ids, how="sum", **more):
    exact = by_unit(net, losses, batch, ids, how)
    norms = norms_of(exact)
    net.zero_grad()
    step(*batch, units=torch.tensor(ids, dtype=torch.int64), **more)
    factors = step.clip_factors.double()
    assert step.norms.shape == factors.shape == (UNITS,) and step.dropped == 0
    assert relative_error(step.norms, norms) <= 1e-5
    ideal = (step.max_grad_norm / norms).clamp(max=1.0)
    assert (factors <= ideal * (1.0 + 1e-5)).all() and (factors >= ideal * (1.0 - 1e-3)).all()
    for name, p in net.named_parameters():
        expected = torch.einsum("n,n...->...", factors, exact[name])
        assert relative_error(p.grad, expected) <= 1e-5 if expected.any() else not p.grad.any(), name


def compiled(name, how="sum", c=0.5, **more):
    torch.manual_seed(0)
    make, losses, batches = MODELS[name]
    net = make()
    options = {"max_grad_norm": c, "batch_size": 6, "backend": "aot_eager", "num_units": UNITS, "per_unit": how}
    return dpfast.compile_step(net, losses, **{**options, **more}), net, losses, batches


@pytest.mark.parametrize("how", ["sum", "mean"])
@pytest.mark.parametrize("name", MODELS)
def test_draws_of_any_size_in_one_graph(name, how):
    step, net, losses, batches = compiled(name, how)
    for ids in DRAWS.values():
        check(step, net, losses, batches(len(ids)), ids, how)
    assert len(step._graphs) == 1


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_units_have_the_eager_steps_numbers(name, reference_runs):
    step, net, losses, batches = compiled(name)
    batch, ids = batches(6), torch.tensor(DRAWS["any order"])
    eager = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(net), max_grad_norm=0.5, loss_reduction="sum")
    with eager.units(ids, UNITS):
        losses(eager, *batch).sum().backward()
    step(*batch, units=ids)
    torch.testing.assert_close(step.norms, eager.get_norm_sample(), rtol=1e-6, atol=0)
    torch.testing.assert_close(step.clip_factors, eager.get_clipping_coef(), rtol=1e-6, atol=0)
    assert step.sensitivity == eager.sensitivity


def test_inductor():
    step, net, losses, batches = compiled("transformer", backend="inductor")
    for ids in ("any order", "nobody's", "one sample", "none"):
        check(step, net, losses, batches(len(DRAWS[ids])), DRAWS[ids])


def test_clipping_by_parameter():
    step, net, losses, batches = compiled("mlp", norm_clipper=dpfast.ConstantPerLayerClipper(0.1))
    batch, ids = batches(6), DRAWS["nobody's"]
    step(*batch, units=torch.tensor(ids))
    for name, g in by_unit(net, losses, batch, ids, "sum").items():
        limit = dict(zip(dict(net.named_parameters()), step.norm_clipper.flat_values, strict=True))[name]
        factors = (limit / norms_of({name: g})).clamp(max=1.0)
        assert relative_error(net.get_parameter(name).grad, torch.einsum("n,n...->...", factors, g)) <= 1e-4


def test_padding_is_nobodys_whatever_it_holds():
    step, net, losses, batches = compiled("mlp", "mean")
    valid = torch.tensor([True, False, True, True, True, False])
    x, y = batches(6)
    ids = torch.tensor([0, 0, 1, 1, 2, 4])
    step(x, y, units=ids, valid=valid)
    before = [p.grad.clone() for p in net.parameters()]
    exact = by_unit(net, losses, (x[valid], y[valid]), ids[valid].tolist(), "mean")
    assert relative_error(step.norms, norms_of(exact)) <= 1e-5
    for padding in (0.0, float("inf"), float("nan")):
        net.zero_grad()
        step(x.where(valid[:, None], padding), y, units=ids, valid=valid)
        assert all(torch.equal(p.grad, q) for p, q in zip(net.parameters(), before, strict=True)) and step.dropped == 0


def test_a_unit_that_is_not_finite_is_dropped_whole():
    step, net, _, batches = compiled("mlp")
    x, y = batches(6)
    x[1] = float("nan")
    with pytest.warns(DpfastWarning, match="1 of 5"):
        step(x, y, units=torch.tensor([0, 0, 1, 1, 2, 2]))
        assert step.dropped == 1  # of a GPU known when it is asked for
    assert step.clip_factors[0] == 0
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_the_warning_comes_when_the_number_is_asked_for(monkeypatch):
    """As on a GPU, which nobody waits for."""

    class Late:
        def query(self):
            return False

        def synchronize(self):
            pass

    def add(self, norms):
        self._on_the_way.append((Late(), (~norms.isfinite()).sum(), norms.shape[-1]))

    step, _, _, batches = compiled("mlp")
    monkeypatch.setattr(DroppedSamples, "add", add)
    x, y = batches(6)
    x[1] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpfastWarning)
        step(x, y, units=torch.tensor([0, 0, 1, 1, 2, 2]))
    with pytest.warns(DpfastWarning, match="1 of 5"):
        assert step.dropped == 1


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (None, InputError, r"this step clips units: .*step\(\*batch, units=ids\)"),
        ([0, 1, 2], InputError, r"ids \(3,\) for a batch of 4"),
        ([0, 1, 2, 5], InputError, "ids go from 0 to 5; units are numbered 0 to 4"),
        ([0, 1, 2, -2], InputError, "ids go from -2"),
        ([0.0, 1.0, 2.0, 3.0], InputError, "must be a tensor of whole numbers"),
        ([[0, 1], [2, 3], [0, 1], [2, 3]], InputError, r"are of tokens.*GradSampleModuleFastGradientClipping"),
    ],
)
def test_bad_ids(ids, error, message):
    step, net, _, batches = compiled("mlp")
    with pytest.raises(error, match=message):
        step(*batches(4), units=None if ids is None else torch.tensor(ids))
    assert all(p.grad is None for p in net.parameters())


def test_what_does_not_fit():
    step, _, _, batches = compiled("mlp", chunks=True)
    with pytest.raises(InputError, match="a unit would be clipped in each; give a larger batch_size"):
        step(*batches(7), units=torch.zeros(7, dtype=torch.int64))
    samples = dpfast.compile_step(Mlp(), square_losses, max_grad_norm=1.0, batch_size=4, backend="aot_eager")
    with pytest.raises(InputError, match="this step clips samples"):
        samples(*mlp_batch(4), units=torch.zeros(4, dtype=torch.int64))
    for more in ({"num_units": 2.5}, {"num_units": -1}, {"per_unit": "most"}):
        with pytest.raises(InputError, match=next(iter(more))):
            compiled("mlp", **({"how": more["per_unit"]} if "per_unit" in more else more))


def test_experts_are_refused_by_name():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=3,
        max_position_embeddings=16,
    )
    model = transformers.MixtralForCausalLM(config)

    def losses(model, tokens):
        return model(input_ids=tokens, use_cache=False).logits.square().mean((1, 2))

    step = dpfast.compile_step(model, losses, max_grad_norm=1.0, batch_size=4, backend="aot_eager")
    with pytest.raises(UnsupportedModuleError, match=r"MixtralExperts: how many tokens .*GradSampleModuleFastGradient"):
        step(torch.randint(0, 20, (4, 5)))
