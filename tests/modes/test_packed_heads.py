"""Heads that pick rows of packed documents by a mask, and experts: each document is clipped as if it stood alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping as Module
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

VOCABULARY, D, E = 20, 8, 3
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1], [2, 2, 3, 3, 3, 3, 3, 3], [4, 4, 4, 4, 4, 4, 4, 4]])


class Body(nn.Module):
    """(N, T) -> (N, T, D); attention within a document."""

    def __init__(self):
        super().__init__()
        self.tokens, self.qkv, self.norm = nn.Embedding(VOCABULARY, D), nn.Linear(D, 3 * D), nn.LayerNorm(D)

    def forward(self, tokens, document):
        x = self.tokens(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mask = document[:, None, :] == document[:, :, None]
        return self.norm(x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Masked(nn.Module):
    """Logits of the masked tokens, whose number is 0, (M, V)."""

    def __init__(self, mixes=False):
        super().__init__()
        self.body, self.mixes = Body(), mixes
        self.head = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D), nn.Linear(D, VOCABULARY))

    def forward(self, tokens, document):
        x = self.body(tokens, document)[tokens == 0]
        return self.head(x - 0.5 * x.mean(0) if self.mixes else x)


class Experts(nn.Module):
    """Each token goes through one of a list."""

    def __init__(self):
        super().__init__()
        self.body, self.gate = Body(), nn.Linear(D, E)
        self.ffns = nn.ModuleList(nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, D)) for _ in range(E))
        self.head = nn.Linear(D, VOCABULARY)

    def forward(self, tokens, document):
        hidden = self.body(tokens, document)
        x = hidden.flatten(0, 1)
        weight, index = self.gate(x).softmax(1).max(1)
        y = torch.zeros_like(x)
        for e, ffn in enumerate(self.ffns):
            (rows,) = torch.where(index == e)
            y = y.index_add(0, rows, weight[rows, None] * ffn(x[rows]))
        return self.head(hidden + y.view_as(hidden))[tokens == 0]


def loss(model, tokens, document):
    return F.cross_entropy(model(tokens, document), tokens[tokens == 0] + 3, reduction="sum")


def batch(seed):
    tokens = torch.randint(0, VOCABULARY, IDS.shape, generator=torch.Generator().manual_seed(seed))
    tokens[:, ::3] = 0
    return tokens, IDS


def by_document(model, tokens):
    found = []
    for d in range(5):
        own = tokens[IDS.eq(d)][None]
        found.append(loop_over_samples(model, loss, own, torch.zeros_like(own)))
    return {name: torch.cat([g[name] for g in found]) for name in found[0]}


def step(module, tokens, ids):
    with module.units(ids, 5) as units:
        losses = F.cross_entropy(module(tokens, ids), tokens[tokens == 0] + 3, reduction="none")
        units.sums(torch.zeros(ids.shape).masked_scatter(tokens == 0, losses)).sum().backward()


@pytest.mark.parametrize("model", [Masked, Experts])
def test_documents_have_the_gradients_that_they_have_alone(model):
    model = model()
    module = None
    for seed in range(4):
        tokens, ids = batch(seed)
        exact = by_document(model, tokens)
        norms = norms_of(exact)
        limit = float(norms.median())
        module = module or Module(copy.deepcopy(model), loss_reduction="sum", max_grad_norm=limit)
        module.zero_grad()
        module.max_grad_norm = limit
        step(module, tokens, ids)
        assert relative_error(module.get_norm_sample(), norms) <= 1e-5
        total = clipped_sum(exact, module.max_grad_norm)
        for name, p in module._module.named_parameters():
            assert (p.grad - total[name]).norm() <= 3e-5 * max(total[name].norm(), 1e-2), name


def test_a_head_that_mixes_its_rows_is_refused():
    module = Module(Masked(mixes=True), loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match=r"head\.0 .*unit"):
        step(module, *batch(0))
