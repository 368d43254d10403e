"""The steps that benchmarks/scale.py compares: ``LEGS[wrapper][name](workload, sigma)``, on every rank.

As in ``legs.py`` a step is: clear gradients, forward, backward, clip, noise, divide by the batch of all ranks, SGD; it
leaves in ``p.grad`` the mean over the samples of all ranks. Under DDP and FSDP2 each rank has a batch of its own, under
tensor parallel all have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from legs import LEARNING_RATE, C
from opacus import grad_sample
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.optimizers import (
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    FSDPOptimizerFastGradientClipping,
)
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from workloads import Attention, Gpt, LlamaBlock, Workload

import dpfast
from dpfast.distributed import SharedSecret, local
from dpfast.opacus import DPOptimizerFast


@dataclass(frozen=True)
class Leg:
    """A step on this rank: ``backward(*batch)`` is all of it up to ``p.grad``; the optimizer clears and updates."""

    model: nn.Module
    backward: Callable[..., Any]
    optimizer: Any

    def step(self, *batch: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.backward(*batch)
        self.optimizer.step()


Build = Callable[[Workload, float], Leg]
LEGS: dict[str, dict[str, Build]] = {"none": {}, "DDP": {}, "FSDP2": {}, "FSDP2, bf16": {}, "TP": {}}
"""Under "none" each rank takes its own step, as one process does."""


def leg(name: str, *wrappers: str) -> Callable[[Callable[[str, Workload, float], Leg]], Callable]:
    def register(build: Callable[[str, Workload, float], Leg]) -> Callable:
        for wrapper in wrappers:
            LEGS[wrapper][name] = lambda workload, sigma, of=wrapper: build(of, workload, sigma)
        return build

    return register


# --- models in their wrappers ---


class HeadsFirst(Attention):
    """A head's queries, keys and values are rows of ``qkv`` that stand together: a part of the rows is some heads."""

    def forward(self, x: Tensor) -> Tensor:
        width = self.out.in_features // self.heads
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, width)).transpose(1, 3).unbind(1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


def model_of(wrapper: str, workload: Workload) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    model = workload.build()
    if wrapper == "TP" and isinstance(model, Gpt):
        for block in model.blocks:
            block.attention.__class__ = HeadsFirst
    return model


def sharded(model: Any, **options: Any) -> Any:
    """A unit for each block and one for the rest."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def sharded_in_bf16(model: Any) -> Any:
    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def parted(model: Any) -> Any:
    """Heads, hidden features and the vocabulary are dealt out."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    column, row = ("attention.qkv", "up", "q", "k", "v", "gate"), ("attention.out", "down", "o")
    plan = {name: ColwiseParallel() for name in column} | {name: RowwiseParallel() for name in row}
    for block in model.blocks:
        if isinstance(block, LlamaBlock):
            block.heads //= ranks
        parallelize_module(block, mesh, {name: how for name, how in plan.items() if _has(block, name)})
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, ends)


def _has(module: nn.Module, name: str) -> bool:
    return name in dict(module.named_modules())


PLACE: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: model,
    "DDP": lambda model: model,
    "FSDP2": sharded,
    "FSDP2, bf16": sharded_in_bf16,
    "TP": parted,
}


def batch_of(wrapper: str, workload: Workload) -> tuple[Tensor, ...]:
    torch.manual_seed(1 if wrapper == "TP" else 1 + dist.get_rank())
    return workload.batch()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _samples(wrapper: str, workload: Workload) -> int:
    """Of all ranks that have others."""
    return len(workload.batch()[0]) * (1 if wrapper in ("none", "TP") else dist.get_world_size())


def _mean_backward(call: nn.Module, workload: Workload) -> Callable[..., None]:
    return lambda *batch: workload.losses(call, *batch).mean().backward()


# --- legs ---


def _plain(wrapper: str, workload: Workload) -> tuple[nn.Module, Callable[..., None]]:
    model = PLACE[wrapper](model_of(wrapper, workload))
    call = DistributedDataParallel(model) if wrapper == "DDP" else model
    return model, _mean_backward(call, workload)


@leg("plain", *LEGS)
def plain(wrapper: str, workload: Workload, sigma: float) -> Leg:
    model, backward = _plain(wrapper, workload)
    return Leg(model, backward, _sgd(model))


@leg("plain+noise", *LEGS)
def plain_noise(wrapper: str, workload: Workload, sigma: float) -> Leg:
    """On its own shard alone."""
    model, backward = _plain(wrapper, workload)
    optimizer, std = _sgd(model), sigma * C / _samples(wrapper, workload)

    def add_noise(*_: Any) -> None:
        gradients = [local(p.grad) for p in model.parameters()]
        torch._foreach_add_(gradients, [torch.empty_like(g).normal_(0.0, std) for g in gradients])

    optimizer.register_step_pre_hook(add_noise)
    return Leg(model, backward, optimizer)


@leg("dpfast", *LEGS)
def private(wrapper: str, workload: Workload, sigma: float) -> Leg:
    model = PLACE[wrapper](model_of(wrapper, workload))
    module = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    call = DistributedDataParallel(module) if wrapper == "DDP" else module
    optimizer = DPOptimizerFast(
        _sgd(model),
        noise_multiplier=sigma,
        max_grad_norm=C,
        expected_batch_size=_samples(wrapper, workload),
        secret=None if wrapper == "none" else SharedSecret.agreed(),
    )
    return Leg(model, _mean_backward(call, workload), optimizer)


@leg("dpfast, no noise", *LEGS)
def private_without_noise(wrapper: str, workload: Workload, sigma: float) -> Leg:
    return private(wrapper, workload, 0.0)


def _by_opacus(optimizer_class: type, model: nn.Module, workload: Workload, sigma: float) -> Any:
    # What is one rank's: the optimizer, or FSDP, takes the mean over ranks.
    n = len(workload.batch()[0])
    options = {"noise_multiplier": sigma, "max_grad_norm": C, "expected_batch_size": n}
    return optimizer_class(_sgd(model), **options)


def _two_passes(module: nn.Module, optimizer: Any, workload: Workload) -> Callable[..., None]:
    def backward(*batch: Tensor) -> None:
        losses = workload.losses(module, *batch)
        DPTensorFastGradientClipping(module, optimizer, losses, "mean").backward()

    return backward


@leg("Opacus DPDDP, hooks", "DDP")
def opacus_hooks(wrapper: str, workload: Workload, sigma: float) -> Leg:
    module = grad_sample.GradSampleModule(DPDDP(model_of(wrapper, workload)))
    optimizer = _by_opacus(DistributedDPOptimizer, module, workload, sigma)
    return Leg(module, _mean_backward(module, workload), optimizer)


@leg("Opacus DPDDP, ghost", "DDP")
def opacus_ghost(wrapper: str, workload: Workload, sigma: float) -> Leg:
    module = grad_sample.GradSampleModuleFastGradientClipping(DPDDP(model_of(wrapper, workload)), max_grad_norm=C)
    optimizer = _by_opacus(DistributedDPOptimizerFastGradientClipping, module, workload, sigma)
    return Leg(module, _two_passes(module, optimizer, workload), optimizer)


@leg("Opacus ghost_fsdp", "FSDP2")
def opacus_ghost_fsdp(wrapper: str, workload: Workload, sigma: float) -> Leg:
    model = sharded(model_of(wrapper, workload))
    module = grad_sample.GradSampleModuleFastGradientClippingFSDP(model, max_grad_norm=C)
    optimizer = _by_opacus(FSDPOptimizerFastGradientClipping, module, workload, sigma)
    return Leg(module, _two_passes(module, optimizer, workload), optimizer)


@leg("Opacus ghost_tp", "TP")
def opacus_ghost_tp(wrapper: str, workload: Workload, sigma: float) -> Leg:
    module = grad_sample.GradSampleModuleFastGradientClippingTP(parted(model_of(wrapper, workload)), max_grad_norm=C)
    optimizer = _by_opacus(FSDPOptimizerFastGradientClipping, module, workload, sigma)
    return Leg(module, _two_passes(module, optimizer, workload), optimizer)
