"""Documents packed into rows, and a model that masks attention by document."""

import torch
import torch.nn.functional as F
from torch import nn

from dpfast.testing import loop_over_samples

VOCABULARY, T, LENGTHS = 30, 16, [5, 9, 3, 7, 1]
ROWS = [[0, 1], [2, 3, 4]]


def packed(seed=0):
    """(tokens, positions, ids, labels), (2, T) each, and the documents."""
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    tokens, positions = (torch.zeros(2, T, dtype=torch.int64) for _ in range(2))
    ids, labels = torch.full((2, T), -1), torch.full((2, T), -100)
    for row, members in enumerate(ROWS):
        at = 0
        for d in members:
            own = slice(at, at + LENGTHS[d])
            tokens[row, own], positions[row, own], ids[row, own] = documents[d], torch.arange(LENGTHS[d]), d
            labels[row, at : at + LENGTHS[d] - 1] = documents[d][1:]
            at += LENGTHS[d]
        positions[row, at:] = torch.arange(T - at)
    return (tokens, positions, ids, labels), documents


def losses_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none").view(
        labels.shape
    )


class Packed(nn.Module):
    """A block whose attention looks at ``mixes`` what is not its own document's."""

    def __init__(self, d=12, *, mixes="nothing", folds=False):
        super().__init__()
        self.mixes, self.folds = mixes, folds
        self.tokens, self.positions = nn.Embedding(VOCABULARY, d), nn.Embedding(T, d)
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d, bias=False)
        self.head = nn.Linear(d, VOCABULARY)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, positions):
        places = self.positions(positions)
        x = self.tokens(tokens.flip(1) if self.mixes == "order" else tokens)
        x = x + (places.flip(1) if self.mixes == "positions" else places)
        document = (positions == 0).cumsum(1)
        mask = document[:, None, :] == document[:, :, None]
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        causal = mask.new_ones(mask.shape[1:]).tril()
        mask = causal.expand_as(mask) if self.mixes == "attention" else mask & causal
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        if self.mixes == "behind":
            x = x + self.head.weight[0] * 0 + x.mean(1, keepdim=True)
        if self.folds:
            return self.head(x.flatten(0, 1)).view(*tokens.shape, -1)
        logits = self.head(x)
        return logits + 0.01 * logits.cumsum(1) if self.mixes == "logits" else logits


class NobodySees(Packed):
    """Nobody's tokens see all, as where a mask may have no row without an entry."""

    def forward(self, tokens, documents):
        q, k, v = self.qkv(self.norm(self.tokens(tokens))).chunk(3, dim=-1)
        mask = (documents[:, None, :] == documents[:, :, None]) | (documents[:, :, None] < 0)
        x = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return self.head(x.flatten(0, 1)).view(*tokens.shape, -1) if self.folds else self.head(x)


def document_loss(model, tokens, labels):
    return losses_of(model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens)), labels).sum()


def by_document(model, documents):
    """Each document's gradients, alone in its row."""
    found = []
    for document in documents:
        labels = torch.cat([document[1:], torch.tensor([-100])])
        found.append(loop_over_samples(model, document_loss, document[None], labels[None]))
    return {name: torch.cat([g[name] for g in found]) for name in found[0]}
