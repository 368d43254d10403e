"""A layer's forward as it runs again in the backward pass, by samples or on the whole batch.

What runs is the forward itself, without the hooks in front of the layer and behind it: these ran beside the tap, on the
way to its inputs and from its outputs, and gradients go through them by themselves. Each run finds numbers and buffers
as the forward found them, other attributes as it, or whoever came after it, left them, and leaves all as it is.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpfast.arithmetic import is_traced
from dpfast.errors import UnsupportedModuleError
from dpfast.taps import Gave, numbers_of
from dpfast.trials import put_back

WAYS_OUT = "Register a rule (dpfast.register_rule) or freeze its parameters."

OTHER_SHAPE = (
    "it has no rule, and one sample alone gives an output of another shape: it reaches a batch that is not among its "
    f"inputs. {WAYS_OUT}"
)

_WRITES = (
    "a function in it writes gradients of its parameters itself, into p.grad (gradient accumulation in one kernel), "
    f"and gives none: switch that off. {WAYS_OUT}"
)


class Parted(NamedTuple):
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


class Run:
    """The layer's forward and its gradient, by samples or on the whole batch."""

    def __init__(
        self,
        module: nn.Module,
        own: dict[str, nn.Parameter],
        leaves: list[Any],
        structure: Any,
        batch_dim: int,
        parted: Parted,
        dtype: torch.dtype | None,
        gave: Gave | None,
    ):
        self._made_of, self._gave = (module, own, leaves, structure, batch_dim, parted), gave
        self.dtype, self.parted = dtype, parted
        self.module, self.structure, self.batch_dim = module, structure, batch_dim
        self.leaves = [cast(x, dtype) for x in leaves]
        self.as_given = [
            x.movedim(0, batch_dim) if isinstance(x, Tensor) and x.dim() > batch_dim else x for x in self.leaves
        ]
        self.own = {name: cast(p.detach(), dtype) for name, p in own.items()}
        others = itertools.chain(
            module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        )
        self._others = {name: cast(p.detach(), dtype) for name, p in others if name not in own}
        if gave is not None:
            self._others |= {name: cast(b, dtype) for name, b in gave.before.buffers.items()}

    def outputs_in_its_own_dtype(self) -> list[Tensor]:
        """Of the whole batch, samples in front, in the dtype that the forward ran in."""
        return Run(*self._made_of, None, self._gave).outputs()

    def _outputs(self, parameters: dict[str, Tensor], leaves: list[Any]) -> list[Tensor]:
        args, kwargs = tree_unflatten(leaves, self.structure)
        tensors = {**self._others, **parameters}
        own: dict[int, Tensor] = {}  # of the layer's buffers, which the forward may write to; two names may be of one
        for name, b in self.module.named_buffers(remove_duplicate=False):
            tensors[name] = own[id(b)] = own[id(b)] if id(b) in own else tensors[name].clone()
        # As functional_call, which would run the hooks too. A child that shares a parameter has a tap of its own: names
        # are not tied here.
        with _reparametrize_module(self.module, tensors, tie_weights=False):
            outputs = self.module.forward(*args, **kwargs)
        return [o for o in tree_flatten(outputs)[0] if is_float(o)]

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
                raise UnsupportedModuleError(OTHER_SHAPE)
            return sum((o * g).sum() for o, g in zip(outputs, gradients, strict=True)), outputs

        by_sample = self.parted.by_sample
        batched = [by_sample(x) for x, yes in zip(self.leaves, per_sample, strict=True) if yes]
        with self._as_it_began():
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
        with self._as_it_began():
            return [o.movedim(self.batch_dim, 0) for o in self._outputs(self.own, self.as_given)]

    def _as_it_began(self) -> AbstractContextManager[None]:
        return _attributes_kept(self.module, () if self._gave is None else self._gave.before.numbers)

    def _differentiated(self, leaves: list[Any], backprops: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        leaves = [x.clone() if isinstance(x, Tensor) else x for x in leaves]  # which the forward may change in place
        with torch.enable_grad(), self._as_it_began():
            own = {name: p.detach().requires_grad_() for name, p in self.own.items()}
            outputs = [o.movedim(self.batch_dim, 0) for o in self._outputs(own, leaves)]
            if any(o.shape != g.shape for o, g in zip(outputs, backprops, strict=True)):
                raise UnsupportedModuleError(OTHER_SHAPE)
            followed = [(o, g) for o, g in zip(outputs, backprops, strict=True) if o.requires_grad]
            gradients: Sequence[Tensor | None] = [None] * len(own)
            if followed:
                ends, starts = zip(*followed, strict=True)
                gradients = torch.autograd.grad(ends, list(own.values()), starts, allow_unused=True)
        if any(p.grad is not None for p in own.values()):
            raise UnsupportedModuleError(_WRITES)
        found = {
            name: torch.zeros_like(p) if g is None else g.to_dense() if g.layout != torch.strided else g
            for (name, p), g in zip(self.own.items(), gradients, strict=True)
        }
        return found, [o.detach() for o in outputs]


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_FEW = 4096  # numbers: each step makes copies


@contextmanager
def _attributes_kept(
    module: nn.Module, began: Sequence[tuple[nn.Module, dict[str, Any], frozenset[str]]]
) -> Iterator[None]:
    """What runs within it finds numbers as they were when the layer's forward began, of it and its children. It may set
    attributes there, and write to tensors, arrays, lists, sets and dicts, of which it has copies: under vmap what it
    leaves is dead when the run has ended. Tensors in lists may be many, and are not copied. What it keeps outside of
    modules is put back."""
    before = [(vars(m), dict(vars(m))) for m in module.modules()]
    copies: dict[int, Any] = {}  # two may have the same
    there = {id(now) for now, _ in before}
    try:
        for now, then in before:
            for name, x in then.items():
                if name not in _OF_EVERY_MODULE and id(x) not in copies:
                    copies[id(x)] = _copied(x)
                now[name] = copies.get(id(x), x)
        for m, numbers, names in began:
            if id(vars(m)) in there:  # and not gone since
                for name in numbers_of(m).keys() - names:  # the forward has made it
                    del vars(m)[name]
                vars(m).update(numbers)
        with nullcontext() if is_traced() else put_back(module, most=_FEW):  # a capture does it all
            yield
    finally:
        for now, then in before:
            for name in now.keys() - then.keys():
                del now[name]
            now.update(then)


_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
_HOLDERS = _DICTS | {list, tuple, set, deque}  # not classes made of them, which may not be copied so


def _copied(x: Any, within: bool = False) -> Any:
    if type(x) is Tensor:
        return x if within or x.layout != torch.strided or x.requires_grad else x.clone()
    if type(x) not in _HOLDERS:
        return x.copy() if type(x).__name__ == "ndarray" else x
    if type(x) in (list, tuple):
        return type(x)([_copied(y, True) if type(y) in _HOLDERS else y for y in x])
    found = x.copy()
    if type(x) in _DICTS:
        found.update({key: _copied(y, True) for key, y in x.items() if type(y) in _HOLDERS})
    return found


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """A tensor of floats in that dtype; None: its own."""
    return x.to(dtype) if is_float(x) else x
