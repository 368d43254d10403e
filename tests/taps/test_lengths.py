"""What the lengths of packed sequences do to other samples: nothing, or the model is refused."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

D, T, C = 4, 9, 1.0
LENGTHS = torch.tensor([3, 9, 4, 6, 2, 5])
CHANGES = "changes with how long the longest sequence of the batch is: what follows (inner.)?rnn"


def valid(x, lengths):
    return (torch.arange(x.shape[1], device=x.device) < lengths[:, None]).unsqueeze(-1)


def masked_mean(x, lengths):
    return (x * valid(x, lengths)).sum(1) / lengths[:, None]


class Model(nn.Module):
    """An embedding, a packed layer and, as ``way`` says, what follows it."""

    def __init__(self, way, cell=nn.GRU, batch_first=True, **options):
        super().__init__()
        self.table, self.rnn = nn.Embedding(20, D), cell(D, D, batch_first=batch_first, **options)
        width = D * (2 if options.get("bidirectional") else 1)
        self.mid, self.scores, self.head = nn.Linear(width, D), nn.Linear(D, 1, bias=False), nn.Linear(D, 3)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.end = nn.Linear(D, D)
        self.conv, self.norm, self.drop = nn.Conv1d(width, D, 3, padding=1), nn.LayerNorm(D), nn.Dropout(0.5)
        self.way, self.batch_first, self.loss = way, batch_first, None

    def forward(self, tokens, lengths, classes=None):
        x = self.table(tokens)
        packed = pack_padded_sequence(
            x if self.batch_first else x.transpose(0, 1), lengths.cpu(), self.batch_first, enforce_sorted=False
        )
        out, state = self.rnn(packed)
        return self.way(self, out, state, lengths, classes)


def padded(model, out, **options):
    x = pad_packed_sequence(out, model.batch_first, **options)[0]
    return x if model.batch_first else x.transpose(0, 1)


def states(model, out, state, lengths, classes):
    state = state[0] if isinstance(state, tuple) else state
    return model.head(model.mid(state[-2:].transpose(0, 1).flatten(1) if model.rnn.bidirectional else state[-1]))


def mean_of_own(model, out, state, lengths, classes):
    return model.head(masked_mean(model.mid(padded(model, out)), lengths))


def sum_of_zeros(model, out, state, lengths, classes):
    return model.head(model.mid(padded(model, out).sum(1)))


def maximum_of_own(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    return model.head(x.masked_fill(~valid(x, lengths), -torch.inf).amax(1))


def last_of_own(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    return model.head(x[torch.arange(len(x)), lengths - 1])


def total_length(model, out, state, lengths, classes):
    return model.head(model.mid(padded(model, out, total_length=T)).mean(1))


def tokens_of_all(model, out, state, lengths, classes):
    """As many as the longest has: a loss outside leaves padding out."""
    return model.head(model.norm(model.mid(padded(model, out))))


def pooled_by_attention(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    scores = model.scores(x.tanh()).masked_fill(~valid(x, lengths), -torch.inf)
    return model.head((scores.softmax(1) * x).sum(1))


def attention(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    x = x + model.attention(x, x, x, key_padding_mask=~valid(x, lengths)[..., 0], need_weights=False)[0]
    return model.head(masked_mean(x, lengths))


def mask_of_the_longest(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return model.head((x * mask.unsqueeze(-1)).sum(1) / lengths[:, None])


def one_more_at_the_end(model, out, state, lengths, classes):
    """It stands behind the longest."""
    x = model.mid(padded(model, out))
    x = torch.cat([x, model.end(x[:, :1])], 1)
    mask = F.pad(valid(x[:, :-1], lengths)[..., 0], (0, 1), value=True)
    x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None, :])
    return model.head((x * mask.unsqueeze(-1)).sum(1) / (1 + lengths[:, None]))


def convolved(model, out, state, lengths, classes):
    """What is padding is zeros to it, as what is behind the end."""
    return model.head(masked_mean(model.conv(padded(model, out).transpose(1, 2)).relu().transpose(1, 2), lengths))


def by_a_constant(model, out, state, lengths, classes):
    return states(model, out, state, lengths, classes) * (lengths[:, None] / T)


def own_losses(model, out, state, lengths, classes):
    """By sample, with connectionist temporal classification."""
    logits = model.head(model.mid(padded(model, out))).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logits, classes[:, None] % 2 + 1, lengths, torch.ones_like(lengths), reduction="none")


RIGHT = {
    "states": states,
    "mean of its own": mean_of_own,
    "sum of zeros": sum_of_zeros,
    "maximum of its own": maximum_of_own,
    "last of its own": last_of_own,
    "total_length": total_length,
    "tokens of all": tokens_of_all,
    "pooled by attention": pooled_by_attention,
    "attention": attention,
    "mask of the longest": mask_of_the_longest,
    "one more at the end": one_more_at_the_end,
    "convolved": convolved,
    "by a constant": by_a_constant,
    "ctc": own_losses,
}
CELLS = {
    "sorted by torch": {},
    "time first": {"batch_first": False},
    "lstm, both directions": {"cell": nn.LSTM, "bidirectional": True, "num_layers": 2},
}


def batch():
    torch.manual_seed(0)
    tokens = torch.randint(1, 20, (6, T)) * (torch.arange(T) < LENGTHS[:, None])
    return tokens, LENGTHS, torch.tensor([0, 1, 2, 2, 1, 0])


def by_sample(model, tokens, lengths, classes):
    """(N,)"""
    out = model(tokens, lengths, classes)
    if out.dim() == 3:
        out = out * valid(out, lengths)
    return (3 * out).sin().flatten(1).sum(1) if out.dim() > 1 else out


def loss(model, *inputs):
    return by_sample(model, *inputs).sum()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpfastWarning)
        yield


def gradients(plain, make, *inputs):
    """Of all parameters, of the loss of the samples ``make`` gives."""
    model = copy.deepcopy(plain).double()
    found = torch.autograd.grad(make(model, *inputs), list(model.parameters()), allow_unused=True)
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if g is None else g.flatten()
            for p, g in zip(model.parameters(), found, strict=True)
        ]
    )


def moved_by_the_longest(plain):
    """By which part of itself the gradient of the five others moves when the longest sample is taken out: fp64."""
    inputs, rest = batch(), torch.tensor([0, 2, 3, 4, 5])
    among = gradients(plain, lambda model, *some: by_sample(model, *some)[rest].sum(), *inputs)
    alone = gradients(plain, loss, *(x[rest] for x in inputs))
    return float((among - alone).norm() / among.norm())


def one_pass(model):
    return GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")


def two_passes(model):
    return GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum", passes=2)


def each_sample(model):
    return GradSampleModule(model, loss_reduction="sum")


MODES = {"one pass": one_pass, "two passes": two_passes, "each sample": each_sample}


def found_in(mode, plain, make, *inputs):
    """What a step leaves in each parameter: p.grad, clipped; of single samples the sum of these, clipped."""
    model = MODES[mode](copy.deepcopy(plain))
    losses = make(model, *inputs)
    losses.sum().backward(retain_graph=mode == "two passes")
    if mode == "two passes":
        model.zero_grad()
        factors = model.get_clipping_coef()
        model.disable_hooks()
        (factors * losses).sum().backward()
    named = dict(model._module.named_parameters())
    if mode == "each sample":
        return clipped_sum({k: p.grad_sample.double() for k, p in named.items() if p.grad_sample is not None}, C)
    return {k: p.grad for k, p in named.items() if p.grad is not None}


def assert_right(plain, *inputs):
    exact = clipped_sum(loop_over_samples(plain, loss, *inputs), C)
    for mode in MODES:
        found = found_in(mode, plain, by_sample, *inputs)
        for name, expected in exact.items():
            assert relative_error(found.get(name, torch.zeros_like(expected)), expected) <= 1e-5, (mode, name)


@pytest.mark.parametrize(
    ("way", "cell"), [*((way, "sorted by torch") for way in RIGHT), *(("mean of its own", cell) for cell in CELLS)]
)
def test_what_leaves_padding_out(way, cell):
    plain = Model(RIGHT[way], **CELLS[cell])
    assert moved_by_the_longest(plain) <= 1e-12
    assert_right(plain, *batch())


def mean(model, out, state, lengths, classes):
    return model.head(model.mid(padded(model, out)).mean(1))


def maximum(model, out, state, lengths, classes):
    return model.head(padded(model, out).amax(1))


def softmax(model, out, state, lengths, classes):
    x = padded(model, out)
    return model.head((model.scores(x).softmax(1) * x).sum(1))


def attention_to_padding(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    return model.head(masked_mean(x + model.attention(x, x, x, need_weights=False)[0], lengths))


def convolved_twice(model, out, state, lengths, classes):
    """Behind the first the padding is its bias, and what is behind the end zeros."""
    x = model.conv(model.conv(padded(model, out).transpose(1, 2)).relu()).transpose(1, 2)
    return model.head(masked_mean(x, lengths))


def pooled(model, out, state, lengths, classes):
    return model.head(F.adaptive_avg_pool1d(padded(model, out).transpose(1, 2), 2).sum(2))


def last(model, out, state, lengths, classes):
    return model.head(model.mid(padded(model, out))[:, -1] + model.end(state[-1]))


def relative_positions(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    return model.head(masked_mean(x * torch.arange(x.shape[1])[:, None] / x.shape[1], lengths))


def by_the_longest(model, out, state, lengths, classes):
    """Nothing is padded here."""
    return states(model, out, state, lengths, classes) * (lengths / lengths.max())[:, None]


def by_all_lengths(model, out, state, lengths, classes):
    return states(model, out, state, lengths, classes) / lengths.sum()


def dropped_mean(model, out, state, lengths, classes):
    return model.head(model.drop(model.mid(padded(model, out))).mean(1))


def behind_a_gate(model, out, state, lengths, classes):
    """Which lets nothing through as long as its weight is zeros."""
    return states(model, out, state, lengths, classes) + model.gate(padded(model, out).mean(1))


WRONG = {
    "mean": mean,
    "maximum": maximum,
    "softmax": softmax,
    "attention to padding": attention_to_padding,
    "convolved twice": convolved_twice,
    "pooled": pooled,
    "last": last,
    "relative positions": relative_positions,
    "by the longest": by_the_longest,
    "by all lengths": by_all_lengths,
}


def refused(mode, plain, make, *inputs):
    with pytest.raises(UnsupportedModuleError, match=CHANGES):
        make(MODES[mode](copy.deepcopy(plain)), *inputs).sum().backward()


@pytest.mark.parametrize(
    ("way", "mode"), [*((way, "one pass") for way in WRONG), *(("mean", mode) for mode in MODES if mode != "one pass")]
)
def test_what_depends_on_the_longest(way, mode):
    plain = Model(WRONG[way])
    assert moved_by_the_longest(plain) >= 1e-2
    refused(mode, plain, by_sample, *batch())


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell != "sorted by torch"])
def test_other_layers_and_layouts_that_depend_on_the_longest(cell):
    plain = Model(lambda model, out, *_: model.head(model.mid(padded(model, out)).mean(1)), **CELLS[cell])
    refused("one pass", plain, by_sample, *batch())


def test_a_gate_that_is_zeros_hides_nothing():
    plain = Model(behind_a_gate)
    plain.gate = nn.Linear(D, 3)
    nn.init.zeros_(plain.gate.weight)
    refused("one pass", plain, by_sample, *batch())


@pytest.mark.parametrize("n", [6, 2, 1])
def test_where_all_are_equally_long(n):
    """Some are taken shorter; in the batch they are told by none leaving it."""
    tokens, _, classes = batch()
    refused("one pass", Model(mean), by_sample, tokens[:n], torch.full((n,), T), classes[:n])
    model = one_pass(Model(mean_of_own))
    by_sample(model, tokens[:n], torch.full((n,), T), classes[:n]).sum().backward()


class ByTokens(nn.Module):
    """Takes lengths, and knows by the tokens, or by targets, what is padding."""

    def __init__(self, way):
        super().__init__()
        self.model, self.way = Model(tokens_of_all), way

    def forward(self, tokens, lengths, targets=None):
        x = self.model(tokens, lengths)
        targets = (tokens if targets is None else targets)[:, : x.shape[1]]
        if self.way != "mean":
            losses = F.cross_entropy(x.transpose(1, 2), targets % 3, reduction="none") * (targets != 0)
            losses = losses.sum(1) / (targets != 0).sum(1)
            return losses if self.way == "losses" else losses.mean()
        mask = (targets != 0).unsqueeze(-1)
        return (x * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize("way", ["mean", "losses", "loss"])
@pytest.mark.parametrize("n", [6, 2, 1])
@pytest.mark.parametrize("lengths", [LENGTHS, torch.full((6,), T)])
def test_what_is_padding_is_told_by_other_inputs(lengths, n, way):
    """Where a sample is taken shorter than it is, these are too."""
    torch.manual_seed(0)
    tokens = torch.randint(1, 20, (6, T)) * (torch.arange(T) < lengths[:, None])
    model = one_pass(ByTokens(way))
    model(tokens[:n], lengths[:n]).sum().backward()
    model(tokens[:n], lengths[:n], tokens[:n]).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("way", [mean, mean_of_own, attention])
def test_other_dtypes(way, dtype):
    plain = Model(way).to(dtype)
    if way is mean:
        refused("one pass", plain, by_sample, *batch())
    else:
        by_sample(one_pass(plain), *batch()).sum().backward()


# --- lengths that the model counts ---


class Counting(nn.Module):
    """Counts what is no padding, in its tokens or in a mask."""

    def __init__(self, way):
        super().__init__()
        self.inner = Model(way)

    def forward(self, tokens, mask, classes):
        lengths = (tokens != 0).sum(1) if mask is None else torch.as_tensor(mask.sum(1).tolist())
        return self.inner(tokens, lengths, classes)


class Sorting(Model):
    """Counts and sorts."""

    def forward(self, tokens, mask, classes):
        lengths, order = (tokens != 0).sum(1).sort(descending=True)
        back = order.argsort()
        out, _ = self.rnn(pack_padded_sequence(self.table(tokens)[order], lengths.cpu(), batch_first=True))
        return self.way(self, padded(self, out)[back], lengths[back])


def counted(model, tokens, mask, classes):
    out = model(tokens, mask, classes)
    if out.dim() == 3:
        out = out * (tokens[:, : out.shape[1]] != 0).unsqueeze(-1)
    return (3 * out).sin().flatten(1).sum(1)


def counted_batch(masked):
    tokens, lengths, classes = batch()
    return tokens, (torch.arange(T) < lengths[:, None]) if masked else None, classes


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "way", ["mean of its own", "tokens of all", "attention", "mask of the longest", "total_length"]
)
def test_counted_lengths(way, masked):
    plain, inputs = Counting(RIGHT[way]), counted_batch(masked)
    exact = clipped_sum(loop_over_samples(plain, lambda *some: counted(*some).sum(), *inputs), C)
    found = found_in("one pass", plain, counted, *inputs)
    for name, expected in exact.items():
        assert relative_error(found.get(name, torch.zeros_like(expected)), expected) <= 1e-5, name


def of_own_sorted(model, x, lengths):
    return model.head(x)


def of_all_sorted(model, x, lengths):
    return model.head(x * (lengths / lengths.max())[:, None, None])


def test_counted_lengths_by_which_the_model_sorts():
    plain, inputs = Sorting(of_own_sorted), counted_batch(masked=False)
    exact = clipped_sum(loop_over_samples(plain, lambda *some: counted(*some).sum(), *inputs), C)
    found = found_in("one pass", plain, counted, *inputs)
    assert all(relative_error(x, exact[name]) <= 1e-5 for name, x in found.items())
    with pytest.raises(UnsupportedModuleError, match=CHANGES):
        counted(one_pass(Sorting(of_all_sorted)), *inputs).sum().backward()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("way", ["mean", "maximum", "relative positions"])
def test_counted_lengths_of_which_the_longest_changes_others(way, masked):
    model = one_pass(Counting(WRONG[way]))
    with pytest.raises(UnsupportedModuleError, match=CHANGES):
        counted(model, *counted_batch(masked)).sum().backward()


# --- random numbers ---


def dropped(model, out, state, lengths, classes):
    """By modules, functions, attention and noise: as many as there are positions."""
    x = F.dropout(model.drop(model.mid(padded(model, out))), 0.3)
    x = x + 0.1 * torch.randn_like(x) + model.attention(x, x, x, key_padding_mask=~valid(x, lengths)[..., 0])[0]
    return model.head(masked_mean(x, lengths))


def test_random_numbers_are_no_lengths():
    plain = Model(dropped, num_layers=2, dropout=0.5)
    plain.attention.dropout = 0.5
    by_sample(one_pass(plain), *batch()).sum().backward()
    refused("one pass", Model(dropped_mean, num_layers=2, dropout=0.5), by_sample, *batch())


# --- losses that the model makes ---


def loss_of_own(model, out, state, lengths, classes):
    logits = model.head(masked_mean(model.mid(padded(model, out)), lengths))
    return F.cross_entropy(logits, classes)


def loss_of_tokens(model, out, state, lengths, classes):
    """Each sample's own mean over its own."""
    logits = model.head(model.mid(padded(model, out)))
    losses = F.cross_entropy(logits.transpose(1, 2), classes[:, None].expand(logits.shape[:2]), reduction="none")
    return masked_mean(losses.unsqueeze(-1), lengths).mean()


def loss_of_all_positions(model, out, state, lengths, classes):
    logits = model.head(model.mid(padded(model, out)))
    return F.cross_entropy(logits.flatten(0, 1), classes.repeat_interleave(logits.shape[1]))


def loss_by_all_tokens(model, out, state, lengths, classes):
    logits = model.head(model.mid(padded(model, out)))
    losses = F.cross_entropy(logits.transpose(1, 2), classes[:, None].expand(logits.shape[:2]), reduction="none")
    return (losses.unsqueeze(-1) * valid(logits, lengths)).sum() / lengths.sum()


def whole_loss(model, *inputs):
    return model(*inputs)


def moved_in_loss(plain):
    """What stands above, of a mean over samples: what the batch of the five gives, and the longest alone."""
    inputs, rest, longest = batch(), torch.tensor([0, 2, 3, 4, 5]), torch.tensor([1])
    whole, five, alone = (
        gradients(plain, whole_loss, *(x[some] for x in inputs)) * len(some)
        for some in (torch.arange(6), rest, longest)
    )
    return float((whole - five - alone).norm() / whole.norm())


def mean_loss(model):
    return GradSampleModuleFastGradientClipping(model, max_grad_norm=C)


@pytest.mark.parametrize("way", [loss_of_own, loss_of_tokens])
def test_losses_of_the_model_that_leave_padding_out(way):
    plain = Model(way)
    assert moved_in_loss(plain) <= 1e-12
    exact = clipped_sum(loop_over_samples(plain, whole_loss, *batch()), C)
    model = mean_loss(copy.deepcopy(plain))
    model(*batch()).backward()
    for name, p in model._module.named_parameters():
        if p.grad is not None:
            assert relative_error(p.grad, exact[name]) <= 1e-5, name


@pytest.mark.parametrize("way", [loss_of_all_positions, loss_by_all_tokens])
def test_losses_of_the_model_that_do_not(way):
    plain = Model(way)
    assert moved_in_loss(plain) >= 1e-2
    with pytest.raises(UnsupportedModuleError, match=rf"output 0 of the model.*{CHANGES}"):
        mean_loss(plain)(*batch()).backward()


def test_a_loss_that_is_kept_and_depends_on_the_longest():
    def way(model, out, state, lengths, classes):
        x = model.mid(padded(model, out))
        model.loss = x.mean((0, 1)).sum()
        return model.head(masked_mean(x, lengths))

    by_sample(one_pass(Model(way)), *batch()).sum().backward()
    model = one_pass(Model(way))
    out = by_sample(model, *batch()).sum()
    with pytest.raises(UnsupportedModuleError, match=rf"loss, an attribute of the model.*{CHANGES}"):
        (out + model._module.loss).backward()


def test_one_output_of_two():
    def way(model, out, state, lengths, classes):
        return mean(model, out, state, lengths, classes), states(model, out, state, lengths, classes)

    one_pass(Model(way))(*batch())[1].sin().sum().backward()
    with pytest.raises(UnsupportedModuleError, match=rf"output 0 of the model.*{CHANGES}"):
        one_pass(Model(way))(*batch())[0].sin().sum().backward()


# --- what cannot be told ---


def valid_convolution(model, out, state, lengths, classes):
    x = F.conv1d(padded(model, out).transpose(1, 2), model.conv.weight.detach().repeat(1, 1, 2))  # of six
    return model.head(x.mean(2) if model.mixes else x[..., 0])


@pytest.mark.parametrize("mixes", [False, True])
def test_batches_in_which_the_shortest_alone_is_too_short(mixes):
    """Beside it stands the longest sample, one step shorter."""
    plain = Model(valid_convolution)
    plain.mixes = mixes
    if mixes:
        refused("one pass", plain, by_sample, *batch())
    else:
        by_sample(one_pass(plain), *batch()).sum().backward()


def of_one_length(model, out, state, lengths, classes):
    x = padded(model, out)
    if x.shape[1] < T:
        raise ValueError("too short")
    return model.head(x.mean(1))


def test_a_model_that_takes_no_shorter_ones_is_warned_about_once():
    model = one_pass(Model(of_one_length))
    with pytest.warns(DpfastWarning, match="lengths of its packed sequences do.*ValueError: too short") as said:
        by_sample(model, *batch()).sum().backward()
        by_sample(model, *batch()).sum().backward()
    assert len([x for x in said if "packed" in str(x.message)]) == 1
    assert said[0].filename == __file__


class Cut(nn.Module):
    """Draws by itself how much of each sample it reads."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(D, D, batch_first=True), nn.Linear(D, 3)

    def forward(self, x):
        lengths = torch.randint(1, x.shape[1] + 1, x.shape[:1])
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=T)[0].sum(1))


def test_lengths_that_come_of_no_input_are_warned_about():
    with pytest.warns(DpfastWarning, match="of its packed sequences do to other samples: they come of no input"):
        one_pass(Cut())(torch.randn(6, T, D)).square().sum().backward()


def test_nothing_is_left_of_a_look():
    """Neither in the model nor in the random numbers."""
    model, inputs = one_pass(Model(mean_of_own)), batch()
    before, state = copy.deepcopy(model._module.state_dict()), torch.get_rng_state()
    by_sample(model, *inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model._module.parameters())
    assert all(torch.equal(x, before[name]) for name, x in model._module.state_dict().items())
    assert all(map(torch.equal, inputs, batch()))
