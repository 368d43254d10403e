"""Which way each layer of a model goes, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpfast.arithmetic import cost, ops
from dpfast.errors import InputError
from dpfast.factors import Blocks, Factor, Lookup, OuterProduct, PatchProduct, Reshaped
from dpfast.modes import GradSampleModule, Step, TappedModel
from dpfast.taps import Record, find_forward

FALLBACK = "functorch (vmap; no rule)"
_BYTES = 4  # what is kept is fp32 at most


@dataclass(frozen=True)
class Use:
    """One use of one parameter in a step.

    Attributes:
        layer: qualified name and class of the module whose tap caught it.
        parameter: qualified name.
        rule: the rule's name; :data:`FALLBACK` where the layer has none.
        way: "rank_one", "gram", "direct" or "keep" (``cost``), "lookup", or "dense" for gradients as they are.
        shape: (T, D, P) of an outer product, (T, D) of a lookup, the parameter's shape otherwise.
        flops: what the norm costs a sample, on top of the clipped sum.
        kept_bytes: what is kept of a sample until its clip factor is known, beyond what autograd keeps anyway.
        samples: where they are in the layer's output, as in ``layout=``: the dimension, or "N*k" or "k*N" rows of it;
            "?" behind it where that is assumed, because the model could not be run to find out.
    """

    layer: str
    parameter: str
    rule: str
    way: str
    shape: tuple[int, ...]
    flops: int
    kept_bytes: int
    samples: str = ""


@dataclass(frozen=True)
class Explanation:
    """Every use of every trainable parameter, in the order of the backward pass; ``str()`` is a table."""

    uses: tuple[Use, ...]
    num_samples: int

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The layers that go through vmap because they have no rule."""
        return tuple(dict.fromkeys(u.layer for u in self.uses if u.rule == FALLBACK))

    @property
    def flops(self) -> int:
        """Of all norms of one sample."""
        return sum(u.flops for u in self.uses)

    @property
    def kept_bytes(self) -> int:
        """Of one sample, over all uses."""
        return sum(u.kept_bytes for u in self.uses)

    def __str__(self) -> str:
        header = ("layer", "parameter", "rule", "way", "shape", "FLOPs", "kept bytes", "samples")
        rows = [
            (
                u.layer,
                u.parameter,
                u.rule,
                u.way,
                "×".join(map(str, u.shape)),
                f"{u.flops:,}",
                f"{u.kept_bytes:,}",
                u.samples,
            )
            for u in self.uses
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]
        total = f"{len(self.uses)} uses, a sample: {self.flops:,} FLOPs of norms, {self.kept_bytes:,} bytes kept"
        without = f"without a rule: {', '.join(self.fallbacks) or 'none'}"
        return "\n".join([*lines, total, without])


def explain(model: nn.Module, *batch: Any, **inputs: Any) -> Explanation:
    """Says which way each trainable parameter of ``model`` goes in one-pass clipping.

    Runs one forward and one backward pass on ``batch`` (``model(*batch, **inputs)``); gradients, random numbers and
    ``grad_sample`` are left as they are.

    Args:
        model: wrapped by dpfast or not.
        batch, inputs: the model's inputs; shapes are what counts.

    Raises:
        InputError: the model's output has nothing to differentiate.

    >>> print(explain(nn.Linear(3, 2), torch.ones(4, 3)).uses[0].way)
    rank_one
    """
    if isinstance(model, GradSampleModule) and model._tapped is not None:
        return _explained(model._tapped, model, batch, inputs)
    tapped = TappedModel(model, _Nothing())
    tapped.add()
    try:
        return _explained(tapped, model, batch, inputs)
    finally:
        tapped.remove()


class _Nothing:
    """A mode that leaves nothing behind."""

    passes = 1
    defers = False

    def on_forward(self, inputs: Sequence[Tensor]) -> None:
        pass

    def on_factor(self, step: Step, parameter: nn.Parameter, factor: Factor, only_use: bool) -> None:
        pass

    def on_finish(self, step: Step) -> None:
        pass


def _explained(tapped: TappedModel, model: nn.Module, batch: tuple[Any, ...], inputs: dict[str, Any]) -> Explanation:
    names = {p: name for name, p in tapped.model.named_parameters()}
    uses: list[Use] = []
    sizes: set[int] = set()

    def observe(record: Record, parameter: nn.Parameter, factor: Factor) -> None:
        rule = _rule_name(tapped, record)
        sizes.add(factor.num_samples)
        found = [_use(record.tap.layer, names.get(parameter, "?"), rule, part) for part in _parts(factor)]
        uses.extend(replace(use, samples=record.where()) for use in found)

    before = tapped.mode, tapped.enabled, tapped.observe
    tapped.mode, tapped.enabled, tapped.observe = _Nothing(), True, observe
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            outputs = [x for x in tree_leaves(model(*batch, **inputs)) if isinstance(x, Tensor) and x.requires_grad]
            if not outputs:
                raise InputError("the model's output depends on no trainable parameter")
            total = sum(x.float().sum() for x in outputs)
            total.backward(inputs=_trainable(tapped.model))  # type: ignore[union-attr]  # there are outputs
    finally:
        tapped.mode, tapped.enabled, tapped.observe = before
        tapped.drop_guards()  # the next forward pass sets those again that its mode needs
    return Explanation(tuple(uses), max(sizes, default=0))


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _rule_name(tapped: TappedModel, record: Record) -> str:
    if record.as_is:
        forward = find_forward(record.tap.module)
        maker: Any = record.rule if forward is None else forward
        return maker.__name__
    rule = None if tapped.force_functorch else record.rule
    return FALLBACK if rule is None else rule.__name__


def _parts(factor: Factor) -> list[Factor]:
    if isinstance(factor, Reshaped):
        return _parts(factor.factor)
    if isinstance(factor, Blocks):
        return [part for block in factor.factors for part in _parts(block)]
    return [factor]


def _use(layer: str, parameter: str, rule: str, factor: Factor) -> Use:
    if isinstance(factor, (OuterProduct, PatchProduct)):
        groups = 1
        if isinstance(factor, PatchProduct):
            (t, d, p), groups, device = factor.matrix_shape, factor.groups, factor.rows.device
        else:
            (_, t, d), p, device = factor.activations.shape, factor.shape[0], factor.activations.device
        if factor.keeps:
            way: cost.Way = "keep"
        elif isinstance(factor, OuterProduct):
            way = ops.norm_way(factor.activations, factor.backprops)
        else:
            way = cost.norm_way(t, d, p, device)
        kept = _BYTES * factor.shape.numel() if factor.keeps else factor.nbytes // max(1, factor.num_samples)
        return Use(layer, parameter, rule, way, (t, d, p), groups * cost.norm_flops(way, t, d, p), kept)
    if isinstance(factor, Lookup):
        t, d = factor.indices.shape[1], factor.shape[1]
        return Use(layer, parameter, rule, "lookup", (t, d), 2 * t * d, _BYTES * t * d)
    size = factor.shape.numel()
    return Use(layer, parameter, rule, "dense", tuple(factor.shape), 2 * size, _BYTES * size)
