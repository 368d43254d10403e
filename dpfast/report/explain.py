"""Which way each layer of a model goes, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpfast.arithmetic import cost
from dpfast.factors import Factor, Lookup, OuterProduct, PatchProduct, parts_of
from dpfast.modes import GradSampleModule, TappedModel
from dpfast.report.measure import Loss, Measured, Run, sum_of
from dpfast.report.page import Fallback, page
from dpfast.report.takes import IN_TURN, Caught, Turns, way_of
from dpfast.taps import Record, find_forward
from dpfast.trials import ONE_AT_A_TIME, put_back

FALLBACK = "functorch (vmap; no rule)"
_BYTES = 4  # what is kept is fp32 at most


@dataclass(frozen=True)
class Use:
    """One use of one parameter in a step.

    Attributes:
        layer: qualified name and class of the module whose tap caught it.
        parameter: qualified name.
        rule: the rule's name; :data:`FALLBACK` where the layer has none.
        way: "rank_one", "gram", "direct" or "keep" (``cost``), "in turn" (norm and sum sample by sample), "lookup", or
            "dense" for gradients as they are.
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


class _Of(NamedTuple):
    """What was explained."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Explanation:
    """Every use of every trainable parameter, in the order of the backward pass; ``str()`` is a table."""

    uses: tuple[Use, ...]
    num_samples: int
    _of: _Of | None = field(default=None, repr=False, compare=False)  # what :meth:`measure` runs again

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

    def measure(self, loss: Loss | None = None, done: Callable[[], None] = lambda: None) -> Measured:
        """What a plain and a private step of this model take on this machine, layer by layer and way by way.

        Takes some fifty steps. Gradients, random numbers, buffers and what forwards keep outside of modules are left as
        they were; on a GPU the statistics of peak memory are not. A prediction is made of what the parts took; whole
        steps are measured beside it.

        Args:
            loss: gives one number for the model's output; None: the sum of the outputs.
            done: called after each of ``report.Run.STEPS`` parts.

        Raises:
            InputError: the loss is not one number.
        """
        assert self._of is not None  # as explain() makes it
        return Run(self._of.model, self._of.args, self._of.kwargs, loss).measure(done)

    def html(self, loss: Loss | None = None, done: Callable[[], None] = lambda: None) -> str:
        """A page of what a step costs and why, in one file: :meth:`measure`, drawn. Arguments as there."""
        assert self._of is not None
        model = self._of.model
        name = type(model._module if isinstance(model, GradSampleModule) else model).__name__
        return page(name, self.num_samples, self._mended(), self.measure(loss, done))

    def _mended(self) -> list[Fallback]:
        found = []
        for layer in self.fallbacks:
            kind = layer.rpartition("(")[2].rstrip(")")
            why = "has no rule of its own: its gradients come from torch.func, sample by sample (vmap)."
            found.append(Fallback(layer, why, f"@dpfast.register_rule({kind})  # docs/writing-a-rule.md; or freeze it"))
        for use in {u.layer: u for u in self.uses if u.samples.endswith("?")}.values():
            name = use.layer.rpartition(" (")[0]
            why = (
                f"is assumed to have its samples in {use.samples.rstrip('?')}: the model could not be run to find out."
            )
            found.append(Fallback(use.layer, why, f'layout={{"{name}": {use.samples.rstrip("?")}}}'))
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "num_samples": self.num_samples,
            "flops": self.flops,
            "kept_bytes": self.kept_bytes,
            "fallbacks": list(self.fallbacks),
            "uses": [asdict(use) for use in self.uses],
        }

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

    Runs one forward and one backward pass on ``batch`` (``model(*batch, **inputs)``); gradients, random numbers,
    ``grad_sample`` and what the forward keeps outside of its modules are left as they are.

    Args:
        model: wrapped by dpfast or not.
        batch, inputs: the model's inputs; shapes are what counts.

    Raises:
        InputError: the model's output has nothing to differentiate. UnsupportedModuleError, EscapedGradientError: a
            step refuses the model.

    >>> print(explain(nn.Linear(3, 2), torch.ones(4, 3)).uses[0].way)
    rank_one
    """
    if isinstance(model, GradSampleModule) and model._tapped is not None:
        return _explained(model._tapped, model, batch, inputs)
    tapped = TappedModel(model, Caught())
    tapped.add()
    try:
        return _explained(tapped, model, batch, inputs)
    finally:
        tapped.remove()


def _explained(tapped: TappedModel, model: nn.Module, batch: tuple[Any, ...], inputs: dict[str, Any]) -> Explanation:
    names = {p: name for name, p in tapped.model.named_parameters()}
    uses: list[Use] = []
    sizes: set[int] = set()
    turns, places = Turns(tapped.model.parameters()), []

    def observe(record: Record, parameter: nn.Parameter, factor: Factor) -> None:
        rule = _rule_name(tapped, record)
        sizes.add(factor.num_samples)
        turns.see(parameter, factor)
        places.append(len(uses))
        found = [_use(record.tap.layer, names.get(parameter, "?"), rule, part) for part in parts_of(factor)]
        uses.extend(replace(use, samples=record.where()) for use in found)

    before = tapped.mode, tapped.enabled, tapped.observe
    tapped.mode, tapped.enabled, tapped.observe = Caught(), True, observe
    try:
        with ONE_AT_A_TIME, put_back(tapped.model), torch.random.fork_rng(), torch.enable_grad():
            # No gradient comes to where it is kept: taps take those of parameters, or refuse them.
            args, kwargs = tree_map(_apart, (batch, inputs))
            sum_of(model(*args, **kwargs)).backward()
    finally:
        tapped.mode, tapped.enabled, tapped.observe = before
        tapped.guards.drop()  # the next forward pass sets those again that its mode needs
    for i in turns.taken:
        use = uses[places[i]]
        t, d, p = use.shape
        flops = cost.norm_flops("keep", t, d, p)
        uses[places[i]] = replace(use, way=IN_TURN, flops=flops, kept_bytes=turns.inputs(i))
    return Explanation(tuple(uses), max(sizes, default=0), _Of(model, batch, inputs))


def _apart(x: Any) -> Any:
    """An input that nothing is differentiated beyond, and that stays as it is."""
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x


def _rule_name(tapped: TappedModel, record: Record) -> str:
    if record.as_is:
        forward = find_forward(record.tap.module)
        maker: Any = record.rule if forward is None else forward
        return maker.__name__
    rule = None if tapped.force_functorch else record.rule
    return FALLBACK if rule is None else rule.__name__


def _use(layer: str, parameter: str, rule: str, factor: Factor) -> Use:
    if isinstance(factor, (OuterProduct, PatchProduct)):
        groups = 1
        if isinstance(factor, PatchProduct):
            (t, d, p), groups = factor.matrix_shape, factor.groups
        else:
            (_, t, d), p = factor.activations.shape, factor.shape[0]
        way: Any = way_of(factor)
        kept = _BYTES * factor.shape.numel() if factor.keeps else factor.nbytes // max(1, factor.num_samples)
        return Use(layer, parameter, rule, way, (t, d, p), groups * cost.norm_flops(way, t, d, p), kept)
    if isinstance(factor, Lookup):
        t, d = factor.indices.shape[1], factor.shape[1]
        return Use(layer, parameter, rule, "lookup", (t, d), 2 * t * d, _BYTES * t * d)
    size = factor.shape.numel()
    return Use(layer, parameter, rule, "dense", tuple(factor.shape), 2 * size, _BYTES * size)
