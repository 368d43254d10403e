"""The layers that the kernels are measured on, named after the models they come from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The verbs that are measured, and the name that tile table and cost model have for each.
KERNEL = {
    "grad_sample": "outer_product",
    "direct norm": "outer_norm",
    "Gram norm": "gram_norm",
    "weighted sum": "weighted_sum",
    "lookup norm": "lookup_norm",
}


@dataclass(frozen=True)
class Layer:
    """A linear layer of one step: N samples of T positions, D in-features, P out-features.

    `factors` > 1: that many layers of these sizes at once, as LoRA has them. `lookup`: an embedding instead, of P rows
    of D features, whose gradient is (P, D) too.
    """

    name: str
    N: int
    T: int
    D: int
    P: int
    dtype: torch.dtype = torch.bfloat16
    factors: int = 1
    lookup: bool = False

    def inputs(self, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """(activations (N, T, D), backprops (N, T, P), clip factors (N,)), random; of an embedding, (indices (N, T),
        backprops (N, T, D), clip factors), every second index one of a hundred, as words are.
        """
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        if self.lookup:
            a = torch.randint(self.P, (self.N, self.T), generator=generator, device=device)
            a[:, ::2] %= 100
            b = draw(self.N, self.T, self.D).to(self.dtype)
        else:
            a, b = (draw(self.N, self.T, size).to(self.dtype) for size in (self.D, self.P))
        return a, b, torch.rand(self.N, generator=generator, device=device) + 0.1


LAYERS = (
    Layer("GPT-2 qkv", 8, 1024, 768, 2304),
    Layer("GPT-2 up", 8, 1024, 768, 3072),
    Layer("GPT-2 up, T=256", 32, 256, 768, 3072),
    Layer("GPT-2 head", 4, 1024, 768, 50257),
    Layer("GPT-2 tokens", 8, 1024, 768, 50257, lookup=True),
    Layer("Llama-3.2-1B q", 8, 1024, 2048, 2048),
    Layer("Llama-3.2-1B up", 8, 1024, 2048, 8192),
    Layer("Llama-3.2-1B head", 2, 1024, 2048, 128256),
    Layer("Llama-3.2-1B tokens", 8, 1024, 2048, 128256, lookup=True),
    Layer("Llama-8B q", 4, 2048, 4096, 4096),
    Layer("Llama-8B up", 4, 2048, 4096, 14336),
    Layer("ViT-L up", 64, 197, 1024, 4096),
    Layer("ResNet stem", 32, 12544, 147, 64),
    Layer("ResNet 3×3", 32, 784, 1152, 128),
    Layer("LoRA A", 16, 1024, 4096, 8),
    Layer("LoRA B", 16, 1024, 8, 4096),
    Layer("8192×8192", 4, 2048, 8192, 8192),
    Layer("1024×1024, N=1", 1, 8192, 1024, 1024),
    Layer("GPT-2 up, fp32", 8, 1024, 768, 3072, torch.float32),
    Layer("LoRA A × 64", 16, 1024, 4096, 8, factors=64),
)
