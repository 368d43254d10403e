"""Any layer without a rule: vmap over samples of the gradient of its forward (torch.func).

The layer's forward runs again, one sample at a time as seen by the layer, so it must treat samples alike: every
tensor input whose first dimension is N is taken apart, every other input is shared.
Source: Horace He, Richard Zou, functorch (2021), "per-sample gradients".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Dense, Factor
from dpfast.registry import Activations


def functorch(
    module: nn.Module, activations: Activations, backprops: Tensor | Sequence[Tensor]
) -> dict[nn.Parameter, Factor]:
    """Gradients of the module's own trainable parameters, (N, *shape) each, in fp32 or fp64.

    Args:
        module: the layer; parameters of its children are left to their own rules.
        activations: the layer's inputs; tensors (N, ...) are per sample.
        backprops: (N, ...), or one per output tensor.

    Raises:
        UnsupportedModuleError: the forward cannot be taken apart by samples (it draws random numbers, mixes
            samples, or branches on values).
    """
    own = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    children = _detached({name: p for name, p in module.named_parameters() if name not in own})
    backprops = [backprops] if isinstance(backprops, Tensor) else list(backprops)
    n = backprops[0].shape[0]
    if n == 0:  # vmap does not take empty batches
        return {p: Dense(_at_least_fp32(p.new_zeros(0, *p.shape))) for p in own.values()}
    leaves, structure = tree_flatten((tuple(activations), activations.kwargs))
    per_sample = [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == n for x in leaves]
    batched = [x for x, yes in zip(leaves, per_sample, strict=True) if yes]

    def loss(parameters: dict[str, Tensor], sample: list[Tensor], gradients: list[Tensor]) -> Tensor:
        samples = iter(sample)
        inputs = [
            next(samples).unsqueeze(activations.batch_dim) if yes else x
            for x, yes in zip(leaves, per_sample, strict=True)
        ]
        args, kwargs = tree_unflatten(inputs, structure)
        outputs = [
            o for o in tree_flatten(functional_call(module, {**children, **parameters}, args, kwargs))[0] if _counts(o)
        ]
        return sum((o.squeeze(activations.batch_dim) * g).sum() for o, g in zip(outputs, gradients, strict=True))

    try:
        per_parameter = vmap(grad(loss), in_dims=(None, 0, 0))(_detached(own), batched, backprops)
    except Exception as error:
        raise UnsupportedModuleError(
            f"{module}: has no rule, and its forward cannot be repeated sample by sample "
            f"({type(error).__name__}: {error}). Register a rule (dpfast.register_rule) or freeze its parameters."
        ) from error
    return {p: Dense(_at_least_fp32(per_parameter[name])) for name, p in own.items()}


def _counts(output: Any) -> bool:
    return isinstance(output, Tensor) and output.is_floating_point()


def _detached(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in parameters.items()}


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
