"""What stands beside tensors in what a model is called with, what is alike in a whole batch, and batches of one."""

import warnings
from collections import UserDict
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import dpfast
from dpfast.errors import DpfastError, DpfastWarning
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

LENGTHS = [7, 2, 3, 2, 4, 2]


class Cut(nn.Module):
    """A mean over the time of the longest."""

    def __init__(self, longest):
        super().__init__()
        self.layer, self.longest = nn.Linear(4, 3), longest

    def forward(self, x, lengths):
        return self.layer(x[:, : self.longest(lengths)].mean(1))


CALLED = {
    "list": (lambda n: list(n), max),
    "tuple": (lambda n: tuple(n), max),
    "array": (lambda n: np.array(n), lambda x: int(x.max())),
    "texts": (lambda n: ["a" * k for k in n], lambda x: max(map(len, x))),
    "tensors": (lambda n: [torch.tensor(k) for k in n], lambda x: int(torch.stack(x).max())),
    "dict": (lambda n: {"length": list(n)}, lambda x: max(x["length"])),
    "boxes": (lambda n: [{"boxes": torch.ones(k, 4)} for k in n], lambda x: max(len(y["boxes"]) for y in x)),
}


@pytest.mark.parametrize("what", CALLED)
def test_lists_are_exchanged_as_tensors_are(what):
    made, longest = CALLED[what]
    model = dpfast.GradSampleModule(Cut(longest))
    with pytest.raises(DpfastError, match=r"several samples|samples meet|not its own"):
        model(torch.randn(6, 7, 4), made(LENGTHS)).sum().backward()


class Own(nn.Module):
    """Each sample by its own entry."""

    def __init__(self, length):
        super().__init__()
        self.layer, self.length = nn.Linear(4, 3), length

    def forward(self, x, lengths):
        found = lengths["length"] if isinstance(lengths, dict) else lengths
        return self.layer(torch.stack([h[: self.length(k)].sum(0) for h, k in zip(x, found, strict=True)]))


OWN = {
    "list": int,
    "tuple": int,
    "array": int,
    "texts": len,
    "tensors": int,
    "dict": int,
    "boxes": lambda y: len(y["boxes"]),
}


@pytest.mark.parametrize("what", OWN)
def test_entries_that_are_each_samples_own_are_right(what):
    torch.manual_seed(0)
    made, plain = CALLED[what][0], Own(OWN[what]).double()
    model = dpfast.GradSampleModule(plain, loss_reduction="sum")
    x, given = torch.randn(6, 7, 4).double(), made(LENGTHS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, given).square().sum().backward()
    assert repr(given) == repr(made(LENGTHS))
    found = plain.layer.weight.grad_sample
    model.to_standard_module()
    for i, n in enumerate(LENGTHS):
        loss = plain(x[i : i + 1], made([n])).square().sum()
        assert relative_error(found[i], torch.autograd.grad(loss, plain.layer.weight)[0]) <= 1e-12


class Batch(NamedTuple):
    length: list[int]
    name: str


@dataclass(frozen=True)
class Frozen:
    length: list[int]


HOLDERS = {
    "names": lambda n: Batch(n, "batch"),
    "frozen": Frozen,
    "object": lambda n: SimpleNamespace(length=n),
    "user dict": lambda n: UserDict(length=n),
}


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_holds_them_stays_what_it_is(holder, mixes):
    def found(x):
        return x["length"] if isinstance(x, UserDict) else x.length

    class Held(Own):
        def forward(self, x, given):
            return super().forward(x, found(given)) / (max(found(given)) if mixes else 1)

    model, given = dpfast.GradSampleModule(Held(int)), HOLDERS[holder](list(LENGTHS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if not mixes:
            model(torch.randn(6, 7, 4), given).sum().backward()
            assert found(given) == LENGTHS
            return
        with pytest.raises(DpfastError, match=r"several samples|samples meet|not its own"):
            model(torch.randn(6, 7, 4), given).sum().backward()


def test_a_mapping_that_cannot_be_written_is_on_trust():
    class Held(Own):
        def forward(self, x, given):
            return super().forward(x, given["length"])

    model = dpfast.GradSampleModule(Held(int))
    with pytest.warns(DpfastWarning, match="is called with a collection of 6"):
        model(torch.randn(6, 7, 4), MappingProxyType({"length": list(LENGTHS)})).sum().backward()


class Detector(nn.Module):
    """Makes its loss itself, by how many boxes there are in the batch (Carion et al. 2020)."""

    def __init__(self, of_batch):
        super().__init__()
        self.layer, self.of_batch = nn.Linear(4, 4), of_batch

    def forward(self, x, targets):
        boxes = self.layer(x)
        losses = [(b - t["boxes"]).abs().sum() for b, t in zip(boxes, targets, strict=True)]
        counts = [len(t["boxes"]) for t in targets]
        if self.of_batch:
            return sum(losses) / sum(counts)
        return torch.stack([loss / n for loss, n in zip(losses, counts, strict=True)])


@pytest.mark.parametrize("of_batch", [False, True])
def test_targets_of_a_detector(of_batch):
    targets = [{"boxes": torch.randn(n, 4), "name": "a" * n} for n in LENGTHS]
    model = dpfast.GradSampleModule(Detector(of_batch), loss_reduction="sum")
    loss = model(torch.randn(6, 4), targets).sum()
    if not of_batch:
        loss.backward()
        return
    with pytest.raises(DpfastError, match=r"samples meet|the loss"):
        loss.backward()


class Packed(nn.Module):
    """Wants its samples sorted by length, and says so by a list."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x, lengths):
        return self.head(self.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][0])


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, names):
        return self.layer(x) * len(names)


@pytest.mark.parametrize("what", ["sorted", "set"])
def test_where_no_others_can_be_put_it_is_on_trust_and_that_is_said(what):
    model = dpfast.GradSampleModule(Packed() if what == "sorted" else Named())
    x = torch.randn(6, 7, 4) if what == "sorted" else torch.randn(6, 4)
    given = (lambda n: sorted(LENGTHS[:n], reverse=True)) if what == "sorted" else (lambda n: set(range(n)))
    with pytest.warns(DpfastWarning, match=r"is called with a (list|collection) of 6, as many as there are"):
        model(x, given(6)).sum().backward()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "is called with a")
        warnings.filterwarnings("ignore", "could not be run")
        model(x[:5], given(5)).sum().backward()  # once is enough


class Sized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, size, states=()):
        return self.layer(x.view(-1, size[0], size[1], 4).mean((1, 2)) + sum(states))


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, cached):
        return self.layer(x.sum(1) + sum(layer.keys for layer in cached))


@pytest.mark.parametrize("n", [2, 3])
def test_sizes_and_states_are_no_samples(n):
    model = dpfast.GradSampleModule(Sized())
    told = pytest.warns(DpfastWarning, match="collection of 2") if n == 2 else warnings.catch_warnings()
    with told:  # of the tuple, which may be two samples' lengths
        if n > 2:
            warnings.simplefilter("error")
        model(torch.randn(n, 6, 4), (2, 3), [torch.randn(n, 4) for _ in range(n)]).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached = [SimpleNamespace(keys=torch.randn(n, 4)) for _ in range(n)]  # by layer
        dpfast.GradSampleModule(Cached())(torch.randn(n, 6, 4), cached).sum().backward()


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, mask):
        h = torch.tanh(self.inner(x)) * (mask if mask.is_floating_point() else mask.float())[..., None]
        return self.outer(h.mean(1) - mask.float().mean())


@pytest.mark.parametrize(
    "mask", [torch.ones(4, 5).bool(), torch.zeros(4, 5).bool(), torch.ones(4, 5), torch.zeros(4, 5)], ids=str
)
def test_a_mask_that_is_alike_in_the_whole_batch(mask):
    """Is exchanged for another: samples meet in its mean, whatever the next batch has."""
    model = dpfast.GradSampleModule(Masked())
    with pytest.raises(DpfastError, match=r"several samples|samples meet|not its own"):
        model(torch.randn(4, 5, 4), mask).sum().backward()


class Shifted(nn.Module):
    """By a mask of the next tokens, over how many there are in the batch, or of the longest."""

    def __init__(self, whole):
        super().__init__()
        self.inner, self.outer, self.whole = nn.Linear(4, 4), nn.Linear(4, 3), whole

    def forward(self, x, mask):
        kept = mask[:, :-1, None].float()
        return self.outer((torch.tanh(self.inner(x))[:, :-1] * kept).sum(1) / self.whole(kept))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("length", [1, 4, 6, 7, 8])
@pytest.mark.parametrize("whole", [lambda m: m.sum(), lambda m: m.mean(), lambda m: m.sum(1).max()])
def test_masks_of_samples_that_are_equally_long(whole, length, dtype):
    """As where batches are made by length. Nothing is longer than the longest there may be."""
    if length > 4 and float(whole(torch.ones(2, 2))) == 2.0:
        length = 2
    model = dpfast.GradSampleModule(Shifted(whole))
    mask = (torch.arange(8) < length).expand(4, 8).to(dtype)
    with pytest.raises(DpfastError, match=r"several samples|samples meet|not its own"):
        model(torch.randn(4, 8, 4), mask).sum().backward()


class Imputed(nn.Module):
    """The mean of the batch where a feature is missing."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x, has):
        h = torch.tanh(self.inner(x))
        return self.outer(torch.where(has[:, :1], h, h.mean(0)))


def test_flags_that_are_alike():
    model = dpfast.GradSampleModule(Imputed())
    with pytest.raises(DpfastError, match=r"several samples|samples meet|not its own"):
        model(torch.randn(4, 2), torch.ones(4, 2).bool()).sum().backward()


class Normalised(nn.Module):
    """By how many tokens of the batch are there: alike in a batch of one, whatever stands there."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.table(tokens).sum(1) / (tokens != 0).sum())


def test_batches_of_one_tell_little_of_larger_ones():
    torch.manual_seed(0)
    model = dpfast.GradSampleModule(Normalised())
    tokens = torch.randint(2, 7, (4, 5))
    tokens[1:, 2:] = 0
    with pytest.raises(DpfastError, match=r"several samples|samples meet|not its own"):  # by the last at the latest
        for x in (*torch.randint(2, 7, (2, 1, 5)), tokens):
            model(x).sum().backward()


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.abs())


@pytest.mark.parametrize("n", [1, 3])
def test_complex_samples_that_are_alike(n):
    x = torch.randn(4, dtype=torch.complex64).expand(n, 4)
    model = dpfast.GradSampleModule(Waves(), loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
    assert model._module.layer.weight.grad_sample.shape == (len(x), 3, 4)


class Marked(nn.Module):
    """A layer, or a parameter, for the rows of marked tokens, whose numbers come by way of Python or NumPy."""

    def __init__(self, how, free):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.how, self.free = how, free

    def forward(self, tokens):
        rows = torch.tanh(self.table(tokens)).flatten(0, 1)
        if self.how == "list":
            picked = torch.tensor([i for i, k in enumerate(tokens.flatten().tolist()) if k == 8], dtype=torch.int64)
        elif self.how == "items":
            picked = torch.as_tensor([i for i, k in enumerate(tokens.flatten()) if k.item() == 8], dtype=torch.int64)
        else:
            picked = torch.from_numpy(np.flatnonzero(np.asarray(tokens).ravel() == 8))
        found = rows[picked] @ self.layer.weight.T if self.free else self.layer(rows[picked])
        return self.head(torch.zeros_like(rows).index_copy(0, picked, found).view(*tokens.shape, 4).sum(1))


def marked(counts):
    tokens = torch.randint(0, 8, (len(counts), 7))
    for row, count in zip(tokens, counts, strict=True):
        row[torch.randperm(7)[:count]] = 8
    return tokens


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("how", ["list", "items", "numpy"])
def test_rows_that_python_picks_by_the_data(how, free):
    """As many of each sample in the first batches, others of as many in all later."""
    torch.manual_seed(0)
    plain = Marked(how, free).double()
    model = dpfast.GradSampleModuleFastGradientClipping(plain, max_grad_norm=0.1, loss_reduction="sum")
    for counts in ([2] * 6, [2] * 5, [1, 3, 2, 1, 3, 2], [3, 1, 1, 3], [4, 0, 4, 0]):
        tokens = marked(counts)
        model.zero_grad()
        try:
            model(tokens).sin().sum().backward()
        except DpfastError:
            assert free  # a parameter's use there is followed, or refused
            return
        model.remove_hooks()
        exact = clipped_sum(loop_over_samples(plain, lambda m, t: m(t).sin().sum(), tokens), 0.1)
        model.add_hooks()
        for name, expected in exact.items():
            if counts[0] != 4 or not name.startswith("layer.bias"):
                assert relative_error(plain.get_parameter(name).grad, expected) <= 1e-4, (counts, name)


def test_validation_in_inference_mode_of_a_model_that_picks_rows():
    torch.manual_seed(0)
    model = dpfast.GradSampleModule(Marked("list", False))
    model(marked([2, 1, 3])).sum().backward()
    expected = model._module(marked([1, 2])).detach().shape
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert model(marked([1, 2])).shape == expected
        model.eval()
    model.train()
    model(marked([1, 2, 0])).sum().backward()
