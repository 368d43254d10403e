"""GradSampleModuleFastGradientClipping: one backward pass leaves the clipped sum in ``p.grad``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.arithmetic import SquaredNorm, towards_zero
from dpfast.distributed import Sums, local, not_in, sums_of
from dpfast.errors import InputError, StateError
from dpfast.factors import Dense, Factor, Waiting, merge, sq_norms
from dpfast.modes.accumulation import Left, check_ranks, leave, left_in, noise_of
from dpfast.modes.clippers import (
    ClipFactors,
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    NormClipper,
    check_clipper,
    check_threshold,
    clip_factors,
    safe_factors,
)
from dpfast.modes.gathered import Gathered, added, clipped_total, rounding
from dpfast.modes.grad_sample_module import GradSampleModule
from dpfast.modes.nonfinite_samples import DroppedSamples
from dpfast.modes.second_pass import FirstPass, SecondPass
from dpfast.modes.steps import Step, check_own


def create_norm_sample(*, param: nn.Parameter, grad_sample: Tensor, max_batch_len: int) -> None:
    """Leaves the L2 norms of ``grad_sample`` (N, *shape) in ``param._norm_sample`` (N,), as Opacus's function does.

    A parameter that needs no gradient is left alone; ``max_batch_len`` 0 stands for an empty batch.
    """
    if not param.requires_grad:
        return
    if max_batch_len == 0:
        param._norm_sample = grad_sample.new_zeros(0)  # type: ignore[attr-defined]  # as in Opacus
        return
    value = Dense(grad_sample).sq_norm().value.sqrt()
    value = value if grad_sample.dtype == torch.float64 else value.float()
    param._norm_sample = value  # type: ignore[attr-defined]  # as in Opacus


_SUMS_OF_ZEROS = (
    "the second backward pass of {count} samples was not that of Σ_n c_n loss_n, or did not repeat the first, whose "
    "norms were taken: its clipped sums are zeros. Give (factors * losses).sum(), make the model deterministic, or "
    "take passes=1"
)


class GradSampleModuleFastGradientClipping(GradSampleModule):
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

    Raises:
        as :class:`GradSampleModule`; InputError for ``max_grad_norm``.

    The sum is not divided by N, also with ``loss_reduction="mean"``: Opacus's optimizers divide by the expected
    batch size. A trainable parameter that the step did not use gets zeros, because noise must reach it all the same.

    >>> model = GradSampleModuleFastGradientClipping(nn.Linear(3, 2, bias=False), max_grad_norm=1.0)
    >>> model(torch.ones(4, 3)).sum(1).mean().backward()
    >>> model.get_norm_sample().pow(2), model.weight.grad.norm().round(decimals=3)
    (tensor([6.0000, 6.0000, 6.0000, 6.0000]), tensor(4.))
    """

    _over_ranks: Sums | None = None
    _left: Left | None = None  # what was in p.grad, where there are other ranks

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
    ):
        check_threshold(max_grad_norm)
        if passes not in (1, 2):
            raise InputError(f"passes={passes} must be 1 (book-keeping) or 2 (ghost clipping)")
        check_clipper(norm_clipper, m, passes)
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

    # --- what the last backward pass left ---

    def get_norm_sample(self) -> Tensor:
        """L2 norms of the per-sample gradients over all trainable parameters, (N,) fp32, as computed.

        They are private: do not publish them.

        Raises:
            StateError: before any backward pass.
        """
        return self._last_norms().value.sqrt().float()

    def get_clipping_coef(self) -> Tensor:
        """The clip factors c (N,) fp32 of the last backward pass, (P, N) for P parameters clipped one by one.

        Raises:
            StateError: before any backward pass. InputError: with two passes, when they are multiplied with losses
                of any shape but (N,).
        """
        self._last_norms()
        if self.passes == 1:
            return self._clip_factors
        self._first.asked = True
        return self._clip_factors.as_subclass(ClipFactors)

    @property
    def per_sample_gradient_norms(self) -> Tensor:
        """:meth:`get_norm_sample` as an attribute; AttributeError before any backward pass."""
        if self._norms is None:
            raise AttributeError(
                "per_sample_gradient_norms is not set. Please call forward and backward on the model before accessing "
                "this property."
            )
        return self.get_norm_sample()

    @property
    def nonfinite_samples(self) -> int:
        """How many samples were dropped so far because their norm was inf or NaN. Waits for a GPU."""
        return self._dropped.count

    @property
    def norm_slack(self) -> Tensor:
        """(bound - norm) / norm of the last backward pass, (N,): how much too careful the clip factors are."""
        norms = self._last_norms()
        return (norms.upper.sqrt() / norms.value.sqrt().clamp(min=torch.finfo(torch.float64).tiny) - 1.0).float()

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
        """The most that adding or removing one sample can move the clipped sum, in L2 norm."""
        return self._clipper().sensitivity

    def _last_norms(self) -> SquaredNorm:
        if self._norms is None:
            raise StateError("no backward pass has run yet; call loss.backward() before reading norms or clip factors")
        return self._norms

    def _clipper(self) -> NormClipper:
        return self._norm_clipper or ConstantFlatClipper(self.max_grad_norm)

    # --- mode: keep each factor, take the norms at the end, then the sums; at once where nothing has to wait ---

    def on_forward(self) -> None:
        """Finds the DDP or FSDP2 that is to carry the sums.

        Raises:
            StateError: a wrapper of torch.distributed in which norms or sums would be wrong. InputError,
                UnsupportedModuleError: a DDP, or shards, that cannot carry them.
        """
        wrapper = self._wrapper()
        if wrapper is not None and wrapper.kind not in ("DDP", "FSDP2"):
            raise StateError(not_in(wrapper, type(self).__name__))
        if wrapper is None:
            self._over_ranks = None
            return
        if self._over_ranks is None or not self._over_ranks.is_of(wrapper.module):
            assert self._tapped is not None
            self._over_ranks = sums_of(wrapper, self._module, self._tapped)
        self._over_ranks.on_forward()

    def on_factor(self, step: Step, parameter: nn.Parameter, factor: Factor, only_use: bool) -> None:
        if not step.gathered:
            self._start_step(step)
        entry = step.gathered.setdefault(parameter, Gathered())
        if step.second is not None:
            first = step.second.first
            weights = first.weights if parameter.dtype is torch.float64 else first.single
            entry.add(factor.weighted_sum(weights.to(parameter.device)))
            return
        if entry.closed:
            raise StateError(
                f"parameter {self._name(parameter)} was used again after its norm had been taken; in one backward "
                "pass, call the model in one thread, and not while another of its steps is under way"
            )
        if not self.use_ghost_clipping:
            factor = factor.materialized()
        clips_alone = type(self._norm_clipper) is ConstantPerLayerClipper  # a subclass may need all norms
        entry.closed = only_use and (clips_alone or self.passes == 2)
        if step.waiting is None:
            step.waiting = Waiting(keep=self.passes == 1)
        if only_use and not clips_alone and step.waiting.wants(factor):
            step.waiting.add(factor, entry.receive)
        elif entry.closed:
            entry.norm = factor.sq_norm()
        else:
            entry.factors.append(factor.kept())
        if clips_alone and entry.closed:
            limit = self._norm_clipper.flat_values[self._places[parameter]]  # type: ignore[union-attr]  # clips_alone
            norm = entry.norm.upper.sqrt() * (self._scale(step) * (1.0 + rounding(parameter)))
            factors = safe_factors((limit / norm).clamp(max=1.0), norm, limit)
            entry.clip(factor, factors * self._scale(step))

    def on_finish(self, step: Step) -> None:
        if not step.gathered:  # nothing has come by
            self._start_step(step)
        if step.second is not None:
            self._finish_second(step, step.second)
            return
        check_own(self._places, step.gathered)
        if step.waiting is not None:
            step.waiting.take()
        scale, clipper = self._scale(step), self._clipper()
        entries = [step.gathered.pop(p, None) for p in self._places]
        without = [e for e in entries if e is not None and e.norm is None]
        for entry in without:
            entry.factors = [merge(entry.factors)]
        for entry, norm in zip(without, sq_norms([e.factors[0] for e in without]), strict=True):
            entry.norm = norm
        self._norms = _total_norm([e.norm for e in entries if e is not None], scale)
        if clipper.is_per_layer:
            unused = torch.zeros_like(self._norms.upper)
            norms = [
                unused if e is None else e.norm.upper.to(unused.device).sqrt() * (scale * (1.0 + rounding(p)))
                for p, e in zip(self._places, entries, strict=True)
            ]
            factors = clip_factors(clipper, norms)
            self._clip_factors = towards_zero(torch.stack(factors) if factors else unused, torch.float32)
            coefficients = [f * scale for f in factors]
        else:
            norms = [self._norms.upper.sqrt() * (1.0 + max(map(rounding, self._places), default=0.0))]
            factors = clip_factors(clipper, norms)
            self._clip_factors = towards_zero(factors[0], torch.float32)
            double = factors[0] * scale
            single = towards_zero(double, torch.float32)  # once for all
            coefficients = [double if p.dtype is torch.float64 else single for p in self._places]
        if norms:
            self._dropped.add(torch.stack(norms))
        if step.first is not None:
            self._first = step.first
            self._first.weights, self._first.single = double, single
            self._leave_norm_samples(entries, scale)
            if self._over_ranks is not None:
                self._over_ranks.keep_promises()
            return
        of = dict(zip(self._places, zip(entries, coefficients, strict=True), strict=True))
        self._leave_sums(lambda p: clipped_total(*of.pop(p)))

    def _leave_norm_samples(self, entries: list[Gathered | None], scale: float) -> None:
        """``p._norm_sample`` (N,), where Opacus's ghost clipping has it: the norms as computed, one op for all."""
        unused = torch.zeros_like(self._last_norms().value)
        squares = [unused if e is None else e.norm.value.to(unused.device) for e in entries]
        norms = torch.stack(squares or [unused]).sqrt() * scale
        dtypes = [torch.float64 if p.dtype is torch.float64 else torch.float32 for p in self._places]
        rows = {dtype: norms.to(dtype).unbind() for dtype in set(dtypes)}
        for i, (p, dtype) in enumerate(zip(self._places, dtypes, strict=True)):
            p._norm_sample = rows[dtype][i].to(p.device)  # type: ignore[attr-defined]  # as in Opacus

    def _finish_second(self, step: Step, second: SecondPass) -> None:
        """``p.grad += Σ_n c_n g_n`` where the second pass has repeated the first; else nothing is released."""
        messages, at_fault = second.faults()
        if at_fault.device.type == "cpu":
            if at_fault.any():
                raise StateError(messages[int(at_fault.int().argmax())])
        elif messages:  # nobody waits for the device: the sums become zeros, and a warning tells when it has arrived
            any_fault = at_fault.any()
            self._at_fault.add(torch.where(any_fault, torch.nan, second.first.weights))
            for entry in step.gathered.values():
                entry.total = entry.total.masked_fill(any_fault.to(entry.total.device), 0.0)
        self._leave_sums(lambda p: step.gathered[p].total if p in step.gathered else None)

    def _start_step(self, step: Step) -> None:
        """What is trainable may change between steps; a second pass has the first's."""
        if step.second is None or self._over_ranks is not None:
            tapped, parameters = self._tapped, [p for p in self._module.parameters() if p.requires_grad]
            trainable = dict.fromkeys(map(tapped.own, parameters) if tapped else parameters)  # None: removed since
            self._places = {p: i for i, p in enumerate(trainable)}
            self._clipper().for_parameters(len(trainable))
        if self._over_ranks is not None:  # by the end of the pass DDP may have put other tensors into p.grad
            self._left = left_in(self._places)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out what the last batch has left here, which is private."""
        return {**self.__dict__, "_norms": None, "_clip_factors": None, "_first": FirstPass()}

    def _name(self, parameter: nn.Parameter) -> str:
        return next((n for n, p in self._module.named_parameters() if p is parameter), "?")

    def _leave_sums(self, total: Callable[[nn.Parameter], Tensor | None]) -> None:
        """``p.grad += Σ_n c_n g_n`` for every trainable parameter, over the samples of all ranks where there are some.

        Args:
            total: the sum over this rank's samples, None where the step has not used the parameter; asked once.
        """
        before = self._left_before()
        ranks = self._over_ranks
        if ranks is None or not ranks.crosses:
            totals = [total(p) for p in self._places]  # all of them first, so that none is half done
            for p, own in zip(self._places, totals, strict=True):
                if own is not None:
                    p.grad = added(p.grad, own, p.dtype)
                elif p.grad is None and p.requires_grad:
                    p.grad = torch.zeros_like(p)
            self._note(before, of_rank=ranks is not None, ranks=0 if ranks is None else ranks.number)
            return
        add_first = before is not None and before.of_rank
        of_all = {p: local(p.grad).clone() for p in self._places if p.grad is not None and not add_first}

        def of_rank(p: nn.Parameter) -> Tensor | None:
            own = total(p)
            if not add_first or p.grad is None:
                return own
            return p.grad if own is None else p.grad + own

        ranks.reduce(
            list(self._places),
            of_rank,
            lambda p, over_ranks: added(of_all.get(p), over_ranks, p.dtype),
            lambda: self._note(before, ranks=ranks.number),
            self._clipper().sensitivity,
            type(self._clipper()).__name__,
            self.loss_reduction,
            0 if before is None else before.passes,
            noise_of(self._places),
        )

    def _left_before(self) -> Left | None:
        """What earlier passes have left in ``p.grad``, to which another sum may be added."""
        before = left_in(self._places) if self._over_ranks is None else self._left
        if before is not None:
            self.check_accumulation()
            ranks = self._over_ranks
            check_ranks(before, 0 if ranks is None else ranks.number, crosses=ranks is not None and ranks.crosses)
        return before

    def _note(self, before: Left | None, **of: Any) -> None:
        """One sum more is in ``p.grad``."""
        passes, sensitivity = (before.passes, before.sensitivity) if before is not None else (0, 0.0)
        leave(self._places, Left(passes + 1, max(sensitivity, self.sensitivity), **of))


def _total_norm(norms: list[SquaredNorm], scale: float) -> SquaredNorm:
    """The squared norm over several parameters, each gradient times ``scale``."""
    if not norms:
        return SquaredNorm(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
    device = norms[0].value.device
    value = torch.stack([n.value.to(device) for n in norms]).sum(0) * scale**2
    upper = torch.stack([n.upper.to(device) for n in norms]).sum(0) * (scale**2 * (1.0 + (len(norms) + 4) * 2.0**-53))
    return SquaredNorm(value, upper)
