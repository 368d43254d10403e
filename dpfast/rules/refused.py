"""Layers that cannot have per-sample gradients, with the usual remedy of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dpfast.taps import register_fault

_FREEZE = "or freeze it"
_OF_TORCH = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


@register_fault(nn.modules.batchnorm._BatchNorm)
def batch_norm(layer: nn.modules.batchnorm._BatchNorm) -> str | None:
    """In training mode, and where it has no statistics of its own, it normalises over the batch."""
    if not (layer.training or layer.running_mean is None or any(p.requires_grad for p in layer.parameters())):
        return None
    return (
        "normalises over the batch, so a sample's gradient depends on the others; replace it with GroupNorm "
        "(opacus.validators.ModuleValidator.fix does), or freeze it and put it in eval mode"
    )


@register_fault(nn.modules.instancenorm._InstanceNorm)
def running_statistics(layer: nn.modules.instancenorm._InstanceNorm) -> str | None:
    """Statistics of the samples are kept in buffers, outside what is clipped; in eval mode it normalises by them."""
    if not (layer.track_running_stats and (layer.training or any(p.requires_grad for p in layer.parameters()))):
        return None
    return (
        "keeps running statistics of the samples, which are not private; build it with track_running_stats=False, or "
        "freeze it and put it in eval mode"
    )


@register_fault((nn.Embedding, nn.EmbeddingBag))
def by_frequency(layer: nn.Embedding | nn.EmbeddingBag) -> str | None:
    """Both options look at the whole batch's indices."""
    if not (layer.scale_grad_by_freq or layer.max_norm is not None) or not layer.weight.requires_grad:
        return None
    return (
        "scale_grad_by_freq and max_norm make a sample's gradient depend on the others in its batch; build it "
        f"without them, {_FREEZE}"
    )


@register_fault(nn.AdaptiveLogSoftmaxWithLoss)
def adaptive_softmax(layer: nn.AdaptiveLogSoftmaxWithLoss) -> str | None:
    """Its tails see only the samples whose target is in them."""
    if not any(p.requires_grad for p in layer.parameters()):
        return None
    return f"sends each sample to a different part of itself; use nn.Linear and log_softmax, {_FREEZE}"


@register_fault(torch.jit.ScriptModule)
def compiled_by_jit(layer: torch.jit.ScriptModule) -> str | None:
    """Its forward is not Python's."""
    if not any(p.requires_grad for p in layer.parameters()):
        return None
    return f"is a TorchScript module, whose forward cannot be tapped; wrap the model it was made from, {_FREEZE}"


@register_fault(nn.modules.lazy.LazyModuleMixin)  # type: ignore[arg-type]  # a mixin of modules
def uninitialised(layer: Any) -> str | None:
    """Its parameters do not exist yet."""
    if not layer.has_uninitialized_params():
        return None
    return "is not initialised; run one forward pass before wrapping the model"


@register_fault(nn.Module)
def computed_before(layer: nn.Module) -> str | None:
    """Hooks that make a layer's weight before its forward, where no tap sees what of."""
    if not layer._forward_pre_hooks:  # nearly all layers
        return None
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, (BasePruningMethod, SpectralNorm, WeightNorm)):
            made, by = hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name, type(hook).__module__
            of = [n for n, p in layer._parameters.items() if n.startswith(f"{made}_") and p is not None]
        elif type(layer) in _OF_TORCH and "weight" not in layer._parameters:
            made, by = "weight", "a forward pre-hook"
            of = [n for n, p in layer._parameters.items() if n != "bias" and p is not None]
        else:
            continue
        if any(layer._parameters[n].requires_grad for n in of):  # type: ignore[union-attr]  # none is None
            return (
                f"its {made} is made of {' and '.join(of)} before its forward ({by}); make it by a parametrization "
                "(torch.nn.utils.parametrize; torch.nn.utils.parametrizations has weight_norm and spectral_norm), or "
                f"freeze {' and '.join(of)}"
            )
    return None
