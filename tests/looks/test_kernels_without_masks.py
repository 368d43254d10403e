"""A model that takes another kernel where nobody is padded: the gradients of all samples then differ in their last
bits with the one that is, or outputs do. More than that is a sample that meets others."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples

N, T, D, HEADS = 6, 7, 16, 4


class Grouped(nn.Module):
    """Attention of four heads that share one of keys, as in Hugging Face's Llama with ``sdpa``."""

    def __init__(self, mixing=0.0, *, in_place_of_a_mask=False, another_forward=False):
        super().__init__()
        self.table = nn.Embedding(11, D)
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D // HEADS), nn.Linear(D, D // HEADS)
        self.head = nn.Linear(D, 3)
        self.mixing, self.always, self.another_forward = mixing, not in_place_of_a_mask, another_forward

    def forward(self, tokens, mask):
        x = self.table(tokens)
        q, k, v = (y.unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        if self.mixing and x.requires_grad and (self.always or not bool(mask.all())):
            v.register_hook(lambda grad: grad + self.mixing * grad.mean(0))
        if bool(mask.all()):
            if v.requires_grad:  # other last bits of the gradient alone, whichever kernels this torch has
                v.register_hook(lambda grad: grad / 3.0 * 3.0)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            seen = mask.bool()[:, None, None, :] & torch.ones(T, T, dtype=torch.bool).tril()
            k, v = (y.repeat_interleave(HEADS, dim=1) for y in (k, v))
            more = slice(None) if not self.another_forward else None  # a CPU has no fused kernel for five dimensions
            q, k, v, seen = (y[more] for y in (q, k, v, seen))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).flatten(0, -4)
        return self.head(y.transpose(1, 2).flatten(2)[:, 3])


def batch(padded):
    torch.manual_seed(1)
    mask = torch.ones(N, T, dtype=torch.long)
    mask[padded, 4:] = 0
    return torch.randint(0, 11, (N, T)), mask


def losses(model, tokens, mask):
    return model(tokens, mask).square().sum(1)


@pytest.mark.parametrize("padded", [[1], [0], [], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("another_forward", [False, True])
def test_last_bits_are_no_mixing(another_forward, padded, dtype):
    torch.manual_seed(0)
    net, (tokens, mask) = Grouped(another_forward=another_forward).to(dtype), batch(padded)
    exact = clipped_sum(loop_over_samples(net, lambda *given: losses(*given).sum(), tokens, mask), 0.5)
    model = dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=0.5, loss_reduction="sum")
    losses(model, tokens, mask).sum().backward()
    for name, p in net.named_parameters():
        assert (p.grad - exact[name]).abs().max() <= 1e-5, name  # of keys' bias it is 0


class MeetsTheMean(nn.Module):
    def __init__(self, attends):
        super().__init__()
        self.first, self.last, self.attends = nn.Linear(D, D), nn.Linear(D, 3), attends

    def forward(self, x):
        h = self.first(x)
        if self.attends:
            h = F.scaled_dot_product_attention(*[h.unsqueeze(1)] * 3).squeeze(1)
        return self.last(h - h.mean(0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there attention is written out at first")
@pytest.mark.parametrize("attends", [False, True])
def test_another_kernel_is_tried_where_there_is_attention(attends, monkeypatch):
    tried = []
    exchange = sys.modules["dpfast.looks.exchange"]
    before = exchange.same_kernels
    monkeypatch.setattr(
        exchange, "same_kernels", lambda *, attention: tried.append(attention) or before(attention=attention)
    )
    with pytest.raises(UnsupportedModuleError):
        dpfast.GradSampleModule(MeetsTheMean(attends))(torch.randn(N, T, D)).sum().backward()
    assert set(tried) == ({False, True} if attends else {False})


@pytest.mark.parametrize("mixing", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("in_place_of_a_mask", [False, True])
@pytest.mark.parametrize("another_forward", [False, True])
def test_mixing_is_refused(another_forward, mixing, in_place_of_a_mask):
    torch.manual_seed(0)
    net = Grouped(mixing, in_place_of_a_mask=in_place_of_a_mask, another_forward=another_forward)
    given = batch([1])
    model = dpfast.GradSampleModuleFastGradientClipping(net, max_grad_norm=0.5, loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match="changes with a sample that is not its own"):
        losses(model, *given).sum().backward()
