"""GradSampleModuleFastGradientClipping: one backward pass leaves the clipped sum in ``p.grad``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.arithmetic import SquaredNorm, is_traced
from dpfast.distributed import Sums, not_in, parts_of, sums_of, told_to_all
from dpfast.errors import InputError, StateError
from dpfast.factors import Factor, InTurn, OuterProduct, Ragged, Reshaped, Waiting, pin
from dpfast.modes.accumulation import Left
from dpfast.modes.before import Before
from dpfast.modes.clipped import Clipped, clip, clip_to
from dpfast.modes.clippers import (
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    NormClipper,
    check_clipper,
    check_threshold,
)
from dpfast.modes.gathered import Gathered, check_unwritten, clipped_totals, take_norms, used_again
from dpfast.modes.grad_sample_module import GradSampleModule
from dpfast.modes.in_turn import clip_in_turn, clips_one_by_one, find_in_turn, waits_for_its_turn
from dpfast.modes.last_norms import LastNorms
from dpfast.modes.leave_sums import Found, LeavesSums
from dpfast.modes.memory_budget import MemoryBudget
from dpfast.modes.nonfinite_samples import DroppedSamples
from dpfast.modes.norm_samples import leave_norm_samples
from dpfast.modes.rounding import rounding
from dpfast.modes.second_pass import FirstPass, SecondPass
from dpfast.modes.steps import Step, check_own
from dpfast.modes.units import PerUnit
from dpfast.taps import in_backward, keys_of

_SUMS_OF_ZEROS = (
    "the second backward pass of {count} samples was not that of Σ_n c_n loss_n, or did not repeat the first, whose "
    "norms were taken: its clipped sums are zeros. Give (factors * losses).sum(), make the model deterministic, or "
    "take passes=1"
)


class GradSampleModuleFastGradientClipping(LeavesSums, LastNorms, PerUnit, GradSampleModule):
    """Wraps a module; a plain ``loss.backward()`` leaves ``p.grad = Σ_n c_n g_n`` with ``c_n = min(1, C / ‖g_n‖)``.

    Book-keeping (Bu et al. 2023, "Differentially Private Optimization on Large Model at Small Cost"): one
    backward pass keeps each layer's activations and backprops (or its per-sample gradients, where those are
    smaller), takes the norms over all trainable parameters, and then the clipped sums. Autograd computes no
    ordinary gradient of a tapped parameter.

    Formal guarantee: for every sample the exact ‖c_n g_n‖ is at most ``sensitivity``; c_n comes from a proven upper
    bound of the norm (docs/bounds.md has a table of what is proven by mode and dtype). A gradient that torch or a rule
    gives by sample (group norms, layers without a rule, samplers of your own) is taken as the exact one: what is
    measured is what is summed. A sample whose norm is not finite gets c_n = 0 and adds exactly nothing.

    Args:
        m, batch_first, loss_reduction, strict, force_functorch, layout: as in :class:`GradSampleModule`.
        max_grad_norm: C; may be changed between steps.
        use_ghost_clipping: False takes every norm from materialized per-sample gradients.
        passes: 1 as above. 2 as Opacus: the backward pass leaves norms alone; the caller's second one, on
            ``Σ_n c_n loss_n`` with the factors of :meth:`get_clipping_coef` under :meth:`disable_hooks`, leaves
            ``p.grad``. It repeats the first from the gradients that the first had at the model's outputs (those of the
            model's inputs, too, are the first's), and the factors are applied where gradients are summed. StateError
            where the loss is another one, or a layer sees other numbers than in the first pass.
            After the first, each trainable parameter has its norms in ``p._norm_sample`` (N,), as in Opacus's protocol,
            also in a pickle of the model; one pass leaves nothing private on a parameter.
        norm_clipper: takes the place of ``ConstantFlatClipper(max_grad_norm)``.
        memory_budget: what one pass may hold of all layers between norms and clipped sums: bytes a sample (an int), or
            a multiple of the layers' inputs and output gradients (a float). Which layers write their gradients is then
            planned for the fastest step that fits, from the shapes of the first step of each kind, which holds the
            least. None: each layer writes gradients of up to 1.5 times the bytes of its own, but for those that are
            taken in turn. With any budget, what is not written may be: one sample's gradients more, 32 MiB at most.

    Raises:
        InputError: ``max_grad_norm``; in a backward pass, a budget that cannot be met, with the smallest that can.
        UnsupportedModuleError: as in :class:`GradSampleModule`.

    The sum is not divided by N, also with ``loss_reduction="mean"``: Opacus's optimizers divide by the expected
    batch size. A trainable parameter that the step did not use gets zeros, because noise must reach it all the same.

    >>> model = GradSampleModuleFastGradientClipping(nn.Linear(3, 2, bias=False), max_grad_norm=1.0)
    >>> model(torch.ones(4, 3)).sum(1).mean().backward()
    >>> model.get_norm_sample().pow(2), model.weight.grad.norm().round(decimals=3)
    (tensor([6.0000, 6.0000, 6.0000, 6.0000]), tensor(4.))
    """

    gives_gradients = False
    _over_ranks: Sums | None = None  # where ranks have other samples
    _parts: Any = None  # a TensorParallel, where they have other parameters
    _budget: MemoryBudget | None = None  # what plans which layers write their gradients
    _before: Before | None = None  # what is known from the last step
    _numbers: list[int] | None = None  # id of each trainable parameter, of the places' step

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        max_grad_norm: float = 1.0,
        use_ghost_clipping: bool = True,
        passes: int = 1,
        norm_clipper: NormClipper | None = None,
        layout: Mapping[str, Any] | None = None,
        memory_budget: float | None = None,
    ):
        check_threshold(max_grad_norm)
        if passes not in (1, 2):
            raise InputError(f"passes={passes} must be 1 (book-keeping) or 2 (ghost clipping)")
        check_clipper(norm_clipper, m, passes)
        if memory_budget is not None and passes == 2:
            raise InputError("memory_budget is for passes=1; two passes hold one layer at a time")
        super().__init__(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
            layout=layout,
        )
        self.max_grad_norm = max_grad_norm
        self.use_ghost_clipping = use_ghost_clipping
        self.passes = passes
        self._dropped = DroppedSamples()
        self._at_fault = DroppedSamples(_SUMS_OF_ZEROS)
        self._norm_clipper = norm_clipper
        self._places: dict[nn.Parameter, int] = {}
        self._norms: SquaredNorm | None = None
        self._clip_factors: Any = None  # a Tensor, from the first norms on
        self._first = FirstPass()
        if memory_budget is not None:
            self._budget = MemoryBudget(memory_budget)

    # --- how samples are clipped ---

    @property
    def norm_clipper(self) -> NormClipper | None:
        """What takes the place of ``ConstantFlatClipper(max_grad_norm)``, if anything; may be set between steps."""
        return self._norm_clipper

    @norm_clipper.setter
    def norm_clipper(self, norm_clipper: NormClipper | None) -> None:
        check_clipper(norm_clipper, self._module, self.passes)
        self._norm_clipper = norm_clipper

    @property
    def sensitivity(self) -> float:
        """The most that adding or removing one sample can move the clipped sum, in L2 norm; for what rounding it to 16
        bits makes of this, see docs/bounds.md, "Parameters of 16 bits"."""
        return self._clipper().sensitivity

    def _clipper(self) -> NormClipper:
        return self._norm_clipper or ConstantFlatClipper(self.max_grad_norm)

    # --- mode: keep each factor, take the norms at the end, then the sums; at once where nothing has to wait ---

    def on_forward(self, inputs: Sequence[Tensor], call: tuple[Any, Any]) -> None:
        """Finds the DDP or FSDP2 that is to carry the sums, or the mesh over which parameters are parted.

        Raises:
            StateError: a wrapper of torch.distributed in which norms or sums would be wrong. InputError,
                UnsupportedModuleError: a DDP, or shards, that cannot carry them.
        """
        if torch.is_grad_enabled() and in_backward() is None:
            self._keys = keys_of(*call)
        wrapper = self._wrapper()
        if wrapper is not None and self._budget is not None:
            raise StateError("memory_budget is for one process; leave it out")
        if wrapper is not None and wrapper.kind not in ("DDP", "FSDP2", "DTensor"):
            raise StateError(not_in(wrapper, type(self).__name__))
        assert self._tapped is not None
        before, self._parts = self._parts, parts_of(wrapper, self._module, self._tapped)
        if self._parts is not None:
            self._parts.agreed = None if before is None else before.agreed
            self._parts.on_forward(inputs)
        if wrapper is None or wrapper.kind == "DTensor":
            self._over_ranks = None
            return
        if self._over_ranks is None or not self._over_ranks.is_of(wrapper.module):
            self._over_ranks = sums_of(wrapper, self._module, self._tapped)
        self._over_ranks.on_forward()

    @property
    def defers(self) -> bool:
        """With one factor a sample, and here alone."""
        plain = self.passes == 1 and self.use_ghost_clipping and self._over_ranks is None and self._parts is None
        return plain and self._budget is None and not is_traced() and not self._clipper().is_per_layer

    def on_factor(self, step: Step, parameter: nn.Parameter, factor: Factor, only_use: bool) -> None:
        if not step.started:
            self._start_step(step)
        entry = step.gathered.get(parameter)
        if entry is None:
            entry = step.gathered[parameter] = Gathered()
        else:
            only_use = False  # forwards do not show all uses that come (checkpoints)
        if self._parts is not None and (step.second is None or self._parts.is_part(factor)):
            entry.factors.append(factor.kept() if self.use_ghost_clipping else factor.materialized())
            return
        if step.second is not None:
            first = step.second.first
            weights = first.weights if parameter.dtype is torch.float64 else first.single
            entry.add(factor.weighted_sum(weights.to(parameter.device)))
            return
        if entry.closed or (step.deferred and step.deferred.has(parameter)):
            raise StateError(used_again(self._name(parameter)))
        if not self.use_ghost_clipping:
            factor = factor.materialized()
        traced = is_traced()
        if traced:
            pin(factor)
        # A subclass may need all norms; in a graph all factors come from one place.
        clips_alone = type(self._norm_clipper) is ConstantPerLayerClipper and not traced
        entry.closed = only_use and (clips_alone or self.passes == 2)
        if self._budget is not None and not entry.closed:
            self._budget.tell(self._places[parameter], factor, only_use)
        if step.waiting is None:
            step.waiting = Waiting(keep=self.passes == 1)
        is_product = isinstance(factor, (OuterProduct, Reshaped))
        if only_use and not clips_alone and is_product and step.waiting.wants(factor):
            step.waiting.add(factor, entry.receive)
        elif entry.closed:
            entry.norm = factor.sq_norm()
        elif only_use and is_product and self._one_by_one(step) and waits_for_its_turn(factor):
            entry.wait(factor)
        else:
            entry.wait(factor.kept() if only_use or not isinstance(factor, Ragged) else factor)
        if clips_alone and entry.closed:
            limit = self._norm_clipper.flat_values[self._places[parameter]]  # type: ignore[union-attr]  # clips_alone
            entry.clip_alone(factor, limit, self._scale(step), rounding(parameter), step.valid)

    def on_finish(self, step: Step) -> None:
        if not step.started:  # the mode has been asked for nothing
            self._start_step(step)
        if step.second is not None:
            self._finish_second(step, step.second)
            return
        if self._budget is not None:
            self._budget.end()
        if step.deferred:
            step.deferred.take()
        alone = not step.gathered and step.waiting is None and step.valid is None and self._norm_clipper is None
        order = step.deferred.order if step.deferred and alone and self._budget is None else None
        if order is not None and self._finish_as_before(step, step.deferred, order):
            return
        if step.deferred:
            step.deferred.check_own(self._places)
        deferred = step.deferred.alikes() if step.deferred else []
        if step.waiting is not None:
            step.waiting.take()
        scale = self._scale(step)
        entries = [step.gathered.pop(p, None) for p in self._places]
        check_own(self._places, step.gathered)  # what is left
        alone = step.first is not None  # no sums cross ranks
        with told_to_all(None if alone else self._over_ranks, self._places):
            check_unwritten(self._places, entries, self._name)
        if self._parts is not None:
            found = {p: entry for p, entry in zip(self._places, entries, strict=True) if entry is not None}
            settings = self._sum_parts(step, found)
        each = is_traced() or self._parts is not None or self._clipper().is_per_layer or step.first is not None
        in_turn = find_in_turn(entries) if self._one_by_one(step) else {}
        rest = [None if place in in_turn else entry for place, entry in enumerate(entries)]
        norms = take_norms(self._places, rest, deferred, step.num_samples or 0, each=each)
        if self._parts is not None:
            of = dict(zip(self._places, norms, strict=True))
            by_parameter = self._clipper().is_per_layer or step.first is not None
            with told_to_all(None if alone else self._over_ranks, self._places):
                whose = step.valid if step.units is None else step.units.ids
                norms = self._parts.over_mesh(of, *settings, by_parameter=by_parameter, whose=whose)
        if in_turn:
            clipped, totals = self._clip_in_turn([*in_turn.values()], norms, scale, step.valid)
            parameters = list(self._places)
            for place, total in zip(in_turn, totals, strict=True):
                entries[place].total = total.view(parameters[place].shape)
        else:
            clipped = self._clip(norms, scale, step.valid)
        in_turn.clear()  # frees their inputs
        self._norms, self._clip_factors = SquaredNorm(clipped.norms, clipped.upper), clipped.factors
        if step.first is not None:
            self._first = step.first
            self._first.weights, self._first.single = clipped.weights, clipped.single
            self._first.sensitivity = self.sensitivity
            leave_norm_samples(dict(zip(self._places, norms, strict=True)), clipped.norms, scale, step.valid)
            if self._over_ranks is not None:
                self._follow_moved()
                self._over_ranks.keep_promises(self._note_again)
            return
        self._leave_sums(clipped_totals(self._places, entries, deferred, clipped, alone=self._is_alone))
        if order is not None:
            self._before = Before.learned(self._places, step.num_samples or 0, order, deferred)

    def _one_by_one(self, step: Step) -> bool:
        """Whether a sample's factor follows from its own norm, all of which is here, and there is room for all sums."""
        here = self.passes == 1 and step.units is None and self._parts is None
        here = here and not (self._over_ranks is not None and self._over_ranks.by_unit)
        return here and (self._norm_clipper is None or clips_one_by_one(self._norm_clipper))

    def _finish_as_before(self, step: Step, deferred: Any, order: object) -> bool:
        """Finishes the step, where it is like the last one; else does nothing."""
        before, n = self._before, step.num_samples or 0
        if before is None or not before.fits(self._places, n, order):
            return False
        numbers = deferred.numbers()
        norm = before.remembered.total_sq_norm(numbers)
        limit = self._clipper().sensitivity
        clipped = clip_to(limit, norm, self._scale(step))
        # Not by the attributes: each takes a module some ten times as long as this.
        vars(self).update(_norms=SquaredNorm(clipped.norms, clipped.upper), _clip_factors=clipped.factors)
        sums = before.sums(numbers, clipped.single)
        if sums is None:  # a sample that is not finite has the coefficient 0
            self._dropped.add(clipped.measured)
            nobody = [None] * len(self._places)
            self._leave_sums(clipped_totals(self._places, nobody, deferred.alikes(), clipped, alone=self._is_alone))
        elif not before.leave(sums, self._with_one_more(Left(0, 0.0))):
            self._leave_sums(before.by_parameter(sums).get)
        return True

    def _clip(self, norms: Sequence[SquaredNorm | None], scale: float | Tensor, valid: Tensor | None) -> Clipped:
        """What the sums are weighted with; counts the samples that are dropped."""
        roundings = list(map(rounding, self._places))
        return self._counted(clip(self._clipper(), norms, scale=scale, rounding=roundings, valid=valid))

    def _clip_in_turn(
        self, products: Sequence[OuterProduct], norms: Sequence[Any], scale: float | Tensor, valid: Tensor | None
    ) -> tuple[Clipped, list[Tensor]]:
        """:meth:`_clip`, and the sums of what is taken in turn with it, (P, D) each."""
        in_turn = InTurn(products)
        excess = max(map(rounding, self._places))
        clipped = clip_in_turn(in_turn, norms, self._clipper(), excess, scale, valid)
        return self._counted(clipped), in_turn.totals()

    def _counted(self, clipped: Clipped) -> Clipped:
        if len(clipped.measured):
            self._dropped.add(clipped.measured)
        return clipped

    def _finish_second(self, step: Step, second: SecondPass) -> None:
        """``p.grad += Σ_n c_n g_n`` where the second pass has repeated the first; else nothing is released."""
        messages, at_fault = second.faults()
        fault, second.first.repeated = None, True
        if self.sensitivity != second.first.sensitivity:
            fault = (
                f"samples are clipped to {second.first.sensitivity} by the first pass, and now to {self.sensitivity}"
            )
        if at_fault.device.type == "cpu":
            if messages and at_fault.any():
                fault = messages[int(at_fault.int().argmax())]
        elif messages:  # nobody waits for the device: the sums become zeros, and a warning tells when it has arrived
            any_fault = at_fault.any()
            self._at_fault.add(torch.where(any_fault, torch.nan, second.first.weights))
            for entry in step.gathered.values():
                entry.total = entry.total.masked_fill(any_fault.to(entry.total.device), 0.0)
        if self._parts is not None or fault is not None:
            self._sum_parts(step, step.gathered, fault)
            weights = second.first.weights
            for p, entry in step.gathered.items():
                for factor in entry.factors:
                    entry.add(factor.weighted_sum(weights if p.dtype is torch.float64 else second.first.single))
        self._leave_sums(lambda p: step.gathered[p].total if p in step.gathered else None)

    def _start_step(self, step: Step) -> None:
        """What is trainable may change between steps; a second pass has the first's."""
        step.started = True
        if self._budget is not None:
            self._budget.begin(step.units)
        if step.second is None or self._over_ranks is not None:
            if self._tapped is None:  # removed since
                trainable = [p for p in self._module.parameters() if p.requires_grad]
            else:
                trainable = self._tapped.trainable()
            numbers = list(map(id, trainable))
            if numbers != self._numbers:  # which are those of the parameters in ``_places``
                self._places = {p: i for i, p in enumerate(dict.fromkeys(trainable))}
                self._numbers = numbers
            self._clipper().for_parameters(len(self._places))
        if self._over_ranks is not None:  # by the end of the pass DDP may have put other tensors into p.grad
            self._find()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out what the last batch has left here, which is private."""
        now: dict[str, Any] = {
            "_norms": None,
            "_clip_factors": None,
            "_first": FirstPass(),
            "_before": None,
            "_numbers": None,
            "_found": Found(),
        }
        return {**self.__dict__, **now}

    def _name(self, parameter: nn.Parameter) -> str:
        return next((n for n, p in self._module.named_parameters() if p is parameter), "?")
