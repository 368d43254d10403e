"""Models that are called with lists and arrays alone: the first of them says how many samples there are."""

import collections
import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import dpfast
from dpfast.errors import DpfastWarning, InputError, UnsupportedModuleError
from dpfast.testing import clipped_sum, relative_error

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")

C = 0.3


class Bag(nn.Module):
    """The mean of each one's tokens, of lists of several lengths."""

    def __init__(self):
        super().__init__()
        self.table, self.mid, self.head = nn.Embedding(20, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def rows(self, entries):
        tokens = pad_sequence([torch.zeros(0, dtype=torch.int64), *map(torch.tensor, entries)], batch_first=True)[1:]
        return (self.mid(self.table(tokens)).tanh() * (tokens != 0)[..., None]).sum(1)

    def forward(self, entries):
        return self.head(self.rows(entries))


class ByName(Bag):
    def forward(self, *, batch, scale=1.0):
        return super().forward([entry["ids"] for entry in batch["entries"]]) * scale


class Texts(Bag):
    def forward(self, texts):
        return super().forward([[ord(c) - 97 for c in text] for text in texts])


class Pairs(Bag):
    """Two lists, each with an entry for each sample."""

    def forward(self, questions, answers):
        return self.head(self.rows(questions) * self.rows(answers))


class Arrays(nn.Module):
    def __init__(self, dim=0):
        super().__init__()
        self.mid, self.head, self.dim = nn.Linear(4, 5), nn.Linear(5, 3), dim

    def forward(self, array):
        x = torch.as_tensor(array, dtype=self.mid.weight.dtype)
        return self.head(self.mid(x).tanh().sum(1 - self.dim))


def tokens(n):
    return [torch.randint(1, 20, (int(k),)).tolist() for k in torch.randint(1, 9, (n,))]


def arrays(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape)


WAYS = {
    "lists": (Bag, lambda n: (tokens(n),), lambda entries, i: (entries[i : i + 1],)),
    "tuples": (Bag, lambda n: (tuple(tokens(n)),), lambda entries, i: (entries[i : i + 1],)),
    "deques": (Bag, lambda n: (collections.deque(tokens(n)),), lambda entries, i: ([entries[i]],)),
    "texts": (
        Texts,
        lambda n: (["".join(chr(97 + i) for i in some) for some in tokens(n)],),
        lambda texts, i: (texts[i : i + 1],),
    ),
    "two lists": (Pairs, lambda n: (tokens(n), tokens(n)), lambda one, two, i: (one[i : i + 1], two[i : i + 1])),
    "arrays": (Arrays, lambda n: (arrays(n, 2, 4),), lambda array, i: (array[i : i + 1],)),
    "nested lists": (Arrays, lambda n: (arrays(n, 2, 4).tolist(),), lambda array, i: (array[i : i + 1],)),
}


def made(model, **how):
    model = copy.deepcopy(model)
    return dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum", **how)


def exact_of(plain, n, call):
    """Of each sample, by a loop over them. call: with the model and the sample's number."""
    plain, found = copy.deepcopy(plain).double(), []
    for i in range(n):
        plain.zero_grad()
        call(plain, i).square().sum().backward()
        found.append([p.grad.clone() for p in plain.parameters()])
    named = dict(plain.named_parameters())
    return {name: torch.stack(some) for name, some in zip(named, zip(*found, strict=True), strict=True)}


def assert_clipped(wrapped, exact):
    for name, summed in clipped_sum(exact, C).items():
        assert relative_error(wrapped._module.get_parameter(name).grad, summed) <= 1e-5, name


@pytest.mark.parametrize("way", WAYS)
def test_batches_of_all_sizes(way):
    make, batch, of = WAYS[way]
    plain = make()
    wrapped = made(plain)
    if way == "nested lists":
        warnings.simplefilter("ignore", DpfastWarning)  # each might be an input of all samples
    for n in (5, 1, 9, 2, 6):
        given = batch(n)
        wrapped.zero_grad()
        wrapped(*given).square().sum().backward()
        assert_clipped(wrapped, exact_of(plain, n, lambda model, i, given=given: model(*of(*given, i))))


@pytest.mark.parametrize("way", ["lists", "tuples", "texts", "arrays"])
def test_an_empty_batch(way):
    make, batch, _ = WAYS[way]
    wrapped = made(make())
    wrapped(*batch(6)).square().sum().backward()
    wrapped.zero_grad()
    wrapped(*batch(0)).square().sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in wrapped.parameters())


def test_in_what_is_given_by_name():
    plain = ByName()
    wrapped = made(plain)
    for n in (6, 4):
        entries = [{"ids": some} for some in tokens(n)]
        wrapped.zero_grad()
        wrapped(batch={"entries": entries}, scale=torch.tensor(2.0)).square().sum().backward()

        def call(model, i, entries=entries):
            return model(batch={"entries": entries[i : i + 1]}, scale=2.0)

        assert_clipped(wrapped, exact_of(plain, n, call))


def test_arrays_of_time_first():
    plain, array = Arrays(dim=1), arrays(7, 6, 4)
    wrapped = made(plain, batch_first=False)
    wrapped(array).square().sum().backward()
    assert_clipped(wrapped, exact_of(plain, 6, lambda model, i: model(array[:, i : i + 1])))


def test_who_is_no_padding_is_told_as_of_tensors():
    plain, some = Bag(), tokens(6)
    wrapped = made(plain)
    with wrapped.valid(torch.tensor([True, True, False, True, False, True])):
        wrapped(some).square().sum().backward()
    exact = exact_of(plain, 6, lambda model, i: model(some[i : i + 1]))
    assert_clipped(wrapped, {name: g[[0, 1, 3, 5]] for name, g in exact.items()})


@pytest.mark.parametrize("way", ["lists", "arrays"])
@pytest.mark.parametrize("n", [5, 2, 1])
def test_who_mixes_them_is_refused(way, n):
    make, batch, _ = WAYS[way]

    class Mixes(make):
        def forward(self, entries):
            out = super().forward(entries)
            return out - out.mean(0)

    with pytest.raises(UnsupportedModuleError, match="depends on several samples"):
        made(Mixes())(*batch(n)).square().sum().backward()


class OfFields(Pairs):
    def forward(self, fields):
        return super().forward(*fields)


@pytest.mark.parametrize("n", [5, 2])
def test_a_tuple_of_fields_is_no_list_of_samples(n):
    """Also where there are as many samples as fields."""
    wrapped, some = made(OfFields()), (tokens(n), tokens(n))
    for _ in range(2):
        with pytest.raises(InputError, match=r"dimension 0 \(with tuple\).* not be run"):
            wrapped(some)
    with torch.no_grad():
        assert wrapped(some).shape == (n, 3)


class OfObjects(Bag):
    def forward(self, given):
        return super().forward([[3], [4, 5]])


@pytest.mark.parametrize(
    "given", [{(1, 2), (3,)}, "a text", 7, ("mean", "sum")], ids=["set", "text", "number", "names"]
)
def test_what_has_no_entries_is_an_error(given):
    with pytest.raises(InputError, match="called with no tensor that has samples in dimension 0"):
        made(OfObjects())(given)


def test_a_layer_that_sees_others_than_there_are_entries():
    class Words(Bag):
        def forward(self, texts):
            return self.head(self.mid(self.table(torch.tensor([len(w) for text in texts for w in text.split()]))))

    wrapped = made(Words())
    warnings.simplefilter("ignore", DpfastWarning)
    with pytest.raises(InputError, match="follows the batch, but is no multiple of it"):
        wrapped(["a bb", "ccc d eeee", "f"]).square().sum().backward()


# --- lists of tensors: a sample each, or rows of all samples each ---


class OfTensors(Bag):
    """Padded by torch."""

    def forward(self, entries, labels=None):
        lengths = torch.tensor([len(entry) for entry in entries])
        tokens = pad_sequence(entries, batch_first=True)
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        h = self.mid(self.table(tokens)).tanh()
        return self.head((h * mask[..., None]).sum(1) / lengths[:, None])


class OfPictures(nn.Module):
    """Of three channels and several sizes."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, pictures):
        height, width = (max(x.shape[d] for x in pictures) for d in (1, 2))
        x, mask = (pictures[0].new_zeros(len(pictures), c, height, width) for c in (3, 1))
        for i, picture in enumerate(pictures):
            x[i, :, : picture.shape[1], : picture.shape[2]] = picture
            mask[i, :, : picture.shape[1], : picture.shape[2]] = 1
        return self.head((self.conv(x).tanh() * mask).sum((2, 3)) / mask.sum((2, 3)))


class OfVectors(Arrays):
    def forward(self, vectors):
        return self.head(self.mid(torch.stack(vectors)).tanh())


def rows(n):
    return [torch.randint(1, 20, (int(k),)) for k in torch.randperm(9)[:n] + 1]


def some_pictures(n):
    return [torch.randn(3, *(2 + torch.randint(0, 6, (2,))).tolist()) for _ in range(n)]


OF_TENSORS = {
    "token tensors": (OfTensors, rows),
    "tuples of them": (OfTensors, lambda n: tuple(rows(n))),
    "pictures": (OfPictures, some_pictures),
    "vectors": (OfVectors, lambda n: [torch.randn(4) for _ in range(n)]),
}


def assert_right_with(wrapped, plain, entries, *labels):
    wrapped.zero_grad()
    wrapped(entries, *labels).square().sum().backward()

    def call(model, i):
        some = entries[i : i + 1]
        return model([x.double() if x.is_floating_point() else x for x in some])

    assert_clipped(wrapped, exact_of(plain, len(entries), call))


@pytest.mark.parametrize("what", OF_TENSORS)
@pytest.mark.parametrize("first", [5, 3])
def test_each_tensor_of_a_list_is_a_sample_where_the_model_takes_them_so(what, first):
    """Also where they have as many channels as there are."""
    make, batch = OF_TENSORS[what]
    plain = make()
    wrapped = made(plain)
    warnings.simplefilter("ignore", DpfastWarning)  # that it is no list of inputs, where that could be
    for n in (first, 1, 7, 2, 3, 4):
        assert_right_with(wrapped, plain, batch(n))


def test_beside_tensors_that_have_the_samples():
    plain, some = OfTensors(), rows(6)
    assert_right_with(made(plain), plain, some, torch.zeros(6))


@pytest.mark.parametrize("what", ["pictures", "vectors"])
def test_that_each_is_taken_for_a_sample_is_said(what):
    make, batch = OF_TENSORS[what]
    with pytest.warns(
        DpfastWarning, match="list of 5, each of which is taken for a sample: nothing else says how many"
    ):
        made(make())(batch(5))


class OfViews(nn.Module):
    """Of all samples, each of them centred."""

    def __init__(self, centred=True):
        super().__init__()
        self.layer, self.centred = nn.Linear(4, 5), centred

    def forward(self, views):
        z = self.layer(torch.stack([torch.as_tensor(x, dtype=self.layer.weight.dtype) for x in views]))
        return z - z.mean(1, keepdim=True) if self.centred else z


@pytest.mark.parametrize("n", [5, 2, 3])
def test_views_of_all_samples_are_none(n):
    """With each for a sample, their samples would meet and nothing would show it."""
    warnings.simplefilter("ignore", DpfastWarning)
    with pytest.raises(UnsupportedModuleError, match="depends on several samples"):
        made(OfViews())([torch.randn(n, 4), torch.randn(n, 4)]).square().sum().backward()


def test_of_arrays_it_is_said():
    with pytest.warns(DpfastWarning, match="list of 2, each of which is taken for a sample"):
        made(OfViews(centred=False))([arrays(5, 4), arrays(5, 4)])


class OfInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(3, 5)

    def forward(self, inputs):
        return self.one(inputs[0]) * self.two(inputs[1])


def test_a_list_of_inputs_is_as_it_was():
    plain = OfInputs()
    wrapped = made(plain)
    warnings.simplefilter("ignore", DpfastWarning)
    for n in (2, 5):
        inputs = [torch.randn(n, 4), torch.randn(n, 3)]
        wrapped.zero_grad()
        wrapped(inputs).square().sum().backward()

        def call(model, i, inputs=inputs):
            return model([x[i : i + 1].double() for x in inputs])

        assert_clipped(wrapped, exact_of(plain, n, call))


def test_a_list_of_nothing_beside_a_scalar_tensor():
    """``None`` in a list is no first tensor."""

    class Beside(Bag):
        def forward(self, options, entries, scale):
            return super().forward(entries) * scale

    plain, some = Beside(), tokens(6)
    wrapped = made(plain)
    options = {"a": [None, None]}
    warnings.simplefilter("ignore", DpfastWarning)
    with pytest.raises(dpfast.DpfastError):  # two of something, and six entries
        wrapped(options, some, torch.tensor(2.0)).square().sum().backward()
    wrapped = made(plain)
    wrapped(None, some, torch.tensor(2.0)).square().sum().backward()
    assert_clipped(wrapped, exact_of(plain, 6, lambda model, i: model(None, some[i : i + 1], 2.0)))
