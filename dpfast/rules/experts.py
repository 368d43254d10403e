"""Experts of Hugging Face's transformers 5: one weight (E, P, D) for all, and each token goes through some of them.

All of its experts modules share one signature, ``(hidden_states, top_k_index, top_k_weights)``, and what the decorator
``use_experts_implementation`` says of them. It runs here in pieces that know the token of each row, whatever
implementation the configuration names (eager, batched, grouped: the same mathematics).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from dpfast.arithmetic import is_traced
from dpfast.errors import InputError, UnsupportedModuleError
from dpfast.factors import Blocks, Dense, Factor, OfExperts, OuterProduct, Reshaped, Runs
from dpfast.taps import (
    Activations,
    Pieces,
    experts_of,
    find_forward,
    never_compiled,
    register_by_row,
    register_fault,
    register_forward,
)

DECORATED = "transformers.integrations.moe.forward"
"""What the decorator wraps around a class's forward."""

SAME_SIGNATURE = (DECORATED, "transformers.models.step3p7.modeling_step3p7.Step3p7Experts")


@register_forward(SAME_SIGNATURE)
def experts_of_tokens(layer: Any, piece: Pieces, *args: Any, **kwargs: Any) -> Tensor:
    """As the module's own forward: hidden_states (R, D), top_k_index and top_k_weights (R, k) -> (R, D), R tokens."""
    if is_traced():
        raise UnsupportedModuleError(
            f"{type(layer).__name__}: how many tokens an expert gets is known when a step runs, and a graph has fixed "
            "shapes; take GradSampleModuleFastGradientClipping, the same step without a graph"
        )
    hidden, index, weights = _inputs(layer, args, kwargs)
    tokens, k = index.shape
    experts, order = index.flatten().sort(stable=True)
    counts = _counts(experts, layer.num_experts)
    chosen = sum(counts)  # others are no expert's: a router says so by a number past the last
    experts, order = experts[:chosen], order[:chosen]
    output = _through(layer, piece, hidden[order // k], experts, order // k, counts, tokens)
    output = output * weights.flatten()[order].unsqueeze(-1)
    every = output.new_zeros(tokens * k, output.shape[1]).index_copy(0, order, output)
    return every.unflatten(0, (tokens, k)).sum(1).to(hidden.dtype)


@register_by_row(SAME_SIGNATURE)
def every_expert(layer: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The same, where every token goes through every expert: no row's bits depend on where other tokens went."""
    hidden, index, weights = _inputs(layer, args, kwargs)
    total = torch.zeros_like(hidden)
    for e in range(layer.num_experts):
        rows = torch.full((len(hidden),), e, device=hidden.device)
        counts = [len(hidden) if i == e else 0 for i in range(layer.num_experts)]
        output = _through(layer, _untapped, hidden, rows, rows, counts, len(hidden))
        share = (weights * (index == e)).sum(1, keepdim=True)
        total = total + torch.where(share != 0, output * share, 0.0).to(total.dtype)
    return total


def _inputs(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """By position, as classes name them differently."""
    own = inspect.unwrap(type(layer).forward)
    hidden, index, weights = inspect.signature(own).bind(layer, *args, **kwargs).args[1:]
    if hidden.dim() != 2 or index.shape != weights.shape or index.shape[0] != hidden.shape[0]:
        raise InputError(
            f"{type(layer).__name__}: hidden_states {tuple(hidden.shape)}, top_k_index {tuple(index.shape)} and "
            f"top_k_weights {tuple(weights.shape)} are not (R, D), (R, k) and (R, k)"
        )
    if getattr(layer, "_is_expert_parallel", False):
        raise UnsupportedModuleError(
            f"{type(layer).__name__}: its experts are parted among ranks, whose tokens are of other ranks' samples; "
            "load the model without expert parallelism, or freeze them"
        )
    norm = getattr(layer, "post_expert_norm", None)
    if norm is not None and any(p.requires_grad for p in norm.parameters()):
        raise UnsupportedModuleError(
            f"{type(layer).__name__}: its post_expert_norm sees the tokens of all samples, sorted by expert, and has "
            "no rule there; freeze its parameters"
        )
    return hidden, index, weights


def _counts(experts: Tensor, num_experts: int) -> list[int]:
    """How many rows each expert has. Fake tensors have no values: there the first has all."""
    if isinstance(experts, FakeTensor):
        return [len(experts)] + [0] * (num_experts - 1)
    return torch.bincount(experts, minlength=num_experts)[:num_experts].tolist()


def _through(
    layer: Any, piece: Any, x: Tensor, experts: Tensor, tokens: Tensor, counts: list[int], num_tokens: int
) -> Tensor:
    """Rows (S, D), those of an expert together, through theirs.

    Args:
        piece: see ``Pieces``. experts, tokens: of each row, (S,). counts: rows of each expert.
    """
    linear, rule = _linear_of(layer, counts), _rule_of(layer, num_tokens)
    up = "gate_up_proj" if _is(layer, "has_gate") else "up_proj"
    x = piece(rule, linear, _weight_and_bias(layer, up), x, experts, tokens)
    x = layer._apply_gate(x) if _is(layer, "has_gate") else layer.act_fn(x)
    x = piece(rule, linear, _weight_and_bias(layer, "down_proj"), x, experts, tokens)
    return layer.post_expert_norm(x) if _is(layer, "has_post_expert_norm") else x


def _is(layer: Any, what: str) -> bool:
    """What the decorator says; its own defaults where there is none."""
    return bool(getattr(layer, what, what == "has_gate"))


def _untapped(rule: Any, function: Callable[..., Any], parameters: Sequence[Any], *inputs: Any) -> Any:
    return function(*inputs, *parameters)


def _weight_and_bias(layer: Any, name: str) -> list[nn.Parameter | None]:
    return [getattr(layer, name), getattr(layer, f"{name}_bias") if _is(layer, "has_bias") else None]


def _linear_of(layer: Any, counts: list[int]) -> Callable[..., Tensor]:
    transposed = _is(layer, "is_transposed")

    def linear(x: Tensor, experts: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        outputs: list[Tensor] = []
        for e, rows in enumerate(x.split(counts)):
            if len(rows) or (not outputs and e == len(counts) - 1):
                outputs.append(F.linear(rows, weight[e].T if transposed else weight[e], _of(bias, e)))
        return torch.cat(outputs)

    return linear


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


def _rule_of(layer: Any, num_tokens: int) -> Callable[..., Mapping[Any, Factor]]:
    def experts_of_tokens(
        parameters: Sequence[nn.Parameter | None], activations: Activations, backprops: Tensor
    ) -> Mapping[Any, Factor]:
        """activations: rows (S, D), and the expert and the token of each; backprops (S, P)."""
        (x, experts, tokens), (weight, bias) = activations, parameters
        a, b = x.unsqueeze(1), backprops.unsqueeze(1)
        runs = Runs(tokens, num_tokens)
        product = OuterProduct(b, a) if _is(layer, "is_transposed") else OuterProduct(a, b)
        found: dict[Any, Factor] = {weight: OfExperts(product, experts, layer.num_experts, runs)}
        if bias is not None:
            found[bias] = OfExperts(Dense(backprops), experts, layer.num_experts, runs)
        return found

    return experts_of_tokens


@register_forward("transformers.models.inkling.modeling_inkling.InklingSharedExperts")
def shared_experts(layer: Any, piece: Pieces, hidden_states: Tensor, gammas: Tensor) -> Tensor:
    """Every token goes through all of them: hidden_states (N, T, D), and the share of each in a token."""
    gate, up = (piece(_of_each, _through_each, [p], hidden_states) for p in (layer.gate_proj, layer.up_proj))
    activated = layer.act_fn(gate) * up * gammas.reshape(*gate.shape[:-1], 1)
    down = piece(_of_each, _through_each, [layer.down_proj], activated)
    return down.float().sum(2).to(hidden_states.dtype)


def _through_each(x: Tensor, weight: Tensor) -> Tensor:
    """(N, T, D) or (N, T, E, D) with (E, P, D) -> (N, T, E, P)"""
    return torch.einsum("ntd,epd->ntep" if x.dim() == 3 else "nted,epd->ntep", x, weight)


def _of_each(
    parameters: Sequence[nn.Parameter | None], activations: Activations, backprops: Tensor
) -> Mapping[Any, Factor]:
    (weight,) = parameters
    assert weight is not None
    b = backprops.unbind(2)
    a = activations[0].unbind(2) if activations[0].dim() == 4 else [activations[0]] * len(b)
    return {weight: Reshaped(Blocks([OuterProduct(x, y) for x, y in zip(a, b, strict=True)]), weight.shape)}


# --- what cannot be parted by samples ---


@register_fault(nn.Module)
def gathered(layer: nn.Module) -> str | None:
    """Experts of other kinds: layers in them see tokens of all samples."""
    if not _is_of_experts(type(layer)) or experts_of(layer) or find_forward(layer) is not None:  # type: ignore[arg-type]  # as in registry
        return None
    if not any(p.requires_grad for p in layer.parameters()):
        return None
    return (
        "sends tokens of all samples to experts in a way that has no rule, so what is in it does not know whose they "
        "are; take a model whose experts have one weight for all, (E, P, D), and use_experts_implementation of "
        "transformers 5, or freeze it"
    )


@lru_cache(maxsize=4096)
def _is_of_experts(cls: type) -> bool:
    return cls.__module__.startswith("transformers.models.") and cls.__name__.endswith(("Experts", "NaiveMoe"))


@register_fault("transformers.models.nllb_moe.modeling_nllb_moe.NllbMoeSparseMLP")
def with_capacity(layer: nn.Module) -> str | None:
    """Tokens are counted along the whole batch."""
    if not any(p.requires_grad for p in layer.parameters()):
        return None
    return (
        "drops tokens where an expert has as many as it takes, which depends on the other samples in the batch; take a "
        "model without a capacity of experts, or freeze it"
    )


@register_fault("peft.tuners.lora.layer.ParamWrapper")
def of_a_parameter(layer: Any) -> str | None:
    """It changes a weight of the module in it, which runs with the sum."""
    own = [p for name, p in layer.named_parameters() if not name.startswith("base_layer.")]
    if not any(p.requires_grad for p in own):
        return None
    return (
        "adapts a parameter of another module (PEFT's target_parameters), whose forward uses the sum of both, and that "
        "has no rule; adapt modules by target_modules (experts in a list are modules too), or freeze it"
    )


def refuse_balancing(model: nn.Module) -> list[RemovableHandle]:
    """Modules in it that make a loss of how evenly experts are used, over all samples of the batch, raise
    UnsupportedModuleError where a gradient comes of that loss."""
    modules = [m for m in model.modules() if _balances(type(m))]  # type: ignore[arg-type]  # as in registry
    return [m.register_forward_hook(_refuse_balancing, with_kwargs=True) for m in modules]


@lru_cache(maxsize=4096)
def _balances(cls: type) -> bool:
    code = getattr(inspect.unwrap(getattr(cls, "forward", _balances)), "__code__", None)
    return "load_balancing_loss_func" in getattr(code, "co_names", ())


@never_compiled
def _refuse_balancing(module: Any, args: Any, kwargs: Any, output: Any) -> None:
    message = (
        f"{type(module).__name__}: the load-balancing loss (output_router_logits=True) multiplies by how often all "
        "samples chose an expert, so it is no sum of samples' losses, and clipping bounds nothing; call the model "
        "without output_router_logits, or compute the loss of its logits yourself"
    )
    asked = kwargs.get("output_router_logits")
    if asked is None:
        asked = getattr(module.config, "output_router_logits", False)
    if asked and isinstance(output, tuple) and torch.is_grad_enabled():
        raise UnsupportedModuleError(f"{message} (it is known by its name, which return_dict=False takes away)")

    def refuse(grad: Tensor) -> None:
        raise UnsupportedModuleError(message)

    losses = [getattr(output, name, None) for name in ("aux_loss", "encoder_aux_loss", "decoder_aux_loss")]
    losses = [loss for loss in losses if isinstance(loss, Tensor) and loss.requires_grad]
    if losses:  # the model's own loss is made of them; said here, where it is known why it mixes samples
        losses.append(getattr(output, "loss", None))
    for loss in losses:
        if isinstance(loss, Tensor):
            loss.register_hook(refuse)
