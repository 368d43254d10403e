"""What a look at three samples, once, does not show: it is looked at more samples, and again."""

import random

import pytest
import torch
import torch.nn.functional as F
from noted import Noted
from two_linears import C, D, N, Net, clipping, step

from dpfast.errors import UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")


def order_of(samples):
    """Drawn alike wherever the model stands: one in 56 draws of a quarter of eight mixes nothing, and is not seen."""
    return torch.randperm(samples, device="cpu")


class Mixup(Net):
    """With a random other sample: itself, in one of six draws of three."""

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(0.6 * h + 0.4 * h[order_of(len(h))])


class Quarter(Net):
    """A quarter of the batch is mixed: of three samples none."""

    def forward(self, x):
        h = torch.tanh(self.first(x))
        k = len(x) // 4
        return self.last(torch.cat([0.5 * h[:k] + 0.5 * h[order_of(len(x))[:k]], h[k:]]))


class Groups(Net):
    def forward(self, x):
        h = self.first(x)
        return self.last(h - h.view(4, -1, 7).mean(0).repeat(4, 1) if len(x) % 4 == 0 else h)


class Hard(Net):
    """The samples with the largest losses, of which three have none."""

    def forward(self, x):
        losses = self.last(torch.tanh(self.first(x))).square().sum(1)
        return losses.topk(len(x) // 4).values.sum()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cls", [Mixup, Quarter, Groups])
def test_more_samples(cls, seed):
    torch.manual_seed(seed)
    with pytest.raises(UnsupportedModuleError, match=r"depends on several samples|not its own"):
        step(clipping(cls()), torch.randn(N, D))


class Sometimes(Net):
    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(0.7 * h + 0.3 * h.flip(0) if random.random() < 0.5 else h)


class Weighted(Net):
    """A term over the batch, with a weight that is no parameter: an argument, an attribute, a buffer."""

    weight = 0.0

    def __init__(self):
        super().__init__()
        self.register_buffer("of_buffer", torch.zeros(()))

    def forward(self, x, weight=0.0):
        h = torch.tanh(self.first(x))
        return self.last(h - (weight + self.weight + self.of_buffer) * h.mean(0))


def found_after(wrapped, changed, most):
    """How many steps pass until an error; ``changed`` is called after the first."""
    x = torch.randn(N, D)
    for i in range(most):
        try:
            step(wrapped, x)
        except UnsupportedModuleError:
            return i
        if i == 0:
            changed(wrapped._module)
    return most


@pytest.mark.parametrize(
    "changed", [lambda m: setattr(m, "weight", 0.5), lambda m: m.of_buffer.fill_(0.5)], ids=["attribute", "buffer"]
)
@pytest.mark.parametrize("first", [1, 4])
def test_a_weight_that_was_zero(changed, first):
    torch.manual_seed(0)
    wrapped = clipping(Weighted())
    for _ in range(first - 1):
        step(wrapped, torch.randn(N, D))
    assert found_after(wrapped, changed, 9) <= 8 - first


MIXINGS = {
    "all": lambda h: h - h.mean(0),
    "pairs": lambda h: h + h.unflatten(0, (-1, 2)).flip(1).flatten(0, 1),
    "halves": lambda h: h + h.roll(len(h) // 2, 0),
    "from last to first": lambda h: h + h.flip(0),
    "the one before": lambda h: torch.cat([h[:1], h[1:] + h[:-1].detach()]),
    "the one behind": lambda h: torch.cat([h[:-1] + h[1:].detach(), h[-1:]]),
    "with the first": lambda h: h + h[0].detach(),
    "with the last": lambda h: h + h[-1].detach(),
    "groups of neighbours": lambda h: (
        h - h.unflatten(0, (2, -1)).mean(1, keepdim=True).expand(2, len(h) // 2, -1).flatten(0, 1)
    ),
    "groups over and over": lambda h: h - h.unflatten(0, (-1, 2)).mean(0).repeat(len(h) // 2, 1),
}


class Begins(Net):
    """Mixes samples, once it is told to, by an entry in a list: an attribute that is set is looked at at once."""

    def __init__(self, mixing="none"):
        super().__init__()
        self.mixing = [mixing]

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(MIXINGS[self.mixing[0]](h) if self.mixing[0] != "none" else h)


@pytest.mark.parametrize("n", [4, 6, 8, 64])
@pytest.mark.parametrize("mixing", MIXINGS)
def test_mixing_that_begins_later_is_found_in_one_run(mixing, n):
    """By the next look, which exchanges three samples at once; also what only goes one way."""
    torch.manual_seed(0)
    wrapped = clipping(Begins())
    for _ in range(4):
        step(wrapped, torch.randn(n, D))
    wrapped._module.mixing[0] = mixing
    for _ in range(3):
        step(wrapped, torch.randn(n, D))
    with pytest.raises(UnsupportedModuleError, match=r"depends on several samples|not its own"):
        step(wrapped, torch.randn(n, D))


@pytest.mark.parametrize("n", [4, 6, 16])
@pytest.mark.parametrize("mixing", ["pairs", "groups over and over", "groups of neighbours"])
def test_in_batches_that_must_be_even(mixing, n):
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModuleError, match=r"depends on several samples|not its own"):
        step(clipping(Begins(mixing)), torch.randn(n, D))


def test_a_weight_that_was_zero_and_is_an_argument():
    torch.manual_seed(0)
    wrapped, x = clipping(Weighted()), torch.randn(N, D)
    for _ in range(20):
        step(wrapped, x, 0.0)
    for again in (lambda: step(wrapped, x, 0.5), lambda: step(wrapped, x, weight=0.5)):
        with pytest.raises(UnsupportedModuleError, match="depends on several samples"):
            again()


def test_a_branch_that_is_taken_now_and_then():
    """It shows in one of the later looks."""
    missed = 0
    for seed in range(20):
        torch.manual_seed(seed)
        random.seed(seed)
        missed += found_after(clipping(Sometimes()), lambda _: None, 70) == 70
    assert missed <= 4  # of 20, where 5 looks miss it with 1/32 each


class ByKeys(Net):
    def forward(self, batch, task=0):
        mixes = batch.get("task") == "pairs" or "pairs" in batch or task == 1
        h = self.first(batch["pairs" if "pairs" in batch else "x"])
        return self.last(h - h.mean(0) if mixes else h)


@pytest.mark.parametrize("how", ["key", "text", "number"])
def test_keys_texts_and_small_numbers_are_kinds(how):
    torch.manual_seed(0)
    wrapped, x = clipping(ByKeys()), torch.randn(N, D)
    for _ in range(4):
        step(wrapped, {"x": x, "task": "one"})
    batch = {"key": {"pairs": x}, "text": {"x": x, "task": "pairs"}, "number": {"x": x, "task": "one"}}[how]
    with pytest.raises(UnsupportedModuleError, match="depends on several samples"):
        step(wrapped, batch, int(how == "number"))


def test_numbers_in_lists_are_no_kinds():
    class Lists(Weighted):
        def forward(self, x, lengths):
            return super().forward(x) + sum(lengths)

    wrapped = clipping(Lists())
    for i in range(4):
        step(wrapped, torch.randn(N, D), [0, i, i // 2])
    assert len(wrapped._tapped.probe._looks) == 1


def test_looks_are_few():
    forward, counted = Weighted.forward, Noted()

    class Counted(Weighted):
        def forward(self, x):
            counted.note(len(x))
            return forward(self, x)

    wrapped, steps = clipping(Counted()), []
    for _ in range(70):
        counted.clear()
        step(wrapped, torch.randn(N, D))
        steps.append(counted.all())
    assert [i for i, sizes in enumerate(steps) if sizes != [N]] == [0, 1, 7, 63]


# --- what is kept for the next pass ---


class Codebook(Net):
    """A vector-quantised layer whose codes follow the batches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("code", torch.randn(4, 7))

    def forward(self, x):
        h = self.first(x)
        nearest = torch.cdist(h, self.code).argmin(1)
        quantised = self.code[nearest]
        with torch.no_grad():
            self.code.mul_(0.9).add_(F.one_hot(nearest, 4).to(h).t() @ h, alpha=0.1)
        return self.last(h + (quantised - h).detach())


class Queue(Net):
    def __init__(self):
        super().__init__()
        self.seen = [torch.zeros(4, 7)]

    def forward(self, x):
        h = self.first(x)
        similar = h @ self.seen[-1].t()
        self.seen.append(h.detach()[:4])
        return self.last(h) + similar.logsumexp(1, keepdim=True)


class Centre(Net):
    def __init__(self, follows=True):
        super().__init__()
        self.follows = follows
        self.register_buffer("mean", torch.randn(7))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h = self.first(x)
        self.steps += 1
        self.last_attention = h.detach().softmax(1)  # to be looked at by others, and never read
        centred = h - self.mean
        if self.follows:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.last(centred.tanh())


class Scale(Net):
    """In a number of Python's."""

    mean = 1.0

    def forward(self, x):
        h = self.first(x) / self.mean
        self.mean = 0.9 * self.mean + 0.1 * float(h.detach().abs().mean())
        return self.last(h.tanh())


class Bank:
    def __init__(self):
        self.rows = {"all": torch.zeros(4, 7)}


class WithBank(Net):
    """In an object that is no module."""

    def __init__(self):
        super().__init__()
        self.bank = Bank()

    def forward(self, x):
        h = self.first(x)
        similar = h @ self.bank.rows["all"].t()
        self.bank.rows = {"all": h.detach()[:4]}
        return self.last(h) + similar.logsumexp(1, keepdim=True)


class WithHidden(Net):
    """In a module that is kept in a list, past ``modules()``."""

    def __init__(self):
        super().__init__()
        self.hidden = [Centre()]
        self.hidden[0].requires_grad_(False)

    def forward(self, x):
        h = self.first(x)
        found = h - self.hidden[0].mean
        self.hidden[0].mean = 0.9 * self.hidden[0].mean + 0.1 * h.detach().mean(0)
        return self.last(found.tanh())


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (WithHidden, r"hidden\[0\].mean"),
        (WithBank, r"bank.rows\['all'\]"),
        (Codebook, "code"),
        (Queue, r"seen\[1\]"),
        (Centre, "mean"),
        (Scale, "mean"),
    ],
)
def test_what_a_pass_keeps_of_its_samples_for_the_next(cls, name):
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModuleError, match=rf"keeps of its samples .*{name}"):
        step(clipping(cls()), torch.randn(N, D))


def test_what_is_kept_and_not_read_is_nothing():
    torch.manual_seed(0)
    model, x = Centre(follows=False), torch.randn(N, D)
    exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x)
    wrapped = clipping(model)
    for _ in range(3):
        step(wrapped, x)
    for name, total in clipped_sum(exact, C).items():
        assert relative_error(model.get_parameter(name).grad, total) < 1e-5


# --- losses and statistics that are no output of one number ---


class Losses(Net):
    how = ""

    def forward(self, x):
        h = torch.tanh(self.first(x))
        losses = self.last(h).square().sum(1)
        centred = h - h.mean(0)
        covariance = centred.t() @ centred / len(x)
        if self.how == "linear":
            return torch.stack([losses.sum(), h.sum()])
        if self.how == "two losses":
            return torch.stack([losses.sum(), covariance.square().sum()])
        if self.how == "a matrix":
            return covariance
        if self.how == "complex numbers":
            return torch.fft.fft(h, dim=0)
        self.balance = covariance.square().sum()
        return losses


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("two losses", "output 0 .*changes with another"),
        ("a matrix", "output 0 .*changes with another"),
        ("complex numbers", "output 0 .*several samples"),
        ("", "balance, an attribute.*changes with another"),
    ],
)
def test_losses_over_the_batch(how, what):
    torch.manual_seed(0)
    model = Losses()
    model.how = how
    wrapped = clipping(model)
    output = wrapped(torch.randn(N, D))
    loss = output.abs().sum() + (0 if how else model.balance)
    with pytest.raises(UnsupportedModuleError, match=f"made from {what}"):
        loss.backward()


@pytest.mark.parametrize("how", ["", "linear"])
def test_losses_of_samples_are_right(how):
    """Also beside one over the batch that nobody takes, and as a vector of several."""
    torch.manual_seed(0)
    model, x = Losses(), torch.randn(N, D)
    model.how = how
    exact = loop_over_samples(model, lambda m, x: m(x).sum(), x)
    clipping(model)(x).sum().backward()
    for name, total in clipped_sum(exact, C).items():
        assert relative_error(model.get_parameter(name).grad, total) < 1e-5
