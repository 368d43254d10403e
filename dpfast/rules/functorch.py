"""Any layer without a rule: vmap over samples of the gradient of its forward (torch.func).

The layer's forward runs again, one sample at a time as seen by the layer, so it must treat samples alike. Every
tensor input whose first dimension is N is taken apart, every other input is shared; where more than one input
could be either (a (T, T) mask with T = N), the way is checked against the layer's run on the whole batch.
Source: Horace He, Richard Zou, functorch (2021), "per-sample gradients".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpfast.arithmetic import accumulating_dtype
from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Dense, Factor
from dpfast.taps import Activations, owned_parameters

_SAME = 1e-3
"""Relative difference up to which two runs of a layer count as the same."""

_WAYS_OUT = "Register a rule (dpfast.register_rule) or freeze its parameters."


def functorch(
    module: nn.Module, activations: Activations, backprops: Tensor | Sequence[Tensor]
) -> dict[nn.Parameter, Factor]:
    """Gradients of the module's own trainable parameters, (N, *shape) each, in fp32 or fp64.

    Args:
        module: the layer; parameters of its children are left to their own rules.
        activations: the layer's inputs; tensors (N, ...) are per sample.
        backprops: (N, ...), or one per output tensor.

    Raises:
        UnsupportedModuleError: the forward cannot be taken apart by samples (it draws random numbers, mixes
            samples, or branches on values).

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
    run = _Run(module, own, [_cast(x, dtype) for x in leaves], structure, activations.batch_dim)
    backprops = [_cast(b, dtype) for b in backprops]
    candidates = [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == n for x in leaves]
    if not any(candidates):
        raise UnsupportedModuleError(f"it has no rule, and no input of it has {n} samples. {_WAYS_OUT}")
    try:
        if sum(candidates) > 1:
            per_parameter = _checked(run, candidates, activations.followed, backprops)
        else:
            per_parameter, _ = run(candidates, backprops)
    except UnsupportedModuleError:
        raise
    except Exception as error:
        raise UnsupportedModuleError(
            f"it has no rule, and its forward cannot be repeated sample by sample "
            f"({type(error).__name__}: {error}). {_WAYS_OUT}"
        ) from error
    return _by_parameter(own, per_parameter)


def _by_parameter(own: dict[str, nn.Parameter], gradients: dict[str, Tensor]) -> dict[nn.Parameter, Factor]:
    """A parameter of several names has the sum of their gradients."""
    sums: dict[nn.Parameter, Tensor] = {}
    for name, p in own.items():
        sums[p] = sums[p] + gradients[name] if p in sums else gradients[name]
    return {p: Dense(values) for p, values in sums.items()}


class _Run:
    """The layer's forward and its gradient, by samples or on the whole batch."""

    def __init__(
        self, module: nn.Module, own: dict[str, nn.Parameter], leaves: list[Any], structure: Any, batch_dim: int
    ):
        dtype = accumulating_dtype(*(x for x in leaves if _is_float(x)))
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

    def __call__(self, per_sample: list[bool], backprops: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Gradients {name: (N, *shape)} and the outputs, samples in front."""

        def loss(
            parameters: dict[str, Tensor], sample: list[Tensor], gradients: list[Tensor]
        ) -> tuple[Any, list[Tensor]]:
            samples = iter(sample)
            leaves = [
                next(samples).unsqueeze(self.batch_dim) if yes else x
                for x, yes in zip(self.as_given, per_sample, strict=True)
            ]
            outputs = [o.squeeze(self.batch_dim) for o in self._outputs(parameters, leaves)]
            if any(o.shape != g.shape for o, g in zip(outputs, gradients, strict=True)):
                raise UnsupportedModuleError(
                    f"it has no rule, and one sample alone gives an output of another shape: it reaches a batch that "
                    f"is not among its inputs. {_WAYS_OUT}"
                )
            return sum((o * g).sum() for o, g in zip(outputs, gradients, strict=True)), outputs

        batched = [x for x, yes in zip(self.leaves, per_sample, strict=True) if yes]
        return vmap(grad(loss, has_aux=True), in_dims=(None, 0, 0))(self.own, batched, backprops)

    def whole(self, backprops: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The ordinary gradients and the outputs of the whole batch, samples in front."""

        def loss(parameters: dict[str, Tensor]) -> tuple[Any, list[Tensor]]:
            outputs = [o.movedim(self.batch_dim, 0) for o in self._outputs(parameters, self.as_given)]
            return sum((o * g).sum() for o, g in zip(outputs, backprops, strict=True)), outputs

        return grad(loss, has_aux=True)(self.own)


def _checked(run: _Run, candidates: list[bool], followed: list[bool], backprops: list[Tensor]) -> dict[str, Tensor]:
    """Takes apart those inputs whose samples, run one by one, give the batch's outputs and summed gradients.

    The first input, and one that a gradient goes through, comes from the samples and is never shared.
    """
    gradients, outputs = run.whole(backprops)
    followed = followed or [False] * len(candidates)
    places = [i for i, yes in enumerate(candidates) if yes][1:]
    places = [i for i in places if not followed[i]]
    problem: Exception | None = None
    for shared in itertools.chain.from_iterable(itertools.combinations(places, k) for k in range(len(places) + 1)):
        try:
            found, repeated = run([yes and i not in shared for i, yes in enumerate(candidates)], backprops)
        except Exception as error:
            problem = problem or error
            continue
        sums = {name: g.sum(0) for name, g in found.items()}
        if all(_same(sums[name], g) for name, g in gradients.items()) and all(map(_same, repeated, outputs)):
            return found
    if problem is not None:
        raise problem
    raise UnsupportedModuleError(
        f"it has no rule, and its samples run one by one do not give what they gave in the batch: it mixes them, or "
        f"one of its inputs is no input of samples. {_WAYS_OUT}"
    )


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


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool((x - y).norm() <= _SAME * y.norm() + torch.finfo(y.dtype).tiny)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if _is_float(x) else x
