"""The oracle, per-sample gradients by a loop over samples in fp64, and the check of a rule against it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpfast.errors import DpfastWarning, InputError
from dpfast.factors import Factor
from dpfast.modes import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.taps import has_hooks
from dpfast.trials import without_graphs

TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Relative L2 errors that :func:`check_rule` allows. In 16 bits the layer's own forward and backward round, so there
twice the error of a loop over samples in that dtype is allowed too; likewise in fp32 on a GPU, where cuDNN may take
TF32."""


def loop_over_samples(
    model: nn.Module,
    loss: Callable[..., Tensor],
    *batch: Any,
    batch_dim: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Per-sample gradients, one ordinary backward pass a sample, in fp64.

    Args:
        model: not changed; a copy in fp64 does the work. Not wrapped by dpfast or Opacus, nor what such a module holds,
            whose hooks would clip here too: copy it before it is wrapped.
        loss: ``loss(model, *batch)``, the scalar loss of a batch; it is called with batches of one sample, so it
            may be a sum or a mean over samples.
        batch: tensors (or trees of them) with N samples in dimension ``batch_dim``; floats are converted to ``dtype``.
        dtype: of the copy.

    Returns:
        {name: (N, *shape)} for every trainable parameter, zeros where a sample does not reach it.

    Raises:
        InputError: the loss is not a scalar; the model is wrapped.

    >>> import torch.nn.functional as F
    >>> layer, x = nn.Linear(3, 2), torch.ones(4, 3)
    >>> {k: tuple(g.shape) for k, g in loop_over_samples(layer, lambda m, x: m(x).sum(), x).items()}
    {'weight': (4, 2, 3), 'bias': (4, 2)}
    """
    if any(map(has_hooks, model.modules())):
        raise InputError(
            "the model is wrapped, and its hooks would make these gradients, clipped as in training: give a copy that "
            "was made before it was wrapped, with load_state_dict() for its weights of now, or "
            "copy.deepcopy(wrapped).to_standard_module()"
        )
    model = copy.deepcopy(model, without_graphs(model)).to(dtype)
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    batch = _converted(batch, dtype)
    num_samples = next(x for x in _tensors(batch)).shape[batch_dim]
    gradients: dict[str, list[Tensor]] = {name: [] for name in names}
    for i in range(num_samples):
        sample = tree_map(lambda x, i=i: _samples(x, batch_dim, i, 1), batch)
        model.zero_grad(set_to_none=True)
        value = loss(model, *sample)
        if value.dim() != 0:
            raise InputError(f"the loss has shape {tuple(value.shape)}, not that of a scalar; reduce it by mean or sum")
        value.backward()
        for name, p in names.items():
            gradients[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    return {
        name: torch.stack(values) if values else names[name].new_zeros(0, *names[name].shape)
        for name, values in gradients.items()
    }


def _samples(x: Any, dim: int, first: int, number: int) -> Any:
    """Contiguous, as cuDNN wants a recurrent layer's states."""
    return x.narrow(dim, first, number).contiguous() if isinstance(x, Tensor) else x


_FP32_ANSWER = 1e-6  # norms and clip factors are given in fp32
_SMALL = 1e-2  # a parameter's gradients below this share of all are compared with that share
_SLACK = 1e-3  # how much more than exact factors a proven bound may clip


def check_rule(
    module: nn.Module,
    *inputs: Any,
    batch_dim: int = 0,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64, torch.bfloat16),
) -> None:
    """Compares what dpfast does with a module to a loop over samples: every verb, both passes, N samples, 1 and 0.

    Args:
        module: a layer or model with trainable parameters; a copy is wrapped. It must draw no random numbers.
        inputs: what its forward takes, floats in any dtype; every tensor has its N samples in ``batch_dim``.
        dtypes: module and inputs are converted to each in turn.

    Raises:
        AssertionError: a gradient, norm or sum is further from the loop's than ``TOLERANCES`` allows, or a bound is
            below the norm; the message names parameter, verb and dtype. InputError: nothing is trainable.

    >>> check_rule(nn.Linear(3, 2), torch.randn(4, 5, 3))
    """
    if not any(p.requires_grad for p in module.parameters()):
        raise InputError(f"no parameter of {type(module).__name__} is trainable: there is no gradient to compare")
    for dtype in dtypes:
        converted = tree_map(
            lambda x, t=dtype: x.to(t) if isinstance(x, Tensor) and x.is_floating_point() else x, inputs
        )
        num_samples = _tensors(converted)[0].shape[batch_dim]
        for n in sorted({0, 1, num_samples}):
            batch = tree_map(lambda x, n=n: _samples(x, batch_dim, 0, n), converted)
            if n == 0 and not _takes_nothing(module, batch):
                continue
            with warnings.catch_warnings():  # a rule is looked at, and nobody trains
                warnings.filterwarnings("ignore", ".* trains parameters in torch", DpfastWarning)
                _check_batch(copy.deepcopy(module).to(dtype), batch, batch_dim, f"{dtype}, {n} samples")


def separable_loss(model: nn.Module, *inputs: Any) -> Tensor:
    """A loss in which no sample touches another, whatever the outputs' shapes."""
    outputs = [x for x in _tensors(model(*inputs)) if x.is_floating_point()]
    total: Any = sum(torch.sin(3.0 * x).sum() for x in outputs)
    return total


def _rounds_itself(parameter: Tensor) -> bool:
    """Whether torch's own layers may be further off than ``TOLERANCES``."""
    return parameter.dtype.itemsize == 2 or (parameter.dtype is torch.float32 and not parameter.is_cpu)


def _takes_nothing(module: nn.Module, batch: tuple[Any, ...]) -> bool:
    """Whether the module itself runs on a batch of no samples."""
    try:
        with torch.no_grad():
            copy.deepcopy(module).double()(*_converted(batch, torch.float64))
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


def _check_batch(module: nn.Module, batch: tuple[Any, ...], batch_dim: int, where: str) -> None:
    parameter = next(module.parameters())
    dtype = parameter.dtype
    tolerance = TOLERANCES[dtype]
    exact = loop_over_samples(module, separable_loss, *batch, batch_dim=batch_dim)
    norms = norms_of(exact)
    size = float(norms.norm()) + 1e-30
    lost: dict[str, Tensor] = {}
    if _rounds_itself(parameter):
        low = loop_over_samples(module, separable_loss, *batch, batch_dim=batch_dim, dtype=dtype)
        lost = {name: low[name].double() - g for name, g in exact.items()}
        shares = [float(lost[name].norm()) / max(float(g.norm()), _SMALL * size) for name, g in exact.items()]
        tolerance = max(tolerance, 2.0 * max(shares))
    options: dict[str, Any] = {"batch_first": batch_dim == 0, "loss_reduction": "sum"}

    def compare(what: str, actual: Tensor | None, expected: Tensor, summands: float = 0.0, rounded: float = 0) -> None:
        assert actual is not None, f"{what} ({where}): missing"
        assert actual.shape == expected.shape, f"{what} ({where}): {tuple(actual.shape)}, not {tuple(expected.shape)}"
        difference = float((actual.double() - expected).norm())
        scale = max(float(expected.norm()), summands, _SMALL * size)
        error, allowed = difference / scale if difference else 0.0, max(tolerance, 2.0 * rounded / scale)
        assert error <= allowed, f"{what} ({where}): relative error {error:.1e} is above {allowed:.0e}"

    wrapped = GradSampleModule(copy.deepcopy(module), **options)
    tapped: Any = wrapped._tapped
    tapped.observe = lambda record, p, factor: _check_factor(factor, tolerance, f"{type(module).__name__}, {where}")
    separable_loss(wrapped, *batch).backward()
    summed = {name: g.sum(0) for name, g in exact.items()}
    for name, p in wrapped._module.named_parameters():
        if p.requires_grad:
            compare(f"grad_sample of {name}", p.grad_sample, exact[name])  # type: ignore[attr-defined]  # as in Opacus

    limit = float(norms.median()) if len(norms) else 1.0
    wrapped = GradSampleModuleFastGradientClipping(copy.deepcopy(module), max_grad_norm=max(limit, 1e-3), **options)
    separable_loss(wrapped, *batch).backward()
    tolerance = max(tolerance, _FP32_ANSWER)
    compare("norms", wrapped.get_norm_sample(), norms)
    coefficients = wrapped.get_clipping_coef().double()
    share = coefficients / (wrapped.max_grad_norm / norms).clamp(max=1.0)
    one = 4.0 * tolerance  # a single sample may be further off than all of them together
    assert (share >= 1.0 - _SLACK - one).all() and (share <= 1.0 + one).all(), f"clip factors ({where}): {share}"
    for name, p in wrapped._module.named_parameters():
        if p.requires_grad:
            summands = _size_of_summands(coefficients, exact[name])
            expected = torch.einsum("n,n...->...", coefficients, exact[name])
            rounded = _size_of_summands(coefficients, lost[name]) if lost else 0.0  # factors weight other samples
            compare(f"clipped sum of {name}", p.grad, expected, summands, rounded)

    wrapped = GradSampleModuleFastGradientClipping(copy.deepcopy(module), passes=2, **options)
    loss = separable_loss(wrapped, *batch)
    loss.backward(retain_graph=True)
    compare("norms of two passes", wrapped.get_norm_sample(), norms)
    wrapped.disable_hooks()
    loss.backward()
    for name, p in wrapped._module.named_parameters():
        if p.requires_grad and len(norms):
            assert p.grad is not None, f"second pass of {name} ({where}): missing"
            error = float((p.grad.double() - summed[name]).norm()) / size
            assert error <= tolerance, f"second pass of {name} ({where}): relative error {error:.1e}"


def _check_factor(factor: Factor, tolerance: float, where: str) -> None:
    """The verbs of one factor against its own materialized gradients."""
    gradients = factor.materialize()
    assert gradients.shape[1:] == factor.shape, (
        f"{where}: shape {tuple(factor.shape)}, not {tuple(gradients.shape[1:])}"
    )
    norms = norms_of({"": gradients.double()})
    coefficients = torch.rand(len(norms), dtype=torch.float64, device=norms.device)
    coefficients[1::2] = 0.0
    expected = torch.einsum("n,n...->...", coefficients, gradients.double())
    summands = _size_of_summands(coefficients, gradients.double())
    for verb, form in {"": factor, "kept ": factor.kept(), "materialized ": factor.materialized()}.items():
        value, upper = form.sq_norm()
        for what, actual, exact, least in (
            ("sq_norm", value.sqrt(), norms, 0.0),
            ("materialize", form.materialize(2.0), 2.0 * gradients, 0.0),
            ("weighted_sum", form.weighted_sum(coefficients.to(gradients.dtype)), expected, summands),
        ):
            error = relative_error(actual, exact, least)
            assert error <= max(tolerance, 1e-5), f"{where}: {verb}{what} has relative error {error:.1e}"
        # The gradients that we compare with are rounded too; the bound may not stay below them by more than that.
        slack = 1e-12 if gradients.dtype == torch.float64 else 1e-6
        assert (upper.sqrt() >= norms * (1.0 - slack)).all(), f"{where}: the bound of {verb}sq_norm is below the norm"


def _size_of_summands(coefficients: Tensor, gradients: Tensor) -> float:
    """``√Σ_n (c_n ‖g_n‖)²``: the least that the error of ``Σ_n c_n g_n`` is compared with. Samples cancel in a sum and
    their roundings do not, which add up as numbers that know nothing of each other. One summand that is missing or has
    another sign is 1/√N of it, where it would be 1/N of the sum of the norms."""
    return float((coefficients * norms_of({"": gradients})).norm())


def clipped_sum(gradients: dict[str, Tensor], max_grad_norm: float) -> dict[str, Tensor]:
    """``Σ_n min(1, C / ‖g_n‖) g_n``, what one private backward pass is to leave in ``p.grad``.

    Args:
        gradients: {name: (N, *shape)}, :func:`loop_over_samples`'s answer. max_grad_norm: C, a positive number.

    Returns:
        {name: (*shape)} in the gradients' dtype.
    """
    norms = norms_of(gradients)
    factors = torch.where(norms > max_grad_norm, max_grad_norm / norms, 1.0)
    return {name: torch.einsum("n,n...->...", factors, g) for name, g in gradients.items()}


def norms_of(gradients: dict[str, Tensor]) -> Tensor:
    """Samples' L2 norms over all parameters, (N,), of gradients {name: (N, *shape)} as :func:`loop_over_samples` gives
    them; at least one."""
    squares = [g.unsqueeze(-1).flatten(1).square().sum(1) for g in gradients.values()]
    return torch.stack(squares).sum(0).sqrt()


def relative_error(actual: Tensor, exact: Tensor, least: float = 0.0) -> float:
    """``‖actual − exact‖ / max(‖exact‖, least)`` in fp64; 0 where both are zero or empty, inf for NaN."""
    difference = float((actual.double() - exact.double()).norm())
    size = max(float(exact.double().norm()), least)
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 and difference == difference else float("inf")


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _converted(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)
