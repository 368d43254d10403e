"""Packed sequences whose samples the model has put in another order: followed, or refused by name."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import InputError, UnsupportedModuleError
from dpfast.rules import recurrent
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

D, T, C = 4, 7, 1.0
LENGTHS = torch.tensor([2, 7, 3, 6, 1, 4])
WEIGHTS = torch.tensor([5.0, 1.0, 3.0, 0.2, 20.0, 1.0], dtype=torch.float64)

PICK = {
    "x[order]": lambda x, order: x[order],
    "index_select": lambda x, order: x.index_select(0, order),
    "time first": lambda x, order: x.transpose(0, 1)[:, order],
}
NOT_FOLLOWED = {
    "flip": lambda x, order: x.flip(0),
    "roll": lambda x, order: x.roll(2, 0),
    "cat": lambda x, order: torch.cat([x[2:], x[:2]]),
    "gather": lambda x, order: x.gather(0, order[:, None, None].expand_as(x)),
    "index_copy": lambda x, order: torch.zeros_like(x).index_copy(0, order, x),
}


class Tagger(nn.Module):
    """Sorts by length, packs, and puts back in order."""

    def __init__(self, cell=nn.LSTM, pick=PICK["x[order]"], by="position", again=False, **options):
        super().__init__()
        self.batch_first = pick is not PICK["time first"]
        self.table, self.head = nn.Embedding(20, D), nn.Linear(D * (1 + options.get("bidirectional", False)), 3)
        self.rnn, self.drop = cell(D, D, batch_first=self.batch_first, **options), nn.Dropout(0.0)
        self.more = cell(D, D, batch_first=self.batch_first) if again else None
        self.pick, self.by = pick, by

    def forward(self, tokens, lengths=None):
        lengths = (tokens != 0).sum(1) if lengths is None else lengths
        lengths, order = lengths.sort(descending=True)
        if self.pick in NOT_FOLLOWED.values():  # all are long, so that any order will do
            lengths = torch.full_like(lengths, T)
        x = self.pick(self.table(tokens), order)
        if self.pick in NOT_FOLLOWED.values():
            order = self.pick(torch.arange(len(order))[:, None, None], order).flatten()
        packed = pack_padded_sequence(x, lengths.cpu(), self.batch_first)
        packed = packed._replace(data=self.drop(packed.data))
        out, _ = self.rnn(input=packed) if self.by == "keyword" else self.rnn(packed)
        if self.more is not None:
            out, _ = self.more(out)
        out = pad_packed_sequence(out, self.batch_first, total_length=tokens.shape[1])[0]
        back = order.argsort()
        return self.head(out[back] if self.batch_first else out[:, back].transpose(0, 1))


class States(nn.Module):
    """Several sequences a sample, each in an order of its own."""

    def __init__(self, cell=nn.RNN):
        super().__init__()
        self.first = nn.Linear(D, D)
        self.rnns = nn.ModuleList([cell(D, D, batch_first=True) for _ in range(3)])

    def forward(self, x, *lengths):
        out, x = [], self.first(x)
        for rnn, length in zip(self.rnns, lengths, strict=True):
            order = length.argsort(descending=True)
            states = rnn(pack_padded_sequence(x[order], length[order].cpu(), batch_first=True))[1]
            out.append((states[0] if isinstance(states, tuple) else states)[-1][order.argsort()])
        return torch.stack(out, 1)


def loss(model, *inputs):
    *inputs, weights = inputs
    return (model(*inputs).square().flatten(1).sum(1) * weights).sum()


@contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Of cuDNN: those of a copy do not, as in torch.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        yield


def assert_right(plain, *inputs):
    """Norms by sample, gradients and the clipped sum, at the first two steps."""
    exact = loop_over_samples(plain, loss, *inputs)
    summed = clipped_sum(exact, C)
    samples = GradSampleModule(copy.deepcopy(plain), loss_reduction="sum")
    clipping = GradSampleModuleFastGradientClipping(copy.deepcopy(plain), max_grad_norm=C, loss_reduction="sum")
    for _ in range(2):
        for model in (samples, clipping):
            model.zero_grad()
            loss(model, *inputs).backward()
        for name, gradients in exact.items():
            assert relative_error(samples._module.get_parameter(name).grad_sample, gradients) <= 1e-5, name
            assert relative_error(clipping._module.get_parameter(name).grad, summed[name]) <= 1e-5, name


def tokens():
    torch.manual_seed(0)
    return torch.randint(1, 20, (6, T)) * (torch.arange(T) < LENGTHS[:, None])


@pytest.mark.parametrize("pick", PICK)
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_sequences_that_the_model_sorts_itself(cell, pick):
    plain = Tagger(cell, PICK[pick]).double()
    assert_right(plain, tokens(), LENGTHS, WEIGHTS)


def test_sorted_sequences_of_opacus():
    rnn = pytest.importorskip("opacus.layers")
    assert_right(Tagger(rnn.DPLSTM).double(), tokens(), LENGTHS, WEIGHTS)


@pytest.mark.parametrize("options", [{"again": True}, {"by": "keyword"}, {"num_layers": 2}])
def test_sorted_sequences_otherwise(options):
    assert_right(Tagger(**options).double(), tokens(), LENGTHS, WEIGHTS)


def test_lengths_that_the_model_counts_itself():
    """Exchanging a sample puts all in another order, and makes other batches of them at each time."""
    assert_right(Tagger(), tokens(), WEIGHTS.float())


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_look_gives_states_as_cudnn_wants_them(cell, monkeypatch):
    """It refuses others, and a look that fails is taken on trust."""

    def as_cudnn(native):
        def call(*args):
            packed = isinstance(args[1], torch.Tensor) and args[1].dtype == torch.int64  # sizes of batches
            states = args[1 + packed]
            for x in states if isinstance(states, list) else [states]:
                assert x.is_contiguous(), "rnn: hx is not contiguous"
            return native(*args)

        return call

    monkeypatch.setattr(recurrent, "_NATIVE", {name: as_cudnn(f) for name, f in recurrent._NATIVE.items()})
    with no_warnings():
        assert_right(Tagger(cell, num_layers=2, bidirectional=True).double(), tokens(), WEIGHTS)


@pytest.mark.parametrize("cell", [nn.RNN, nn.LSTM])
def test_each_sequence_in_an_order_of_its_own(cell):
    torch.manual_seed(0)
    lengths = [torch.randperm(6) + 1 for _ in range(3)]
    assert_right(States(cell).double(), torch.randn(6, 6, D, dtype=torch.float64), *lengths, WEIGHTS)


@pytest.mark.parametrize("how", NOT_FOLLOWED)
def test_another_order_that_is_not_followed(how):
    model = GradSampleModuleFastGradientClipping(Tagger(pick=NOT_FOLLOWED[how]), max_grad_norm=C, loss_reduction="sum")
    with pytest.raises(InputError, match=r"rnn \(LSTM\): its samples stand in another order.*enforce_sorted=False"):
        loss(model, tokens(), LENGTHS, WEIGHTS.float()).backward()


class Checkpointed(nn.Module):
    """What a backward pass repeats stands outside of the forward whose rows are followed."""

    def __init__(self):
        super().__init__()
        self.first, self.rnn, self.head = nn.Linear(D, D), nn.GRU(D, D, batch_first=True), nn.Linear(D, D)

    def states(self, x, lengths):
        order = lengths.argsort(descending=True)
        packed = pack_padded_sequence(x[order], lengths[order].cpu(), batch_first=True)
        return self.rnn(packed)[1][-1][order.argsort()]

    def forward(self, x, lengths):
        return self.head(checkpoint(self.states, self.first(x), lengths, use_reentrant=True))


def test_sorted_sequences_in_a_reentrant_checkpoint():
    model = GradSampleModuleFastGradientClipping(Checkpointed(), max_grad_norm=C, loss_reduction="sum")
    with pytest.raises(InputError, match=r"rnn \(GRU\): its samples stand in another order"):
        loss(model, torch.randn(6, T, D), LENGTHS, WEIGHTS.float()).backward()


class Sorted(nn.Module):
    """torch sorts, the layer is called by keyword."""

    def __init__(self, given):
        super().__init__()
        self.first, self.rnn, self.head = nn.Linear(D, D), nn.GRU(D, D, batch_first=True), nn.Linear(D, D)
        self.given = given

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.first(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = self.rnn(packed, x[:, :1].transpose(0, 1).contiguous()) if self.given else self.rnn(input=packed)
        return self.head(pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0])


@pytest.mark.parametrize("t", [6, T])
@pytest.mark.parametrize("given", [False, True])
def test_sequences_that_torch_sorts(given, t):
    """As many time steps as samples too, where only a run of the model tells which is which."""
    torch.manual_seed(0)
    with no_warnings():
        assert_right(Sorted(given).double(), torch.randn(6, t, D).double(), LENGTHS.clamp(max=t), WEIGHTS)


LENGTH = {
    "as they are": lambda lengths: lengths.cpu(),
    "one less": lambda lengths: (lengths - 1).clamp(min=1).cpu(),
    "a list": lambda lengths: lengths.tolist(),
    "another list": lambda lengths: [max(int(n) - 1, 1) for n in lengths],
    "of another dtype": lambda lengths: lengths.to(torch.int32).cpu(),
}
MIXES = {
    "counts of classes": lambda h, classes, valid: h / torch.bincount(classes, minlength=3)[classes][:, None],
    "how many are valid": lambda h, classes, valid: h * valid[:, None] / valid.sum(),
}


class Beside(nn.Module):
    """Takes one number a sample beside the lengths, and one bool."""

    def __init__(self, length, mixes=None):
        super().__init__()
        self.rnn, self.head, self.classes = nn.GRU(D, D, batch_first=True), nn.Linear(D, 3), nn.Embedding(3, D)
        self.length, self.mixes = length, mixes

    def forward(self, x, lengths, classes, valid):
        packed = pack_padded_sequence(x, self.length(lengths), batch_first=True, enforce_sorted=False)
        h = self.head(self.rnn(packed)[1][-1] + self.classes(classes))
        return h * valid[:, None] if self.mixes is None else self.mixes(h, classes, valid)


def beside():
    torch.manual_seed(0)
    return (
        torch.randn(6, T, D).double(),
        LENGTHS,
        torch.tensor([0, 1, 1, 2, 2, 0]),
        torch.tensor([1, 1, 0, 1, 1, 0]) > 0,
    )


@pytest.mark.parametrize("length", LENGTH)
def test_numbers_beside_lengths(length):
    """Lengths stay as they are where samples are exchanged, whatever is made of them."""
    with no_warnings():
        assert_right(Beside(LENGTH[length]).double(), *beside(), WEIGHTS)


@pytest.mark.parametrize("length", LENGTH)
@pytest.mark.parametrize("mixes", MIXES)
def test_numbers_beside_lengths_by_which_samples_meet(mixes, length):
    model = GradSampleModule(Beside(LENGTH[length], MIXES[mixes]).double(), loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match="depends on several samples"):
        loss(model, *beside(), WEIGHTS).backward()
