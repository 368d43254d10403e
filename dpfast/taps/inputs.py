"""The tensors in what a model is called with, whatever holds them."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpfast.errors import InputError, warn_caller
from dpfast.taps.passes import in_backward

WITHOUT_TENSORS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
INERT = (*WITHOUT_TENSORS, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, enum.Enum)
_DEPTH = 3
_LISTED = (
    "{} is called with a {}: dimension {} of each, {}, is taken for the samples. Where each is a "
    "sample, make one of them all (torch.stack, torch.nn.utils.rnn.pad_sequence): as it is, clipping would bound parts "
    "of samples, and a whole one by nothing (docs/layouts.md)"
)
_EACH = (
    "{0} is called with a {1}, each of which is taken for a sample: nothing else says how many there are, and it runs "
    "so. Where each has something of all samples (views, inputs), clipping would bound each of these, and a sample by "
    "nothing: give them as arguments of their own, or as tensors (N, ...) (docs/layouts.md)"
)
_ON_TRUST = (
    "{0} is called with a {1} of {3}, as many as there are samples (or several for each), in whose places no other "
    "samples' were put: that none changes another's gradient by that (the longest of all, a sum over them) is "
    "taken on trust. Give a tensor (N, ...) to have it looked at, or hold in the model what is no sample's "
    "(docs/layouts.md)"
)


def leaves_of(inputs: Any) -> list[Any]:
    """What is in lists, dicts, packed sequences excepted, and in objects that hold tensors (dataclasses, batches)."""
    if type(inputs) is tuple and len(inputs) == 2 and type(inputs[1]) is dict and not inputs[1]:  # arguments
        args = inputs[0]
        if type(args) is tuple and all(type(x) is Tensor for x in args):
            return list(args)
    leaves = tree_leaves(inputs, is_leaf=_is_packed)
    if all(isinstance(x, (Tensor, *WITHOUT_TENSORS)) for x in leaves):
        return leaves
    return Structure(inputs).leaves


def results_in(output: Any, depth: int = _DEPTH) -> list[Any]:
    """What is in a model's output: in lists, dicts and the like, and in objects that hold tensors."""
    found: list[Any] = []
    for x in tree_leaves(output):
        inside: Any = None
        if depth and not isinstance(x, (Tensor, torch.nn.Module, *WITHOUT_TENSORS)):
            inside = list(x.values()) if isinstance(x, Mapping) else attributes_of(x)
        some = results_in(inside, depth - 1) if inside else []
        found += some if any(isinstance(y, Tensor) for y in some) else [x]
    return found


def attributes_of(x: Any) -> dict[str, Any]:
    """What an object of somebody's own holds by names, in slots too."""
    slots = [vars(cls) for cls in type(x).__mro__ if "__slots__" in vars(cls)]
    names = [name for known in slots for name, y in known.items() if isinstance(y, types.MemberDescriptorType)]
    return {**{name: getattr(x, name) for name in names if hasattr(x, name)}, **getattr(x, "__dict__", {})}


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors among a pytree's leaves, found sooner where it is of tuples, lists and dicts."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (tuple, list)):
        return [] if isinstance(x, WITHOUT_TENSORS) else [y for y in tree_leaves(x) if isinstance(y, Tensor)]
    found: list[Tensor] = []
    for y in x:
        if isinstance(y, Tensor):
            found.append(y)
        elif not isinstance(y, WITHOUT_TENSORS):
            found += tensors_in(y)
    return found


def check_leaves(model: torch.nn.Module, leaves: Sequence[Any], n: int | None, dim: int) -> None:
    """Of what the model is called with, and has ``n`` samples in that dimension; None: no tensor has any.

    Raises:
        InputError: one is nested. Where gradients are recorded: one is sparse, or there are no samples.
    """
    name, recorded = type(model).__name__, torch.is_grad_enabled()
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.is_nested:
            raise InputError(
                f"{name} is called with a nested tensor, whose samples have no dimension of their own; pad it "
                "(torch.nested.to_padded_tensor) and mask what is padding"
            )
        if isinstance(x, Tensor) and x.layout is not torch.strided and recorded:
            raise InputError(
                f"{name} is called with a tensor of layout {x.layout}, {tuple(x.shape)} (input {i}, counted from 0), "
                "whose samples cannot be exchanged to see what becomes of them; give it dense (x.to_dense()) or, where "
                "it is shared by all (an adjacency matrix), as a buffer of the model"
            )
    if n is None and recorded and in_backward() is None:
        raise _cannot_be_told(model, leaves, dim)


def have_samples(leaves: Sequence[Any], dim: int) -> bool:
    """Whether one of them is a tensor with that dimension, or a packed sequence."""
    return any(isinstance(x, PackedSequence) or (isinstance(x, Tensor) and x.dim() > dim) for x in leaves)


def check_counted(model: torch.nn.Module, inputs: Any, dim: int, why: str) -> None:
    """Of what the model is called with, (args, kwargs), where it could not be looked at.

    Raises:
        InputError: no tensor says how many samples there are.
    """
    if not have_samples(leaves_of(inputs), dim):
        arguments = (*inputs[0], *inputs[1].values())
        raise _cannot_be_told(model, arguments, dim, f", as it could not be run with others ({why})")


def _cannot_be_told(model: torch.nn.Module, given: Sequence[Any], dim: int, why: str = "") -> InputError:
    kinds = ", ".join(type(x).__name__ for x in given) or "nothing"
    return InputError(
        f"{type(model).__name__} is called with no tensor that has samples in dimension {dim} (with {kinds}): how many "
        f"there are, and whose rows are whose, cannot be told{why}; give it tensors (tokenise before, torch.as_tensor "
        "of arrays), or one list or array with an entry for each sample"
    )


_said: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()


def warn_of_lists(
    model: torch.nn.Module, dim: int, called: Any, on_trust: Sequence[str], each: str | None = None
) -> None:
    """Once for a model, of each: where what is taken for the first input is the first of several in a list, which may
    be samples, and where something else than a tensor seems to have entries of samples that were not exchanged.

    Args:
        called: ``inputs``, their ``leaves``, and how many samples there are. on_trust: the kinds of those. each: a list
            whose entries are taken for samples, and may be of all.
    """
    said, arguments = _said.setdefault(model, set()), (*called.inputs[0], *called.inputs[1].values())
    first = next((x for x in called.leaves if isinstance(x, Tensor)), None)
    tensors = [x for x in arguments if type(x) is list and len(x) > 1 and all(isinstance(y, Tensor) for y in x)]
    found = {_EACH: each, _LISTED: next((f"list of {len(x)} tensors" for x in tensors if x[0] is first), None)}
    if _ON_TRUST not in said and not found[_LISTED]:
        found[_ON_TRUST] = next(iter(on_trust), None)
    for message, what in found.items():
        if what is not None and message not in said:
            said.add(message)
            warn_caller(message.format(type(model).__name__, what, dim, called.n))


_WHICH = (
    "{} is called with tensors that have {} in dimension {}: the {} of the first are taken for the samples, and {}. "
    "Where the samples are those of another (times or a grid that all share came first), clipping would bound "
    "positions, and a sample by nothing: pass a tensor of the batch first, by keyword too, and return one with the "
    "samples in dimension {} (docs/layouts.md#which-input-has-the-samples)"
)


def check_which_is_the_batch(
    model: torch.nn.Module,
    dim: int,
    n: int,
    leaves: Sequence[Any],
    output: Any,
    apart: Mapping[int, Sequence[int]],
) -> bool:
    """Where inputs differ in what may be the number of samples, what comes out must have them in the same dimension.
    Returns whether that is settled: one row may be one for all samples, and a batch of one.

    Args:
        n: as the first has. apart: of each output, the dimensions in which samples stayed apart when exchanged.

    Raises:
        InputError: it has another input's there.
    """
    sizes = {x.shape[dim] for x in leaves if isinstance(x, Tensor) and x.dim() > dim}
    others, is_settled = sizes - {n, 1}, n == 1 or 1 not in sizes
    if not others:
        return is_settled
    given = {i: x for i, x in enumerate(results_in(output)) if isinstance(x, Tensor) and x.requires_grad}
    at = {i: apart.get(i, [d for d, size in enumerate(x.shape) if size == n]) for i, x in given.items()}
    # Time-first models may give one row a sample (a class), with the samples in front.
    if not given or any(dim in dims or 0 in dims for dims in at.values()):
        return is_settled
    swapped = next((x for x in given.values() if x.dim() > dim and x.shape[dim] in others), None)
    comes = f"no output has them there ({', '.join(str(tuple(x.shape)) for x in given.values())})"
    if swapped is not None:
        comes = f"an output is {tuple(swapped.shape)}, with another one's there"
    said = _WHICH.format(type(model).__name__, " and ".join(map(str, sorted(sizes))), dim, n, comes, dim)
    if swapped is not None:
        raise InputError(said)
    warn_caller(said)
    return True


def keys_of(args: Any, kwargs: Any) -> tuple[str, ...]:
    """By what names a call's inputs come, of arguments and of what is in dicts; None is not there."""
    given = [kwargs, *(x for x in args if isinstance(x, Mapping))]
    return tuple(sorted({str(key) for some in given for key, x in some.items() if x is not None}))


def may_be_given_again(x: Any) -> bool:
    """Whether a copy of the model may be called with it, or with a copy of it, and nobody notices."""
    if isinstance(x, Tensor):
        return not is_traceable_wrapper_subclass(x)
    if isinstance(x, (torch.nn.Module, PackedSequence, torch.Generator, Iterator)) or not stands_alone(x):
        return False
    try:
        copy.deepcopy(x)
    except Exception:  # whatever an object of somebody's own raises
        return False
    return True


def stands_alone(x: Any, depth: int = _DEPTH) -> bool:
    """Whether it is no function, or one that reaches no module and no tensor but by its arguments."""
    if not isinstance(x, types.FunctionType):
        return True
    known = x.__globals__
    cells = [cell.cell_contents for cell in x.__closure__ or () if cell != types.CellType()]
    named = [known[name] for name in names_in(x.__code__) if name in known]
    held = [*cells, *named, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    return all(
        isinstance(y, INERT)
        and not is_a_method(y)
        and (depth > 0 or type(y) is not type(x))
        and stands_alone(y, depth - 1)
        for y in held
    )


def is_a_method(x: Any) -> bool:
    """Of an object, as ``kept.append``, and not of a module or type."""
    owner = getattr(x, "__self__", None) if isinstance(x, types.BuiltinFunctionType) else None
    return not isinstance(owner, (types.ModuleType, type, type(None)))


def names_in(code: types.CodeType) -> list[str]:
    """All that it may ask for by name."""
    inner = [name for x in code.co_consts if isinstance(x, types.CodeType) for name in names_in(x)]
    return [*code.co_names, *inner]


class Structure:
    """Inputs taken apart.

    Attributes:
        leaves: as :func:`leaves_of` gives them. holds: whether there are tensors, or what is whole.

    Args:
        whole: ids of what stays as it is; None is among the leaves for it.
    """

    def __init__(self, inputs: Any, depth: int = _DEPTH, whole: Set[int] = frozenset()):
        self._whole = whole
        flat, self._spec = tree_flatten(inputs, is_leaf=lambda x: _is_packed(x) or id(x) in whole)
        self._parts: list[tuple[Any, Structure | None]] = []
        self.leaves: list[Any] = []
        for x in flat:
            inside = None if id(x) in whole else _opened(x, depth, whole)
            self._parts.append((x, inside))
            self.leaves += [None if id(x) in whole else x] if inside is None else inside.leaves
        self.holds = any(inside or isinstance(x, Tensor) or id(x) in whole for x, inside in self._parts)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The same with other leaves."""
        rest = iter(leaves)
        return self._made(rest)

    def _made(self, rest: Any) -> Any:
        flat = []
        for x, inside in self._parts:
            if id(x) in self._whole:
                next(rest)
                flat.append(x)
            elif inside is None:
                leaf = next(rest)
                flat.append(leaf if isinstance(leaf, (Tensor, *WITHOUT_TENSORS)) else copy.deepcopy(leaf))
            else:
                x = copy.copy(x)
                _, fill = _inside(x)
                fill(inside._made(rest))
                flat.append(x)
        return tree_unflatten(flat, self._spec)


def _is_packed(x: Any) -> bool:
    return isinstance(x, PackedSequence)


def _opened(x: Any, depth: int, whole: Set[int]) -> Structure | None:
    """What an object of somebody's own holds, if there are tensors in it, or what is whole."""
    if not depth or isinstance(x, (Tensor, torch.nn.Module, *WITHOUT_TENSORS, PackedSequence)):
        return None
    found, _ = _inside(x)
    inside = Structure(found, depth - 1, whole) if found else None
    return inside if inside is not None and inside.holds else None


def _inside(x: Any) -> tuple[Any, Callable[[Any], None]]:
    """What it holds, in a dict or list, and what puts others in their place."""
    if isinstance(x, MutableMapping) and not isinstance(x, UserDict):
        return dict(x), x.update
    if isinstance(x, list):
        return list(x), lambda others: x.__setitem__(slice(None), others)
    if dataclasses.is_dataclass(x) and not hasattr(x, "__dict__"):

        def fill(others: dict[str, Any]) -> None:
            for name, value in others.items():
                object.__setattr__(x, name, value)

        return {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}, fill
    held = getattr(x, "__dict__", None)
    return (held, held.update) if isinstance(held, dict) else (None, lambda _: None)
