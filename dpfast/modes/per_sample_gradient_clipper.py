"""PerSampleGradientClipper: clipping as a step of one's own, as in Opacus before 1.0."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.arithmetic import accumulating_dtype
from dpfast.errors import StateError
from dpfast.factors import Dense
from dpfast.modes.clipped import clip
from dpfast.modes.clippers import NormClipper, check_is_clipper
from dpfast.modes.grad_sample_module import GradSampleModule, check_is_module
from dpfast.modes.rounding import added, rounding, warn_of_16_bits
from dpfast.modes.steps import Step


class PerSampleGradientClipper:
    """Attaches to a module and clips its per-sample gradients, batch by batch, into an average.

    Args:
        module: the module; go on calling it as it is. :meth:`close` takes everything off it again.
        norm_clipper: says how much of each sample may stay.
        batch_first, loss_reduction, layout: as in :class:`dpfast.GradSampleModule`; with "mean", :meth:`pre_step`
            divides the clipped sum by the number of samples, with "sum" it does not.

    Raises:
        as GradSampleModule; InputError where the clipper has thresholds for another number of parameters.

    One ``loss.backward()`` and one :meth:`clip_and_accumulate` a batch, then :meth:`pre_step` before the optimizer's
    step. Semantics of Opacus 0.13, with norms that are proven not to be too small. A trainable parameter that the loss
    of a batch does not reach (a head of boxes, and no image with one) has gradients of zeros there.

    >>> from dpfast import ConstantFlatClipper
    >>> layer = nn.Linear(3, 2, bias=False)
    >>> clipper = PerSampleGradientClipper(layer, ConstantFlatClipper(1.0))
    >>> for _ in range(2):
    ...     layer(torch.ones(4, 3)).sum(1).mean().backward()
    ...     clipper.clip_and_accumulate()
    >>> thresholds, samples = clipper.pre_step()
    >>> samples, thresholds.tolist(), layer.weight.grad.norm().round(decimals=3).item()
    (8, [1.0], 1.0)
    """

    def __init__(
        self,
        module: nn.Module,
        norm_clipper: NormClipper,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        layout: Mapping[str, Any] | None = None,
    ):
        self.module = module
        self.norm_clipper = norm_clipper
        self.batch_first = batch_first
        self.loss_reduction = loss_reduction
        self.on_batch_clip_func: Callable[..., None] | None = None
        check_is_module(module)
        check_is_clipper(norm_clipper)
        norm_clipper.for_parameters(len(self._named_parameters()))
        self._wrapped: _Noting | None = _Noting(
            module, batch_first=batch_first, loss_reduction=loss_reduction, layout=layout
        )
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._sensitivity = 0.0  # the largest that a batch was clipped with
        self._samples = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r}, {self.norm_clipper!r})"

    def __del__(self) -> None:
        if hasattr(self, "_wrapped") and not sys.is_finalizing():  # where nothing can be imported any more
            self.close()

    @property
    def hooks_attached(self) -> bool:
        """Until :meth:`close`."""
        return self._wrapped is not None

    def set_on_batch_clip_func(self, on_batch_clip_func: Callable[..., None] | None) -> None:
        """Has a function called for each parameter that is clipped, and once with no argument set per batch.

        It gets ``param_name``, ``clipping_factor`` (N,), ``clipping_threshold`` (scalar), ``per_sample_norm`` (N,),
        ``per_sample_grad`` (N, *shape), ``grad_before_clip`` and ``grad_after_clip`` (*shape) by keyword; for the
        whole batch all of them are None.
        """
        self.on_batch_clip_func = on_batch_clip_func

    def clip_and_accumulate(self) -> None:
        """Clips the gradients of the last backward pass and adds them to what :meth:`pre_step` will average.

        ``.grad`` is None from here to :meth:`pre_step`, so a step between them takes nothing that is not clipped.

        Raises:
            StateError: no trainable parameter has per-sample gradients, or one has none that was frozen in a backward
                pass, or whose own were taken away.

        Nothing is accumulated where it fails, out of memory or in ``on_batch_clip_func``: it may be called again.
        """
        parameters = self._named_parameters()
        given = {name: getattr(p, "grad_sample", None) for name, p in parameters.items()}
        samples = {name: _joined(g) for name, g in given.items() if g is not None}
        not_reached = self._wrapped.not_reached if self._wrapped is not None and samples else ()
        missing = [name for name, p in parameters.items() if name not in samples and p not in not_reached]
        if missing:
            raise StateError(
                f"no per-sample gradients for {', '.join(missing)}: call loss.backward() before clip_and_accumulate(), "
                "once for each call; what is to be clipped must be trainable (requires_grad) in the backward pass"
            )
        n = len(next(iter(samples.values()))) if samples else 0
        squares = [Dense(samples[name]).sq_norm() if name in samples else None for name in parameters]
        clipped = clip(self.norm_clipper, squares, scale=1.0, rounding=list(map(rounding, parameters.values())))
        thresholds = self.norm_clipper.thresholds
        self._sensitivity = max(self._sensitivity, self.norm_clipper.take_sensitivity())
        totals = {}
        for i, (name, p) in enumerate(parameters.items()):
            j = i if self.norm_clipper.is_per_layer else 0
            factors = clipped.coefficients(j, p.dtype)
            if name in samples:
                total = Dense(samples[name]).weighted_sum(factors.to(p.device))
            else:
                total = torch.zeros_like(p, dtype=accumulating_dtype(p))
            totals[p] = total
            self._report(
                param_name=name,
                clipping_factor=factors.float(),
                clipping_threshold=thresholds[j],
                per_sample_norm=clipped.measured[j].float(),
                per_sample_grad=samples[name] if name in samples else total.expand(n, *p.shape),
                grad_before_clip=torch.zeros_like(p) if p.grad is None else p.grad,
                grad_after_clip=self._averaged(total, n, p.dtype),
            )
        for p, total in totals.items():  # nothing here takes memory, or runs anybody's code
            self._sums[p] = self._sums[p].add_(total) if p in self._sums else total
            p.grad_sample = None  # type: ignore[attr-defined]  # as in Opacus
            p.grad = None  # the sum that is not clipped: an optimizer's step before pre_step() has nothing to take
        self._samples += n
        self._report()

    def pre_step(self) -> tuple[Tensor, int]:
        """Puts the average (the sum, with ``loss_reduction="sum"``) over all accumulated batches into ``.grad``.

        Returns:
            (‖thresholds‖ for each trainable parameter (P,), what noise must be scaled to, the largest of all
            accumulated batches; the number of samples).

        Raises:
            StateError: :meth:`clip_and_accumulate` has not been called since the last step; a parameter that has not
                been clipped since has a gradient, with which the optimizer would step; or one that has been clipped is
                the module's no more.
        """
        if not self._sums:
            raise StateError(
                "You need to call clip_and_accumulate first: nothing has been accumulated since the last step"
            )
        own = set(self.module.parameters())
        if any(p not in own for p in self._sums):
            raise StateError(
                "parameters were replaced (load_state_dict(..., assign=True)?) since clip_and_accumulate(), whose sums "
                "are of those before: replace them between steps, or call zero_grad() and take the batches once more"
            )
        for name, p in self.module.named_parameters():
            if p not in self._sums and p.grad is not None and p.grad.any():
                raise StateError(
                    f"parameter {name} {tuple(p.shape)} has a gradient that nobody has clipped, and the optimizer "
                    "would step with it: it was frozen, or made trainable, since its backward pass. Set its grad to "
                    "None, or freeze it behind clip_and_accumulate()"
                )
        samples = self._samples
        warn_of_16_bits(self.module, self._sums, may_be_taken=False)
        for p, total in self._sums.items():
            p.grad = self._averaged(total, samples, p.dtype)
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)  # noise is scaled to them
        thresholds = torch.full((len(self._sums),), self._sensitivity, dtype=dtype)
        self._reset()
        return thresholds, samples

    def zero_grad(self) -> None:
        """Forgets per-sample gradients and what was accumulated; ``.grad`` is the optimizer's."""
        for p in self.module.parameters():
            if hasattr(p, "grad_sample"):
                p.grad_sample = None
        self._reset()

    def close(self) -> None:
        """Takes everything off the module. Safe to call twice."""
        if self._wrapped is not None:
            self._wrapped.to_standard_module()
            self._wrapped = None

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def _averaged(self, total: Tensor, samples: int, dtype: torch.dtype) -> Tensor:
        return added(None, total / max(samples, 1) if self.loss_reduction == "mean" else total.clone(), dtype)

    def _reset(self) -> None:
        self._sums.clear()
        self._samples, self._sensitivity = 0, 0.0

    def _report(self, **what: Any) -> None:
        if self.on_batch_clip_func is None:
            return
        names = ("param_name", "clipping_factor", "clipping_threshold", "per_sample_norm", "per_sample_grad")
        self.on_batch_clip_func(**{**dict.fromkeys((*names, "grad_before_clip", "grad_after_clip")), **what})


class _Noting(GradSampleModule):
    """Notes which trainable parameters backward passes do not reach.

    Attributes:
        not_reached: since ``grad_sample`` was last cleared, in no pass, and trainable in each.
    """

    not_reached: frozenset[nn.Parameter] = frozenset()

    def on_finish(self, step: Step) -> None:
        before, follows = self.not_reached, self.has_left()
        super().on_finish(step)
        now = frozenset(p for p in self._module.parameters() if p.requires_grad and p not in step.gathered)
        self.not_reached = before & now if follows else now


def _joined(grad_sample: Tensor | list[Tensor]) -> Tensor:
    """Several backward passes before one clipping are one batch; they have used the same parameters."""
    return torch.cat(grad_sample) if isinstance(grad_sample, list) else grad_sample
