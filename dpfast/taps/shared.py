"""What is computed without samples: parameters that a forward uses by itself, outputs of layers that see no samples.

A position table, a table of relative positions, a weight that another module uses functionally: each goes as a
``Shared`` tensor through what makes more tensors without samples of it (views, products with its like), until an
operation brings it together with samples. That operation, and no other, sees one copy for each sample (of stride 0), or
has a rule as a layer has; the gradients of the copies are those of the samples, and go back to the parameters through
the few operations in between. Which operation it is, and where the samples are there, fake tensors have told
(``probe``): the forward goes the way that it went there, and each operation is known by its way.

Nothing is lost without a word. What a ``Shared`` tensor holds ends in leaves that refuse gradients: an operation that
was not seen before, or that has no rule, gives an ordinary tensor whose gradient is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpfast.arithmetic import is_traced
from dpfast.errors import UnsupportedModuleError
from dpfast.factors import Dense, Factor, OuterProduct, folded, merge
from dpfast.taps.activations import Activations
from dpfast.taps.gathered import picked_here
from dpfast.taps.layout import Rows
from dpfast.taps.leaves import leaf, without_values
from dpfast.taps.nested import each_tensor
from dpfast.taps.nodes import is_of_tap
from dpfast.taps.others import looked_at
from dpfast.taps.passes import in_backward, saves_as_torch_does
from dpfast.taps.pulled_back import pulled_back, remaining

Way = tuple[Any, ...]
"""The operations that made a tensor, from the parameter or layer on."""


_ASKS = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "is_cuda")),
        *(
            getattr(Tensor, name)
            for name in ("dim", "size", "numel", "is_floating_point", "is_complex", "is_contiguous")
        ),
    )
)
"""What makes no tensor of one."""


_requires_grad: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # without a line of Python


class Owner(Protocol):
    """Of whom a tensor without samples comes: a tap."""

    module: nn.Module
    layer: str
    looks: bool  # whether it notes what happens, and refuses nothing

    def follow(self, operation: Operation) -> Any:
        """The operation's result."""

    def tapped(
        self,
        output: Any,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        parameters: Sequence[nn.Parameter],
        *,
        fresh: bool,
        rule: Any,
        as_is: bool = False,
    ) -> Any:
        """``output`` as it is, with its gradient caught."""


class Source(NamedTuple):
    """One use of parameters in what is computed without samples.

    Attributes:
        tap, key: of whom, and how that is learned.
        value: what the layer gave, or what stands in the parameter's place.
        factors: the parameters' factored gradients, of one that stands for the N gradients of ``value``.
    """

    tap: Owner
    key: Way
    parameters: Sequence[nn.Parameter]
    value: Tensor
    factors: Callable[[Factor], Mapping[nn.Parameter, Factor]]


_as_subclass = torch._C.TensorBase.as_subclass
"""Not what others have put in its place for all tensors: fastai's shares attributes with what it makes."""


class Shared(Tensor):
    """A tensor without samples that parameters went into.

    Attributes:
        value: the tensor. sources: of what it was made. tap, way: of whom it comes, and by which operations.
    """

    value: Tensor
    sources: tuple[Source, ...]
    tap: Owner
    way: Way
    transposed: Shared | None  # of which this is the transpose, (D, P)
    _copies: dict[Any, Tensor]
    _made_by: Any  # autograd's node

    @classmethod
    def make(cls, tap: Owner, way: Way, value: Tensor, sources: Sequence[Source]) -> Shared:
        """``value`` under the way that it came."""
        if isinstance(value, FakeTensor):  # which cannot be of two classes
            made = _as_subclass(without_values(f"{tap.layer}, {tuple(value.shape)}", value), cls)
        else:
            made = _as_subclass(value, cls)
        made.tap, made.way, made.value, made.sources = tap, way, value, tuple(sources)
        made.transposed, made._copies = None, {}
        with torch._C.DisableTorchFunctionSubclass():
            made._made_by = made.grad_fn
        return made

    def settled(self) -> Tensor:
        """Itself, or its value where that has no gradients.

        Functions with a backward of their own (``autograd.Function``) run without gradients, and what they make gets
        its history as it comes out, of which no subclass is told.
        """
        if not torch.is_grad_enabled():
            return self
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(self.value, FakeTensor):  # whose own history says nothing of that
                if self.grad_fn is not self._made_by and is_traced():
                    raise UnsupportedModuleError(NO_WAY_BACK.format(self.tap.layer))
                return self if self.requires_grad else self.value.detach()
            if self.grad_fn is not self._made_by:
                self._made_by, self.value = self.grad_fn, _as_subclass(self, Tensor)
            return self if self.requires_grad else self.value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS and type(args[0]) is cls:
            return func(args[0].value, *args[1:], **(kwargs or {}))
        operation = Operation(func, args, kwargs or {})
        if not operation.shared:
            return operation.plain()
        tap = operation.shared[0].tap
        if torch.is_grad_enabled() and not tap.looks and operation.writes():
            raise UnsupportedModuleError(f"{tap.layer}: {operation.name!r} {_WRITES}")
        return tap.follow(operation)

    def copies(self, dim: int, n: int) -> Tensor:
        """One for each of n samples, in dimension ``dim`` (of size 1, or one more before it), or in one more in front
        where that is negative; tapped, so that each brings back its sample's gradient."""
        key = (dim, n, in_backward(), picked_here())
        if key not in self._copies:
            value = self.value.detach()
            one_more = dim >= 0 and value.shape[dim] != 1
            value = value.unsqueeze(dim) if one_more else value.reshape((1,) * -dim + value.shape)
            axis = max(dim, 0)
            expanded = value.expand(*value.shape[:axis], n, *value.shape[axis + 1 :])

            def copies(module: nn.Module, activations: Activations, backprops: Tensor) -> Mapping[Any, Factor]:
                by_sample = backprops.movedim(axis, 0)
                return self.factors(Dense(by_sample.reshape(by_sample.shape[0], *self.value.shape)))

            found = self.tap.tapped(expanded, ((), {}), self.parameters, fresh=False, rule=copies, as_is=True)
            self._copies[key] = met_in(axis, found)
        return self._copies[key]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that went into it, each once."""
        return list({id(p): p for source in self.sources for p in source.parameters}.values())

    def factors(self, factor: Factor) -> Mapping[nn.Parameter, Factor]:
        """The parameters' factors, of one of this tensor's own gradients."""
        if len(self.sources) == 1 and self.sources[0].value is self.value:
            return self.sources[0].factors(factor)
        if self.transposed is not None and isinstance(factor, OuterProduct):
            return self.transposed.factors(OuterProduct(factor.backprops, factor.activations))
        found: dict[nn.Parameter, list[Factor]] = {}
        gradients = pulled_back(factor, self.value, [source.value for source in self.sources])
        for source, gradient in zip(self.sources, gradients, strict=True):
            if gradient is not None:
                for parameter, of_it in source.factors(gradient).items():
                    found.setdefault(parameter, []).append(of_it)
        for source in self.sources:  # of which nothing but the shape was used
            if not found.keys() >= set(source.parameters):
                nothing = source.value.new_zeros(factor.num_samples, *source.value.shape)
                for parameter, of_it in source.factors(Dense(nothing)).items():
                    found.setdefault(parameter, [of_it])
        return {parameter: merge(factors) for parameter, factors in found.items()}


def without_samples(tap: Owner, output: Tensor, inputs: Any, parameters: Sequence[nn.Parameter], rule: Any) -> Shared:
    """What a layer made without samples.

    Args:
        output: plain, or already Shared, as one input was.
        inputs: (positional, keyword) that the rule needs.
    """
    before = output.sources if isinstance(output, Shared) else ()
    value = output.value if isinstance(output, Shared) else leaf(output, tap.layer)
    tensors = Activations(*_plain(inputs))

    counts = not isinstance(tap.module, _BY_LAST_DIMENSIONS)  # its dimensions from the first on
    has_batch = value.dim() > 1 and value.dim() != _dims_without_batch(tap.module)
    alone = has_batch and value.shape[0] == 1  # a batch of one, which is every sample's

    def factors(factor: Factor) -> Mapping[nn.Parameter, Factor]:
        backprops = factor.materialized().values
        n = backprops.shape[0]
        if counts and has_batch:  # rows, as many for each sample
            given = tensors.map(lambda x: x.expand(n, *x.shape).flatten(0, 1) if x.dim() else x)
            found = looked_at(rule, type(tap.module).__name__, rule(tap.module, given, backprops.flatten(0, 1)))
            return {p: folded(of_rows, n, rows_together=True) for p, of_rows in found.items()}
        given = tensors.map(
            lambda x: (x if alone and x.dim() and x.shape[0] == 1 else x.unsqueeze(0)).expand(
                n, *(x.shape[1:] if alone and x.dim() and x.shape[0] == 1 else x.shape)
            )
        )
        found = rule(tap.module, given, backprops.squeeze(1) if alone else backprops)
        return looked_at(rule, type(tap.module).__name__, found)

    key = ("alone" if value is not getattr(output, "value", None) else "through", value.dim())
    return Shared.make(tap, key, value, (*before, Source(tap, key, parameters, value, factors)))


_BY_LAST_DIMENSIONS = (nn.Linear, nn.Bilinear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)
"""Layers to which all dimensions but the last are positions, so one more in front is none that they know."""


def _dims_without_batch(module: nn.Module) -> int:
    """Of the output of a layer that takes one sample alone, too; 1 where nothing says so."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.weight.dim() - 1
    return module._get_no_batch_dim() if isinstance(module, nn.modules.instancenorm._InstanceNorm) else 1


_LOOK_AT_OTHERS = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.reshape_as, Tensor.view_as}
"""Operations in which only dtype, device or shape of other tensors count."""


NO_WAY_BACK = (
    "{}: no gradient goes back through what is made of its parameters alone (an autograd.Function, in a captured "
    "step); make it of torch's own functions"
)
_WRITES = (
    "writes to a parameter, or to what was made of parameters alone, whose earlier uses and other names would have the "
    "gradients of later ones: make a new tensor (x = x * y, not x *= y), or torch.cat and torch.where for parts of one"
)
_WRITERS = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_WRITERS |= {"__setitem__", "__set__"}  # of an attribute


class Operation:
    """One operation that a Shared tensor goes into.

    Attributes:
        shared: those that do. others: the other tensors. way: of its results.
    """

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.func, self.name = getattr(func, "of_rows", func), getattr(func, "__name__", "")
        found: list[Any] = []
        self.shared: list[Shared] = []
        self.args, self.kwargs = _settled((args, kwargs), found, self.shared)
        self.others = [x for x in found if not isinstance(x, Shared)]
        self.way = (self.name, *[x.way if isinstance(x, Shared) else x.dim() for x in found])

    def writes(self) -> bool:
        """Whether it changes a Shared tensor."""
        if not self.kwargs:
            return self.is_in_place() and isinstance(self.args[0], Shared)
        target = self.args[0] if self.args else self.kwargs.get("input")
        in_place = self.is_in_place() or self.kwargs.get("inplace") is True
        return isinstance(self.kwargs.get("out"), Shared) or (in_place and isinstance(target, Shared))

    def is_in_place(self) -> bool:
        """Whether its name says that it changes its first tensor."""
        name = self.name
        return name in _WRITERS or (name.endswith("_") and not name.endswith("__"))

    def meets_others(self) -> bool:
        """Whether a gradient would go through a tensor that is not Shared, a parameter that was frozen when the way was
        learned: it would be lost in a result that remains without samples."""
        return any(map(_requires_grad, self.others)) and self.func not in _LOOK_AT_OTHERS

    def times(self) -> tuple[int, ...]:
        """Of a repetition."""
        _, *times = self.args
        return tuple(times[0]) if len(times) == 1 and not isinstance(times[0], int) else tuple(times)

    def plain(self, of: Callable[[Tensor], Tensor] | None = None) -> Any:
        """Its result, as torch gives it; with what ``of`` gives in the place of tensors that are not Shared."""
        args, kwargs = _plain((self.args, self.kwargs), of)
        return self.func(*args, **kwargs)

    def remains(self) -> Any:
        """Its result, which has no samples either."""
        with remaining():
            output = self.plain()
        # Within a function with a backward of its own. What that saves goes by the hooks, so there must be none.
        inside = not torch.is_grad_enabled() and in_backward() is None and saves_as_torch_does()
        return self.wrapped(output, lambda x: x.requires_grad or inside)

    def wrapped(self, output: Any, is_shared: Callable[[Tensor], bool], number: int = 0) -> Any:
        """The result, of whose tensors those are Shared that may have gradients."""
        if isinstance(output, (tuple, list)):
            parts = [self.wrapped(x, is_shared, i) for i, x in enumerate(output)]
            return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
        differentiable = isinstance(output, Tensor) and (output.is_floating_point() or output.is_complex())
        if not differentiable or not is_shared(output):
            return output
        first, way = self.shared[0], (*self.way, number)
        if len(self.shared) > 1:
            sources = {id(source.value): source for x in self.shared for source in x.sources}
            return Shared.make(first.tap, way, output, list(sources.values()))
        made = Shared.make(first.tap, way, output, first.sources)
        if _is_transpose(output, first.value):
            made.transposed = first
        return made


def met_in(place: int | Rows, output: Any) -> Any:
    """``output``, with its samples' place told to whoever comes by its tap."""
    node = (output[0] if isinstance(output, tuple) else output).grad_fn
    if is_of_tap(node):
        node.record.meets_in = place
    return output


def _plain(x: Any, of: Callable[[Tensor], Tensor] | None = None) -> Any:
    """The same with plain tensors, the others changed."""
    return each_tensor(x, lambda x: x.value if isinstance(x, Shared) else x if of is None else of(x))


def _settled(x: Any, found: list[Any], shared: list[Shared]) -> Any:
    """The same with those Shared that have gradients, which ``shared`` gets; ``found`` gets all tensors, in order."""

    def settled(x: Tensor) -> Tensor:
        found.append(x)
        if isinstance(x, Shared):
            x = x.settled()
            if isinstance(x, Shared):
                shared.append(x)
        return x

    return each_tensor(x, settled)


def _is_transpose(x: Tensor, of: Tensor) -> bool:
    return (
        x.dim() == of.dim() == 2
        and x._is_view()
        and x._base is (of._base if of._is_view() else of)
        and (x.shape, x.stride()) == (of.shape[::-1], of.stride()[::-1])
        and x.storage_offset() == of.storage_offset()
    )
