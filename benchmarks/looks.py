"""What it takes to look whether samples meet, at the first forward pass and at later ones: docs/layouts.md's table.

    python benchmarks/looks.py [gpt long mlp lora cnn packed] [--threads 1 2] [--no-write]

Wall time of ``Probe.look``, and of the look at the loss, over that of the one-pass step around them, noise and
optimizer included. Looks after the 8th forward pass are taken to cost what the 8th costs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from legs import build
from rows import RESULTS, Rows, environment
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from watch import timed_within
from workloads import WORKLOADS, Workload

from dpfast.looks import Probe, looks_again_at
from dpfast.modes import mixed_losses

STEPS, ALL = 20, 1000


class Packed(nn.Module):
    """A classifier of sequences that are packed by lengths the model takes, with the states of both directions."""

    def __init__(self, vocabulary: int, d: int, classes: int):
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, d), nn.Linear(2 * d, classes)
        self.lstm = nn.LSTM(d, d, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.tokens(ids), lengths, batch_first=True, enforce_sorted=False)
        states = self.lstm(packed)[1][0]
        return self.head(torch.cat([states[0], states[1]], dim=-1))


def packed(n: int, t: int, d: int) -> Workload:
    def losses(model: nn.Module, ids: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(ids, lengths), targets, reduction="none")

    return Workload(
        "packed",
        f"LSTM both ways, d={d}, packed sequences of up to T={t}, N={n}, vocabulary 1000",
        lambda: Packed(1000, d, 4),
        lambda: (torch.randint(1000, (n, t)), torch.randint(t // 4, t + 1, (n,)), torch.randint(4, (n,))),
        losses,
        check_samples=4,
    )


MODELS = {**{name: WORKLOADS[name] for name in ("gpt", "long", "mlp", "lora", "cnn")}, "packed": packed(32, 64, 128)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("workloads", nargs="*", default=[*MODELS])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    for name in options.workloads:
        for threads in options.threads:
            row = measure(MODELS[name], threads)
            shown = f"first {row['first']:.1f} steps, later {row['later']:.1f}, {row['share']:.2%} of {ALL}"
            print(f"{row['title']}, {threads} threads: {shown}", flush=True)
            if not options.no_write:
                Rows(RESULTS / "looks.jsonl", environment("cpu")).add(**row)


def measure(workload: Workload, threads: int) -> dict:
    """In steps without a look: of the first two forward passes together, of a later one, and of so many steps."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step, batch = build("dpfast one-pass", workload.build(), workload, 1.0), workload.batch()
    looks, others = [], []
    for _ in range(STEPS):
        with timed_within([(Probe, "look"), (mixed_losses, "check_apart")]) as seconds:
            start = time.perf_counter()
            step(*batch)
            looks.append(sum(seconds))
            others.append(time.perf_counter() - start - looks[-1])
    usual = statistics.median(others)
    later = looks[7]
    number = sum(map(looks_again_at, range(2, ALL)))
    return {
        "workload": workload.name,
        "title": workload.title,
        "threads": threads,
        "ms": 1e3 * usual,
        "first": (looks[0] + looks[1]) / usual,
        "later": later / usual,
        "share": (looks[0] + looks[1] + number * later) / (ALL * usual),
    }


if __name__ == "__main__":
    main()
