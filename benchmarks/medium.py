"""The step of other people's models, of medium size: time and memory as in step.py, on a CPU.

    python benchmarks/medium.py build/models/site-packages  # the folder that `make test-models` installs packages to
    python benchmarks/medium.py build/models/site-packages bit vit --rounds 4 --again

Rows go to benchmarks/results/medium.jsonl, one a leg; report.py makes docs/medium.md of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import step
import torch
import torch.nn.functional as F
from in_turns import AS_IT_IS, allocator_name
from rows import RESULTS, ROOT, Rows, environment, processor
from torch import Tensor, nn
from workloads import Workload, class_losses

sys.path.append(str(ROOT / "tests" / "support"))
from torchvision_apart import import_torchvision

CHOSEN = ["plain", "plain+noise", "opacus hooks", "dpfast one-pass"]
CLASSES, WORDS = 100, 2000
_alive: list[object] = []


def _images(n: int, size: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(n, 3, size, size), torch.randint(0, CLASSES, (n,)))


def _of_timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES)

    return make


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=CLASSES, **sizes, **without))


def _next_words(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def _class_of_text(model: Any, tokens: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=tokens).logits, y, reduction="none")


def _text(n: int, t: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, WORDS, (n, t)), torch.randint(0, WORDS, (n, t)))


def _labelled(n: int, t: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, WORDS, (n, t)), torch.randint(0, CLASSES, (n,)))


MODELS = {
    name: Workload(name, title, build, batch, losses, check_samples=1, rounds_itself=True)
    for name, title, build, batch, losses in (
        ("vit", "timm vit_tiny_patch16_224, N=8", _of_timm("vit_tiny_patch16_224"), _images(8, 224), class_losses),
        ("convnext", "timm convnext_atto, 224×224, N=8", _of_timm("convnext_atto"), _images(8, 224), class_losses),
        ("bit", "timm resnetv2_50x1_bit, 128×128, N=8", _of_timm("resnetv2_50x1_bit"), _images(8, 128), class_losses),
        ("llama", "transformers Llama, d=256, 4 layers, T=128, N=8", _llama, _text(8, 128), _next_words),
        ("bert", "transformers BERT, d=256, 4 layers, T=128, N=8", _bert, _labelled(8, 128), _class_of_text),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("packages", type=Path, help="folder with timm; torch is this environment's")
    parser.add_argument("models", nargs="*", metavar="model", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=6, help="of each generation of processes")
    parser.add_argument("--generations", type=int, default=step.GENERATIONS)
    parser.add_argument("--again", action="store_true", help="measure anew what this commit has rows of")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    sys.path.append(str(options.packages.resolve()))
    _alive.append(import_torchvision())
    where = {"threads": 1, "allocator": allocator_name(AS_IT_IS)}
    for name in options.models or MODELS:
        table = Rows(RESULTS / "medium.jsonl", {**environment("cpu"), **processor()})
        if table.has(workload=name, **processor()) and not options.again:
            print(f"{name}: this commit has its rows in {table.out.name}")
            continue
        errors = step.gradient_errors(MODELS[name], CHOSEN)
        rows = step.measure_in_turns(MODELS[name], errors, options.rounds, 1, AS_IT_IS, options.generations)
        rows = [{**row, **where, "title": MODELS[name].title} for row in rows]
        for row in [] if options.no_write else rows:
            table.add(**row)
        step.show(MODELS[name].title, rows)


if __name__ == "__main__":
    main()
