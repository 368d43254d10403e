"""Which of torch.distributed's wrappers stands around a model, or inside it."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpfast.distributed.placements import is_shard, ranks_sharing


class Wrapper(NamedTuple):
    """What was found.

    Attributes:
        kind: "DDP" right around the model or right inside, "nested DDP", "FSDP2", "FSDP2 around", "FSDP1", "DTensor"
            (tensor parallel), "DTensor in DDP", "plain parts", "pipeline" or "context" (parallel).
        module: the wrapper, or the module it was found at. name: of that module in the model; "" where it is outside.
    """

    kind: str
    module: Any
    name: str


def in_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def number_of_ranks() -> int:
    """Of the default process group; 1 where there is none."""
    return dist.get_world_size() if in_process_group() else 1


def ranks_of(wrapper: Wrapper) -> int:
    """Over how many ranks a DDP, or a module that was given to ``fully_shard``, sums."""
    if wrapper.kind == "DDP":
        return dist.get_world_size(wrapper.module.process_group)
    return next((ranks_sharing(p) for p in wrapper.module.parameters() if is_shard(p)), 1)


def find_wrapper(model: nn.Module, around: nn.Module) -> Wrapper | None:
    """Asked while a forward pass of the model, or of what is around it, runs; ``around``: dpfast's own module."""
    if "torch.distributed.pipelining" in sys.modules and _called_by("torch.distributed.pipelining"):
        return Wrapper("pipeline", model, "")
    attention = getattr(nn.functional.scaled_dot_product_attention, "__module__", None) or ""
    if attention.startswith("torch.distributed.tensor.experimental"):  # context_parallel has put its own there
        return Wrapper("context", model, "")
    outside = DistributedDataParallel._active_ddp_module
    kind = _sharded(around)
    if kind is not None:
        return Wrapper(kind, around, "")
    parted = plain = None
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            return Wrapper("DDP" if module is model else "nested DDP", module, name)
        kind = _sharded(module)
        if kind is not None:
            return Wrapper(kind, module, name)
        if parted is None and any(map(is_shard, module._parameters.values())):
            parted = Wrapper("DTensor", module, name)
        if getattr(module, "_hf_device_mesh", None) is not None:
            plain = Wrapper("plain parts", module, name)
    if parted is not None:
        return parted if outside is None else parted._replace(kind="DTensor in DDP")
    if plain is not None:
        return plain
    if outside is not None:
        return Wrapper("DDP", outside, "")
    taken = _imported("FullyShardedDataParallel") is not None and next(model.parameters(), None) is None
    return Wrapper("FSDP1", model, "") if taken else None  # around the model, its parameters are FSDP1's now


def _called_by(package: str) -> bool:
    """Whether a function of that package has called what runs now."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(package):
            return True
        frame = frame.f_back
    return False


def _imported(name: str) -> Any:
    """That class of torch.distributed.fsdp, where it is imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


def _sharded(module: nn.Module) -> str | None:
    """Whether the module's parameters are, or will be, parts of whole ones. Classes that are not imported are not
    there."""
    for name, kind in (("FSDPModule", "FSDP2"), ("FullyShardedDataParallel", "FSDP1")):
        cls = _imported(name)
        if cls is not None and isinstance(module, cls):
            return kind
    return None


_REMEDIES = {
    "DDP": "DistributedDataParallel leaves {mode} wrong gradients: it sums ordinary ones, before they are clipped. Use "
    "GradSampleModuleFastGradientClipping (grad_sample_mode='dpfast'), or Opacus's "
    "DifferentiallyPrivateDistributedDataParallel with its optimizer",
    "nested DDP": "{at} is a DistributedDataParallel inside the model of {mode}; wrap the whole model in one, or none",
    "FSDP2": "{at} was given to fully_shard, and {mode} has no gradients of whole parameters; use "
    "GradSampleModuleFastGradientClipping (grad_sample_mode='dpfast'), and give the whole model to fully_shard as well",
    "FSDP2 around": "a module around {at} was given to fully_shard, and {mode} cannot see its units; give the model "
    "itself to fully_shard, before or after it is wrapped",
    "FSDP1": "{at} is a FullyShardedDataParallel, whose flat parameters have no per-sample gradients in {mode}; use "
    "fully_shard or DistributedDataParallel",
    "DTensor": "{at} holds DTensor parameters (tensor parallel), of which {mode} would take a part for the whole; use "
    "GradSampleModuleFastGradientClipping, its optimizer and PoissonBatches yourself (docs/distributed.md)",
    "DTensor in DDP": "{at} holds DTensor parameters (tensor parallel) inside a DistributedDataParallel, and {mode} "
    "supports one of the two at a time",
    "plain parts": "{at} has parts of parameters as plain tensors (tp_plan of this version of transformers), which "
    "{mode} would take for the whole; take transformers 5.23 or later, whose parts are DTensors, or parallelize_module",
    "pipeline": "{at} runs as a stage of torch.distributed.pipelining, and {mode} would clip its part of each "
    "sample's gradient by itself: no rank has all layers, and norms do not cross ranks. Use fully_shard",
    "context": "{at} runs in context_parallel, and {mode} would clip what part of the positions adds to each sample's "
    "gradient: norms of sums over ranks are not taken. Use fully_shard or tensor parallel",
}


def not_in(wrapper: Wrapper, mode: str) -> str:
    """Why that mode refuses it, and what to use."""
    at = f"{wrapper.name or 'the model'} ({type(wrapper.module).__name__})"
    return _REMEDIES[wrapper.kind].format(at=at, mode=mode)
