"""A character model of two transformer blocks, trained on the beginning of Alice in Wonderland: plain, then private.

    python examples/characters.py [--steps 60] [--epsilon 8]

The text, in `examples/data/`, is Lewis Carroll's of 1865 and in the public domain. A sample is a run of 16 characters,
and ε is for one such run more or less. Prints the loss on the last tenth of the text, which no model has seen, what
each model writes by itself, and ε. Sixteen kilobytes are little to learn from with privacy: the private model knows
letters and which follow which, where the plain one begins to spell.
"""

import argparse
import math
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from opacus.accountants.utils import get_noise_multiplier
from torch import Tensor, nn

import dpfast
from dpfast.opacus import DPOptimizerFast

TEXT = Path(__file__).resolve().parent / "data" / "alice.txt"
LENGTH, WIDTH, BLOCKS, HEADS = 16, 32, 2, 4
RATE = 0.5  # with which each sample is drawn for a step
DELTA = 1e-4
MAX_GRAD_NORM = 1.0
LEARNING_RATE = 1e-2


class Block(nn.Module):
    """Causal attention and a perceptron, each on a normed input and added to it."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm_1(x)).chunk(3, dim=2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class CharacterModel(nn.Module):
    """GPT in small; the head is the embedding's own weight."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).transpose(1, 2), y)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, sigma: float | None) -> float:
    """Trains in place, privately with noise ``sigma``, plainly with None. Returns ε."""
    draws, accountant = torch.Generator().manual_seed(0), RDPAccountant()
    if sigma is None:
        optimizer, called = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE), model
    else:
        called = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=MAX_GRAD_NORM)
        optimizer = DPOptimizerFast(
            torch.optim.Adam(model.parameters(), lr=LEARNING_RATE),
            noise_multiplier=sigma,
            max_grad_norm=MAX_GRAD_NORM,
            expected_batch_size=RATE * len(x),
        )
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=RATE))
    for _ in range(steps):
        drawn = torch.rand(len(x), generator=draws) < RATE  # Poisson sampling, which ε counts on
        optimizer.zero_grad()
        loss_of(called, x[drawn], y[drawn]).backward()
        optimizer.step()
    return math.inf if sigma is None else accountant.get_epsilon(DELTA)


@torch.no_grad()
def write(model: nn.Module, letters: str, start: str = "alice ", number: int = 120) -> str:
    """Goes on from ``start``, a character at a time."""
    draws = torch.Generator().manual_seed(0)
    codes = [letters.index(letter) for letter in start]
    for _ in range(number):
        chances = model(torch.tensor([codes[-LENGTH:]]))[0, -1].softmax(0)
        codes.append(int(torch.multinomial(chances, 1, generator=draws)))
    return "".join(letters[code] for code in codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--epsilon", type=float, default=8.0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Optimal order is the largest alpha")  # the accountant's first guess
    torch.set_num_threads(1)
    text = " ".join(TEXT.read_text().lower().split())
    letters = "".join(sorted(set(text)))
    codes = torch.tensor([letters.index(letter) for letter in text])
    windows = codes[: len(codes) // LENGTH * LENGTH]
    x = windows.view(-1, LENGTH)
    y = torch.cat([windows[1:], windows[:1]]).view(-1, LENGTH)
    seen = len(x) * 9 // 10
    sigma = get_noise_multiplier(
        target_epsilon=options.epsilon, target_delta=DELTA, sample_rate=RATE, steps=options.steps, accountant="rdp"
    )
    print(f"{seen} runs of {LENGTH} characters to learn from, {len(letters)} different ones")
    for name, noise in (("plain", None), ("private", sigma)):
        torch.manual_seed(0)
        model = CharacterModel(len(letters))
        untrained = loss_of(model, x[seen:], y[seen:]).item()
        epsilon = train(model, x[:seen], y[:seen], options.steps, noise)
        loss = loss_of(model, x[seen:], y[seen:]).item()
        print(f"{name}: loss {untrained:.2f} -> {loss:.2f} on unseen text, ε = {epsilon:.2f} at δ = {DELTA}")
        print(f"    | {write(model, letters)}", flush=True)


if __name__ == "__main__":
    main()
