"""Within ``model.units(...)`` a unit is clipped as one: against a loop over samples, added up by unit."""

import contextlib
import copy
import threading

import pytest
import torch
from cases import assert_gradients, clipped_as_told, example, mean_loss, sum_loss
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast import GradSampleModuleFastGradientClipping as Module
from dpfast.errors import InputError, StateError
from dpfast.testing import loop_over_samples, norms_of, relative_error

IDS = {
    "several each": [0, 0, 1, 2, 2, 2],
    "any order": [2, 0, 1, 0, 2, 2],
    "nobody's": [1, -1, 0, 1, -1, 3],
    "one each": [5, 4, 0, 1, 2, 3],
    "equal runs": [0, 0, 0, 1, 1, 1],
    "one unit": [0] * 6,
    "nobody at all": [-1] * 6,
}


def conv():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 5))
    return model, (torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,)))


def build(name):
    if name == "conv":
        return conv()
    model, *batch = example(name)
    return model, batch


def per_unit(gradients, ids, num_units, how):
    out = {}
    for name, g in gradients.items():
        total = g.new_zeros(num_units, *g.shape[1:])
        for row, unit in zip(g, ids, strict=True):
            if unit >= 0:
                total[unit] += row
        if how == "mean":
            counts = torch.tensor([max(1, list(ids).count(unit)) for unit in range(num_units)])
            total /= counts.view(-1, *[1] * (g.dim() - 1))
        out[name] = total
    return out


@pytest.mark.parametrize("how", ["sum", "mean"])
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("name", ["transformer", "mlp", "tied", "recurrent", "shared_weight", "conv"])
def test_units_against_a_loop(name, ids, how):
    model, batch = build(name)
    ids = IDS[ids]
    reduction, loss = ("mean", mean_loss) if how == "sum" else ("sum", sum_loss)
    exact = per_unit(loop_over_samples(model, sum_loss, *batch), ids, 7, how)
    norms = norms_of(exact)
    c = float(norms[norms > 0].median()) if (norms > 0).any() else 1.0
    module = Module(model, max_grad_norm=c, loss_reduction=reduction)
    with module.units(torch.tensor(ids), 7, per_unit=how) as units:
        loss(module, *batch).backward()
    assert units.counts.tolist() == [ids.count(u) for u in range(7)]
    assert module.per_sample_gradient_norms.shape == (7,)
    assert relative_error(module.get_norm_sample(), norms) <= 1e-5
    factors = module.get_clipping_coef().double()
    assert (factors * norms <= c * (1 + 1e-7)).all()
    assert relative_error(factors, torch.where(norms > c, c / norms, 1.0)) <= 1e-4  # they are taken from bounds
    expected = {n: torch.einsum("n,n...->...", factors, g) for n, g in exact.items()}
    assert_gradients({n: p.grad for n, p in module._module.named_parameters()}, expected)


@pytest.mark.parametrize("clipper", ["per layer", "automatic"])
def test_clippers(clipper):
    model, batch = build("transformer")
    exact = per_unit(loop_over_samples(model, sum_loss, *batch), IDS["nobody's"], 4, "mean")
    names = [n for n, _ in model.named_parameters()]
    if clipper == "per layer":
        norms = torch.stack([exact[n].flatten(1).norm(dim=1) for n in names])
        limits = norms.median(dim=1).values
        factors = dict(zip(names, (limits[:, None] / norms.clamp(min=1e-12)).clamp(max=1.0), strict=True))
        norm_clipper = dpfast.ConstantPerLayerClipper(limits.tolist())
    else:
        factors = dict.fromkeys(names, 1.0 / (norms_of(exact) + 0.01))
        norm_clipper = dpfast.AutomaticClipper(1.0)
    module = Module(model, norm_clipper=norm_clipper)
    with module.units(torch.tensor(IDS["nobody's"]), 4, per_unit="mean"):
        mean_loss(module, *batch).backward()
    told = module.get_clipping_coef().double()  # less than these by what its bounds add
    told = dict(zip(names, told if told.dim() > 1 else [told] * len(names), strict=True))
    for name in names:
        assert (told[name] <= factors[name] * (1 + 1e-7)).all(), name
        assert relative_error(told[name], factors[name]) <= 2e-4, name
    expected = {n: torch.einsum("n,n...->...", told[n], g) for n, g in exact.items()}
    assert_gradients({n: p.grad for n, p in module._module.named_parameters()}, expected)


@pytest.mark.parametrize("name", ["transformer", "tied", "shared_weight", "conv"])
def test_a_unit_has_the_same_bits_in_whatever_batch_it_stands(name):
    model, batch = build(name)
    ids = torch.tensor(IDS["any order"])

    def norms(ids, num_units, *batch):
        module = Module(copy.deepcopy(model), loss_reduction="sum")
        with module.units(ids, num_units):
            sum_loss(module, *batch).backward()
        return module._norms

    together = norms(ids, 3, *batch)
    for unit in range(3):
        alone = norms(torch.where(ids == unit, 0, -1), 1, *batch)
        assert torch.equal(alone.value[0], together.value[unit]) and torch.equal(alone.upper[0], together.upper[unit])


def test_padding_that_is_nobodys_adds_exactly_nothing():
    model, (x, y) = build("mlp")
    model.double()
    x = x.double()
    grads = []
    for poison in (0.0, float("inf"), float("nan")):
        spoilt = x.clone()
        spoilt[4:] = poison
        module = Module(copy.deepcopy(model), loss_reduction="sum", max_grad_norm=0.1)
        with module.units(torch.tensor([0, 0, 1, 2, -1, -1]), 3):
            sum_loss(module, spoilt, y).backward()
        grads.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
        assert module.nonfinite_samples == 0 and module.get_norm_sample().isfinite().all()
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_a_unit_that_is_not_finite_is_dropped_whole():
    model, (x, y) = build("mlp")
    x[1] = float("nan")
    module = Module(model, loss_reduction="sum", max_grad_norm=0.1)
    with pytest.warns(dpfast.errors.DpfastWarning, match="1 of 3"), module.units(torch.tensor([0, 0, 1, 1, 2, 2]), 3):
        sum_loss(module, x, y).backward()
        assert module.nonfinite_samples == 1
    assert module.get_clipping_coef()[0] == 0 and all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_and_a_backward_pass_after_the_block(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("mlp")[0]
            self.first = nn.Linear(12, 12)

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    model, (x, y) = Checkpointed(), build("mlp")[1]
    ids = IDS["any order"]
    exact = per_unit(loop_over_samples(model, sum_loss, x, y), ids, 3, "sum")
    module = Module(model, loss_reduction="sum", max_grad_norm=0.5)
    with module.units(torch.tensor(ids), 3):
        loss = sum_loss(module, x, y)
    loss.backward()
    assert_gradients(gradients(module), clipped_as_told(module.get_clipping_coef(), exact, 0.5))


def test_an_empty_batch():
    model, (x, y) = build("mlp")
    module = Module(model)
    with module.units(torch.zeros(0, dtype=torch.int64), 2):
        sum_loss(module, x[:0], y[:0]).backward()
    assert module.get_norm_sample().tolist() == [0.0, 0.0]
    assert all(not p.grad.any() for p in module.parameters())


def test_ids_of_other_dtypes_and_the_step_after():
    model, (x, y) = build("mlp")
    module = Module(model, loss_reduction="sum")
    for dtype in (torch.int32, torch.uint8, torch.int64):
        with module.units(torch.tensor([0, 0, 1, 1, 2, 2], dtype=dtype), 3):
            sum_loss(module, x, y).backward()
        assert module.get_norm_sample().shape == (3,)
    sum_loss(module, x, y).backward()
    assert module.get_norm_sample().shape == (6,)


@pytest.mark.parametrize(
    ("ids", "num_units", "more", "message"),
    [
        (torch.tensor([0, 1, 2]), 3, {}, r"ids \(3,\) for a batch of 6"),
        (torch.zeros(6), 3, {}, r"ids \(6,\) torch.float32 must be a tensor of whole numbers"),
        (torch.zeros(6, dtype=torch.bool), 3, {}, "whole numbers"),
        ([0] * 6, 3, {}, "ids list must be a tensor"),
        (torch.tensor(3), 3, {}, "whole numbers"),
        (torch.zeros(6, dtype=torch.int64, device="meta"), 3, {}, "meta device"),
        (torch.tensor([0, -2, 0, 0, 0, 0]), 3, {}, "from -2 to 0; units are numbered 0 to 2"),
        (torch.tensor([0, 3, 0, 0, 0, 0]), 3, {}, r"from 0 to 3; units are numbered 0 to 2 \(num_units=3\)"),
        (torch.zeros(6, dtype=torch.int64), -1, {}, "num_units=-1"),
        (torch.zeros(6, dtype=torch.int64), 2.0, {}, "num_units=2.0"),
        (torch.zeros(6, dtype=torch.int64), True, {}, "num_units=True"),
        (torch.zeros(6, dtype=torch.int64), 2, {"per_unit": "max"}, "per_unit='max'"),
    ],
)
def test_bad_input(ids, num_units, more, message):
    model, batch = build("mlp")
    module = Module(model)
    with pytest.raises(InputError, match=message), module.units(ids, num_units, **more):
        mean_loss(module, *batch).backward()
    assert all(p.grad is None for p in module.parameters())
    mean_loss(module, *batch).backward()  # nothing of it is left
    assert module.get_norm_sample().shape == (6,)


def test_a_mode_without_clipping_has_none():
    with pytest.raises(AttributeError, match=r"GradSampleModuleFastGradientClipping has units\(...\)"):
        dpfast.GradSampleModule(build("mlp")[0]).units  # noqa: B018  # asking is enough
    model = build("mlp")[0]
    model.units = 64  # a model's own
    assert dpfast.GradSampleModule(model).units == 64


def test_what_stands_in_the_wrong_order():
    model, batch = build("mlp")
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    module = Module(model)
    with pytest.raises(StateError, match="no forward pass"), module.units(ids, 3):
        pass
    with pytest.raises(StateError, match="no forward pass"), module.units(ids, 3), torch.no_grad():
        module(batch[0])
    loss = mean_loss(module, *batch)
    with pytest.raises(StateError, match="other units"), module.units(ids, 3):
        loss.backward()
    with pytest.raises(StateError, match=r"units\(...\) within"), module.units(ids, 3), module.units(ids, 3):
        pass
    both = module.valid(torch.ones(6, dtype=torch.bool))
    with pytest.raises(StateError, match="padding is nobody's"), module.units(ids, 3), both:
        mean_loss(module, *batch)
    with module.units(ids, 3):
        one = mean_loss(module, *batch)
    with module.units(ids, 3):
        two = mean_loss(module, *batch)
    with pytest.raises(StateError, match="other units"):
        (one + two).backward()
    with module.units(ids, 3):
        one = mean_loss(module, *batch)
    with pytest.raises(StateError, match="other units"):
        (mean_loss(module, *batch) + one).backward()
    assert all(p.grad is None for p in module.parameters())
    with pytest.raises(StateError, match="passes=1"), Module(build("mlp")[0], passes=2).units(ids, 3):
        pass
    module.remove_hooks()
    with pytest.raises(StateError, match="add_hooks"), module.units(ids, 3):
        pass


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(20, 6, mode="mean"), nn.Linear(6, 5)

    def forward(self, words, offsets):
        return self.head(torch.tanh(self.bags(words, offsets)))


@pytest.mark.parametrize("ids", [None, [0, 1, 1, 0], [2, -1, 0, 2]])
def test_bags_in_one_row(ids):
    torch.manual_seed(0)
    model, words, offsets = Bags(), torch.randint(0, 20, (11,)), torch.tensor([0, 3, 3, 9])  # one is empty
    y = torch.randint(0, 5, (4,))

    def loss(model, n):
        own = words[offsets[n] : offsets[n + 1] if n < 3 else None]
        return torch.nn.functional.cross_entropy(model(own, torch.zeros(1, dtype=torch.int64)), y[n : n + 1])

    exact = {n: [] for n, _ in model.named_parameters()}
    for n in range(4):
        alone = copy.deepcopy(model).double()
        loss(alone, n).backward()
        for name, p in alone.named_parameters():
            exact[name].append(p.grad)
    exact = per_unit({n: torch.stack(g) for n, g in exact.items()}, ids or range(4), 4, "sum")
    module = Module(model, loss_reduction="sum", max_grad_norm=0.5 * float(norms_of(exact).max()))
    with module.units(torch.tensor(ids), 4) if ids else contextlib.nullcontext():
        torch.nn.functional.cross_entropy(module(words, offsets), y, reduction="sum").backward()
    assert relative_error(module.get_norm_sample(), norms_of(exact)) <= 1e-5
    assert_gradients(gradients(module), clipped_as_told(module.get_clipping_coef(), exact, module.max_grad_norm))


class Choices(nn.Module):
    """As BERT's head for multiple choice: (N, C, T) goes through the layers as (N·C, T)."""

    def __init__(self):
        super().__init__()
        self.tokens, self.hidden, self.score = nn.Embedding(30, 8), nn.Linear(8, 8), nn.Linear(8, 1, bias=False)

    def forward(self, tokens):
        rows = torch.tanh(self.hidden(self.tokens(tokens.flatten(0, 1)))).mean(1)
        return self.score(rows).view(tokens.shape[:2])


@pytest.mark.parametrize("ids", [None, [1, 0, 1, -1, 2]])
def test_rows_of_choices(ids):
    torch.manual_seed(0)
    model, tokens, y = Choices(), torch.randint(0, 30, (5, 3, 4)), torch.randint(0, 3, (5,))
    exact = per_unit(loop_over_samples(model, sum_loss, tokens, y), ids or range(5), 5, "sum")
    module = Module(model, loss_reduction="sum", max_grad_norm=0.5 * float(norms_of(exact).max()))
    with module.units(torch.tensor(ids), 5) if ids else contextlib.nullcontext():
        sum_loss(module, tokens, y).backward()
    assert relative_error(module.get_norm_sample(), norms_of(exact)) <= 1e-5
    assert_gradients(gradients(module), clipped_as_told(module.get_clipping_coef(), exact, module.max_grad_norm))


def gradients(module):
    return {n: p.grad for n, p in module._module.named_parameters()}


def test_a_forward_in_another_thread_than_the_block_is_refused():
    """Its samples were clipped one by one, and not by unit."""
    model, found = Module(nn.Linear(3, 2), loss_reduction="sum"), []

    def run():
        try:
            model(torch.ones(4, 3)).sum().backward()
        except StateError as error:
            found.append(str(error))

    with model.units(torch.tensor([0, 0, 1, 1]), 2):
        model(torch.ones(4, 3)).sum().backward()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(found) == 1 and "another thread is within units" in found[0]
    run()
    assert len(found) == 1


@pytest.mark.parametrize("of", ["samples", "other units"])
def test_a_backward_pass_of_others_in_another_thread_is_refused(of):
    """As a GPU's are. It was clipped by what the block does not say."""
    model, batch = build("mlp")
    module, ids, found = Module(model), torch.tensor([0, 0, 1, 1, 2, 2]), []
    with module.units(ids, 3) if of == "other units" else contextlib.nullcontext():
        loss = mean_loss(module, *batch)

    def run(loss):
        try:
            loss.backward()
        except StateError as error:
            found.append(str(error))

    with module.units(ids, 3):
        for some in (loss, mean_loss(module, *batch)):
            thread = threading.Thread(target=run, args=(some,))
            thread.start()
            thread.join()
    assert len(found) == 1 and "other units" in found[0]


def test_ids_that_the_caller_writes_over():
    """As a loader does that fills one tensor again and again."""
    model, batch = build("mlp")
    module, given = Module(model), torch.tensor([0, 0, 1, 1, 2, -1])
    with module.units(given.clone(), 3):
        mean_loss(module, *batch).backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    with module.units(given, 3):
        loss = mean_loss(module, *batch)
        given.copy_(torch.tensor([2, 1, 0, -1, 0, 1]))
        loss.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(module.parameters(), expected, strict=True))


@pytest.mark.parametrize("again", ["forward", "graph"])
def test_a_second_backward_pass_of_the_same_units_is_refused(again):
    """It would clip each of them twice."""
    model, batch = build("mlp")
    module, ids = Module(model), torch.tensor([0, 0, 1, 1, 2, 2])
    with module.units(ids, 3):
        loss = mean_loss(module, *batch)
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in module.parameters()]
        with pytest.raises(
            StateError, match=r"second backward pass within one units\(...\).* up to 2C; add the losses"
        ):
            (loss if again == "graph" else mean_loss(module, *batch)).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), once, strict=True))
    module.zero_grad()
    with module.units(ids, 3):
        (mean_loss(module, *batch) + mean_loss(module, *batch)).backward()
    assert module.get_norm_sample().shape == (3,)
