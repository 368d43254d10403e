"""Whether documents meet is looked at again: masks that are left out later, or for longer rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping as Module
from dpfast.errors import UnsupportedModuleError


class MaskedUntil(nn.Module):
    """Attention by document, whose mask is left out where ``leaves_out(model, T)`` says so."""

    def __init__(self, leaves_out):
        super().__init__()
        self.leaves_out = leaves_out
        self.emb, self.qkv, self.out = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 20)
        self.forgets = False

    def forward(self, tokens, documents):
        n, t = tokens.shape
        q, k, v = self.qkv(self.emb(tokens)).view(n, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = torch.ones(t, t, dtype=torch.bool).tril().expand(n, 1, t, t)
        if not self.leaves_out(self, t):
            mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(n, t, 8))


def step_of_two_documents(module, t):
    documents = torch.arange(2).repeat_interleave(t // 2).repeat(3, 1) + 2 * torch.arange(3)[:, None]
    tokens = torch.randint(0, 20, (3, t))
    with module.units(documents, 6) as units:
        losses = F.cross_entropy(module(tokens, documents).flatten(0, 1), tokens.flatten(), reduction="none")
        units.sums(losses.view(tokens.shape)).sum().backward()
    module.zero_grad()


def test_a_mask_that_longer_rows_do_not_have():
    """It was looked at once for each kind of input, and rows of another length are of the same kind."""
    torch.manual_seed(0)
    module = Module(MaskedUntil(lambda model, t: t > 4), loss_reduction="sum")
    for _ in range(3):  # the next forward pass is none that is looked at by its number
        step_of_two_documents(module, 4)
    with pytest.raises(UnsupportedModuleError, match="units meet"):
        step_of_two_documents(module, 8)


def test_a_mask_that_is_left_out_later():
    torch.manual_seed(0)
    module = Module(MaskedUntil(lambda model, t: model.forgets), loss_reduction="sum")
    for _ in range(3):
        step_of_two_documents(module, 4)
    module._module.forgets = True
    with pytest.raises(UnsupportedModuleError, match="units meet"):
        for _ in range(8):
            step_of_two_documents(module, 4)
