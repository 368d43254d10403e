"""``compile_step``: forward, backward, norms, clip factors and clipped sums as one compiled graph."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dpfast.arithmetic import reduced_convolutions, reduced_products
from dpfast.compiled.apart import check_apart, check_losses
from dpfast.compiled.batches import Batch, num_samples, padded
from dpfast.compiled.graph import Graph, Own, Walked
from dpfast.compiled.mode import GraphMode, learner, mixed_in, running
from dpfast.distributed import number_of_ranks
from dpfast.errors import InputError, StateError
from dpfast.modes import (
    GradSampleModule,
    Guards,
    NormClipper,
    Units,
    check_parameters,
    check_threshold,
    check_valid,
    clips_one_by_one,
    left_in,
    not_noted,
    nothing_left,
)
from dpfast.taps import has_hooks

Losses = Callable[..., Tensor]


def compile_step(
    model: nn.Module,
    losses: Losses,
    *,
    max_grad_norm: float,
    batch_size: int,
    norm_clipper: NormClipper | None = None,
    layout: Mapping[str, Any] | None = None,
    chunks: bool = True,
    backend: str = "inductor",
    num_units: int | None = None,
    per_unit: str = "sum",
) -> CompiledStep:
    """The step of :class:`GradSampleModuleFastGradientClipping` as one graph, compiled once for batches of any size.

    Maths:
        ``p.grad += Σ_n c_n g_n`` with ``c_n = min(1, C / ‖g_n‖)``, g_n the gradient of sample n's loss.

    The first call captures what the eager step does (its taps, rules, factors and checks run once, without values) and
    compiles it, which takes minutes for a large model and seconds from torch's caches on disk. Another call runs the
    graph; it is captured anew where shapes, dtypes, devices, train/eval, ``requires_grad``, autocast or the kind of
    clipper are others. Numbers and flags of Python (a dropout's p, a config) are what they were at capture. Noise and
    optimizer stay outside. The model itself is not changed and may run, and train, without this.

    Args:
        model: not wrapped.
        losses: ``losses(model, *batch) -> (N,)``, one loss a sample, by the model that it is given.
        max_grad_norm: C; ``step.max_grad_norm`` may be changed between steps, as may ``step.norm_clipper``.
        batch_size: the graph's; a smaller batch is padded, a larger one takes several passes.
        norm_clipper, layout: as in the eager mode.
        chunks: False makes a batch of more than ``batch_size`` samples an error.
        backend: torch.compile's.
        num_units: U, the most that a batch has, where units are clipped and not samples (docs/units.md); each step is
            told whose its samples are, ``step(*batch, units=ids)``.
        per_unit: "sum" of a unit's gradients, or "mean".

    Returns:
        ``step(*batch, valid=None, units=None)``, see :class:`CompiledStep`.

    Raises:
        InputError: an argument is out of its range.

    >>> net = nn.Linear(3, 2, bias=False)
    >>> step = compile_step(
    ...     net, lambda model, x: model(x).sum(1), max_grad_norm=1.0, batch_size=4, backend="eager")  # not compiled
    >>> step(torch.ones(3, 3))
    >>> step.norms.pow(2), net.weight.grad.norm().round(decimals=3)
    (tensor([6.0000, 6.0000, 6.0000]), tensor(3.))
    """
    return CompiledStep(
        model,
        losses,
        batch_size=batch_size,
        chunks=chunks,
        backend=backend,
        layout=layout,
        max_grad_norm=max_grad_norm,
        norm_clipper=norm_clipper,
        num_units=num_units,
        per_unit=per_unit,
    )


class CompiledStep:
    """``step(*batch, valid=None, units=None)`` leaves ``p.grad += Σ_n c_n g_n`` for every trainable parameter, or of
    units ``Σ_u c_u G_u``.

    A draw of no samples leaves zeros. Padding (``valid`` False, or what fills a batch up) adds exactly nothing,
    whatever it holds; it has no norm and is in no count. ``p.grad`` is that of the eager step, with the same note of
    how many passes it holds, so dpfast's optimizers take it as they take that one's.

    Formal guarantee: as the eager step's. What norms are taken of is a tensor in memory, which is what is summed, and
    norms become factors outside of what the compiler changes, in fp64 and by the eager step's code (docs/compiled.md).
    """

    needs_units = False  # an engine that draws units refuses the compiled mode
    needs_valid = False  # an engine's batches are padded

    def __init__(
        self,
        model: nn.Module,
        losses: Losses,
        *,
        batch_size: int,
        chunks: bool,
        backend: str,
        layout: Mapping[str, Any] | None,
        max_grad_norm: float,
        norm_clipper: NormClipper | None,
        num_units: int | None,
        per_unit: str,
    ):
        if not (isinstance(batch_size, int) and batch_size > 0):
            raise InputError(f"batch_size={batch_size!r} must be a positive number of samples")
        GradSampleModule.validate(model, strict=True)
        check_losses(losses)
        if isinstance(model, torch._dynamo.OptimizedModule):
            raise InputError("the model is torch.compile's already, and compile_step compiles: give model._orig_mod")
        if any(isinstance(m, GradSampleModule) or has_hooks(m) for m in model.modules()):
            raise StateError(
                "take the module itself: it, or one in it, has hooks already; remove the first ones with "
                "remove_hooks() or to_standard_module()"
            )
        if number_of_ranks() > 1:
            raise StateError(
                "compile_step leaves the sum of this process's samples alone; over ranks take "
                "GradSampleModuleFastGradientClipping under DistributedDataParallel or fully_shard"
            )
        check_parameters(model, (p for p in model.parameters() if p.requires_grad), hooks=False)
        self.model, self.losses, self.batch_size, self.chunks = model, losses, batch_size, chunks
        self._backend, self._layout = backend, layout
        self._mode = GraphMode(nn.Module(), loss_reduction="sum", max_grad_norm=max_grad_norm)  # nothing is tapped
        self._mode._module = model
        self._mode.norm_clipper = norm_clipper
        if num_units is not None:
            Units(torch.zeros(0, dtype=torch.int64), num_units, per_unit, 0)  # checks them
        self.num_units, self.per_unit = num_units, per_unit
        self._begin()

    def _begin(self) -> None:
        """Without graphs, and nothing left of a batch."""
        # What the model's own backward passes add to the sums of a step gets a note.
        self._guards = Guards(self.model, lambda parameter, grad: None, hooks=False)
        weakref.finalize(self, self._guards.remove)  # what this step has left is watched no more
        self._walked = Walked(self.model)
        self._graphs: dict[Hashable, Graph] = {}
        self._parts: list[tuple[Tensor, ...]] = []
        self._limits: tuple[float, torch.device] | None = None
        self._limit_there = torch.empty(0)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles capture their graphs anew; what the last batch has left here is private."""
        anew = {"_guards", "_walked", "_graphs", "_parts", "_limits", "_limit_there"}
        return {name: x for name, x in vars(self).items() if name not in anew}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __getattr__(self, name: str) -> Any:  # of what is not here
        raise AttributeError(f"a compiled step has no {name!r}; the model is step.model")

    # --- settings ---

    @property
    def max_grad_norm(self) -> float:
        """C; may be changed between steps."""
        return self._mode.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._mode.max_grad_norm = check_threshold(value)

    @property
    def norm_clipper(self) -> NormClipper | None:
        """What takes the place of ``ConstantFlatClipper(max_grad_norm)``, if anything; may be set between steps."""
        return self._mode.norm_clipper

    @norm_clipper.setter
    def norm_clipper(self, norm_clipper: NormClipper | None) -> None:
        self._mode.norm_clipper = norm_clipper

    @property
    def sensitivity(self) -> float:
        """The most that adding or removing one sample can move the clipped sum, in L2 norm."""
        return self._mode.sensitivity

    def forbid_grad_accumulation(self) -> None:
        """From here on a second step without ``zero_grad`` raises StateError (Poisson sampling)."""
        self._mode.forbid_grad_accumulation()

    def allow_grad_accumulation(self) -> None:
        """Undoes :meth:`forbid_grad_accumulation`."""
        self._mode.allow_grad_accumulation()

    # --- what the last call left ---

    @property
    def norms(self) -> Tensor:
        """L2 norms of the valid samples' gradients, (N,) fp32, or of the units', (U,), as computed. Private: do not
        publish them."""
        return torch.cat([value.sqrt().float()[valid] for value, _, _, valid in self._last()])

    @property
    def clip_factors(self) -> Tensor:
        """Their clip factors, (N,) fp32, (P, N) for P parameters clipped one by one."""
        return torch.cat([factors[..., valid] for _, factors, _, valid in self._last()], dim=-1)

    @property
    def dropped(self) -> int:
        """How many of the last call's samples had a norm of inf or NaN and were dropped. Waits for a GPU, and for the
        warning that may still be on its way."""
        _ = self._mode.nonfinite_samples
        return sum(int((~measured.isfinite()).any(0).sum()) for _, _, measured, _ in self._last())

    def _last(self) -> list[tuple[Tensor, ...]]:
        if not self._parts:
            raise StateError("no step has run yet")
        return self._parts

    # --- the step ---

    def __call__(self, *batch: Any, valid: Tensor | None = None, units: Tensor | None = None) -> None:
        """One step.

        Args:
            batch: what ``losses`` takes behind the model; every tensor in it has its N samples first.
            valid: (N,) bool, False for padding; None: there is none.
            units: the unit of each sample, (N,) whole numbers in [-1, num_units), -1: nobody's; units may have none.

        Raises:
            InputError: tensors of different lengths, a mask that is not (N,) bool, no mask where an engine made the
                step, more than ``batch_size`` samples without ``chunks`` or with units, ids that do not fit, losses
                that are not (N,), or of which one is seen to depend on other samples. StateError: the model has other
                parameters than when it was captured, or ``p.grad`` holds what no private step has left.
                UnsupportedModuleError: the model reads values.
                BackendError: torch.compile cannot compile here.
        """
        if valid is None and self.needs_valid:
            raise InputError(
                "the engine's batches are filled up with zeros, which would count as samples: "
                "for (x, y), valid in loader: step(x, y, valid=valid)"
            )
        leaves, structure = tree_flatten(batch)
        whole = Batch(leaves, structure)
        n = num_samples(whole.tensors)
        device = whole.tensors[0].device
        valid = torch.ones(n, dtype=torch.bool, device=device) if valid is None else valid
        check_valid(valid, n)
        whose = self._whose(units, valid)
        clipped = valid if self.num_units is None else valid.new_ones(self.num_units)
        if n > self.batch_size and not self.chunks:
            raise InputError(
                f"a batch of {n} samples is larger than batch_size={self.batch_size}, and chunks=False; allow chunks, "
                "or give a larger batch_size"
            )
        own = self._walked.own(self.model)
        trainable = own.trainable
        self._guards.set(trainable)
        self._mode.begin(trainable)
        alone = nothing_left(trainable)
        if not alone:
            self._check_left(trainable)
        sums: dict[nn.Parameter, Tensor | None] = dict.fromkeys(trainable)
        parts: list[tuple[Tensor, ...]] = []
        with torch.no_grad(), running(self._mode):
            if n == 0:
                nothing = self._mode.own_clip([None] * len(trainable), clipped)
                parts.append((nothing.norms, nothing.factors, nothing.measured, clipped))
            for tensors, mask in padded(whole.tensors, whose.to(device), self.batch_size):
                graph = self._graph(own, whole, tensors)
                inputs = [*tensors, mask, self._limit(device)]
                *found, value, factors, measured = graph.run(own, inputs, alone=alone and n <= self.batch_size)
                if graph.counts:
                    self._mode.count(measured)
                for p, total in zip(graph.of, found, strict=True):
                    before = sums[p]
                    sums[p] = total if before is None else before.add_(total)
                parts.append((value, factors, measured, mask if self.num_units is None else clipped))
            self._mode.leave(sums)
        self._parts = parts

    def _whose(self, ids: Tensor | None, valid: Tensor) -> Tensor:
        """What a graph is told of its samples: which are valid, or whose they are."""
        if (ids is None) != (self.num_units is None):
            raise InputError(
                "this step clips units: tell it whose its samples are, step(*batch, units=ids)"
                if ids is None
                else "this step clips samples; for units make it with compile_step(..., num_units=)"
            )
        if ids is None or self.num_units is None:
            return valid
        units = Units(ids, self.num_units, self.per_unit, 0)
        if units.of_tokens:
            raise InputError(
                f"ids {tuple(ids.shape)} are of tokens, and a graph has ids of samples, (N,); "
                "GradSampleModuleFastGradientClipping takes them, in the same step without a graph"
            )
        units.start(len(valid), None)
        if len(valid) > self.batch_size:
            raise InputError(
                f"a batch of {len(valid)} samples takes several passes of batch_size={self.batch_size}, and a unit "
                "would be clipped in each; give a larger batch_size"
            )
        self._mode.now = Units(units.ids.where(valid.cpu(), -1), self.num_units, self.per_unit, 0)
        return self._mode.now.ids

    def _check_left(self, trainable: list[nn.Parameter]) -> None:
        """Raises StateError where gradients are there that are no private step's."""
        left = left_in(trainable)
        if not_noted(trainable) or (left is not None and left.unclipped):
            raise StateError(
                "p.grad holds gradients that no private step has left, and clipped sums would be added to them: the "
                "model ran backward by itself, or p.grad was replaced; call zero_grad() first. Who changes a clipped "
                "sum between two steps writes into p.grad"
            )

    def _graph(self, own: Own, whole: Batch, tensors: list[Tensor]) -> Graph:
        if self._graphs:
            next(iter(self._graphs.values())).check_model(own)
        key = self._key(own, whole, tensors)
        found = self._graphs.get(key)
        if found is not None and found.counts and self.norm_clipper is not None:  # it has min(1, C / norm) in it
            key = key, "asks the clipper"
            found = self._graphs.get(key)
        several = len(whole.tensors[0]) > 1
        # The model was first seen with too few samples to tell whose rows are whose, or losses with one.
        if found is None or not found.settled or (several and not found.apart):
            found = self._graphs[key] = self._captured(own, whole, tensors, found)
            found.apart = found.apart or several
        elif several and found.is_looked_at_again():
            found.apart = False  # until it has been
            found = self._graphs[key] = self._captured(own, whole, tensors, found, again=True)
            found.apart = True
        return found

    def _key(self, own: Own, whole: Batch, tensors: list[Tensor]) -> Hashable:
        """What a capture has taken as it was."""
        devices = sorted({x.device.type for x in tensors} | {"cpu"})
        return (
            whole.structure,
            tuple((type(x), x) for x in whole.others),
            tuple((x.shape, x.dtype, x.device) for x in tensors),
            tuple((x.shape, x.stride(), x.dtype, x.device) for x in own.buffers),
            tuple((p.shape, p.stride(), p.dtype, p.device, p.requires_grad) for p in own.parameters),
            tuple(m.training for m in own.modules),
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
            (reduced_products(), reduced_convolutions(), torch.are_deterministic_algorithms_enabled()),
            torch.get_num_threads(),
            (self._mode._clipper().is_per_layer, clips_one_by_one(self._mode._clipper())),
        )

    def _limit(self, device: torch.device) -> Tensor:
        """C, () fp64."""
        limit = self._mode.max_grad_norm
        if self._limits != (limit, device):
            self._limits, self._limit_there = (limit, device), torch.tensor(limit, dtype=torch.float64, device=device)
        return self._limit_there

    def _captured(
        self, own: Own, whole: Batch, tensors: list[Tensor], before: Graph | None, *, again: bool = False
    ) -> Graph:
        """A graph of the step, or that before where a look at samples tells nothing else; ``again``: nothing wrong."""
        from dpfast.compiled.capture import capture  # which imports much that eager steps do not need

        some = Batch.like(whole, tensors)
        options = {"layout": self._layout, "norm_clipper": self.norm_clipper}
        learned = learner(self.model, options)
        try:
            settled = learned.learn(self.losses, whole.of(whole.copies()))
            if before is not None and not before.apart:
                check_apart(self.model, self.losses, learned, whole, some, options)
            if before is not None and again and not mixed_in(learned)[1]:
                return before
            if before is not None and before.places == learned.places():
                return before.seen_again(settled)
            start = time.perf_counter()
            found = capture(self.model, self.losses, some, self.batch_size, learned, options, self.num_units)
            check_apart(self.model, self.losses, learned, whole, some, options)
        finally:
            learned.drop_guards()
        return Graph(found, own, self._backend, settled=settled, places=learned.places(), start=start)
