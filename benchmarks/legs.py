"""The ways to take one training step that are compared: ``LEGS[name](model, workload, sigma) -> step(*batch)``.

A step is: clear gradients, forward, backward, clip, noise, divide by N, SGD. It leaves the (clipped, noised) mean
gradient in ``p.grad``. Every private leg and ``plain+noise`` add noise of the same standard deviation.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from noisy_sgd import NoisySgd, two_backwards
from torch import Tensor, nn
from workloads import Workload

import dpfast

if importlib.util.find_spec("opacus"):
    from opacus import grad_sample as opacus_modules
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    from dpfast.opacus import DPOptimizerFast
else:  # its own legs are left out, dpfast's take an optimizer of a few lines
    opacus_modules = DPTensorFastGradientClipping = None
    DPOptimizer = DPOptimizerFast = NoisySgd

C = 1.0
LEARNING_RATE = 1e-4

Step = Callable[..., None]
LEGS: dict[str, Callable[[nn.Module, Workload, float], Step]] = {}
FASTDP = "fastDP"  # a leg where its sources are at hand
PRIVATE = (
    FASTDP,
    "opacus hooks",
    "opacus ghost",
    "float-then-contract",
    "dpfast materialize",
    "dpfast one-pass",
    "dpfast two-pass",
)


def leg(name: str, *, by_opacus: bool = False) -> Callable:
    def register(build: Callable) -> Callable:
        if opacus_modules or not by_opacus:
            LEGS[name] = build
        return build

    return register


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=LEARNING_RATE)


def _private(optimizer_class: type, model: nn.Module, sigma: float, n: int) -> DPOptimizer:
    return optimizer_class(_sgd(model), noise_multiplier=sigma, max_grad_norm=C, expected_batch_size=n)


@leg("plain")
def plain(model: nn.Module, workload: Workload, sigma: float) -> Step:
    optimizer = _sgd(model)

    def step(*batch: Tensor) -> None:
        optimizer.zero_grad()
        workload.losses(model, *batch).mean().backward()
        optimizer.step()

    return step


@leg("plain+noise")
def plain_noise(model: nn.Module, workload: Workload, sigma: float) -> Step:
    optimizer = _sgd(model)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step(*batch: Tensor) -> None:
        optimizer.zero_grad()
        workload.losses(model, *batch).mean().backward()
        gradients = [p.grad for p in parameters]
        std = sigma * C / len(batch[0])
        torch._foreach_add_(gradients, [torch.empty_like(g).normal_(0.0, std) for g in gradients])
        optimizer.step()

    return step


def _one_backward(wrapped: nn.Module, optimizer: DPOptimizer, workload: Workload) -> Step:
    def step(*batch: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        workload.losses(wrapped, *batch).mean().backward()
        optimizer.step()

    return step


def _two_backwards(wrapped: nn.Module, optimizer: DPOptimizer, workload: Workload) -> Step:
    def step(*batch: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        losses = workload.losses(wrapped, *batch)
        if DPTensorFastGradientClipping is None:
            two_backwards(wrapped, losses)
        else:
            DPTensorFastGradientClipping(wrapped, optimizer, losses, "mean").backward()
        optimizer.step()

    return step


@leg("opacus hooks", by_opacus=True)
def opacus_hooks(model: nn.Module, workload: Workload, sigma: float) -> Step:
    wrapped = opacus_modules.GradSampleModule(model)
    return _one_backward(wrapped, _private(DPOptimizer, model, sigma, len(workload.batch()[0])), workload)


@leg("opacus ghost", by_opacus=True)
def opacus_ghost(model: nn.Module, workload: Workload, sigma: float) -> Step:
    wrapped = opacus_modules.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, use_ghost_clipping=True)
    optimizer = _private(DPOptimizerFastGradientClipping, model, sigma, len(workload.batch()[0]))
    return _two_backwards(wrapped, optimizer, workload)


@contextlib.contextmanager
def _float_then_contract() -> Iterator[None]:
    """Opacus with a sampler for Linear that converts to fp32 and contracts, as people register it."""

    def sampler(layer: nn.Linear, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        activations, backprops = activations[0].float(), backprops.float()
        grads = {}
        if layer.weight.requires_grad:
            grads[layer.weight] = torch.einsum("n...i,n...j->nji", activations, backprops)
        if layer.bias is not None and layer.bias.requires_grad:
            grads[layer.bias] = torch.einsum("n...k->nk", backprops)
        return grads

    samplers = opacus_modules.GradSampleModule.GRAD_SAMPLERS
    before = samplers[nn.Linear]
    samplers[nn.Linear] = sampler
    try:
        yield
    finally:
        samplers[nn.Linear] = before


@leg("float-then-contract", by_opacus=True)
def float_then_contract(model: nn.Module, workload: Workload, sigma: float) -> Step:
    inner = opacus_hooks(model, workload, sigma)

    def step(*batch: Tensor) -> None:
        with _float_then_contract():
            inner(*batch)

    return step


@leg("dpfast materialize")
def materialize(model: nn.Module, workload: Workload, sigma: float) -> Step:
    wrapped = dpfast.GradSampleModule(model)
    return _one_backward(wrapped, _private(DPOptimizer, model, sigma, len(workload.batch()[0])), workload)


@leg("dpfast one-pass")
def one_pass(model: nn.Module, workload: Workload, sigma: float) -> Step:
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    return _one_backward(wrapped, _private(DPOptimizerFast, model, sigma, len(workload.batch()[0])), workload)


@leg("dpfast two-pass")
def two_pass(model: nn.Module, workload: Workload, sigma: float) -> Step:
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, passes=2)
    return _two_backwards(wrapped, _private(DPOptimizerFast, model, sigma, len(workload.batch()[0])), workload)


GRAPHED = ", graph"
"""What a leg's name ends with that is one CUDA graph: forward, backward, clipping, noise and SGD, replayed."""


def in_a_graph(name: str) -> Callable[[nn.Module, Workload, float], Step]:
    """The leg of that name, captured after three steps as they come."""

    def build_it(model: nn.Module, workload: Workload, sigma: float) -> Step:
        step, side, calls = LEGS[name](model, workload, sigma), torch.cuda.Stream(), 0
        inputs: list[Tensor] = []
        graph = torch.cuda.CUDAGraph()

        def replayed(*batch: Tensor) -> None:
            nonlocal calls
            calls += 1
            if calls <= 3:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    step(*batch)
                torch.cuda.current_stream().wait_stream(side)
                return
            if calls == 4:
                inputs.extend(x.clone() for x in batch)
                with torch.cuda.graph(graph):
                    step(*inputs)
            for own, x in zip(inputs, batch, strict=True):
                own.copy_(x)
            graph.replay()

        return replayed

    return build_it


GRAPHED_LEGS = {name + GRAPHED: in_a_graph(name) for name in ("plain", "dpfast one-pass")}


def add_fastdp(sources: Path) -> None:
    """Has its leg run too, from a copy of github.com/awslabs/fast-differential-privacy: clipping and noise as here."""
    sys.path.insert(0, str(sources.resolve()))

    @leg(FASTDP)
    def fastdp(model: nn.Module, workload: Workload, sigma: float) -> Step:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints
            engine = importlib.import_module("fastDP").PrivacyEngine(
                model,
                batch_size=len(workload.batch()[0]),
                sample_size=100_000,
                epochs=1,
                max_grad_norm=C,
                noise_multiplier=sigma,
                clipping_fn="Abadi",
            )
        optimizer = _sgd(model)
        engine.attach(optimizer)
        return _one_backward(model, optimizer, workload)


def build(name: str, model: nn.Module, workload: Workload, sigma: float) -> Step:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus announces its hooks
        return {**LEGS, **GRAPHED_LEGS}[name](model, workload, sigma)
