"""The data and the models of `digits.py`: real 8×8 scans of handwritten digits, a transformer and an MLP."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

TEST_SIZE = 360  # of 1797; the rest, 1437 scans, is what training must keep private


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The scans that ship with scikit-learn, split the same way every time: training set, test set.

    The scaling uses no statistics of the data: a mean over the scans would itself have to be made private.
    """
    pixels, labels = load_digits(return_X_y=True)
    pixels = pixels / 8 - 1  # 0..16 becomes -1..1
    split = train_test_split(pixels, labels, test_size=TEST_SIZE, random_state=0, stratify=labels)
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in split)
    return TensorDataset(train_x.float(), train_y), TensorDataset(test_x.float(), test_y)


class Attention(nn.Module):
    """Multi-head self-attention out of four linear layers.

    Queries, keys and values have no bias: softmax does not see a bias on the keys, so its gradient is exactly
    zero and would only add noise.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)  # (N, heads, T, width / heads)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block that normalizes first: attention, then an MLP, each added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class VisionTransformer(nn.Module):
    """Reads a digit as 16 patches of 2×2 pixels."""

    PATCHES = 16

    def __init__(self, width: int = 64, heads: int = 4, blocks: int = 2):
        super().__init__()
        self.patch = nn.Linear(4, width)
        self.position = nn.Embedding(self.PATCHES, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        # (N, row, y, column, x) -> (N, patch, 4)
        patches = pixels.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, self.PATCHES, 4)
        # One row of indices a sample, so that each sample has its own gradient of the position table.
        # Opacus's ghost clipping needs them contiguous.
        position = torch.arange(self.PATCHES, device=pixels.device).expand(len(pixels), -1).contiguous()
        x = self.blocks(self.patch(patches) + self.position(position))
        return self.head(self.norm(x).mean(dim=1))


class MLP(nn.Sequential):
    """Reads a digit as 64 numbers."""

    def __init__(self, width: int = 256):
        super().__init__(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))


MODELS = {"vision transformer": VisionTransformer, "MLP": MLP}
