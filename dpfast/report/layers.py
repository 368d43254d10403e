"""What layers take in the plain step, each by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


@dataclass(frozen=True)
class Layer:
    """What a layer takes in the plain step, by itself: seconds, and bytes that autograd keeps for its backward."""

    name: str
    forward: float
    input_gradient: float
    weight_gradient: float
    saved: int


def take_layers(
    forward: Callable[[], object], modules: Mapping[str, nn.Module], now: Callable[[], float], rounds: int
) -> list[Layer]:
    """Those that hold no other of them (a parent's time is its children's too), in the order of the forward pass.

    Args:
        forward: calls the model. modules: by name. now: seconds. rounds: the median of so many is taken.
    """
    ids = {id(m) for m in modules.values()}
    alone = {name: m for name, m in modules.items() if not any(id(c) in ids for c in m.modules() if c is not m)}
    found: dict[str, list[list[float]]] = {}
    saved: dict[str, int] = defaultdict(int)
    of_round: dict[str, list[list[float]]] = {}

    def hook(name: str) -> Callable[..., None]:
        def measure(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            times, nbytes = _alone(module, args, kwargs, now)
            of_round.setdefault(name, []).append(times)
            saved[name] = max(saved[name], nbytes)

        return measure

    handles = [m.register_forward_hook(hook(name), with_kwargs=True) for name, m in alone.items()]
    try:
        for _ in range(rounds):
            of_round.clear()
            forward()
            for name, calls in of_round.items():
                found.setdefault(name, []).append([sum(x) for x in zip(*calls, strict=True)])
    finally:
        for handle in handles:
            handle.remove()
    layers = []
    for name, times in found.items():
        forward_pass, input_gradient, weight_gradient = map(median, zip(*times, strict=True))
        layers.append(Layer(name, forward_pass, input_gradient, weight_gradient, saved[name]))
    return layers


def _alone(module: nn.Module, args: Any, kwargs: Any, now: Callable[[], float]) -> tuple[list[float], int]:
    """Seconds of a layer's forward, of the gradients of its inputs and of those of its parameters."""
    leaves, structure = tree_flatten((args, kwargs))
    leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
    args, kwargs = tree_unflatten(leaves, structure)
    inputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        type(module).forward(module, *args, **kwargs)
    start = now()
    output = type(module).forward(module, *args, **kwargs)
    times = [now() - start]
    outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    gradients = [torch.randn_like(x) for x in outputs]
    for of in (inputs, [p for p in module.parameters() if p.requires_grad]):
        start = now()
        if of and outputs:
            torch.autograd.grad(outputs, of, gradients, retain_graph=True, allow_unused=True)
        times.append(now() - start)
    return times, sum(kept.values())
