"""The models and batches that the step is measured on.

A workload's ``losses(model, *batch)`` gives one loss per sample, (N,); the training loss is their mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """One row of the table: ``build()`` makes the model, ``batch()`` a batch that fits it."""

    name: str
    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    losses: Callable[..., Tensor]
    check_samples: int  # how many samples of the batch the fp64 oracle goes through
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    rounds_itself: bool = False  # its own forward and backward round more than what a leg may be off


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, causal: bool = True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class GptBlock(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = Attention(d, heads)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2's shape: learned positions, LayerNorm in front, GELU; the head is not tied."""

    def __init__(self, vocabulary: int, d: int, blocks: int, t: int, heads: int = 4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, d), nn.Embedding(t, d)
        self.blocks = nn.Sequential(*(GptBlock(d, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        # Repeated, not expanded: Opacus's ghost clipping fails on expanded indices.
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


class RmsNorm(nn.Module):
    """Frozen in the LoRA workload; in the 1B model torch's own nn.RMSNorm stands in its place."""

    def __init__(self, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class LoraLinear(nn.Module):
    """``y = W x + (α / r)·B A x`` with W frozen."""

    def __init__(self, d: int, p: int, rank: int):
        super().__init__()
        self.base = nn.Linear(d, p, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(d, rank, bias=False), nn.Linear(rank, p, bias=False)
        self.scale = 16 / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * self.scale


class LlamaBlock(nn.Module):
    def __init__(self, d: int, hidden: int, heads: int, linear: Callable[[int, int], nn.Module], norm: Callable):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = norm(d), norm(d)
        self.q, self.k, self.v, self.o = (linear(d, d) for _ in range(4))
        self.gate, self.up, self.down = linear(d, hidden), linear(d, hidden), linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = _rotated(q), _rotated(k)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotated(x: Tensor) -> Tensor:
    """Rotary positions on (N, heads, T, width)."""
    t, half = x.shape[-2], x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(t, device=x.device)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1)


class Llama(nn.Module):
    """Llama's shape; with ``rank``, LoRA on every linear layer of the blocks and the rest frozen."""

    def __init__(self, vocabulary: int, d: int, hidden: int, blocks: int, heads: int, rank: int = 0):
        super().__init__()
        norm = RmsNorm if rank else nn.RMSNorm

        def linear(d: int, p: int) -> nn.Module:
            return LoraLinear(d, p, rank) if rank else nn.Linear(d, p, bias=False)

        self.tokens = nn.Embedding(vocabulary, d)
        self.blocks = nn.Sequential(*(LlamaBlock(d, hidden, heads, linear, norm) for _ in range(blocks)))
        self.norm, self.head = norm(d), nn.Linear(d, vocabulary, bias=False)
        if rank:
            self.tokens.requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


def mlp(width: int, layers: int) -> nn.Module:
    parts = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def cnn(width: int) -> nn.Module:
    def block(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.ReLU()]

    return nn.Sequential(
        *block(3, width),
        *block(width, width),
        nn.MaxPool2d(2),
        *block(width, 2 * width),
        nn.MaxPool2d(2),
        *block(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def language_losses(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy per sample, the mean over its positions."""
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def class_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def square_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean(1)


def _text(n: int, t: int, vocabulary: int, device: str = "cpu") -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randint(0, vocabulary, (n, t), device=device) for _ in range(2))


def gpt(name: str, n: int, t: int, d: int, blocks: int, vocabulary: int, check: int, **options) -> Workload:
    title = f"GPT-like, d={d}, {blocks} block{'s' * (blocks > 1)}, T={t}, N={n}, vocabulary {vocabulary}"
    heads = options.pop("heads", 4)
    batch = _text(n, t, vocabulary, options.get("device", "cpu"))
    return Workload(name, title, lambda: Gpt(vocabulary, d, blocks, t, heads), batch, language_losses, check, **options)


_GPU = {"device": "cuda", "dtype": torch.bfloat16}

WORKLOADS = {
    w.name: w
    for w in (
        gpt("gpt", n=16, t=128, d=256, blocks=4, vocabulary=1000, check=16),
        gpt("long", n=4, t=1024, d=128, blocks=1, vocabulary=1000, check=4),
        Workload(
            "mlp",
            "MLP, 4 × Linear 1024, N=256",
            lambda: mlp(1024, 4),
            lambda: (torch.randn(256, 1024), torch.randn(256, 1024)),
            square_losses,
            8,
        ),
        Workload(
            "lora",
            "LoRA rank 8 on a frozen Llama-like base, d=256, 4 blocks, T=256, N=8",
            lambda: Llama(1000, 256, 688, 4, 4, rank=8),
            _text(8, 256, 1000),
            language_losses,
            8,
        ),
        Workload(
            "cnn",
            "CNN, 32×32, width 32, GroupNorm, N=64",
            lambda: cnn(32),
            lambda: (torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))),
            class_losses,
            8,
        ),
        gpt("gpt2-256", n=16, t=256, d=768, blocks=12, vocabulary=50257, check=1, heads=12, **_GPU),
        gpt("gpt2-1024", n=4, t=1024, d=768, blocks=12, vocabulary=50257, check=1, heads=12, **_GPU),
        Workload(
            "llama-1b",
            "Llama-like 1B, bf16, T=1024, N=2",
            lambda: Llama(32000, 2048, 5632, 22, 32),
            _text(2, 1024, 32000, "cuda"),
            language_losses,
            1,
            **_GPU,
        ),
    )
}
