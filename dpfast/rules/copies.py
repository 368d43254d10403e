"""Layers that run with copies of their parameters, one a sample: torch's own backward gives each its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfast.arithmetic import operator
from dpfast.factors import Dense, Factor
from dpfast.rules.normalization import group_norm
from dpfast.taps import Activations, OwnStep, Pieces, find_fault, register_forward


@register_forward(nn.GroupNorm)
def group_norm_of_copies(layer: nn.GroupNorm, piece: Pieces, input: Tensor) -> Tensor:
    """The samples as the channels of one, (1, N·C, *spatial), each with its own copies of weight and bias. Their
    gradients come beside that of the input, at no cost; output and input gradient have the bits of the layer's own.

    Copies in 16 bits would have gradients in 16 bits, and other memory formats would be copied: there the rule answers.
    """
    n, parameters = input.shape[0], (layer.weight, layer.bias)
    if not can_be_one(input, layer.num_groups, parameters):

        def by_rule(parameters: Any, activations: Activations, backprops: Tensor) -> Mapping[Any, Factor]:
            weight, bias = parameters
            of = SimpleNamespace(weight=weight, bias=bias, num_groups=layer.num_groups, eps=layer.eps)
            return group_norm(of, activations, backprops)

        return piece(by_rule, lambda x, w, b: F.group_norm(x, layer.num_groups, w, b, layer.eps), parameters, input)
    own = [p for p in parameters if p is not None]
    if len(own) == len(parameters):
        output = piece.as_one(of_copies, _group_norm_step(layer.num_groups, layer.eps), own, input)
        if output is not None:
            return output
    copies = iter(piece(of_copies, _rows_of(n), own))
    weight, bias = [p if p is None else next(copies) for p in parameters]
    return group_norm_as_one(input, layer.num_groups, weight, bias, layer.eps)


_BEHIND = {"drop", "act"}


def _is_group_norm(layer: Any) -> bool:
    """Whether that is what its forward computes, and nothing behind it has to be caught. ``fast_group_norm`` rounds to
    autocast's dtype."""
    if getattr(layer, "_fast_norm", False) or layer._modules.keys() != _BEHIND:
        return False
    for m in layer._modules.values():
        if m is None or m._modules or m._parameters or find_fault(m) is not None:
            return False
    return True


@register_forward(("timm.layers.norm_act.GroupNormAct", "timm.layers.norm_act.GroupNorm1Act"), only=_is_group_norm)
def group_norm_and_activation(layer: Any, piece: Pieces, input: Tensor) -> Tensor:
    """As the classes' forward; no package is imported. BiT has fifty of them."""
    return layer.act(layer.drop(group_norm_of_copies(layer, piece, input)))


def _rows_of(n: int) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *parameters: tuple([in_a_row(p, n) for p in parameters])


def in_a_row(x: Tensor, n: int) -> Tensor:
    """n copies of (C,), one after the other, (n·C,); ``repeat`` makes more calls. In memory of their own, one channel's
    too, which a view would be n times the same: torch's group norm takes weights for contiguous and reads on."""
    return _unsafe_view(x.expand(n, -1).contiguous(), (-1,)) if n != 1 else x.clone()


def can_be_one(input: Tensor, num_groups: int, parameters: Sequence[Tensor | None]) -> bool:
    """Whether :func:`group_norm_as_one` gives what the samples' own group norm gives; never a question of how many
    there are, so that one alone has the bits that it has among others."""
    for p in parameters:
        if p is not None and p.dtype not in (torch.float32, torch.float64):
            return False
    shape = input.shape
    first = input[0] if shape[0] else None
    return first is not None and first.numel() // num_groups >= 2 and first.is_contiguous()


def group_norm_as_one(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The group norm of (N, C, *spatial) with weights and biases (N·C,)."""
    n, channels = input.shape[:2]
    as_one = input.contiguous().view(1, n * channels, *input.shape[2:])  # a copy of part of the channels
    output = F.group_norm(as_one, n * num_groups, weight, bias, eps)
    # No view to autograd, which would copy the gradient three times where an operation in place follows.
    return _unsafe_view(output, input.shape)


_unsafe_view = operator(torch.ops.aten._unsafe_view.default)


@lru_cache
def _group_norm_step(num_groups: int, eps: float) -> OwnStep:
    """:func:`group_norm_as_one`, and the gradients of its weights and biases, (N·C,) each."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        n, channels = x.shape[:2]
        weights, biases = in_a_row(weight, n), in_a_row(bias, n)
        x = x.contiguous()
        as_one, sizes = x.view(1, n * channels, *x.shape[2:]), (n * channels, x.shape[2:].numel(), n * num_groups)
        output, mean, rstd = torch.native_group_norm(as_one, weights, biases, 1, *sizes, eps)
        return output.view(x.shape), (x, mean, rstd, weights)

    def backward(
        gradient: Tensor, with_input: bool, x: Tensor, mean: Tensor, rstd: Tensor, weights: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
        shape, as_one = x.shape, (1, weights.numel(), *x.shape[2:])
        sizes, wanted = (weights.numel(), shape[2:].numel(), mean.numel()), [with_input, True, True]
        of_output, x = gradient.contiguous().view(as_one), x.view(as_one)
        of_input, of_weights, of_biases = _backward(of_output, x, mean, rstd, weights, 1, *sizes, wanted)
        return of_input.view(shape) if with_input else None, (of_weights, of_biases)

    return OwnStep(forward, backward)


_backward = operator(torch.ops.aten.native_group_norm_backward.default)


def of_copies(
    parameters: Sequence[nn.Parameter], activations: Activations, backprops: Tensor | Sequence[Tensor]
) -> Mapping[nn.Parameter, Factor]:
    """backprops (N·C,) each, of copies one after the other."""
    backprops = (backprops,) if isinstance(backprops, Tensor) else backprops
    return {p: Dense(b.view(-1, *p.shape)) for p, b in zip(parameters, backprops, strict=True)}
