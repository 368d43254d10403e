"""Models that are called with an entry for each sample, a list of tokens or a text, and pad these to the longest by
themselves."""

import dataclasses
import warnings

import cut_to_the_longest
import numpy as np
import of_lengths
import pytest
import torch
from cut_to_the_longest import CHANGES, MIXED, attention, mean
from of_lengths import LENGTHS, T, assert_right_in, batch, masked_mean, mean_of_own, states, valid
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.looks.lengths import are_of_samples, in_each_run
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")

FOURTH = [0, 2, 4, 1, 3, 5]  # of three samples and of all, others are the longest


@dataclasses.dataclass
class Document:
    author: int
    tokens: list


class Sentence:
    """Its words know whose they are."""

    def __init__(self, tokens):
        self.words = [(self, token) for token in tokens]


KINDS = {
    "lists": (lambda tokens: tokens.tolist(), lambda entry: entry),
    "tensors": (lambda tokens: tokens, lambda entry: entry.tolist()),
    "arrays": (lambda tokens: tokens.numpy(), lambda entry: entry.tolist()),
    "characters": (lambda tokens: "".join(chr(97 + i) for i in tokens), lambda entry: [ord(i) - 97 for i in entry]),
    "words": (lambda tokens: " ".join("w" * i for i in tokens), lambda entry: [len(i) for i in entry.split()]),
    "dicts": (lambda tokens: {"x": tokens.tolist(), "y": [1]}, lambda entry: entry["x"]),
    "objects": (lambda tokens: Document(3, tokens.tolist()), lambda entry: entry.tokens),
    "sentences": (lambda tokens: Sentence(tokens.tolist()), lambda entry: [token for _, token in entry.words]),
}


def whole(model, tokens, lengths):
    return model.table(tokens), lengths


class Pads(nn.Module):
    def __init__(self, inner, kind="lists"):
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, classes, entries):
        rows = [torch.tensor(KINDS[self.kind][1](entry)) for entry in entries]
        lengths = torch.tensor([len(row) for row in rows])
        return self.inner(pad_sequence(rows, batch_first=True), lengths, classes)


def cut(way, kind="lists"):
    return Pads(cut_to_the_longest.Model(way, whole), kind)


def packed(way, kind="lists"):
    return Pads(of_lengths.Model(way), kind)


def entries_of(kind, order=range(6), lengths=LENGTHS):
    tokens, _, classes = batch()
    tokens = torch.where(tokens == 0, torch.randint(1, 20, tokens.shape), tokens)
    order = list(order)
    return classes[order], [KINDS[kind][0](tokens[i, : lengths[i]]) for i in order]


def by_sample(model, classes, entries):
    """(N,)"""
    out = model(classes, entries)
    if out.dim() == 3:
        kind = getattr(model, "_module", model).kind
        out = out * valid(out, torch.tensor([len(KINDS[kind][1](entry)) for entry in entries]))
    return (3 * out).sin().flatten(1).sum(1) if out.dim() > 1 else out


def assert_right(plain, classes, entries, mode="one pass"):
    def loss(model, i, label):
        return by_sample(model, label, [entries[j] for j in i]).sum()

    exact = loop_over_samples(plain, loss, torch.arange(len(classes)), classes)
    assert_right_in(mode, plain, by_sample, exact, classes, entries)


def refused(plain, match, classes, entries):
    model = GradSampleModuleFastGradientClipping(plain, max_grad_norm=1.0, loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match=match):
        by_sample(model, classes, entries).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [range(6), FOURTH], ids=["second", "fourth"])
def test_entries_of_all_kinds(kind, order):
    assert_right(cut(attention, kind), *entries_of(kind, order))
    assert_right(packed(of_lengths.attention, kind), *entries_of(kind, order))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_over_padding_is_refused(kind):
    refused(cut(mean, kind), CHANGES, *entries_of(kind))
    refused(packed(of_lengths.mean, kind), of_lengths.CHANGES, *entries_of(kind))


@pytest.mark.parametrize("way", cut_to_the_longest.RIGHT, ids=lambda way: way.__name__)
def test_what_leaves_padding_out(way):
    assert_right(cut(way), *entries_of("lists"))


@pytest.mark.parametrize("way", cut_to_the_longest.WRONG, ids=lambda way: way.__name__)
@pytest.mark.parametrize("order", [range(6), FOURTH], ids=["second", "fourth"])
def test_what_depends_on_the_longest(way, order):
    refused(cut(way), f"{CHANGES}|{MIXED}", *entries_of("lists", order))


@pytest.mark.parametrize("way", of_lengths.RIGHT)
@pytest.mark.parametrize("mode", of_lengths.MODES)
def test_packed_and_padding_left_out(way, mode):
    assert_right(packed(of_lengths.RIGHT[way]), *entries_of("lists"), mode)


@pytest.mark.parametrize("way", of_lengths.WRONG)
def test_packed_and_padding_counted(way):
    refused(packed(of_lengths.WRONG[way]), f"{of_lengths.CHANGES}|{MIXED}", *entries_of("lists"))


def test_batches_of_all_sizes():
    plain = packed(mean_of_own)
    model = GradSampleModuleFastGradientClipping(packed(mean_of_own), max_grad_norm=0.5, loss_reduction="sum")
    model._module.load_state_dict(plain.state_dict())
    for n in (1, 5, 2, 9, 6):
        lengths = torch.randint(1, T + 1, (n,))
        entries = [torch.randint(1, 20, (length,)).tolist() for length in lengths]
        classes = torch.randint(0, 3, (n,))
        model.zero_grad()
        by_sample(model, classes, entries).sum().backward()

        def loss(m, i, label, entries=entries):
            return by_sample(m, label, [entries[j] for j in i]).sum()

        for name, summed in clipped_sum(loop_over_samples(plain, loss, torch.arange(n), classes), 0.5).items():
            assert relative_error(model._module.get_parameter(name).grad, summed) <= 1e-5, (n, name)


class Pictures(nn.Module):
    """Of several sizes, in the corner of one that is as large as the highest and the widest."""

    def __init__(self, masked=True):
        super().__init__()
        self.conv, self.norm, self.head, self.masked = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.LayerNorm(8),
            nn.Linear(8, 3),
            masked,
        )

    def forward(self, classes, pictures):
        height, width = (max(x.shape[d] for x in pictures) for d in (1, 2))
        x, mask = pictures[0].new_zeros(len(pictures), 3, height, width), torch.zeros(len(pictures), 1, height, width)
        for i, picture in enumerate(pictures):
            x[i, :, : picture.shape[1], : picture.shape[2]] = picture
            mask[i, :, : picture.shape[1], : picture.shape[2]] = 1
        mask = mask.to(x)
        x = self.norm(self.conv(x).tanh().movedim(1, -1)).movedim(-1, 1)
        if not self.masked:
            return self.head(x.mean((2, 3)))
        return self.head((x * mask).sum((2, 3)) / mask.sum((2, 3)))


def pictures():
    sizes = [(3, 5), (7, 2), (2, 8), (4, 4), (6, 3)]  # the highest is not the widest
    return torch.tensor([0, 1, 2, 1, 0]), [torch.randn(3, *size) for size in sizes]


def test_pictures_of_several_sizes():
    classes, some = pictures()
    plain = Pictures()

    def loss(model, i, label):
        return by_sample(model, label, [some[j].double() for j in i]).sum()

    exact = loop_over_samples(plain, loss, torch.arange(5), classes)
    assert_right_in("one pass", plain, by_sample, exact, classes, some)
    refused(Pictures(masked=False), CHANGES, classes, some)


class Paragraphs(nn.Module):
    """Sentences of words: padded to as many as any has, and each to the longest anywhere."""

    def __init__(self, way=masked_mean):
        super().__init__()
        self.table, self.mid, self.head, self.way = nn.Embedding(20, 4), nn.Linear(4, 4), nn.Linear(4, 3), way

    def forward(self, classes, documents):
        many, words = max(map(len, documents)), max(len(s) for d in documents for s in d)
        x = torch.zeros(len(documents), many, words, dtype=torch.int64)
        for i, document in enumerate(documents):
            for j, sentence in enumerate(document):
                x[i, j, : len(sentence)] = torch.tensor(sentence)
        lengths = (x != 0).sum(2)
        h = self.mid(self.table(x)).tanh()
        h = (h * (x != 0)[..., None]).sum(2) / lengths.clamp(min=1)[..., None]
        return self.head(self.way(h, (lengths > 0).sum(1)))


def test_sentences_of_words():
    shapes = [(2, 5), (6, 2), (1, 7), (3, 3), (2, 2)]  # who has most sentences has not the longest
    some = [[torch.randint(1, 20, (words,)).tolist() for _ in range(many)] for many, words in shapes]
    classes = torch.tensor([0, 1, 2, 1, 0])
    assert_right(Paragraphs(), classes, some)
    refused(Paragraphs(lambda h, counts: h.mean(1)), CHANGES, classes, some)


class Fixed(nn.Module):
    """Lengths that no sample has: of places."""

    def __init__(self):
        super().__init__()
        self.inner, self.lengths = of_lengths.Model(states), [3, 1, 4, 2, 2, 3, 4] * 16

    def forward(self, classes, entries):
        rows = pad_sequence([torch.tensor(entry)[:4] for entry in entries], batch_first=True, padding_value=1)
        rows = nn.functional.pad(rows, (0, 4 - rows.shape[1]), value=1)
        return self.inner(rows, torch.tensor(self.lengths[: len(rows)]), classes)


def test_lengths_of_places_are_none_of_samples():
    warnings.simplefilter("ignore", DpfastWarning)  # that their lengths come of no input
    refused(Fixed(), "changes with the sample's place in the batch", *entries_of("lists"))


@pytest.mark.parametrize(
    ("base", "runs", "most", "told"),
    [
        ([[1, 3, 5]], [[[3, 3, 5]], [[1, 5, 5]], [[1, 1, 3]]], [1, 1, 1], True),
        ([[1, 3, 5]], [[[1, 3, 5]], [[1, 3, 5]]], [1, 1], False),
        ([[1, 3, 5]], [[[2, 2, 5]]], [1], False),
        ([[1, 3, 5]], [[[2, 2, 5]]], [2], True),
        ([[1, 3, 5], [1, 2, 2]], [[[3, 3, 5], [1, 2, 2]]], [1], False),
        ([[1, 3, 5]], [[[3, 3]]], [1], False),
        ([], [[]], [1], False),
    ],
)
def test_lengths_of_samples_change_with_them(base, runs, most, told):
    assert are_of_samples(base, runs, most) == told


def test_the_largest_value_of_the_batch_is_no_length():
    class Scaled(Pads):
        def forward(self, classes, entries):
            return super().forward(classes, entries) / max(max(entry) for entry in entries)

    refused(Scaled(cut_to_the_longest.Model(attention, whole)), MIXED, *entries_of("lists"))


def test_a_picture_that_is_normalised_by_the_brightest_of_all_is_refused():
    class Brightest(Pictures):
        def forward(self, classes, pictures):
            most = max(float(x.max()) for x in pictures)
            return super().forward(classes, [x / most for x in pictures])

    refused(Brightest(), f"{CHANGES}|{MIXED}", *pictures())


def test_arrays_in_one_of_objects():
    """As :func:`numpy.array` makes it of lists of several lengths."""
    classes, entries = entries_of("lists")
    array = np.empty(6, dtype=object)
    array[:] = entries
    assert_right(cut(attention), classes, array)


class Subwords(Pads):
    """Of which a short text may have more than a long one."""

    def forward(self, classes, entries):
        return super().forward(classes, [[1 + ord(c) % 19 for c in text if c.isupper()] for text in entries])


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [1, 0, 2, 5, 4, 3], [2, 4, 1, 0, 3, 5]])
def test_the_longest_text_has_not_the_most_tokens(order):
    texts = ["Aaaaaaaa aaaaa aaa", "BBBB", "cCcCCc c", "dDDDDDd", "Eeeeeee e e e e e", "FFfff"]
    classes, entries = batch()[2], [texts[i] for i in order]
    assert_right(Subwords(cut_to_the_longest.Model(attention, whole)), classes, entries)
    refused(Subwords(cut_to_the_longest.Model(mean, whole)), CHANGES, classes, entries)


@pytest.mark.parametrize("lengths", [[9, 5, 2, 9, 3, 9, 4], [9, 9, 2, 3, 2, 9, 4], [2, 9, 9, 9, 3, 1, 1]])
@pytest.mark.parametrize("way", [mean, cut_to_the_longest.attention_to_padding])
def test_several_are_the_longest_after_a_batch_of_which_none_is(lengths, way):
    """One of them in another's place leaves the batch as long as it was."""
    model = GradSampleModuleFastGradientClipping(cut(way), max_grad_norm=1.0, loss_reduction="sum")

    def batch_of(lengths):
        entries = [torch.randint(1, 20, (length,)).tolist() for length in lengths]
        return torch.zeros(len(lengths), dtype=torch.int64), entries

    by_sample(model, *batch_of([6] * 5)).sum().backward()
    with pytest.raises(UnsupportedModuleError, match=f"{CHANGES}|{MIXED}"):
        by_sample(model, *batch_of(lengths)).sum().backward()


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 4, 1, 3, 5]])
def test_several_that_are_the_longest_are_right(order):
    lengths = torch.tensor([9, 2, 9, 4, 9, 9])
    assert_right(cut(attention), *entries_of("lists", order, lengths))
    assert_right(packed(of_lengths.attention), *entries_of("lists", order, lengths))
    refused(cut(mean), f"{CHANGES}|{MIXED}", *entries_of("lists", order, lengths))


@pytest.mark.parametrize(
    ("size", "stay", "counts", "at_once", "which"),
    [
        (3, 0, [], False, [(0,), (1,), (2,)]),
        (2, 0, [], False, [(0,), (1,)]),
        (5, 0, [], True, [(0, 1, 4)]),
        (3, 0, [], True, [(0, 1)]),
        (4, 1, [], True, [(0, 1, 2)]),
        (5, 0, [[1, 2, 3, 3, 1], [1, 1, 1, 1, 2]], False, [(0,), (1,), (4,), (2, 3)]),
        (5, 1, [[1, 3, 3, 1, 3]], False, [(0,), (1,), (3,), (1, 2)]),
    ],
)
def test_who_is_exchanged_in_which_run(size, stay, counts, at_once, which):
    assert in_each_run(size, stay, counts, at_once) == which
