"""Any layer without a rule: vmap over samples of the gradient of its forward (torch.func).

The layer's forward runs again, one sample at a time as seen by the layer, so it must treat samples alike. Every
tensor input whose first dimension is N is taken apart, every other input is shared; where more than one input
could be either (a (T, T) mask with T = N), the way is checked against the layer's run on the whole batch.
Source: Horace He, Richard Zou, functorch (2021), "per-sample gradients".

What vmap cannot run (a custom autograd function, ``.item()``, a branch on values, sparse tensors) runs by a loop over
the samples, with a warning, and is checked against the whole batch every time: such code sees values.
"""

from __future__ import annotations

import itertools
import pickle
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten

from dpfast.arithmetic import accumulating_dtype, is_traced
from dpfast.errors import UnsupportedModuleError, warn_caller
from dpfast.factors import Dense, Factor
from dpfast.rules.run_again import WAYS_OUT, Parted, Run, cast, is_float
from dpfast.taps import Activations, Gave, owned_parameters

_SAME = 1e-3
"""Relative difference up to which two runs of a layer count as the same."""

_ROUNDED = 16
"""Roundings of its outputs up to which a run in another dtype may differ and be taken at its word."""

_MIXES = (
    "it has no rule, and its samples run one by one do not give what they gave in the batch: it mixes them, or one of "
    f"its inputs is no input of samples. {WAYS_OUT}"
)
_CHANGED = (
    "it has no rule, and its forward gave another output when it was run again in the backward pass: an attribute, a "
    "buffer, a number or an input that it reads has changed since, or changes each time. Keep it as it was until "
    "backward(), make it an input of the layer, or register a rule (dpfast.register_rule, docs/writing-a-rule.md)"
)
_DRAWS = f"it has no rule, and draws random numbers, which cannot be drawn again. {WAYS_OUT}"

_IN_A_GRAPH = (
    "it has no rule, and taking it apart by samples looks at values, of which a graph has none while it is captured. "
    f"{WAYS_OUT} Or take GradSampleModuleFastGradientClipping, the same step without a graph"
)


def functorch(
    module: nn.Module, activations: Activations, backprops: Tensor | Sequence[Tensor]
) -> dict[nn.Parameter, Factor]:
    """Gradients of the module's own trainable parameters, (N, *shape) each, in fp32 or fp64.

    Args:
        module: the layer; parameters of its children are left to their own rules.
        activations: the layer's inputs; tensors (N, ...) are per sample.
        backprops: (N, ...), or one per output tensor.

    Where samples are known to have several rows each (``activations.rows_together``), these are a batch: there are N
    gradients, not one a row.

    Raises:
        UnsupportedModuleError: the forward cannot be taken apart by samples (it draws random numbers, or mixes
            samples).

    Numerics:
        The forward is repeated in fp32 (fp64 where an input is fp64), whatever the dtype it ran in.
    """
    own = owned_parameters(module)
    backprops = [backprops] if isinstance(backprops, Tensor) else list(backprops)
    n = backprops[0].shape[0]
    leaves, structure = tree_flatten((tuple(activations), activations.kwargs))
    floats = [x for x in leaves if is_float(x)]
    dtype = accumulating_dtype(*floats, *backprops)
    if n == 0:  # vmap does not take empty batches
        return {p: Dense(p.new_zeros(0, *p.shape, dtype=dtype)) for p in own.values()}
    together = activations.rows_together
    parted = Parted(n, True) if together is None else Parted(activations.num_samples or n, together)
    run = Run(module, own, leaves, structure, activations.batch_dim, parted, dtype, activations.gave)
    backprops = [cast(b, dtype) for b in backprops]
    sizes = {n, parted.num_samples}  # the layer itself may make several rows of a sample
    candidates = [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] in sizes for x in leaves]
    if not any(candidates):
        raise UnsupportedModuleError(f"it has no rule, and no input of it has {n} samples. {WAYS_OUT}")
    if module in _by_loop:
        return _by_parameter(own, _by_itself(run, candidates, activations, backprops))
    before = () if is_traced() else _states_on_the_host()
    found = _by_vmap(run, candidates, activations, backprops)
    if before and not isinstance(found, Exception) and _states_on_the_host() != before:  # vmap sees torch's alone
        raise UnsupportedModuleError(_DRAWS)
    if isinstance(found, Exception):
        if is_traced():
            raise UnsupportedModuleError(_IN_A_GRAPH) from found
        problem, found = found, _by_itself(run, candidates, activations, backprops)
        _announce(activations.layer or type(module).__name__, problem)
        _by_loop.add(module)
    return _by_parameter(own, found)


_by_loop: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that vmap could not run."""

_seen: weakref.WeakKeyDictionary[nn.Module, set[bool]] = weakref.WeakKeyDictionary()
"""Modules, and whether in training, whose samples have once been found to give by vmap what they give in the batch."""


def _by_vmap(
    run: Run, candidates: list[bool], took: Activations, backprops: list[Tensor]
) -> dict[str, Tensor] | Exception:
    """The gradients, or why vmap could not run."""
    try:
        if sum(candidates) > 1:
            return _checked(run, run.mapped, candidates, took, backprops)
        found, outputs = run.mapped(candidates, backprops)
        seen = _seen.setdefault(run.module, set())
        same = _as_it_gave(run, took.gave, outputs)
        if not (same and run.module.training in seen) and len(backprops[0]) > 1:
            if not _same_outputs(outputs, run.outputs()):
                raise UnsupportedModuleError(_MIXES)
            seen.add(run.module.training)
        return found
    except UnsupportedModuleError:
        raise
    except Exception as error:
        return error


def _by_itself(run: Run, candidates: list[bool], took: Activations, backprops: list[Tensor]) -> dict[str, Tensor]:
    """The gradients, by a loop over samples."""
    before = _random_states(backprops[0])
    found: dict[str, Tensor] | Exception
    try:
        found = _checked(run, run.one_by_one, candidates, took, backprops)
    except Exception as error:
        found = error
    if _random_states(backprops[0]) != before:
        raise UnsupportedModuleError(_DRAWS)
    if isinstance(found, UnsupportedModuleError):
        raise found
    if isinstance(found, Exception):
        raise UnsupportedModuleError(
            "it has no rule, and its forward cannot be repeated sample by sample "
            f"({type(found).__name__}: {found}). {WAYS_OUT}"
        ) from found
    return found


def _random_states(like: Tensor) -> tuple[Any, ...]:
    """Of the generators that a forward may draw from."""
    on_device = torch.cuda.get_rng_state(like.device).numpy().tobytes() if like.is_cuda else b""
    return on_device, *_states_on_the_host()


def _states_on_the_host() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    of_numpy = b"" if numpy is None else pickle.dumps(numpy.random.get_state())
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), of_numpy


def _announce(layer: str, error: Exception) -> None:
    why = " ".join(str(error).split())[:200]
    warn_caller(
        f"{layer} has no rule, and vmap cannot run it ({type(error).__name__}: {why}): its gradients come from a loop "
        "over samples, which is slow. Register a rule (dpfast.register_rule) to make it fast"
    )


def _by_parameter(own: dict[str, nn.Parameter], gradients: dict[str, Tensor]) -> dict[nn.Parameter, Factor]:
    """A parameter of several names has the sum of their gradients."""
    sums: dict[nn.Parameter, Tensor] = {}
    for name, p in own.items():
        sums[p] = sums[p] + gradients[name] if p in sums else gradients[name]
    return {p: Dense(values) for p, values in sums.items()}


def _checked(
    run: Run,
    way: Callable[[list[bool], list[Tensor]], tuple[dict[str, Tensor], list[Tensor]]],
    candidates: list[bool],
    took: Activations,
    backprops: list[Tensor],
) -> dict[str, Tensor]:
    """Takes apart those inputs whose samples, run one by one, give the batch's outputs and summed gradients.

    The first input, and one that a gradient goes through, comes from the samples and is never shared.

    Args:
        way: how the samples are run.
    """
    gradients, outputs = run.whole(backprops)
    followed = took.followed or [False] * len(candidates)
    places = [i for i, yes in enumerate(candidates) if yes][1:]
    places = [i for i in places if not followed[i]]
    problem: Exception | None = None
    for shared in itertools.chain.from_iterable(itertools.combinations(places, k) for k in range(len(places) + 1)):
        try:
            found, repeated = way([yes and i not in shared for i, yes in enumerate(candidates)], backprops)
        except Exception as error:
            problem = problem or error
            continue
        if _same_outputs(repeated, outputs) and _same_sums(found, gradients):
            _as_it_gave(run, took.gave, outputs)
            return found
    if problem is not None:
        raise problem
    _as_it_gave(run, took.gave, outputs)
    raise UnsupportedModuleError(_MIXES)


def linear_in_parameters(
    module: nn.Module, compute: Callable[[], Tensor], backprops: Tensor
) -> dict[nn.Parameter, Factor]:
    """Gradients of the module's parameters where ``compute()`` (1, ...) is linear in them and has been given to each
    of N samples; backprops (N, ...)."""
    own = owned_parameters(module)
    dtype = accumulating_dtype(backprops)
    values = {name: p.detach().to(dtype) for name, p in own.items()}

    def of_parameters(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(_Computing(module, compute), {f"child.{k}": v for k, v in parameters.items()}, ())[0]

    _, pull_back = vjp(of_parameters, values)  # type: ignore[misc]  # three only with has_aux
    if backprops.shape[0] == 0:
        return {p: Dense(p.new_zeros(0, *p.shape, dtype=dtype)) for p in own.values()}
    (per_parameter,) = vmap(pull_back)(backprops.to(dtype))
    return _by_parameter(own, per_parameter)


class _Computing(nn.Module):
    """A computation with a module's parameters, as a module's forward."""

    def __init__(self, child: nn.Module, compute: Callable[[], Tensor]):
        super().__init__()
        self.child = child
        self.compute = compute

    def forward(self) -> Tensor:
        return self.compute()


def _as_it_gave(run: Run, gave: Gave | None, outputs: list[Tensor]) -> bool:
    """Whether the outputs are what the forward gave, where that is to be compared: False where rounding to 16 bits, or
    the batch, makes more of a difference.

    Raises:
        UnsupportedModuleError: the forward on the whole batch, in the dtypes that it ran in, does not give that.
    """
    if gave is None or not gave.is_to_be_compared():
        return True
    same = gave.is_like(outputs, _SAME)
    if not same:
        by_rounding = gave.is_like(outputs, _ROUNDED * gave.rounding)
        for _ in range(1 if by_rounding else 2):  # what it keeps may come back with every second run
            with gave.autocast():
                again = run.outputs_in_its_own_dtype()
            if not gave.is_like([cast(y, run.dtype) for y in again], max(_SAME, gave.rounding)):
                raise UnsupportedModuleError(_CHANGED)
    gave.is_given_again()
    return same


def _same_outputs(found: Sequence[Tensor], of_batch: Sequence[Tensor]) -> bool:
    """Row by row the same as in the batch, as far as both are finite, which the same rows must be."""
    for x, y in zip(found, of_batch, strict=True):
        if x.shape != y.shape:
            return False
        if x.is_meta:  # no values
            continue
        finite, expected = (z.flatten(1).isfinite().all(1) if z.dim() > 1 else z.isfinite() for z in (x, y))
        if not torch.equal(finite, expected):
            return False
        x, y = x[finite], y[finite]
        if not bool((x - y).norm() <= _SAME * y.norm() + torch.finfo(y.dtype).tiny):
            return False
    return True


def _same_sums(found: dict[str, Tensor], of_batch: dict[str, Tensor]) -> bool:
    """All parameters together: a gradient that is nothing but rounding (a bias in front of a softmax) is no sign. Where
    a sample's is not finite the batch's sum is not either, and outputs alone tell."""
    differences = [found[name].sum(0) - g for name, g in of_batch.items()]
    sizes: Any = sum(g.flatten(1).norm(dim=1) if g.dim() > 1 else g.abs() for g in found.values())
    if not bool(sizes.isfinite().all()):
        return True
    difference: Any = sum(d.norm() for d in differences)
    return bool(difference <= _SAME * sizes.sum() + torch.finfo(sizes.dtype).tiny)
