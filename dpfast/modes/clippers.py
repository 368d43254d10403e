"""Clip factors: how much of each sample's gradient may enter the sum, and what that makes the sum's sensitivity."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.errors import InputError, StateError
from dpfast.taps import in_backward

_ROUNDED_DOWN = 1.0 - 2.0**-22
"""Covers the rounding to fp32 of a factor's product with a gradient; the factor itself is rounded towards zero."""

_LARGEST = 2.0**64
"""Where a clipper scales up without end, a factor stops here: times N it must be finite in fp32."""


class NormClipper(ABC):
    """Base class of norm clippers: from the norms of a batch to clip factors.

    A clipper of one's own defines :meth:`calc_clipping_factors` and :attr:`thresholds`. Whatever factors it gives,
    dpfast lowers them to where no sample exceeds its threshold (:func:`clip_factors`), so a mistake in a clipper
    costs accuracy and not privacy.

    >>> class Half(NormClipper):
    ...     thresholds = torch.tensor([1.0])
    ...     def calc_clipping_factors(self, norms):
    ...         return [torch.full_like(norm, 0.5) for norm in norms]
    >>> clip_factors(Half(), [torch.tensor([1.0, 4.0])])[0].round(decimals=3).tolist()
    [0.5, 0.25]
    """

    is_per_layer: bool = False
    """Whether each parameter has a norm and a threshold of its own, or all of them one together."""

    _clipped_to = 0.0  # the largest sensitivity of factors whose sum nobody has left yet

    @abstractmethod
    def calc_clipping_factors(self, norms: Sequence[Tensor]) -> Sequence[Tensor]:
        """Factors (N,), one tensor for each of ``norms``.

        Args:
            norms: (N,) upper bounds of the L2 norms; one tensor, or one a trainable parameter (in the order of
                ``named_parameters()``) where :attr:`is_per_layer`.
        """

    @property
    @abstractmethod
    def thresholds(self) -> Tensor:
        """The most that a sample may add, (1,), or per parameter where :attr:`is_per_layer`."""

    @property
    def sensitivity(self) -> float:
        """The most that adding or removing one sample can move the clipped sum, in L2 norm: ‖thresholds‖."""
        return float(self.thresholds.double().norm())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sensitivity={self.sensitivity:.6g})"

    def take_sensitivity(self) -> float:
        """Of a sum that is about to be left: that of now, or of when its factors were made, where a class of one's own
        has had other thresholds then."""
        clipped_to, self._clipped_to = self._clipped_to, 0.0
        now = self.sensitivity
        return max(now, clipped_to) if now >= 0.0 else math.inf  # NaN bounds nothing

    def must_agree(self) -> tuple[object, ...]:
        """What all ranks must have alike where several clip together."""
        return type(self).__name__, self.sensitivity, self.thresholds.tolist()

    def for_parameters(self, num_parameters: int) -> None:
        """Called by whoever clips with it, before the first norms: that many parameters will be clipped.

        Raises:
            InputError: a list of thresholds of another length.
        """
        if self.is_per_layer and len(self.thresholds) != num_parameters:
            raise InputError(
                f"{type(self).__name__} has {len(self.thresholds)} thresholds for {num_parameters} trainable "
                "parameters; give one for each, in the order of named_parameters(), or a single one for all"
            )


class ConstantFlatClipper(NormClipper):
    """``c_n = min(1, C / norm_n)`` with one norm over all parameters (Abadi et al. 2016, Algorithm 1).

    Args:
        flat_value: C, positive and finite.

    Raises:
        InputError: C is not a positive finite number; more than one norm is given.

    >>> norms = torch.tensor([0.5, 4.0, torch.inf])
    >>> clip_factors(ConstantFlatClipper(1.0), [norms])[0].round(decimals=3).tolist()
    [1.0, 0.25, 0.0]
    """

    def __init__(self, flat_value: float):
        self.flat_value = check_threshold(flat_value)

    @property
    def thresholds(self) -> Tensor:
        """C, (1,) fp64."""
        return torch.tensor([self.flat_value], dtype=torch.float64)

    @property
    def sensitivity(self) -> float:
        """C, unless a subclass has other thresholds."""
        own = type(self).thresholds is ConstantFlatClipper.thresholds
        return self.flat_value if own else super().sensitivity

    def calc_clipping_factors(self, norms: Sequence[Tensor]) -> list[Tensor]:
        if len(norms) != 1:
            raise InputError(f"{type(self).__name__} clips one norm over all parameters, not {len(norms)} norms")
        return [(self.flat_value / norms[0]).clamp(max=1.0)]


class ConstantPerLayerClipper(NormClipper):
    """``c_np = min(1, C_p / norm_np)`` for each parameter p by itself (McMahan et al. 2018, "per-layer clipping").

    Norm and clipped sum of a parameter are then taken in the backward pass itself and nothing is kept.

    Args:
        flat_values: C_p for each trainable parameter, in the order of ``named_parameters()``; one number, or a list
            of one, for all.

    Raises:
        InputError: a C_p is not a positive finite number; a list whose length is not that of the parameters.
        StateError: sensitivity or thresholds of one C_p for all are read before the parameters are known.

    >>> clipper = ConstantPerLayerClipper([1.0, 2.0])
    >>> [c.tolist() for c in clipper.calc_clipping_factors([torch.tensor([4.0, 0.5]), torch.tensor([4.0, 0.5])])]
    [[0.25, 1.0], [0.5, 1.0]]
    """

    is_per_layer = True

    def __init__(self, flat_values: float | Sequence[float]):
        values = flat_values if isinstance(flat_values, Sequence) else [flat_values]
        self.flat_values = [check_threshold(value) for value in values]
        self._one_for_all = len(self.flat_values) == 1  # however many these are in a step
        self._known, self._value = not self._one_for_all, self.flat_values[0] if self.flat_values else 0.0

    @property
    def thresholds(self) -> Tensor:
        """One for each parameter, (number of parameters,) fp64.

        Raises:
            StateError: one number stands for all, and how many these are is not known yet.
        """
        if not self._known:
            raise StateError(
                "one threshold stands for every parameter, and their number is not known yet: hand the clipper to a "
                "module or a PerSampleGradientClipper first, or give a list"
            )
        return torch.tensor(self.flat_values, dtype=torch.float64)

    def for_parameters(self, num_parameters: int) -> None:
        if self._one_for_all and len(set(self.flat_values)) <= 1:
            self._value = (self.flat_values or [self._value])[0]
            self.flat_values, self._known = [self._value] * num_parameters, True
        super().for_parameters(num_parameters)

    def calc_clipping_factors(self, norms: Sequence[Tensor]) -> list[Tensor]:
        self.for_parameters(len(norms))
        return [(c / norm).clamp(max=1.0) for c, norm in zip(self.flat_values, norms, strict=True)]


class AutomaticClipper(ConstantFlatClipper):
    """``c_n = C / (norm_n + γ)``: every sample is scaled to nearly C (Bu et al. 2022, "Automatic Clipping", Eq. 4).

    Args:
        flat_value: C. gamma: γ > 0, the stability constant.

    Raises:
        InputError: C or γ is not a positive finite number; more than one norm is given.

    >>> AutomaticClipper(1.0, gamma=0.1).calc_clipping_factors([torch.tensor([0.4, 0.9])])
    [tensor([2., 1.])]
    """

    def __init__(self, flat_value: float, gamma: float = 0.01):
        super().__init__(flat_value)
        self.gamma = check_threshold(gamma, "gamma")

    def must_agree(self) -> tuple[object, ...]:
        return *super().must_agree(), self.gamma

    def calc_clipping_factors(self, norms: Sequence[Tensor]) -> list[Tensor]:
        super().calc_clipping_factors(norms)  # refuses more than one norm
        return [self.flat_value / (norms[0] + self.gamma)]


def clip_factors(clipper: NormClipper, norms: Sequence[Tensor]) -> list[Tensor]:
    """The clipper's factors, lowered where a sample would exceed its threshold.

    Formal guarantee: for every returned factor c, in fp64, ``c · norm ≤ threshold``, also once it is multiplied by N
    and rounded towards zero (``arithmetic.towards_zero``); a norm that is inf or NaN gets 0.

    Args:
        norms: (N,) upper bounds of the exact norms, as in :meth:`NormClipper.calc_clipping_factors`.

    Raises:
        InputError: the clipper gives another number of factors or another shape, or thresholds that are NaN or
            negative.
    """
    factors = list(clipper.calc_clipping_factors([norm.clone() for norm in norms]))  # it may write to what it gets
    if [f.shape for f in factors] != [norm.shape for norm in norms]:
        raise InputError(
            f"{type(clipper).__name__}.calc_clipping_factors gave factors of shape "
            f"{[tuple(f.shape) for f in factors]} for norms of shape {[tuple(n.shape) for n in norms]}"
        )
    limits = thresholds_taken(clipper)
    return [safe_factors(f, norm, limit) for f, norm, limit in zip(factors, norms, limits, strict=True)]


def thresholds_taken(clipper: NormClipper) -> list[float]:
    """Of each norm, as the factors are about to be: the clipper notes that sums are clipped to them.

    Raises:
        InputError: one is NaN or negative.
    """
    thresholds = clipper.thresholds.double() if clipper.is_per_layer else None
    limits = [clipper.sensitivity] if thresholds is None else thresholds.tolist()
    clipper._clipped_to = max(clipper._clipped_to, limits[0] if thresholds is None else float(thresholds.norm()))
    if not all(limit >= 0.0 for limit in limits):
        raise InputError(f"{type(clipper).__name__} has thresholds {limits}; each must be a number, and not negative")
    return limits


def safe_factors(factors: Tensor, norms: Tensor, threshold: float) -> Tensor:
    """``min(factors, threshold / norms)``, never negative, and 0 where norm or factor is not finite. (N,) fp64."""
    norms, factors = norms.double(), factors.double()
    most = threshold * _ROUNDED_DOWN / norms
    most = torch.where(norms <= threshold, most.clamp(min=1.0), most)  # 1 is exact: nothing is rounded
    safe = torch.minimum(factors, most).clamp(min=0.0, max=_LARGEST)
    # Below the smallest normal number a factor's own rounding would be as large as itself.
    # (What is compared with inf is finite, and no NaN; of a factor of -inf nothing is left.)
    fit = (norms.abs() < math.inf) & (factors < math.inf) & (safe >= torch.finfo(torch.float64).tiny)
    return torch.where(fit, safe, 0.0)


def constant_factors(threshold: float | Tensor, norms: Tensor) -> Tensor:
    """What :func:`clip_factors` gives by a :class:`ConstantFlatClipper`, the same bits, in fewer calls: of
    ``min(1, C / norm)`` and the most that is safe the latter is less, but for norms up to C, where both are 1. (N,)"""
    most = threshold * _ROUNDED_DOWN / norms
    safe = torch.where(norms <= threshold, 1.0, most)
    return torch.where(safe >= torch.finfo(torch.float64).tiny, safe, 0.0)  # NaN is not


class ClipFactors(Tensor):
    """Clip factors (N,) that are about to weight per-sample losses: multiplying anything but one value a sample is
    an error. A loss of shape (N, 1) would broadcast with them to (N, N), and every sample would be weighted by the
    factors of all, beyond C."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            shapes = {tuple(x.shape) for x in args if isinstance(x, Tensor) and x.dim() > 0}
            if func in _PRODUCTS and len(shapes) > 1:
                raise InputError(
                    f"clip factors and losses of shapes {' and '.join(map(str, sorted(shapes)))} would broadcast; "
                    "give one loss a sample, (N,): reduce or squeeze all dimensions but the first"
                )
            return func(*args, **(kwargs or {}))


_PRODUCTS = {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_}


def check_threshold(value: float, name: str = "max_grad_norm") -> float:
    """``value`` as a float; raises InputError where it is no number, or not positive and finite."""
    try:
        # It is kept as it is, and no string can be computed with.
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0.0):
        raise InputError(f"{name}={value!r} must be a positive finite number")
    return number


def check_is_clipper(norm_clipper: Any) -> None:
    """Raises InputError for what is none."""
    if not isinstance(norm_clipper, NormClipper):
        raise InputError(
            f"norm_clipper={norm_clipper!r} is no NormClipper: give an object, as dpfast.ConstantFlatClipper(1.0), no "
            "number and no class"
        )


def check_clipper(norm_clipper: NormClipper | None, module: nn.Module, passes: int) -> None:
    """Raises InputError where the clipper does not fit the module's parameters or the passes; StateError within a
    backward pass, some of which another one may have clipped."""
    if in_backward() is not None:
        raise StateError("norm_clipper cannot be set while a backward pass runs; set it between steps")
    if norm_clipper is None:
        return
    check_is_clipper(norm_clipper)
    norm_clipper.for_parameters(sum(p.requires_grad for p in module.parameters()))
    if passes == 2 and norm_clipper.is_per_layer:
        raise InputError(
            f"{type(norm_clipper).__name__} gives a sample one factor a parameter, and passes=2 can weight its "
            "loss by a single one; use passes=1, or a flat clipper"
        )
