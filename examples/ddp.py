"""A private character language model on two CPU processes, with DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp.py

Each step is one Poisson draw over both processes. Prints loss, ε and tokens a second and process.
"""

import argparse
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dpfast.opacus import PrivacyEngine

# Lewis Carroll, "Alice's Adventures in Wonderland", 1865, the beginning of chapter 1; public domain.
TEXT = """Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to
do: once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations
in it, "and what is the use of a book," thought Alice "without pictures or conversations?" So she was
considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid),
whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies,
when suddenly a White Rabbit with pink eyes ran close by her. There was nothing so very remarkable in that; nor
did Alice think it so very much out of the way to hear the Rabbit say to itself, "Oh dear! Oh dear! I shall be
late!" """.replace("\n", " ")
LENGTH = 32


class CharacterModel(nn.Module):
    """Two transformer blocks."""

    def __init__(self, vocabulary: int, d: int = 64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, d), nn.Embedding(LENGTH, d)
        block = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(LENGTH, device=x.device).expand(len(x), LENGTH)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        return self.head(self.blocks(self.tokens(x) + self.positions(places), mask=mask, is_causal=True))


def main(wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel) -> None:
    """Trains; ``wrap`` makes the model one of several processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args().epochs
    warnings.filterwarnings("ignore", module="opacus")

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    codes = torch.tensor([letters.index(letter) for letter in TEXT])
    windows = codes.unfold(0, LENGTH + 1, 1)  # each is one sample: a toy's unit of privacy
    data = TensorDataset(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())

    model = wrap(CharacterModel(len(letters)))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        data_loader=DataLoader(data, batch_size=64),  # of all processes together
        noise_multiplier=0.8,
        max_grad_norm=1.0,
    )
    for epoch in range(epochs):
        start, tokens = time.perf_counter(), 0
        for x, y in loader:
            optimizer.zero_grad()
            # A mean over samples, also of a batch that has none.
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / max(1, y.numel())
            loss.backward()
            optimizer.step()
            tokens += y.numel()
        if dist.get_rank() == 0:
            speed = tokens / (time.perf_counter() - start)
            epsilon = engine.get_epsilon(delta=1e-4)
            print(
                f"epoch {epoch + 1}: loss {loss.item():.3f}, ε {epsilon:.2f}, {speed:,.0f} tokens/s a process",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
