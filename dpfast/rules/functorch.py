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
import random
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpfast.arithmetic import accumulating_dtype, is_traced
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.factors import Dense, Factor
from dpfast.taps import Activations, owned_parameters

_SAME = 1e-3
"""Relative difference up to which two runs of a layer count as the same."""

_WAYS_OUT = "Register a rule (dpfast.register_rule) or freeze its parameters."

_MIXES = (
    "it has no rule, and its samples run one by one do not give what they gave in the batch: it mixes them, or one of "
    f"its inputs is no input of samples. {_WAYS_OUT}"
)
_OTHER_SHAPE = (
    "it has no rule, and one sample alone gives an output of another shape: it reaches a batch that is not among its "
    f"inputs. {_WAYS_OUT}"
)
_DRAWS = f"it has no rule, and draws random numbers, which cannot be drawn again. {_WAYS_OUT}"

_IN_A_GRAPH = (
    "it has no rule, and taking it apart by samples looks at values, of which a graph has none while it is captured. "
    f"{_WAYS_OUT} Or take GradSampleModuleFastGradientClipping, the same step without a graph"
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
    floats = [x for x in leaves if _is_float(x)]
    dtype = accumulating_dtype(*floats, *backprops)
    if n == 0:  # vmap does not take empty batches
        return {p: Dense(p.new_zeros(0, *p.shape, dtype=dtype)) for p in own.values()}
    together = activations.rows_together
    parted = _Parted(n, True) if together is None else _Parted(activations.num_samples or n, together)
    run = _Run(module, own, [_cast(x, dtype) for x in leaves], structure, activations.batch_dim, parted)
    backprops = [_cast(b, dtype) for b in backprops]
    sizes = {n, parted.num_samples}  # the layer itself may make several rows of a sample
    candidates = [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] in sizes for x in leaves]
    if not any(candidates):
        raise UnsupportedModuleError(f"it has no rule, and no input of it has {n} samples. {_WAYS_OUT}")
    if module in _by_loop:
        return _by_parameter(own, _by_itself(run, candidates, activations.followed, backprops))
    found = _by_vmap(run, candidates, activations.followed, backprops)
    if isinstance(found, Exception):
        if is_traced():
            raise UnsupportedModuleError(_IN_A_GRAPH) from found
        problem, found = found, _by_itself(run, candidates, activations.followed, backprops)
        _announce(activations.layer or type(module).__name__, problem)
        _by_loop.add(module)
    return _by_parameter(own, found)


_by_loop: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that vmap could not run."""

_seen: weakref.WeakKeyDictionary[nn.Module, set[bool]] = weakref.WeakKeyDictionary()
"""Modules, and whether in training, whose samples have once been found to give by vmap what they give in the batch."""


def _by_vmap(
    run: _Run, candidates: list[bool], followed: list[bool], backprops: list[Tensor]
) -> dict[str, Tensor] | Exception:
    """The gradients, or why vmap could not run."""
    try:
        if sum(candidates) > 1:
            return _checked(run, run.mapped, candidates, followed, backprops)
        found, outputs = run.mapped(candidates, backprops)
        seen = _seen.setdefault(run.module, set())
        if run.module.training not in seen and len(backprops[0]) > 1:
            if not _same_outputs(outputs, run.outputs()):
                raise UnsupportedModuleError(_MIXES)
            seen.add(run.module.training)
        return found
    except UnsupportedModuleError:
        raise
    except Exception as error:
        return error


def _by_itself(run: _Run, candidates: list[bool], followed: list[bool], backprops: list[Tensor]) -> dict[str, Tensor]:
    """The gradients, by a loop over samples."""
    before = _random_states(backprops[0])
    found: dict[str, Tensor] | Exception
    try:
        found = _checked(run, run.one_by_one, candidates, followed, backprops)
    except Exception as error:
        found = error
    if _random_states(backprops[0]) != before:
        raise UnsupportedModuleError(_DRAWS)
    if isinstance(found, UnsupportedModuleError):
        raise found
    if isinstance(found, Exception):
        raise UnsupportedModuleError(
            "it has no rule, and its forward cannot be repeated sample by sample "
            f"({type(found).__name__}: {found}). {_WAYS_OUT}"
        ) from found
    return found


def _random_states(like: Tensor) -> tuple[Any, ...]:
    """Of the generators that a forward may draw from."""
    on_device = torch.cuda.get_rng_state(like.device).numpy().tobytes() if like.is_cuda else b""
    return torch.get_rng_state().numpy().tobytes(), on_device, random.getstate()


def _announce(layer: str, error: Exception) -> None:
    why = " ".join(str(error).split())[:200]
    warnings.warn(
        f"{layer} has no rule, and vmap cannot run it ({type(error).__name__}: {why}): its gradients come from a loop "
        "over samples, which is slow. Register a rule (dpfast.register_rule) to make it fast",
        DpfastWarning,
        stacklevel=2,
    )


def _by_parameter(own: dict[str, nn.Parameter], gradients: dict[str, Tensor]) -> dict[nn.Parameter, Factor]:
    """A parameter of several names has the sum of their gradients."""
    sums: dict[nn.Parameter, Tensor] = {}
    for name, p in own.items():
        sums[p] = sums[p] + gradients[name] if p in sums else gradients[name]
    return {p: Dense(values) for p, values in sums.items()}


class _Parted(NamedTuple):
    """How rows (N·k, ...) are parted by samples."""

    num_samples: int
    together: bool

    def by_sample(self, x: Tensor) -> Tensor:
        """(N, k, ...)"""
        n = self.num_samples
        return x.unflatten(0, (n, -1)) if self.together else x.unflatten(0, (-1, n)).transpose(0, 1)

    def as_rows(self, x: Tensor) -> Tensor:
        """(N·k, ...)"""
        return (x if self.together else x.transpose(0, 1)).flatten(0, 1)


class _Run:
    """The layer's forward and its gradient, by samples or on the whole batch."""

    def __init__(
        self,
        module: nn.Module,
        own: dict[str, nn.Parameter],
        leaves: list[Any],
        structure: Any,
        batch_dim: int,
        parted: _Parted,
    ):
        dtype = accumulating_dtype(*(x for x in leaves if _is_float(x)))
        self.parted = parted
        self.module, self.leaves, self.structure, self.batch_dim = module, leaves, structure, batch_dim
        self.as_given = [
            x.movedim(0, batch_dim) if isinstance(x, Tensor) and x.dim() > batch_dim else x for x in leaves
        ]
        self.own = {name: _cast(p.detach(), dtype) for name, p in own.items()}
        others = itertools.chain(
            module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        )
        self.others = {name: _cast(p.detach(), dtype) for name, p in others if name not in own}

    def _outputs(self, parameters: dict[str, Tensor], leaves: list[Any]) -> list[Tensor]:
        args, kwargs = tree_unflatten(leaves, self.structure)
        # A child that shares a parameter has a tap of its own: names are not tied here.
        outputs = functional_call(self.module, {**self.others, **parameters}, args, kwargs, tie_weights=False)
        return [o for o in tree_flatten(outputs)[0] if _is_float(o)]

    def mapped(self, per_sample: list[bool], backprops: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Gradients {name: (N, *shape)} and the outputs, samples in front."""

        def loss(
            parameters: dict[str, Tensor], sample: list[Tensor], gradients: list[Tensor]
        ) -> tuple[Any, list[Tensor]]:
            samples = iter(sample)
            leaves = [
                next(samples).movedim(0, self.batch_dim) if yes else x
                for x, yes in zip(self.as_given, per_sample, strict=True)
            ]
            outputs = [o.movedim(self.batch_dim, 0) for o in self._outputs(parameters, leaves)]
            if any(o.shape != g.shape for o, g in zip(outputs, gradients, strict=True)):
                raise UnsupportedModuleError(_OTHER_SHAPE)
            return sum((o * g).sum() for o, g in zip(outputs, gradients, strict=True)), outputs

        by_sample = self.parted.by_sample
        batched = [by_sample(x) for x, yes in zip(self.leaves, per_sample, strict=True) if yes]
        found, outputs = vmap(grad(loss, has_aux=True), in_dims=(None, 0, 0))(
            self.own, batched, [by_sample(b) for b in backprops]
        )
        return found, [self.parted.as_rows(o) for o in outputs]

    def one_by_one(self, per_sample: list[bool], backprops: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The same by a loop."""
        gradients: list[dict[str, Tensor]] = []
        outputs: list[list[Tensor]] = []
        by_sample = self.parted.by_sample
        for i in range(self.parted.num_samples):
            leaves = [
                by_sample(x)[i].movedim(0, self.batch_dim if x.dim() > self.batch_dim else 0) if yes else given
                for x, given, yes in zip(self.leaves, self.as_given, per_sample, strict=True)
            ]
            found, outputs_of_one = self._differentiated(leaves, [by_sample(g)[i] for g in backprops])
            gradients.append(found)
            outputs.append(outputs_of_one)
        together = {name: torch.stack([g[name] for g in gradients]) for name in self.own}
        return together, [self.parted.as_rows(torch.stack(some)) for some in zip(*outputs, strict=True)]

    def whole(self, backprops: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The ordinary gradients and the outputs of the whole batch, samples in front."""
        return self._differentiated(self.as_given, backprops)

    def outputs(self) -> list[Tensor]:
        """Of the whole batch, samples in front."""
        return [o.movedim(self.batch_dim, 0) for o in self._outputs(self.own, self.as_given)]

    def _differentiated(self, leaves: list[Any], backprops: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        leaves = [x.clone() if isinstance(x, Tensor) else x for x in leaves]  # which the forward may change in place
        with torch.enable_grad():
            own = {name: p.detach().requires_grad_() for name, p in self.own.items()}
            outputs = [o.movedim(self.batch_dim, 0) for o in self._outputs(own, leaves)]
            if any(o.shape != g.shape for o, g in zip(outputs, backprops, strict=True)):
                raise UnsupportedModuleError(_OTHER_SHAPE)
            followed = [(o, g) for o, g in zip(outputs, backprops, strict=True) if o.requires_grad]
            gradients: Sequence[Tensor | None] = [None] * len(own)
            if followed:
                ends, starts = zip(*followed, strict=True)
                gradients = torch.autograd.grad(ends, list(own.values()), starts, allow_unused=True)
        found = {
            name: torch.zeros_like(p) if g is None else g.to_dense() if g.layout != torch.strided else g
            for (name, p), g in zip(self.own.items(), gradients, strict=True)
        }
        return found, [o.detach() for o in outputs]


def _checked(
    run: _Run,
    way: Callable[[list[bool], list[Tensor]], tuple[dict[str, Tensor], list[Tensor]]],
    candidates: list[bool],
    followed: list[bool],
    backprops: list[Tensor],
) -> dict[str, Tensor]:
    """Takes apart those inputs whose samples, run one by one, give the batch's outputs and summed gradients.

    The first input, and one that a gradient goes through, comes from the samples and is never shared.

    Args:
        way: how the samples are run.
    """
    gradients, outputs = run.whole(backprops)
    followed = followed or [False] * len(candidates)
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
            return found
    if problem is not None:
        raise problem
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


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if _is_float(x) else x
