"""Models that Opacus's own hooks can take (nothing in place, no tied weights), and a data set."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """Embedding, attention by hand, LayerNorms, a head."""

    def __init__(self, vocabulary=40, d=16, classes=5):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, d)
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d, bias=False)
        self.head = nn.Linear(d, classes)

    def forward(self, tokens):
        x = self.tokens(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return self.head((x + self.down(F.gelu(self.up(x)))).mean(1))


def perceptron():
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 5))


def opacus_example(name, n=6, magnitude=1.0):
    """(model, inputs, targets); the same weights and data at every call."""
    torch.manual_seed(0)
    model = {"block": Block, "mlp": perceptron}[name]()
    x = torch.randint(0, 40, (n, 9)) if name == "block" else torch.randn(n, 12) * magnitude
    return model, x, torch.randint(0, 5, (n,))


def loader(name, n=24, batch_size=6):
    _, x, y = opacus_example(name, n)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)
