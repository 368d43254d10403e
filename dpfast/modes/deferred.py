"""Layers that are alike wait for each other: one call of their rule for all.

A small layer costs what its calls cost, and its rule, norm and clipped sum are some forty of them. What such layers
have caught stands together as samples of one layer instead, up to :data:`AT_ONCE`; then their rule is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpfast.arithmetic import RowNorms, exact_arithmetic, ops, reference, stream_here
from dpfast.errors import StateError
from dpfast.factors import Alike, Factor, KernelRecipe, Numbers, Recipe, wait_as_factors
from dpfast.modes.answers import check_answer, check_own_layer
from dpfast.modes.gathered import Gathered
from dpfast.modes.in_turn import SMALL, is_never_in_turn
from dpfast.taps import Activations, Record, TappedLayer, find_likeness

AT_ONCE = {"cpu": 2**19, "cuda": 2**26}
"""Bytes that wait for one call, at most, so that little is held longer than needed and what is made of it stays in the
caches."""

ROOM = 2**20
"""Bytes of gradients that a step keeps where their inputs would be less: in steps of this size calls take the time."""

_MOST_KINDS = 1024

FactorsOf = Callable[[Record, Activations, Any], Mapping[nn.Parameter, Factor]]


class Kind:
    """Layers that stand together: there is one of each likeness.

    Attributes:
        recipes: by what the arithmetic's ways depend on beside; of kinds that differ in the number of samples alone,
            the same. None: of large layers, which go the general way.
        by_kernels: likewise, of large layers where kernels run.
    """

    def __init__(self, recipes: dict[Hashable, Recipe | None], by_kernels: dict[Hashable, KernelRecipe]) -> None:
        self.recipes, self.by_kernels = recipes, by_kernels


_kinds: dict[Hashable, Kind] = {}
_recipes: dict[Hashable, tuple[dict[Hashable, Recipe | None], dict[Hashable, KernelRecipe]]] = {}


class Queue:
    """What layers of one kind have caught, and what follows from it.

    Attributes:
        activations, backprops: while something is still to be made of them.
        versions: of both in turns, then.
        numbers, recipe: what has been worked out, by parameter, and by which recipe. alikes: the same where by none.
    """

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.numbers: Sequence[Numbers | None] = ()
        self.alikes: Sequence[Alike] = ()
        self.records: list[Record] = []
        self.activations: list[Tensor] = []
        self.backprops: list[Tensor] = []
        self.versions: list[int] = []


# Of a tensor, without a line of Python.
_trained, _shape, _version = (getattr(Tensor, name).__get__ for name in ("requires_grad", "shape", "_version"))


class Deferred:
    """Of one step.

    Args:
        factors_of: asks a record's rule.
        gathered: parameters whose factors the mode has.
        row_norms: of the step.
    """

    def __init__(self, factors_of: FactorsOf, gathered: MutableMapping[nn.Parameter, Any], row_norms: RowNorms):
        self._factors_of = factors_of
        self._gathered = gathered
        self._row_norms = row_norms
        self._queues: dict[Kind, Queue] = {}
        self._taken: list[Queue] = []
        self._waiting: set[int] = set()
        self._room = ROOM
        self._circumstances: tuple[object, ...] | None = None  # until a layer waits
        self._came: list[Kind] = []
        self._numbers: list[int] = []
        self._by_shapes = True  # whether they tell of which kinds all factors are

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a layer with that parameter waits, or has waited."""
        return id(parameter) in self._waiting  # which the step's records keep alive

    def takes(self, record: Record, activations: Tensor, backprops: Tensor) -> bool:
        """Whether the layer, of one input and one output, is one that waits, or one of which is known what the mode
        would keep; then that is done."""
        found = _likeness(record, activations, backprops)
        if found is None:
            return False
        kind, most = found
        numbers, uses, gathered = list(map(id, record.parameters)), record.uses, self._gathered
        assert uses is not None  # where there is a likeness
        for number, parameter in zip(numbers, record.parameters, strict=True):
            if uses[number] > 1 or number in self._waiting or parameter in gathered:
                return False
        recipe = kind.by_kernels.get(self._circumstances)
        queue = self._queues.get(kind)
        if recipe is None and queue is None:
            if not self._may_wait(kind, record, activations, backprops, alone=most == 0):
                return False
            recipe = kind.by_kernels.get(self._circumstances)
        if recipe is not None:
            return self._keeps(record, recipe, activations, backprops)
        if queue is None:
            queue = self._queues[kind] = Queue()
        self._waiting.update(numbers)
        self._numbers += numbers
        self._came.append(kind)
        queue.records.append(record)
        queue.activations.append(activations)
        queue.backprops.append(backprops)
        queue.versions += activations._version, backprops._version
        if len(queue.records) >= most:
            with self._row_norms, exact_arithmetic():
                self._take(kind)
        return True

    def _keeps(self, record: Record, recipe: KernelRecipe, a: Tensor, b: Tensor) -> bool:
        """The mode has what it would have kept of the rule's answer; False where the rule is to be asked."""
        if list(map(_shape, record.parameters)) != recipe.shapes:
            return False
        if recipe.only_keeps:
            factors = recipe.factors(a, b)
        else:
            with self._row_norms, exact_arithmetic():
                factors = recipe.factors(a, b)
        if factors is None:
            return False
        for parameter, factor in zip(record.parameters, factors, strict=True):
            entry = self._gathered[parameter] = Gathered()
            entry.wait(factor)
        return True

    def _may_wait(self, kind: Kind, record: Record, a: Tensor, b: Tensor, *, alone: bool) -> bool:
        """Whether layers of a kind of which none waits go this way; ``alone``: it is a large one, and a recipe is all
        that it can have of it."""
        if self._circumstances is None:
            self._circumstances = ops.circumstances()
        if self._circumstances not in kind.recipes:
            if wait_as_factors(a, b):
                return False
            if not alone:
                return True
            kernels = ops.runs_kernels(a, b)
            if kernels or b.is_cpu:
                with self._row_norms, exact_arithmetic():
                    factors = self._asked(record, a, b)
                    if kernels:
                        self._learn_by_kernels(kind, record, factors, a, b)
                    elif all(map(is_never_in_turn, factors)):
                        self._learn(kind, record, factors, a, b)
            kind.recipes.setdefault(self._circumstances, None)
        if self._circumstances in kind.by_kernels:
            return True
        recipe = kind.recipes[self._circumstances]
        if not alone:
            return True
        # More is better written in blocks, where activations have been freed.
        room = reference.KEPT_BLOCK * torch.get_num_threads()
        return recipe is not None and b.shape[0] * recipe.held <= room

    def take(self) -> None:
        """What follows from all that wait is worked out.

        Raises:
            StateError: something has written to what a layer has caught, of which sums are still to be made.
        """
        with self._row_norms, exact_arithmetic():
            for kind in list(self._queues):
                self._take(kind)
        for queue in self._taken:
            if queue.versions:
                _check_unwritten(queue)

    def check_own(self, own: Collection[nn.Parameter]) -> None:
        """Raises UnsupportedModuleError where a layer's parameters are not the model's: a recipe does not tell."""
        for queue in self._taken:
            for record in queue.records:
                check_own_layer(record.tap.layer, record.parameters, own)

    def numbers(self) -> list[Numbers | None]:
        """What has been worked out, by parameter of layers alike."""
        found: list[Numbers | None] = []
        for queue in self._taken:
            found += queue.numbers
        return found

    def alikes(self) -> list[tuple[list[nn.Parameter], Alike]]:
        """The same: a parameter of each layer, and their factor."""
        found = []
        for queue in self._taken:
            records, layers = queue.records, len(queue.records)
            alikes = queue.alikes
            if queue.recipe is not None:
                alikes = queue.recipe.alikes(queue.numbers, layers)  # type: ignore[arg-type]  # with a recipe, all are
            for place, alike in enumerate(alikes):
                parameters = [record.parameters[place] for record in records]
                if list(map(_shape, parameters)).count(alike.factor.shape) != layers:
                    raise StateError(f"{records[0].tap.layer}: layers of one shape have parameters of several")
                found.append((parameters, alike))
        return found

    def _take(self, kind: Kind) -> None:
        queue = self._queues.pop(kind)
        _check_unwritten(queue)
        a, b = queue.activations, queue.backprops
        if len(a) > 1:
            self._work_out(kind, queue, torch.cat(a), torch.cat(b))
        else:
            self._work_out(kind, queue, a[0], b[0])
        if len(a) > 1 or all(number is not None and _is_apart(number, b[0]) for number in queue.numbers):
            queue.activations, queue.backprops, queue.versions = [], [], []
        self._taken.append(queue)

    def _work_out(self, kind: Kind, queue: Queue, a: Tensor, b: Tensor) -> None:
        """What follows from what the layers have caught, one layer's samples after the other's."""
        recipe = kind.recipes.get(self._circumstances)
        if recipe is None:
            factors = self._asked(queue.records[0], a, b)
            recipe = self._learn(kind, queue.records[0], factors, a, b)
        queue.recipe = recipe
        if recipe is not None:  # in the first step too, so that its bits are those of all
            queue.numbers, self._room = recipe.numbers(a, b, self._room)
        else:
            queue.alikes = [Alike(factor, len(queue.records)) for factor in factors]
            queue.numbers = [alike.numbers() for alike in queue.alikes]

    def _asked(self, first: Record, a: Tensor, b: Tensor) -> list[Factor]:
        """The answer of a layer's rule."""
        activations = Activations([a])
        activations.layer = first.tap.layer
        factors = self._factors_of(first, activations, (b,))
        check_answer(first.tap.layer, first.parameters, factors, lambda p: f"its {tuple(p.shape)}")
        return [factors[parameter] for parameter in first.parameters]

    def _learn(self, kind: Kind, first: Record, factors: Sequence[Factor], a: Tensor, b: Tensor) -> Recipe | None:
        """From that answer."""
        if not _is_ours(first):
            self._by_shapes = False
            return None
        recipe = Recipe.learned(factors, a, b)
        if recipe is not None:
            kind.recipes[self._circumstances] = recipe
        return recipe

    def _learn_by_kernels(self, kind: Kind, first: Record, factors: Sequence[Factor], a: Tensor, b: Tensor) -> None:
        recipe = KernelRecipe.learned(factors, a, b) if _is_ours(first) else None
        if recipe is not None:
            kind.by_kernels[self._circumstances] = recipe

    @property
    def order(self) -> object:
        """What has waited, as it came, whose parameters by id, and what the arithmetic's ways depended on: where these
        are equal, so are the shapes and the order of what :meth:`numbers` gives. None where shapes do not tell."""
        return (self._came, self._numbers, self._circumstances) if self._by_shapes else None


def _is_ours(record: Record) -> bool:
    """Whether its rule is one of those that look at no values."""
    return record.rule is not None and record.rule.__module__.startswith("dpfast.rules.")


def _check_unwritten(queue: Queue) -> None:
    a, b = queue.activations, queue.backprops
    then, now = queue.versions, [version for ab in zip(a, b, strict=True) for version in map(_version, ab)]
    if then != now:
        changed = next(i for i, (one, other) in enumerate(zip(then, now, strict=True)) if one != other) // 2
        raise StateError(
            f"{queue.records[changed].tap.layer}: its input, or the gradient at its output, was written to while the "
            "backward pass went on; write to a copy"
        )


def _is_apart(number: Numbers, backprops: Tensor) -> bool:
    """Whether its sum is made of memory of its own."""
    values = number.factor
    return isinstance(values, Tensor) and values.data_ptr() != backprops.data_ptr()


def _likeness(record: Record, a: Tensor, b: Tensor) -> tuple[Kind, int] | None:
    """What layers that stand together have in common, and how many take what may wait; None for one that does not
    wait. What shapes and the module tell is kept by its tap."""
    tap, rule = record.tap, record.rule
    if rule is None or record.as_is or record.place or record.picked or record.uses is None:
        return None
    names = _names(record) if record.names is None else record.names
    if not (all(map(_trained, record.parameters)) and (record.unread or a.is_contiguous()) and b.is_contiguous()):
        return None
    stream = stream_here(b.device)
    like = rule, find_likeness(rule, tap.module), names, a.shape, b.shape, a.dtype, b.dtype, a.device, stream
    known = tap.like
    if known is None or known[0] != like:
        known = tap.like = like, _kind(like, tap, a, b)
    found: tuple[Kind, int] | None = known[1]
    return found


def _names(record: Record) -> tuple[str, ...]:
    """Of the module's parameters that are trained, in its order: one that was deleted and set again stands last."""
    own = record.tap.module._parameters.items()
    return (*(name for name, p in own if p is not None and p.requires_grad), str(len(record.parameters)))


def _kind(like: tuple[Any, ...], tap: TappedLayer, a: Tensor, b: Tensor) -> tuple[Kind, int] | None:
    if like[1] is None or tap.batch_dim or tap.folded:
        return None
    if a.device != b.device or not b.shape or a.shape[:1] != b.shape[:1] or not b.shape[0]:
        return None
    if len(_kinds) >= _MOST_KINDS:
        _kinds.clear()
    small = max(a.nbytes, b.nbytes) <= SMALL.get(b.device.type, 0)
    known = _kinds.get(like)
    if known is None:
        alike = like[0], like[1], like[2], a.shape[1:], b.shape[1:], *like[5:], small
        if len(_recipes) >= _MOST_KINDS:
            _recipes.clear()
        known = _kinds[like] = Kind(*_recipes.setdefault(alike, ({}, {})))
    return known, max(1, AT_ONCE[a.device.type] // max(1, a.nbytes + b.nbytes)) if small else 0
