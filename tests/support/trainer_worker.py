"""One rank of tests/distributed/test_trainer.py: Hugging Face's Trainer, and accelerate, on several processes."""

import os
import tempfile

import torch
import torch.distributed as dist
from processes import attempt, rank_main
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import dpfast
from dpfast.distributed import PoissonBatches, SharedSecret
from dpfast.opacus import DPOptimizerFast

N, RATE, C, SIGMA = 12, 0.5, 0.1, 1.0


def build():
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=17, n_embd=8, n_layer=1, n_head=2, n_positions=8, use_cache=False, **off)
    )


def sequences():
    return torch.randint(17, (N, 6), generator=torch.Generator().manual_seed(1))


def collate(samples):
    """A part of a Poisson batch may be empty, which GPT-2 cannot take: a sequence without targets has no gradient."""
    tokens = torch.stack(samples or [sequences()[0]])
    return {"input_ids": tokens, "labels": tokens if samples else torch.full_like(tokens, -100)}


def mean_of_sequences(outputs, labels, num_items_in_batch=None):
    targets = labels[:, 1:]
    losses = nn.functional.cross_entropy(
        outputs.logits[:, :-1].transpose(1, 2), targets, reduction="none", ignore_index=-100
    )
    return losses.mean(1).mean()


class PrivateTrainer(Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_sampler=self.batches, collate_fn=collate)


class Clears(TrainerCallback):
    """Keeps each step's gradient, and clears it as the optimizer has to."""

    def __init__(self):
        self.gradients = []

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()})

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        optimizer.optimizer.zero_grad()


def private(model, sigma=SIGMA, secret=None):
    module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    options = {"noise_multiplier": sigma, "max_grad_norm": C, "expected_batch_size": N * RATE, "secret": secret}
    return module, DPOptimizerFast(torch.optim.SGD(model.parameters(), lr=1e-3), **options)


def train(sigma=SIGMA, shared=True, parts=1, steps=3):
    """(samples of each part of each step, gradients, weights)"""
    model, secret = build(), SharedSecret.agreed()
    _, optimizer = private(model, sigma, secret if shared else None)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        gradient_accumulation_steps=parts,
        average_tokens_across_devices=False,  # else the loss is times the number of ranks
        max_grad_norm=0.0,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        label_names=["labels"],
    )
    clears = Clears()
    trainer = PrivateTrainer(
        model=model,
        args=arguments,
        train_dataset=sequences(),
        optimizers=(optimizer, None),
        compute_loss_func=mean_of_sequences,
        callbacks=[clears],
    )
    trainer.batches = PoissonBatches(N, RATE, secret, steps=steps * parts)
    trainer.train()
    taken = [trainer.batches.batch(step) for step in range(steps * parts)]
    return taken, clears.gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def accelerated(shared=True):
    """The gradient of one step, and the weights behind it."""
    from accelerate import Accelerator

    model, x = build(), sequences()[dist.get_rank() :: 2]
    module, optimizer = Accelerator(cpu=True).prepare(*private(model, 0.0, SharedSecret.agreed() if shared else None))
    mean_of_sequences(module(input_ids=x), x).backward()
    optimizer.step()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def main():
    rank = str(dist.get_rank())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", ACCELERATE_USE_CPU="1"
    )
    return {
        "exact": attempt(train, 0.0),
        "noise": attempt(train),
        "parts": attempt(train, 0.0, parts=2),
        "no secret": attempt(train, shared=False),
        "accelerate": attempt(accelerated),
        "accelerate, no secret": attempt(accelerated, shared=False),
    }


if __name__ == "__main__":
    rank_main(main)
