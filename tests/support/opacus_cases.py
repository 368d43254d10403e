"""Models that Opacus's own hooks can take (nothing in place, no tied weights), a data set, and training."""

import opacus
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpfast.modes.accumulation import Left, leave
from dpfast.opacus import PrivacyEngine


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


def clipped_by_hand(parameters, sums, sensitivity):
    """Puts sums there as a private backward pass leaves them: a sample moves them by ``sensitivity`` at most."""
    parameters = list(parameters)
    for p, total in zip(parameters, sums, strict=True):
        p.grad = total
    leave(parameters, Left(1, sensitivity))


def loader(name, n=24, batch_size=6):
    _, x, y = opacus_example(name, n)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


PRIVATE_C = 0.5


def private(mode, name="mlp", engine=None, sigma=0.0, model=None, max_grad_norm=PRIVATE_C, seed=1, **options):
    """(engine, model, optimizer, loss function, data loader), everything seeded; mode None is Opacus's engine,
    seed None leaves the noise to it."""
    model = opacus_example(name)[0] if model is None else model
    if engine is None:
        engine = opacus.PrivacyEngine(accountant="rdp") if mode is None else PrivacyEngine(accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(1 if seed is None else seed)  # the sampler's
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader(name),
        noise_multiplier=sigma,
        max_grad_norm=max_grad_norm,
        noise_generator=None if seed is None else torch.Generator().manual_seed(seed),
        **({} if mode is None else {"grad_sample_mode": mode}),
        **options,
    )
    module, optimizer, *criterion, data_loader = made
    return engine, module, optimizer, criterion[0] if criterion else nn.CrossEntropyLoss(), data_loader


def train(module, optimizer, criterion, batches, zero_first=True):
    sizes = []
    for x, y in batches:
        if zero_first:
            optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        sizes.append(len(y))
    return sizes


def weights(module):
    return {name.removeprefix("_module."): p.detach().clone() for name, p in module.named_parameters()}
