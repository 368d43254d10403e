"""A private GPT-like step on packed documents against padded ones, and on units in equal runs against samples.

    python benchmarks/packed.py [--rounds 9] [--documents 128]

CPU time of one thread, the legs in turns in one process; figures are medians of ratios within a round. Documents have 1
to T tokens, half of T on average, so padding is half of a padded batch; the packed batch has the same documents. First
the two clipped sums are compared. How full the packed rows are follows from how many documents there are to choose
from, and with it what packing can bring; the plain model's steps on the same batches say that too. Nothing is kept.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import GptBlock

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.testing import relative_error

T, D, BLOCKS, VOCABULARY, HEADS = 128, 256, 4, 1000, 4


class Gpt(nn.Module):
    """As the workload of that name; with positions, attention is masked by document."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(GptBlock(D, HEADS) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            attention, h = block.attention, block.norm1(x)
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in attention.qkv(h).chunk(3, dim=-1))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
            x = x + attention.out(y.transpose(1, 2).flatten(2))
            x = x + block.down(F.gelu(block.up(block.norm2(x)), approximate="tanh"))
        return self.head(self.norm(x))


def documents(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, T + 1, (number,), generator=generator).tolist()
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


def padded(some: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, labels, positions), (N, T)."""
    tokens, labels = torch.zeros(len(some), T, dtype=torch.int64), torch.full((len(some), T), -100)
    for i, document in enumerate(some):
        tokens[i, : len(document)], labels[i, : len(document) - 1] = document, document[1:]
    return tokens, labels, torch.arange(T).expand(len(some), T)


def packed(some: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, labels, positions, ids), (rows, T), the longest first, each where it fits first."""
    rows: list[list[int]] = []
    for i in sorted(range(len(some)), key=lambda i: -len(some[i])):
        fits = next((r for r in rows if sum(len(some[j]) for j in r) + len(some[i]) <= T), None)
        if fits is None:
            rows.append(fits := [])
        fits.append(i)
    tokens, positions = (torch.zeros(len(rows), T, dtype=torch.int64) for _ in range(2))
    labels, ids = torch.full_like(tokens, -100), torch.full_like(tokens, -1)
    for r, members in enumerate(rows):
        at = 0
        for i in members:
            n = len(some[i])
            tokens[r, at : at + n], positions[r, at : at + n], ids[r, at : at + n] = some[i], torch.arange(n), i
            labels[r, at : at + n - 1] = some[i][1:]
            at += n
        positions[r, at:] = torch.arange(T - at)
    return tokens, labels, positions, ids


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    found = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return found.view(labels.shape)


def legs(number: int) -> dict[str, tuple[Callable[[], nn.Module], int]]:
    """What runs a step, and how many tokens that are no padding it has."""
    some = documents(number)
    real = sum(map(len, some))
    torch.manual_seed(0)
    model, without = Gpt(), Gpt()
    module = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    tokens, labels, positions = padded(some)
    full = torch.randint(0, VOCABULARY, (number // 2, T))
    full_positions = torch.arange(T).expand(number // 2, T)
    equal = torch.arange(number // 2)[:, None].expand(number // 2, T).contiguous()
    p_tokens, p_labels, p_positions, ids = packed(some)
    document = (p_positions == 0).cumsum(1)
    mask = ((document[:, :, None] == document[:, None, :]) & torch.ones(T, T, dtype=torch.bool).tril())[:, None]

    def private(units: Tensor | None, count: int, tokens: Tensor, labels: Tensor, *inputs: Tensor) -> None:
        model.zero_grad()
        if units is None:
            losses(module(tokens, *inputs), labels).sum().backward()
            return
        with module.units(units, count) as of:
            of.sums(losses(module(tokens, *inputs), labels)).sum().backward()

    def leg(*inputs: object) -> Callable[[], nn.Module]:
        def step() -> nn.Module:
            private(*inputs)  # type: ignore[arg-type]  # as above
            return module

        return step

    def plain(labels: Tensor, *inputs: Tensor) -> Callable[[], nn.Module]:
        def step() -> nn.Module:
            without.zero_grad()
            losses(without(*inputs), labels).sum().backward()
            return without

        return step

    return {
        "plain padded": (plain(labels, tokens, positions), real),
        "plain packed": (plain(p_labels, p_tokens, p_positions, mask), real),
        "padded": (leg(None, 0, tokens, labels, positions), real),
        "packed": (leg(ids, number, p_tokens, p_labels, p_positions, mask), real),
        "samples": (leg(None, 0, full, full, full_positions), full.numel()),
        "equal runs": (leg(equal, number // 2, full, full, full_positions), full.numel()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--documents", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    of = legs(options.documents)
    sums = {}
    for name, (step, _) in of.items():
        module = step()  # the first one finds out whose rows are whose
        sums[name] = torch.cat([p.grad.flatten() for p in module.parameters()])
    for one, two in (("plain padded", "plain packed"), ("padded", "packed"), ("samples", "equal runs")):
        assert relative_error(sums[two], sums[one]) <= 1e-4, (one, two)
    times: dict[str, list[float]] = {name: [] for name in of}
    for _ in range(options.rounds):
        for name, (step, _) in of.items():
            start = time.process_time()
            step()
            times[name].append(time.process_time() - start)

    def ratio(one: str, two: str) -> float:
        return statistics.median(x / y for x, y in zip(times[one], times[two], strict=True))

    real = of["packed"][1]
    for name, (_, tokens) in of.items():
        print(f"{name:>12}: {statistics.median(times[name]) * 1e3:8.1f} ms, {tokens} tokens")
    rows = len(packed(documents(options.documents))[0])
    padding = [1 - real / (n * T) for n in (options.documents, rows)]
    print(f"padding {padding[0]:.2f} of the padded batch, {padding[1]:.2f} of the packed")
    print(f"rows, padded over packed: {options.documents / rows:.2f}")
    print(f"tokens a second, packed over padded: {ratio('padded', 'packed'):.2f}")
    print(f"the same of plain steps: {ratio('plain padded', 'plain packed'):.2f}")
    print(f"equal runs over samples: {ratio('equal runs', 'samples'):.3f}")


if __name__ == "__main__":
    main()
