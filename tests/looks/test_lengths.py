"""What the lengths of packed sequences do to other samples: nothing, or the model is refused."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from of_lengths import (
    CELLS,
    CHANGES,
    LENGTHS,
    MODES,
    RIGHT,
    WRONG,
    D,
    Model,
    T,
    assert_right_in,
    attention,
    batch,
    behind_a_gate,
    by_sample,
    dropped_mean,
    loss,
    masked_mean,
    mean,
    mean_of_own,
    moved_by_the_longest,
    one_pass,
    padded,
    that_the_longest_moves,
    tokens_of_all,
    valid,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpfast import GradSampleModule
from dpfast.errors import DpfastWarning, InputError, UnsupportedModuleError
from dpfast.testing import loop_over_samples, relative_error

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")


def assert_right(plain, *inputs):
    exact = loop_over_samples(plain, loss, *inputs)
    for mode in MODES:
        assert_right_in(mode, plain, by_sample, exact, *inputs)


@pytest.mark.parametrize(
    ("way", "cell"), [*((way, "sorted by torch") for way in RIGHT), *(("mean of its own", cell) for cell in CELLS)]
)
def test_what_leaves_padding_out(way, cell):
    plain = Model(RIGHT[way], **CELLS[cell])
    assert moved_by_the_longest(plain) <= 1e-12
    assert_right(plain, *batch())


LONGEST_FOURTH = torch.tensor([0, 2, 4, 1, 3, 5])


class Counts(Model):
    def forward(self, tokens, lengths, classes=None):
        return super().forward(tokens, (tokens != 0).sum(1), classes)


@pytest.mark.parametrize("cls", [Model, Counts])
@pytest.mark.parametrize("way", ["mean of its own", "tokens of all", "attention"])
def test_where_the_longest_stands_does_not_matter(way, cls):
    """Three samples and five are padded to other lengths then, and two dimensions are others."""
    assert_right(cls(RIGHT[way]), *(x[LONGEST_FOURTH] for x in batch()))


class Ascending(Model):
    def forward(self, tokens, lengths, classes=None):
        if not bool((lengths[:-1] <= lengths[1:]).all()):
            raise ValueError("sort the batch by length")
        return super().forward(tokens, lengths, classes)


def test_what_takes_no_samples_in_turns_is_refused_as_before():
    warnings.simplefilter("ignore", DpfastWarning)  # nor in another one's place
    order = LENGTHS.argsort()
    with pytest.raises(InputError, match="has the batch in several dimensions"):
        by_sample(MODES["one pass"](Ascending(RIGHT["tokens of all"])), *(x[order] for x in batch())).sum().backward()


@pytest.mark.parametrize("way", ["mean", "relative positions"])
def test_what_depends_on_the_longest_where_it_stands_fourth(way):
    refused("one pass", Model(WRONG[way]), by_sample, *(x[LONGEST_FOURTH] for x in batch()))


def refused(mode, plain, make, *inputs):
    with pytest.raises(UnsupportedModuleError, match=CHANGES):
        make(MODES[mode](copy.deepcopy(plain)), *inputs).sum().backward()


@pytest.mark.parametrize(
    ("way", "mode"), [*((way, "one pass") for way in WRONG), *(("mean", mode) for mode in MODES if mode != "one pass")]
)
def test_what_depends_on_the_longest(way, mode):
    plain = that_the_longest_moves(lambda: Model(WRONG[way]))
    refused(mode, plain, by_sample, *batch())


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell != "sorted by torch"])
def test_other_layers_and_layouts_that_depend_on_the_longest(cell):
    plain = Model(lambda model, out, *_: model.head(model.mid(padded(model, out)).mean(1)), **CELLS[cell])
    refused("one pass", plain, by_sample, *batch())


class Sorted(Model):
    """Wants the longest first, as pack_padded_sequence does where nobody says otherwise."""

    enforce_sorted = True


LONGEST_FIRST = LENGTHS.argsort(descending=True)


@pytest.mark.parametrize("way", ["states", "mean of its own", "tokens of all"])
def test_sequences_that_are_sorted(way):
    assert_right(Sorted(RIGHT[way]), *(x[LONGEST_FIRST] for x in batch()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["mean", *[way for way in WRONG if way != "mean"][:3]])
def test_sequences_that_are_sorted_and_depend_on_the_longest(way, mode):
    refused(mode, Sorted(WRONG[way]), by_sample, *(x[LONGEST_FIRST] for x in batch()))


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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model trains parameters in torch.bfloat16")
        if way is mean:
            refused("one pass", plain, by_sample, *batch())
        else:
            by_sample(one_pass(plain), *batch()).sum().backward()


# --- random numbers ---


def dropped(model, out, state, lengths, classes):
    """By modules, functions, attention and noise: as many as there are positions."""
    x = F.dropout(model.drop(model.mid(padded(model, out))), 0.3)
    x = x + 0.1 * torch.randn_like(x) + model.attention(x, x, x, key_padding_mask=~valid(x, lengths)[..., 0])[0]
    return model.head(masked_mean(x, lengths))


class OfTorch(nn.Module):
    """A frozen recurrent layer that no tap knows, with dropout between its own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        for name, p in nn.GRU(8, 8, 2).named_parameters():
            self.register_buffer(name, p.detach())

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.first(x), lengths, batch_first=True, enforce_sorted=False)
        states, weights = x.new_zeros(2, len(x), 8), [*self._buffers.values()]
        states = torch.gru(packed.data, packed.batch_sizes, states, weights, True, 2, 0.4, self.training, False)[1]
        return self.last(states[-1][packed.unsorted_indices])


def test_random_numbers_within_a_recurrent_layer_are_no_lengths():
    torch.manual_seed(0)
    wrapped = GradSampleModule(OfTorch().double(), loss_reduction="sum")
    x, lengths = torch.randn(6, 9, 4, dtype=torch.float64), torch.tensor([4, 9, 2, 7, 5, 3])
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(x, lengths).square().sum().backward()
    for p in wrapped._module.parameters():
        assert relative_error(p.grad_sample.sum(0), p.grad) <= 1e-12


def test_random_numbers_are_no_lengths():
    plain = Model(dropped, num_layers=2, dropout=0.5)
    plain.attention.dropout = 0.5
    by_sample(one_pass(plain), *batch()).sum().backward()
    refused("one pass", Model(dropped_mean, num_layers=2, dropout=0.5), by_sample, *batch())


def picked_by_weight(own):
    """Some of the sample's own positions, or of all."""

    def way(model, out, state, lengths, classes):
        x = model.mid(padded(model, out))
        weights = valid(x, lengths)[..., 0].double() if own else torch.ones(x.shape[:2])
        once = torch.multinomial(weights, 1)
        often = torch.multinomial(weights, 12, replacement=True)
        return model.head(x.gather(1, torch.cat([once, often], 1)[..., None].expand(-1, -1, D)).mean(1))

    return way


@pytest.mark.parametrize("seed", range(3))
def test_positions_that_are_picked_by_weight(seed):
    inputs = batch()
    torch.manual_seed(seed)
    by_sample(one_pass(Model(picked_by_weight(own=True))), *inputs).sum().backward()
    refused("one pass", Model(picked_by_weight(own=False)), by_sample, *inputs)


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
    assert said[0].filename.endswith("of_lengths.py")  # where the model is called


class Cut(nn.Module):
    """Draws by itself how much of each sample it reads."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(D, D, batch_first=True), nn.Linear(D, 3)

    def forward(self, x):
        lengths = torch.randint(1, x.shape[1] + 1, x.shape[:1], device="cpu")
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
