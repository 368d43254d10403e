"""Fine-tunes a small Llama by LoRA with differential privacy in Hugging Face's Trainer, in four ways.

    python examples/trainer_lora.py [--rank 128] [--length 32] [--sigma 1.0]        # needs transformers and peft

bf16 autocast, gradient checkpointing, and a logical batch in several micro-batches (gradient accumulation). The
ways to clip are dpfast's one backward pass, and Opacus's `DPOptimizer` on `p.grad_sample`: from dpfast, from Opacus's
hooks with an fp32 sampler, and from Opacus's own sampler, whose gradients autocast makes in bf16 (cheaper, and exact to
2e-3). Prints each way's time, memory and distance from the clipped gradient on dpfast's `p.grad_sample`. The model is
random and the data is synthetic: nothing is downloaded.

Of a micro-batch of N samples, `p.grad_sample` holds N times the LoRA weights: N·rank rows of the layers' widths. One
pass holds the layers' inputs and output gradients instead, N·length rows, where these take less memory. So it needs
less where the rank is well above the length (high rank, short texts), as here; with `--rank 16 --length 64` it holds
what `p.grad_sample` holds. Most of the time is the frozen model's, whichever way is taken.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from opacus.grad_sample import GradSampleHooks
from opacus.optimizers import DPOptimizer
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import dpfast
from dpfast.opacus import OnePassOptimizer

MAX_GRAD_NORM = 0.1
LOGICAL_BATCH, MICRO_BATCHES = 64, 4  # expected; a Poisson batch has as many samples as its coins say
DELTA = 1e-4
# The ways take turns in one process, where the C allocator would give one way's memory back to the system for the
# next to fetch again, a page fault per 4 KB. Here it keeps it, for all; memory is measured without these.
STEADY = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}


class Sequences(Dataset):
    """Counting modulo the vocabulary, from a random start with a random stride; the first tokens are no targets."""

    def __init__(self, samples: int, length: int, vocabulary: int):
        generator = torch.Generator().manual_seed(0)
        start = torch.randint(0, vocabulary, (samples, 1), generator=generator)
        stride = torch.randint(1, 5, (samples, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.tokens[i]

    def collate(self, samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        # Of an empty Poisson draw Llama can make nothing: one sequence without targets has a gradient of exactly 0.
        tokens = torch.stack(samples or [self.tokens[0]])
        labels = tokens.clone()
        labels[:, : 2 if samples else None] = -100
        return {"input_ids": tokens, "labels": labels}


class PoissonMicroBatches:
    """Each step, each sample is drawn with probability ``rate``; the drawn are split into the step's micro-batches."""

    def __init__(self, samples: int, rate: float, steps: int, seed: int = 0):
        self.samples, self.rate, self.steps, self.seed = samples, rate, steps, seed
        self.batch_size = max(1, round(samples * rate) // MICRO_BATCHES)  # for Trainer's progress bar

    def __len__(self) -> int:
        return self.steps * MICRO_BATCHES

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            drawn = (torch.rand(self.samples, generator=generator) < self.rate).nonzero().flatten().numpy()
            yield from (part.tolist() for part in np.array_split(drawn, MICRO_BATCHES))


def mean_of_sequences(outputs, labels, num_items_in_batch=None) -> torch.Tensor:
    """A sequence is a sample: the mean over its targets, then over sequences. Never ``num_items_in_batch``, which
    would weight a sample by what the others hold."""
    logits, targets = outputs.logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none", ignore_index=-100)
    return (losses.sum(1) / (targets != -100).sum(1).clamp(min=1)).mean()


class PrivateTrainer(Trainer):
    """Takes its batches from a Poisson sampler and its loss sample by sample."""

    def __init__(self, *args, micro_batches: PoissonMicroBatches, **kwargs):
        super().__init__(*args, compute_loss_func=mean_of_sequences, **kwargs)
        self.micro_batches = micro_batches

    def get_train_dataloader(self) -> DataLoader:
        data = self.train_dataset
        return DataLoader(data, batch_sampler=self.micro_batches, collate_fn=data.collate)


class PrivateSteps(TrainerCallback):
    """Every micro-batch is clipped; the last one of a step adds the noise and moves the weights."""

    def __init__(self):
        self.gradients: list[torch.Tensor] = []  # of each step, to compare the ways
        self.seconds: list[float] = []  # that each step took

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = clock()

    def on_substep_end(self, args, state, control, optimizer=None, **kwargs):
        optimizer = optimizer.optimizer  # accelerate's wrapper takes no steps between
        optimizer.signal_skip_step(True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.gradients.append(torch.cat([p.grad.flatten().clone() for p in optimizer.optimizer.params]))

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        optimizer.optimizer.zero_grad(set_to_none=True)
        self.seconds.append(clock() - self.start)


def build_model(d: int = 64, layers: int = 2, vocabulary: int = 64, rank: int = 16) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=d,
        intermediate_size=3 * d,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        use_cache=False,
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=rank, target_modules=targets, init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(config), lora)
    model.enable_input_require_grads()  # checkpoints have something to differentiate; the base is frozen
    return model


# The ways to clip: each hooks the model, which stays what it is, and returns the optimizer for the Trainer.


def opacus_hooks(model, sgd, **noise):
    GradSampleHooks(model, loss_reduction="mean")
    return DPOptimizer(sgd, max_grad_norm=MAX_GRAD_NORM, **noise)


def opacus_fp32(model, sgd, **noise):
    """With a sampler for Linear as people register it for mixed precision: both operands to fp32, then the product."""

    def linear(layer, activations, backprops):
        return {layer.weight: torch.einsum("nti,ntj->nji", activations[0].float(), backprops.float())}

    hooks = GradSampleHooks(model, loss_reduction="mean")
    hooks.GRAD_SAMPLERS = {**hooks.GRAD_SAMPLERS, torch.nn.Linear: linear}  # LoRA's layers have no bias
    return DPOptimizer(sgd, max_grad_norm=MAX_GRAD_NORM, **noise)


def materialize(model, sgd, **noise):
    dpfast.GradSampleModule(model, loss_reduction="mean")
    return DPOptimizer(sgd, max_grad_norm=MAX_GRAD_NORM, **noise)


def one_pass(model, sgd, **noise):
    hooks = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="mean", max_grad_norm=MAX_GRAD_NORM)
    return OnePassOptimizer(sgd, module=hooks, max_grad_norm=MAX_GRAD_NORM, **noise)


WAYS = {
    "dpfast, one pass": one_pass,
    "dpfast, p.grad_sample": materialize,
    "Opacus hooks, fp32": opacus_fp32,
    "Opacus hooks, bf16": opacus_hooks,
}


def train(way, model, data, steps: int, sigma: float, checkpointing=True, reentrant=False, out=".", lr=0.5):
    """Returns the gradients of the steps (clipped, averaged, noised), the seconds that each took, and ε."""
    rate = LOGICAL_BATCH / len(data)
    parameters = [p for p in model.parameters() if p.requires_grad]
    noise = {
        "noise_multiplier": sigma,
        "expected_batch_size": LOGICAL_BATCH,
        "generator": torch.Generator(parameters[0].device).manual_seed(0),
    }
    optimizer = way(model, torch.optim.SGD(parameters, lr=lr), **noise)
    accountant = RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=rate))
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=steps,
        gradient_accumulation_steps=MICRO_BATCHES,
        bf16=True,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        max_grad_norm=0.0,  # the Trainer clips before step() adds the noise: it would shrink the sum alone
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        label_names=["labels"],
    )
    callback = PrivateSteps()
    trainer = PrivateTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        optimizers=(optimizer, None),
        callbacks=[callback],
        micro_batches=PoissonMicroBatches(len(data), rate, steps),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return callback.gradients, callback.seconds, accountant.get_epsilon(DELTA) if sigma else float("inf")


def clock() -> float:
    """Seconds; of CPU time where there is no GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def peak_memory() -> float:
    """MB, the most since the process started."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    for line in Path("/proc/self/status").read_text().splitlines() if sys.platform == "linux" else ():
        if line.startswith("VmHWM"):  # ru_maxrss would begin with the parent's
            return int(line.split()[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def run(name: str, options: argparse.Namespace, steps: int) -> tuple:
    # Reentrant checkpointing for all: under the other kind Opacus's hooks leave no grad_sample.
    data, model = Sequences(1024, options.length, 64), build_model(options.d, rank=options.rank)
    with tempfile.TemporaryDirectory() as out:
        return train(WAYS[name], model, data, steps, options.sigma, reentrant=True, out=out)


def measure_memory(name: str, options: argparse.Namespace) -> None:
    """One way in a process of its own, so that its memory can be told from the others'."""
    small = argparse.Namespace(**{**vars(options), "d": 32, "rank": 1})
    run(name, small, 1)  # what the libraries hold themselves
    build_model(options.d, rank=options.rank)
    before = peak_memory()
    run(name, options, 2)
    print(peak_memory() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2, help="of a round")
    parser.add_argument("--rounds", type=int, default=4, help="of all ways in turn, after one to warm up")
    parser.add_argument("--sigma", type=float, default=0.0, help="noise multiplier")
    parser.add_argument("--d", type=int, default=512, help="width of the model")
    parser.add_argument("--rank", type=int, default=128, help="of LoRA")
    parser.add_argument("--length", type=int, default=32, help="tokens in a sequence")
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.memory_of:
        return measure_memory(options.memory_of, options)
    if sys.platform == "linux" and not STEADY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **STEADY})
    seconds = {name: [] for name in WAYS}
    gradient, epsilon = {}, 0.0
    for i in range(options.rounds + 1):
        for name in WAYS:
            gradients, taken, epsilon = run(name, options, options.steps)
            gradient[name] = gradients[0]  # later ones are of weights that differ in the last bits already
            seconds[name] += taken if i else []
    first = gradient["dpfast, p.grad_sample"]
    one_pass = seconds["dpfast, one pass"]
    print(f"Rank {options.rank}, {options.length} tokens, {LOGICAL_BATCH} expected samples in {MICRO_BATCHES} parts")
    print(f"{'':24s}{'s a step':>10s}{'/ one pass':>12s}{'peak MB over the model':>24s}{'gradient off by':>17s}")
    for name, own in seconds.items():
        command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name]
        environment = {k: v for k, v in os.environ.items() if k not in STEADY}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        ratio = statistics.median(x / y for x, y in zip(own, one_pass, strict=True))  # of the same step in a round
        off = ((gradient[name] - first).norm() / first.norm()).item()
        memory = float(done.stdout.split()[-1])
        print(f"{name:24s}{statistics.median(own):10.2f}{ratio:12.2f}{memory:24.0f}{off:17.1e}", flush=True)
    if options.sigma:
        print(f"epsilon {epsilon:.2f} at delta {DELTA} for each round's {options.steps} steps")
    return None


if __name__ == "__main__":
    main()
