"""Weights that a forward makes of parameters in ways that no function of torch's shows, attention on weights, and a
backward pass in which samples meet."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

D = 4


class BatchMean(torch.autograd.Function):
    """Its gradient is less that of the batch."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0, keepdim=True)


class Meets(nn.Module):
    """Where samples do, by a function: one with a backward of its own, say."""

    def __init__(self, mixes):
        super().__init__()
        self.mixes = mixes

    def forward(self, x):
        return self.mixes(x)


class Rounded(torch.autograd.Function):
    """With the gradient of what it rounds."""

    @staticmethod
    def forward(ctx, x):
        return (4.0 * x).round() / 4.0

    @staticmethod
    def backward(ctx, grad):
        return grad


class Product(torch.autograd.Function):
    """Of what LoHa makes its weights of."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * (y + 0.5 * y)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * (y + 0.5 * y), grad * x * 1.5


class OwnBackwards(nn.Module):
    """Weights out of functions with a backward of their own."""

    reentrant: bool | None = None

    def __init__(self):
        super().__init__()
        self.lin, self.factors = nn.Linear(D, D), nn.ParameterDict({"a": torch.randn(D, D), "b": torch.randn(D)})

    def weight(self):
        size = self.lin.weight.abs().mean().detach()
        return Product.apply(Rounded.apply(self.lin.weight / size) * size + self.factors["a"], self.factors["b"])

    def forward(self, x):
        weight = self.weight() if self.reentrant is None else checkpoint(self.weight, use_reentrant=self.reentrant)
        return F.linear(x, weight, self.lin.bias)


class AttentionInFull(nn.Module):
    """torch's function of attention, on other modules' weights (WavLM, the pool of CLIP)."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(D, D, bias=i != 1) for i in range(4))

    def forward(self, x):
        q, k, v, out = self.parts
        x = x.transpose(0, 1)
        biases = torch.cat([q.bias, v.bias, v.bias])  # a key's has no gradient
        separate = {"q_proj_weight": q.weight, "k_proj_weight": k.weight, "v_proj_weight": v.weight}
        separate["use_separate_proj_weight"] = True
        mask = torch.ones(len(x), len(x)).tril() == 0
        given = (D, 2, None, biases, None, None, False, 0.0, out.weight, out.bias)
        y, weights = F.multi_head_attention_forward(x, x, x, *given, attn_mask=mask, **separate)
        packed = (D, 2, torch.cat([k.weight, q.weight, v.weight]), None, *given[4:])
        z, nothing = F.multi_head_attention_forward(y, x, x, *packed, need_weights=False)
        assert nothing is None
        return torch.cat([z.transpose(0, 1), weights], -1)


class BackwardOfSamples(OwnBackwards):
    """Samples go through such a function too."""

    def forward(self, x):
        return self.lin(Product.apply(x, self.factors["b"]))


class BackwardInCheckpoint(OwnBackwards):
    """What its backward needs would have to be made again for all samples at once."""

    reentrant = False
