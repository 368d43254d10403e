"""Heads for kinds of samples, on what is made of whole samples: pooled states, and what a frozen network gives."""

import copy

import pytest
import torch
import torch.nn.functional as F
from in_both_modes import check
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastError
from dpfast.testing import loop_over_samples, norms_of, relative_error

D, T = 8, 5


class Heads(nn.Module):
    """A head for each kind."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)) for _ in "ab")

    def forward(self, x, kinds):
        scores = x.new_zeros(*x.shape[:-1], 2)
        for i, head in enumerate(self.heads):
            mask = kinds == i
            if len(mask.nonzero()):
                scores[mask] = head(x[mask])
        return scores


BODIES = {
    "linear": lambda: nn.Linear(D, D),
    "transformer": lambda: nn.TransformerEncoderLayer(D, 2, D, dropout=0.0, batch_first=True),
    "gru": lambda: nn.GRU(D, D, batch_first=True),
}
POOLED = {
    "first": lambda x, tokens: x[:, 0],
    "mean": lambda x, tokens: x.mean(1),
    "maximum": lambda x, tokens: x.max(1).values,
    "masked mean": lambda x, tokens: (x * (tokens > 0)[..., None].float()).sum(1) / (tokens > 0).sum(1, keepdim=True),
    "last": lambda x, tokens: x[torch.arange(len(x)), (tokens > 0).sum(1) - 1],
    "attention": lambda x, tokens: torch.einsum("nt,ntd->nd", torch.softmax(x.sum(-1), 1), x),
    "of its own tokens": lambda x, tokens: x.gather(1, (tokens[:, :1] % T)[..., None].expand(-1, 1, D))[:, 0],
    "largest": lambda x, tokens: x.topk(2, 1).values.mean(1),
    "flat": lambda x, tokens: x.flatten(1)[:, :D],
    "transposed": lambda x, tokens: F.avg_pool1d(torch.cumsum(x, 1).transpose(1, 2), T)[..., 0],
}


class Pooled(nn.Module):
    """The kind stands in a token beside: 1 to 6 are words."""

    def __init__(self, body, pool, *, frozen, heads=None):
        super().__init__()
        self.table, self.body, self.pool = nn.Embedding(8, D), BODIES[body](), POOLED[pool]
        self.heads = heads or Heads()
        for module in (self.table, self.body) if frozen else ():
            module.requires_grad_(False)

    def forward(self, tokens):
        words, kinds = tokens[:, 1:], tokens[:, 0]
        x = self.body(self.table(words))
        return self.heads(self.pool(x[0] if isinstance(x, tuple) else x, words), kinds)


def batches(*sizes):
    return [torch.cat([torch.randint(2, (n, 1)), torch.randint(1, 7, (n, T))], 1) for n in sizes]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_the_mean_of_a_sample(body, frozen):
    check(Pooled(body, "mean", frozen=frozen), *batches(6, 5, 1, 4))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("pool", [name for name in POOLED if name != "mean"])
def test_what_else_is_made_of_each_sample(pool, frozen):
    check(Pooled("linear", pool, frozen=frozen), *batches(6, 5, 4))


class OfTokens(Heads):
    def __init__(self, between):
        super().__init__()
        self.table, self.body, self.between = nn.Embedding(8, D).requires_grad_(False), BODIES["transformer"](), between
        self.body.requires_grad_(False)

    def forward(self, tokens):
        return super().forward(self.between(self.body(self.table(tokens[:, 1:]))), tokens[:, 1:] % 2).sum(1)


@pytest.mark.parametrize("between", [lambda x: x, lambda x: torch.cumsum(x, 1)], ids=["as given", "summed"])
def test_tokens_of_a_frozen_network(between):
    check(OfTokens(between), *batches(6, 5, 4))


class Checkpointed(Heads):
    def forward(self, x, kinds):
        return checkpoint(super().forward, x, kinds, use_reentrant=False)


def test_heads_in_a_checkpoint():
    check(Pooled("linear", "mean", frozen=False, heads=Checkpointed()), *batches(6, 5, 4))


def inverse(order):
    return order.argsort()


def written(z, order):
    y = z * 1
    y[:].copy_(z[order])
    return y


# What the order may be made by. Two of them are followed, all others are refused: none may be taken for the batch's.
FOLLOWED = {"x[order]": lambda z, o, k: z[o], "index_select": lambda z, o, k: z.index_select(0, o)}
ORDERS = FOLLOWED | {
    "cat of masks": lambda z, o, k: torch.cat([z[k == 0], z[k == 1]]),
    "gather": lambda z, o, k: z.gather(0, o[:, None].expand_as(z)),
    "take_along_dim": lambda z, o, k: torch.take_along_dim(z, o[:, None], 0),
    "embedding": lambda z, o, k: F.embedding(o, z),
    "of a followed one": lambda z, o, k: F.embedding(o, torch.tanh(z)),
    "torch.embedding": lambda z, o, k: torch.embedding(z, o),
    "embedding_bag": lambda z, o, k: F.embedding_bag(o[:, None], z, mode="sum"),
    "one by one": lambda z, o, k: torch.stack([z[i] for i in o.tolist()]),
    "select": lambda z, o, k: torch.stack([z.select(0, i) for i in o.tolist()]),
    "unbind": lambda z, o, k: torch.stack([z.unbind()[i] for i in o.tolist()]),
    "split": lambda z, o, k: torch.cat([z.split(1)[i] for i in o.tolist()]),
    "narrow": lambda z, o, k: torch.cat([z.narrow(0, i, 1) for i in o.tolist()]),
    "x.T[:, order].T": lambda z, o, k: z.T[:, o].T,
    "transpose": lambda z, o, k: z.transpose(0, 1).index_select(1, o).transpose(0, 1),
    "permute": lambda z, o, k: z.permute(1, 0)[:, o].permute(1, 0),
    "a view": lambda z, o, k: z.view(1, *z.shape).index_select(1, o).view(z.shape),
    "entries": lambda z, o, k: torch.take(z, o[:, None] * D + torch.arange(D)),
    "repeat_interleave": lambda z, o, k: torch.cat([z.repeat_interleave((k == i).long(), 0) for i in (0, 1)]),
    "masked_select": lambda z, o, k: torch.cat([torch.masked_select(z, (k == i)[:, None]).view(-1, D) for i in (0, 1)]),
    "index_copy": lambda z, o, k: torch.zeros_like(z).index_copy(0, inverse(o), z),
    "scatter": lambda z, o, k: torch.zeros_like(z).scatter(0, inverse(o)[:, None].expand_as(z), z),
    "index_put": lambda z, o, k: torch.zeros_like(z).index_put((inverse(o),), z),
    "by names": lambda z, o, k: torch.index_select(input=z, dim=0, index=o),
    "gather by names": lambda z, o, k: torch.gather(input=z, dim=0, index=o[:, None].expand_as(z)),
    "a list's": lambda z, o, k: torch.stack(torch._foreach_add([z[i] for i in o.tolist()], 0.0)),
    "copy_": written,
    "an operator": lambda z, o, k: torch.ops.aten.index.Tensor(z, [o]),
    "NumPy": lambda z, o, k: torch.from_numpy(z.detach().numpy()[o.numpy()]),
}


class InOrder(Heads):
    def __init__(self, how, *, frozen):
        super().__init__()
        self.table, self.how = nn.Embedding(8, D).requires_grad_(not frozen), ORDERS[how]
        self.body = nn.Identity() if frozen else nn.Linear(D, D)  # what that gives is followed

    def forward(self, tokens):
        kinds = tokens[:, 0]
        order = torch.argsort(kinds, stable=True)
        z = self.body(self.table(tokens[:, 1:]).mean(1))
        z = written(z, order) if self.how is written else self.how(z, order, kinds)
        return super().forward(z, kinds[order])[inverse(order)]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ORDERS)
def test_an_order_that_the_data_makes_is_followed_or_refused(how, frozen):
    """The first batches are sorted, so that no look shows it."""
    torch.manual_seed(0)
    plain = InOrder(how, frozen=frozen)
    wrapped = GradSampleModuleFastGradientClipping(copy.deepcopy(plain), max_grad_norm=1e6, loss_reduction="sum")
    done = 0
    for i, tokens in enumerate(batches(6, 6, 6, 5, 7)):
        x = tokens[tokens[:, 0].argsort()] if i < 2 else tokens
        exact = norms_of(loop_over_samples(plain, lambda m, x: m(x).square().sum(), x))
        wrapped.zero_grad()
        try:
            wrapped(x).square().sum().backward()
        except DpfastError:
            continue
        assert relative_error(wrapped.get_norm_sample(), exact) <= 1e-5
        done += 1
    assert how not in FOLLOWED or done == 5


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "mix",
    [lambda z: z.roll(1, 0), lambda z: z.flip(0), lambda z: z - z.mean(0), lambda z: z.T.reshape(z.shape)],
    ids=["roll", "flip", "centred", "wrong shape"],
)
def test_samples_that_meet_before_are_refused(mix, frozen, monkeypatch):
    monkeypatch.setitem(POOLED, "mixed", lambda x, tokens: mix(x.mean(1)))
    wrapped = GradSampleModuleFastGradientClipping(Pooled("linear", "mixed", frozen=frozen), max_grad_norm=1.0)
    with pytest.raises(DpfastError):
        wrapped(*batches(6)).sum().backward()
