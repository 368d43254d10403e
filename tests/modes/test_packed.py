"""Documents packed into rows: each is clipped as if it had a row of its own, or the layer that sees more is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import assert_gradients
from packed_cases import LENGTHS, VOCABULARY, NobodySees, Packed, T, by_document, losses_of, packed
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping as Module
from dpfast.errors import InputError, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error


def step(module, batch, num_units=5, **how):
    tokens, positions, ids, labels = batch
    with module.units(ids, num_units, **how) as units:
        units.sums(losses_of(module(tokens, positions), labels)).sum().backward()


def gradients(module):
    return {n: p.grad for n, p in module._module.named_parameters()}


@pytest.mark.parametrize("folds", [False, True])
def test_documents_have_the_gradients_that_they_have_alone(folds):
    model, (batch, documents) = Packed(folds=folds), packed()
    exact = by_document(model, documents)
    norms = norms_of(exact)
    c = float(norms.median())
    module = Module(model, loss_reduction="sum", max_grad_norm=c)
    step(module, batch)
    assert relative_error(module.get_norm_sample(), norms) <= 1e-5
    assert_gradients(gradients(module), clipped_sum(exact, c), tolerance=3e-5)  # factors are taken from bounds


def test_a_mean_of_documents_and_of_tokens():
    model, ((tokens, positions, ids, labels), documents) = Packed(), packed()
    exact = by_document(model, documents)
    for how in ("sum", "mean"):
        module = Module(copy.deepcopy(model), max_grad_norm=1e6)
        with module.units(ids, 5, per_unit=how) as units:
            units.sums(losses_of(module(tokens, positions), labels)).mean().backward()
        counts = units.counts.to(tokens.device) if how == "mean" else torch.ones(5)
        expected = {n: (g / counts.view(-1, *[1] * (g.dim() - 1))).sum(0) for n, g in exact.items()}
        assert_gradients(gradients(module), expected)


def test_a_document_has_the_same_bits_whoever_is_beside_it():
    model, ((tokens, positions, ids, labels), _) = Packed(), packed()

    def norms(ids, num_units):
        module = Module(copy.deepcopy(model), loss_reduction="sum")
        step(module, (tokens, positions, ids, labels), num_units)
        return module._norms

    together = norms(ids, 5)
    for unit in range(5):
        alone = norms(torch.where(ids == unit, 0, -1), 1)
        assert torch.equal(alone.value[0], together.value[unit]) and torch.equal(alone.upper[0], together.upper[unit])


@pytest.mark.parametrize(
    ("mixes", "message"),
    [
        ("attention", r"out \(Linear\): a token's row .*; units meet in it, or between it and the layer before"),
        ("behind", r"head \(Linear\): a token's row"),
        ("order", "a token's row of its output changes with another unit's tokens"),
        ("positions", "a token's row of its output changes with another unit's tokens"),
        ("logits", "output 0 of the model.*a token's entries depend on other units' tokens"),
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_documents_that_meet_are_refused(mixes, message, frozen):
    model, (batch, _) = Packed(mixes=mixes), packed()
    if frozen:  # what sees it is not trained; what comes before it is
        for part in (model.out, model.head):
            part.requires_grad_(False)
        model.tokens = nn.Embedding(VOCABULARY, 12)
    module = Module(model, loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match=message):
        step(module, batch)
    assert all(p.grad is None for p in module.parameters())


def test_documents_that_meet_behind_zeros_are_refused():
    """As adapters and output projections start: who meets before them shows after the first step only."""
    model, (batch, documents) = Packed(mixes="attention"), packed()
    nn.init.zeros_(model.out.weight)
    with pytest.raises(UnsupportedModuleError, match="another unit's tokens"):
        step(Module(model, loss_reduction="sum"), batch)
    model = Packed()
    nn.init.zeros_(model.out.weight)
    module = Module(copy.deepcopy(model), loss_reduction="sum", max_grad_norm=1e6)
    step(module, batch)
    assert_gradients(gradients(module), {n: g.sum(0) for n, g in by_document(model, documents).items()})


def test_a_row_of_one_document_tells_nothing_of_rows_of_several():
    model, ((tokens, positions, ids, labels), _) = Packed(mixes="attention"), packed()
    module = Module(model, loss_reduction="sum")
    step(module, (tokens, torch.arange(T).expand(2, T), torch.arange(2)[:, None].expand(2, T), labels))
    with pytest.raises(UnsupportedModuleError, match="another unit's tokens"):
        step(module, (tokens, positions, ids, labels))


class Layered(nn.Module):
    def __init__(self, layer, run=None):
        super().__init__()
        self.first, self.layer, self.last, self.by = nn.Linear(6, 6), layer, nn.Linear(6, 4), run or (lambda f, x: f(x))

    def forward(self, x):
        return self.last(self.by(self.layer, torch.tanh(self.first(x))))


class Scaled(nn.Module):
    """No rule knows it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.scale / x.norm(dim=-1, keepdim=True)


def sum_of_squares(module, x, ids, num_units):
    with module.units(ids, num_units) as units:
        units.sums(module(x).square().sum(-1)).sum().backward()


@pytest.mark.parametrize("build", [lambda: nn.Linear(6, 6), lambda: nn.LayerNorm(6), Scaled, lambda: nn.PReLU()])
def test_layers_that_see_tokens_one_by_one(build):
    torch.manual_seed(0)
    model, x = Layered(build()), torch.randn(3, 4, 6)
    ids = torch.tensor([[0, 0, 1, 1], [2, 2, 2, -1], [3, 0, 1, 4]])  # units may be in several rows
    rows = loop_over_samples(model, lambda m, x: m(x).square().sum(), x.flatten(0, 1))
    exact = {n: torch.zeros(5, *g.shape[1:]).double() for n, g in rows.items()}
    for name, g in rows.items():
        exact[name].index_add_(0, ids[ids >= 0], g[(ids >= 0).flatten()])
    module = Module(model, loss_reduction="sum", max_grad_norm=float(norms_of(exact).median()))
    sum_of_squares(module, x, ids, 5)
    assert relative_error(module.get_norm_sample(), norms_of(exact)) <= 1e-5
    assert_gradients(gradients(module), clipped_sum(exact, module.max_grad_norm), tolerance=3e-5)


@pytest.mark.parametrize(
    ("layer", "run", "message"),
    [
        (nn.GRU(6, 6, batch_first=True), lambda f, x: f(x)[0], "another unit's tokens|depends on which tokens"),
        (nn.Conv1d(6, 6, 3, padding=1), lambda f, x: f(x.mT).mT, "another unit's tokens|not the tokens"),
        (nn.MultiheadAttention(6, 2, batch_first=True), lambda f, x: f(x, x, x)[0], "another unit's|in pieces"),
        (nn.LayerNorm((4, 6)), lambda f, x: f(x), "another unit's tokens"),
        (nn.Linear(6, 6), lambda f, x: f(x[:, :1]).expand_as(x), "another unit's tokens|not the tokens"),
    ],
)
@pytest.mark.parametrize("several", [True, False])
def test_layers_that_do_not_are_refused(layer, run, message, several):
    ids = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 3]]) if several else torch.tensor([[0] * 4, [1] * 4])
    module = Module(Layered(copy.deepcopy(layer), run), loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match=r"layer \(|last \(") as error:
        sum_of_squares(module, torch.randn(2, 4, 6), ids, 4)
    if several:
        assert pytest.RaisesExc(UnsupportedModuleError, match=message).matches(error.value)
    assert all(p.grad is None for p in module.parameters())


def test_a_loss_of_whole_rows_is_refused():
    model = Layered(nn.Linear(6, 6))
    model.last = nn.Identity()
    ids = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 3]])
    pooled = nn.Sequential(model, nn.Flatten(1))
    module = Module(pooled, loss_reduction="sum")
    with (
        pytest.raises(UnsupportedModuleError, match="depends on several units' tokens"),
        module.units(ids, 4),
    ):
        module(torch.randn(2, 4, 6)).square().sum().backward()


def test_time_first():
    torch.manual_seed(0)
    model, x = Layered(nn.Linear(6, 6)), torch.randn(3, 4, 6)
    ids = torch.tensor([[0, 0, 1, 1], [2, 2, 2, -1], [3, 0, 1, 4]])
    norms = []
    for batch_first in (True, False):
        module = Module(copy.deepcopy(model), loss_reduction="sum", batch_first=batch_first)
        sum_of_squares(module, *((x, ids) if batch_first else (x.transpose(0, 1), ids.T)), 5)
        norms.append(module.get_norm_sample())
    assert relative_error(norms[1], norms[0]) <= 1e-6


def test_ids_that_fit_no_input():
    model, ((tokens, positions, ids, labels), _) = Packed(), packed()
    module = Module(model)
    with pytest.raises(InputError, match=r"ids \(2, 15\) fit none of the model's inputs \(2, 16\), \(2, 16\)"):
        step(module, (tokens, positions, ids[:, :-1], labels))
    with pytest.raises(InputError, match=r"values \(2, 3\)"), module.units(ids, 5) as units:
        units.sums(torch.zeros(2, 3))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face(name):
    huggingface = pytest.importorskip("huggingface")
    torch.manual_seed(0)
    model = getattr(huggingface, name)()
    (tokens, positions, ids, labels), documents = packed()
    tokens, labels = tokens % huggingface.VOCABULARY, torch.where(labels >= 0, labels % huggingface.VOCABULARY, -100)
    padded, mask = torch.zeros(5, max(LENGTHS), dtype=torch.int64), torch.zeros(5, max(LENGTHS), dtype=torch.int64)
    targets = torch.full(padded.shape, -100)
    for i, document in enumerate(documents):
        padded[i, : len(document)], mask[i, : len(document)] = document % huggingface.VOCABULARY, 1
        targets[i, : len(document) - 1] = document[1:] % huggingface.VOCABULARY
    by_row = Module(copy.deepcopy(model), loss_reduction="sum", max_grad_norm=0.3)
    logits = by_row(input_ids=padded, attention_mask=mask, use_cache=False).logits
    (losses_of(logits, targets).sum(1) / (targets >= 0).sum(1).clamp(min=1)).sum().backward()
    module = Module(copy.deepcopy(model), loss_reduction="sum", max_grad_norm=0.3)
    with module.units(ids, 5) as units:
        losses = losses_of(module(input_ids=tokens, position_ids=positions, use_cache=False).logits, labels)
        (units.sums(losses) / units.sums((labels >= 0).float()).clamp(min=1)).sum().backward()
    assert relative_error(module.get_norm_sample(), by_row.get_norm_sample()) <= 1e-5
    assert_gradients(gradients(module), gradients(by_row), tolerance=3e-5)
    for wrong in ({}, {"position_ids": positions, "attention_mask": torch.ones_like(tokens)}):
        module = Module(copy.deepcopy(model), loss_reduction="sum")
        with pytest.raises(UnsupportedModuleError, match="position_ids that start again"), module.units(ids, 5):
            module(input_ids=tokens, use_cache=False, **wrong).logits.sum().backward()


class Masks(nn.Module):
    """Is given the mask, (N, T, T)."""

    def __init__(self):
        super().__init__()
        self.tokens, self.qkv = nn.Embedding(VOCABULARY, 12), nn.Linear(12, 36)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens, mask):
        q, k, v = self.qkv(self.tokens(tokens)).chunk(3, dim=-1)
        return self.head(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("how", ["positions", "mask", "additive"])
def test_a_later_batch_whose_documents_meet_is_refused(how):
    """Of the same shapes as the first, whose did not: positions that go on, or a mask that was forgotten."""
    (tokens, positions, ids, labels), _ = packed()
    right, wrong = positions, torch.arange(T).expand_as(positions)
    if how != "positions":
        right = (ids[:, :, None] == ids[:, None, :]).tril()
        wrong = torch.ones_like(right).tril()
    if how == "additive":
        right, wrong = (torch.where(x, 0.0, -1e9) for x in (right, wrong))
    module = Module(Packed() if how == "positions" else Masks(), loss_reduction="sum")
    step(module, (tokens, right, ids, labels))
    with pytest.raises(UnsupportedModuleError, match="units meet in it"):
        step(module, (tokens, wrong, ids, labels))
    step(module, (tokens, right, ids, labels))


def test_units_that_only_nobodys_tokens_part_are_several():
    """After rows of one unit each, which tell nothing of whether units meet."""
    (tokens, _, _, labels), _ = packed()
    module, positions = Module(Packed(mixes="attention"), loss_reduction="sum"), torch.arange(T).expand(2, T)
    one = torch.tensor([[0] * 10 + [-1] * 6, [1] * 10 + [-1] * 6])
    step(module, (tokens, positions, one, labels), 2)
    two = torch.tensor([[0] * 7 + [-1] * 2 + [1] * 7, [2] * 7 + [-1] * 2 + [3] * 7])
    with pytest.raises(UnsupportedModuleError, match="another unit's tokens"):
        step(module, (tokens, positions, two, labels), 4)


@pytest.mark.parametrize("folds", [False, True])
def test_a_loss_of_nobodys_tokens_brings_nothing_from_one_unit_to_another(folds):
    torch.manual_seed(0)
    model, tokens = NobodySees(folds=folds), torch.randint(0, VOCABULARY, (1, T))
    ids = torch.tensor([[0] * 7 + [1] * 6 + [-1] * 3])
    other = torch.where(ids == 1, (tokens + 5) % VOCABULARY, tokens)

    def norms(given, loss):
        module = Module(copy.deepcopy(model), loss_reduction="sum")
        with module.units(ids, 2) as units:
            loss(losses_of(module(given, ids), tokens), units).backward()
        return module._norms

    everything = [norms(given, lambda losses, units: losses.sum()) for given in (tokens, other)]
    assert torch.equal(everything[0].upper[0], everything[1].upper[0])
    assert not torch.equal(everything[0].upper[1], everything[1].upper[1])
    assert torch.equal(everything[0].upper, norms(tokens, lambda losses, units: units.sums(losses).sum()).upper)


def test_one_of_two_outputs_in_which_nobodys_tokens_see_all():
    """Hooks of the other are called where both are of one operation."""

    class Halves(NobodySees):
        def forward(self, tokens, documents):
            halves = super().forward(tokens, documents).chunk(2, -1)
            return [x.clone() for x in halves] if self.apart else halves

    torch.manual_seed(0)
    model, tokens = Halves(), torch.randint(0, VOCABULARY // 2, (1, T))
    ids, found = torch.tensor([[0] * 7 + [1] * 6 + [-1] * 3]), []
    for model.apart in (False, True):
        module = Module(copy.deepcopy(model), loss_reduction="sum")
        with module.units(ids, 2):
            losses_of(module(tokens, ids)[1], tokens).sum().backward()
        found.append(module._norms.upper)
    assert torch.equal(*found) and (found[0] > 0).all()


class OwnLoss(Packed):
    def forward(self, tokens, positions, labels):
        logits = super().forward(tokens, positions)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_loss_that_the_model_makes_of_all_units_tokens_is_refused():
    (tokens, positions, ids, _), _ = packed()
    module = Module(OwnLoss(), loss_reduction="sum")
    refused = pytest.raises(UnsupportedModuleError, match=r"one number of all units' tokens.* units\.sums")
    with refused, module.units(ids, 5):
        module(tokens, positions, tokens)["loss"].backward()
    with module.units(ids, 5) as units:  # what is not used does no harm
        units.sums(losses_of(module(tokens, positions, tokens)["logits"], tokens)).sum().backward()
    assert module.get_norm_sample().shape == (5,)


def test_a_unit_in_several_rows():
    model, ((tokens, positions, ids, labels), documents) = Packed(), packed()
    exact = {n: torch.stack([g[0] + g[2], g[1], g[3], g[4]]) for n, g in by_document(model, documents).items()}
    whose = torch.tensor([0, 1, 0, 2, 3, -1])[ids]  # documents 0 and 2 are of one person
    module = Module(model, loss_reduction="sum", max_grad_norm=float(norms_of(exact).median()))
    step(module, (tokens, positions, whose, labels), 4)
    assert relative_error(module.get_norm_sample(), norms_of(exact)) <= 1e-5
    assert_gradients(gradients(module), clipped_sum(exact, module.max_grad_norm), tolerance=3e-5)


def test_all_documents_in_one_row():
    """As Hugging Face's DataCollatorWithFlattening gives them."""
    model, (_, documents) = Packed(), packed()
    exact = by_document(model, documents)
    lengths = [len(d) for d in documents]
    tokens = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.arange(5).repeat_interleave(torch.tensor(lengths))[None]
    labels = torch.cat([torch.cat([d[1:], torch.tensor([-100])]) for d in documents])[None]
    module = Module(model, loss_reduction="sum", max_grad_norm=float(norms_of(exact).median()))
    step(module, (tokens, positions, ids, labels))
    assert relative_error(module.get_norm_sample(), norms_of(exact)) <= 1e-5
    assert_gradients(gradients(module), clipped_sum(exact, module.max_grad_norm), tolerance=3e-5)


class _AsLongAsOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm(dim=1, keepdim=True).clamp(min=1e-6)


class Norm(nn.LayerNorm):
    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda g: g - g.mean(1, keepdim=True))
        return super().forward(x)


class OnTheNode(nn.Embedding):
    def __call__(self, x):
        y = super().__call__(x)
        if y.requires_grad:
            y.grad_fn.register_prehook(lambda grads: (grads[0] - grads[0].mean(1, keepdim=True),))
        return y


class MeetsInBackward(Packed):
    def forward(self, tokens, positions):
        return _AsLongAsOne.apply(super().forward(tokens, positions))


@pytest.mark.parametrize("where", ["output", "hook", "node"])
def test_documents_that_meet_in_the_backward_pass_alone_are_refused(where):
    """As gradients that are normalised row by row."""
    model, (batch, _) = (MeetsInBackward() if where == "output" else Packed()), packed()
    if where == "hook":
        model.norm = Norm(12)
    if where == "node":  # of the first layer, behind which there is no other
        model.positions = OnTheNode(*model.positions.weight.shape)
    message = r"\w+ \(.*the gradient at a token's row .* units meet in the backward pass"
    module = Module(model, loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match=message):
        step(module, batch)
    assert all(p.grad is None for p in module.parameters())
