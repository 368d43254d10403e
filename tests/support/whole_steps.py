"""Models and steps that a GPU takes without waiting."""

import torch
import torch.nn.functional as F
from cases import Mlp, Tied, Transformer
from torch import nn

import dpfast


class Images(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3, stride=2),
            nn.Flatten(),
            nn.Linear(36, 5),
        )


def tokens(n=6, t=9):
    return torch.randint(0, 30, (n, t))


MODELS = {
    "transformer": (Transformer, tokens),
    "tied": (Tied, tokens),
    "mlp": (Mlp, lambda: torch.randn(6, 12)),
    "images": (Images, lambda: torch.randn(6, 3, 8, 8)),
}
WRAPPERS = {
    "materialize": dpfast.GradSampleModule,
    "one pass": dpfast.GradSampleModuleFastGradientClipping,
    "per layer": lambda m: dpfast.GradSampleModuleFastGradientClipping(
        m, norm_clipper=dpfast.ConstantPerLayerClipper(0.1)
    ),
    "two passes": lambda m: dpfast.GradSampleModuleFastGradientClipping(m, passes=2),
}


def step(wrapped, x, y):
    losses = F.cross_entropy(wrapped(x).flatten(1), y, reduction="none")
    losses.mean().backward(retain_graph=isinstance(wrapped, dpfast.GradSampleModuleFastGradientClipping))
    if getattr(wrapped, "passes", 1) == 2:
        wrapped.zero_grad()
        wrapped.disable_hooks()
        (losses * wrapped.get_clipping_coef()).sum().backward()
        wrapped.enable_hooks()
