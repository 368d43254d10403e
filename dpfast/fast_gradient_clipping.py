"""GradSampleModuleFastGradientClipping: one backward pass leaves the clipped sum in ``p.grad``."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from dpfast.bounds import SquaredNorm
from dpfast.clipping import ConstantFlatClipper, NormClipper, check_max_norm
from dpfast.errors import DpfastWarning, InputError, StateError
from dpfast.factors import Dense, Factor, merge
from dpfast.grad_sample_module import GradSampleModule
from dpfast.tapped_model import Step


def create_norm_sample(*, param: nn.Parameter, grad_sample: Tensor, max_batch_len: int) -> None:
    """Leaves the L2 norms of ``grad_sample`` (N, *shape) in ``param._norm_sample`` (N,), as Opacus's function does.

    A parameter that needs no gradient is left alone; ``max_batch_len`` 0 stands for an empty batch.
    """
    if not param.requires_grad:
        return
    if max_batch_len == 0:
        param._norm_sample = grad_sample.new_zeros(0)
        return
    value = Dense(grad_sample).sq_norm().value.sqrt()
    param._norm_sample = value if grad_sample.dtype == torch.float64 else value.float()


class GradSampleModuleFastGradientClipping(GradSampleModule):
    """Wraps a module; a plain ``loss.backward()`` leaves ``p.grad = Σ_n c_n g_n`` with ``c_n = min(1, C / ‖g_n‖)``.

    Book-keeping (Bu et al. 2023, "Differentially Private Optimization on Large Model at Small Cost"): one
    backward pass keeps each layer's activations and backprops (or its per-sample gradients, where those are
    smaller), takes the norms over all trainable parameters, and then the clipped sums. Autograd computes no
    ordinary gradient of a tapped parameter.

    Formal guarantee: for every sample the exact ‖c_n g_n‖ is at most ``sensitivity``; c_n comes from a proven upper
    bound of the norm (docs/bounds.md). A sample whose norm is not finite gets c_n = 0 and adds exactly nothing.

    Args:
        m, batch_first, loss_reduction, strict, force_functorch: as in :class:`GradSampleModule`.
        max_grad_norm: C; may be changed between steps.
        use_ghost_clipping: False takes every norm from materialized per-sample gradients.
        passes: 1 as above. 2 as Opacus: the backward pass leaves norms alone; the caller's second one, on
            ``Σ_n c_n loss_n`` under :meth:`disable_hooks`, leaves ``p.grad``.
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

    _detach = True

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
    ):
        check_max_norm(max_grad_norm)
        if passes not in (1, 2):
            raise InputError(f"passes={passes} must be 1 (book-keeping) or 2 (ghost clipping)")
        super().__init__(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
        )
        self.max_grad_norm = max_grad_norm
        self.use_ghost_clipping = use_ghost_clipping
        self.passes = passes
        self.nonfinite_samples = 0
        self._norm_clipper = norm_clipper
        self._norms: SquaredNorm | None = None
        self._clip_factors: Tensor | None = None

    # --- what the last backward pass left ---

    def get_norm_sample(self) -> Tensor:
        """L2 norms of the per-sample gradients over all trainable parameters, (N,) fp32, as computed.

        They are private: do not publish them.

        Raises:
            StateError: before any backward pass.
        """
        return self._last_norms().value.sqrt().float()

    def get_clipping_coef(self) -> Tensor:
        """The clip factors c (N,) fp32 of the last backward pass. Raises StateError before any."""
        self._last_norms()
        return self._clip_factors

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
    def norm_slack(self) -> Tensor:
        """(bound - norm) / norm of the last backward pass, (N,): how much too careful the clip factors are."""
        norms = self._last_norms()
        return (norms.upper.sqrt() / norms.value.sqrt().clamp(min=torch.finfo(torch.float64).tiny) - 1.0).float()

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

    # --- mode: keep each factor, take the norms at the end, then the sums ---

    def on_factor(self, step: Step, parameter: nn.Parameter, factor: Factor) -> None:
        factor = factor.kept() if self.use_ghost_clipping else factor.materialized()
        step.gathered.setdefault(parameter, []).append(factor)

    def on_finish(self, step: Step) -> None:
        factors = {p: merge(uses) for p, uses in step.gathered.items()}
        step.gathered.clear()
        self._norms = _total_norm([f.sq_norm() for f in factors.values()], self._scale(step))
        upper = self._norms.upper.sqrt()
        self._clip_factors = self._clipper().clip_factors(upper).float()
        self._count_nonfinite(upper)
        if self.passes == 1:
            self._leave_sums(factors, self._clip_factors.double() * self._scale(step))

    def _leave_sums(self, factors: dict[nn.Parameter, Factor], coefficients: Tensor) -> None:
        """``p.grad += Σ_n c_n g_n`` for every trainable parameter, all of them or, on an error, none."""
        sums = {}
        while factors:  # a layer's activations and backprops are freed as soon as its sum is taken
            parameter, factor = factors.popitem()
            sums[parameter] = factor.weighted_sum(coefficients.to(parameter.device)).to(parameter.dtype)
        for p in self._module.parameters():
            if not p.requires_grad:
                continue
            if p.grad is not None:
                if p in sums:
                    p.grad += sums[p]
            else:
                p.grad = sums[p] if p in sums else torch.zeros_like(p)

    def _count_nonfinite(self, norms: Tensor) -> None:
        """Counts the samples that were dropped; warns the first time."""
        count = int((~torch.isfinite(norms)).sum())
        if count and not self.nonfinite_samples:
            warnings.warn(
                f"{count} of {len(norms)} samples have a gradient norm that is inf or NaN; they are dropped from the "
                "clipped sum (clip factor 0). model.nonfinite_samples counts them from here on.",
                DpfastWarning,
                stacklevel=2,
            )
        self.nonfinite_samples += count


def _total_norm(norms: list[SquaredNorm], scale: float) -> SquaredNorm:
    """The squared norm over several parameters, each gradient times ``scale``."""
    if not norms:
        return SquaredNorm(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
    device = norms[0].value.device
    value = torch.stack([n.value.to(device) for n in norms]).sum(0) * scale**2
    upper = torch.stack([n.upper.to(device) for n in norms]).sum(0) * scale**2
    return SquaredNorm(value, upper)
