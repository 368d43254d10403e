"""Copies of a tapped model, in which a look runs forward passes.

A deep copy of a small module takes longer than the module: each has a dozen empty dicts, our forward and a tap. So
modules, forwards and taps are copied attribute by attribute, and what these hold as deep copies.
"""

from __future__ import annotations

import copy
import copyreg
import io
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpfast.taps import (
    NOT_FOLLOWED,
    DetachableParameters,
    Picked,
    Tap,
    TappedForward,
    in_backward,
    known_rows,
    packed_in,
    stands_alone,
    with_picked,
)
from dpfast.trials.copied_hooks import hang_up_copies
from dpfast.trials.kept import made_by_autograd

_AS_THEY_ARE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, types.FunctionType, types.BuiltinFunctionType}
)
_NEVER_COPIED = (types.ModuleType, io.IOBase, threading.local, type(threading.Lock()), type(threading.RLock()))
_HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_with_kwargs", "_always_called")))

_COMPILED = "_compiled_call_impl"  # which modules leave out
_STATES = [getattr(cls, "__getstate__", None) for cls in (object, nn.Module)]


def copy_of(
    model: nn.Module, taps: Sequence[Tap], memo: dict[int, Any], *, hooks: bool = False
) -> tuple[nn.Module, list[Tap]]:
    """The model and its taps, as ``copy.deepcopy`` copies them.

    Args:
        memo: what stands in the copy for what in the model, by ids.
        hooks: with copies of what forward hooks hold.
    """
    modules = list(model.modules())
    if not all(map(_is_plain, modules)):
        gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        copied, copies = copy.deepcopy((model, list(taps)), memo)
        for p, gradient in gradients:  # where a DDP's copy has put views of its own buckets (gradient_as_bucket_view)
            p.grad = gradient
        tapped_again(copies)
        drop_hooks(copied)
        if hooks:
            hang_up_copies(model, memo)
        return copied, copies
    forwards = [x for m in modules if type(x := m.__dict__.get("forward")) is TappedForward]
    shells = [x for x in (*modules, *forwards, *taps) if id(x) not in memo]
    memo.update({id(x): type(x).__new__(type(x)) for x in shells})
    for x in reversed(shells):  # a module's children before itself
        held = vars(x)
        if isinstance(x, Tap):
            held = {**held, "like": None}  # found again; it leads to compiled kernels, of which there are no copies
        state = {name: _copied(name, value, memo) for name, value in held.items() if name != _COMPILED}
        if isinstance(x, nn.Module):
            memo[id(x)].__setstate__(state)
        else:
            vars(memo[id(x)]).update(state)
    drop_hooks(memo[id(model)])
    if hooks:
        hang_up_copies(model, memo)
    return memo[id(model)], [memo[id(tap)] for tap in taps]


def tapped_again(taps: Sequence[Tap]) -> None:
    """Puts back those of copies that have none: torch.fx's GraphModule makes itself anew, without its tap."""
    for tap in taps:
        module = tap.module
        if module._parameters and not isinstance(module._parameters, DetachableParameters):
            module._parameters = DetachableParameters(module._parameters)
        if not isinstance(module.__dict__.get("forward"), TappedForward):
            module.forward = TappedForward(tap, module.__dict__.get("forward"))


def _is_plain(module: nn.Module) -> bool:
    """Whether it is copied as any object is."""
    cls = type(module)
    return (
        not hasattr(cls, "__deepcopy__")
        and cls not in copyreg.dispatch_table
        and cls.__reduce_ex__ is object.__reduce_ex__
        and cls.__reduce__ is object.__reduce__
        and getattr(cls, "__getstate__", None) in _STATES
        and not any(getattr(c, "__slots__", ()) for c in cls.__mro__)
    )


def _copied(name: str, value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if name in _HOOKS and not value:
        return kind()
    if name in ("_forward_pre_hooks", "_forward_hooks"):  # see drop_hooks
        return kind(value)
    if kind in (dict, DetachableParameters) and name in ("_parameters", "_modules"):
        return kind({k: None if x is None else copy.deepcopy(x, memo) for k, x in value.items()})
    if isinstance(value, _NEVER_COPIED):
        return value
    if kind is torch.Generator and id(value) not in memo:  # in a fake mode its deep copy ends torch 2.8's process
        memo[id(value)] = value.clone_state()
    return copy.deepcopy(value, memo)


def without_graphs(model: nn.Module) -> dict[int, Tensor]:
    """Copies of what modules hold that autograd made, in objects too (a distribution), by ids: deep copies take no
    graphs."""
    return {id(x): _without_graph(x) for x in made_by_autograd(model)}


def _without_graph(x: Tensor) -> Tensor:
    try:
        return x.detach().clone()
    except RuntimeError:  # left of a vmap that has ended: nobody can read it
        return x


def leaves_of_copy(model: nn.Module) -> dict[int, nn.Parameter]:
    """What stands in a copy for the parameters, where gradients may come to them, by their ids."""
    return {id(p): leaf_of(p) for p in model.parameters()}


def leaf_of(parameter: nn.Parameter) -> nn.Parameter:
    """Another of the same numbers, which keeps no gradient."""
    if type(parameter) is not nn.Parameter:
        return parameter
    leaf = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    if leaf.requires_grad:  # the copies of a look live until the garbage collector may run again
        leaf.register_post_accumulate_grad_hook(_forget)
    return leaf


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def drop_hooks(model: nn.Module) -> None:
    """Of a copy, with which hooks are not copied (but see ``copied_hooks``). Plain functions that hold nothing stay,
    but not those that have made the model's input, which comes as they left it. Hugging Face's models hang up theirs
    again, which collect what they give (router logits, hidden states)."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            has_run = module is model and hooks is module._forward_pre_hooks
            for number in [i for i, hook in hooks.items() if has_run or not _holds_nothing(hook)]:
                del hooks[number]
        if isinstance(module.__dict__.get("forward"), TappedForward):
            module.__dict__["forward"].around = None
        module.__dict__.pop("_output_capturing_hooks_installed", None)


def _holds_nothing(hook: Any) -> bool:
    return type(hook) is types.FunctionType and stands_alone(hook)


def among_all(x: Tensor, numbers: Tensor, rows: int) -> Tensor:
    """Rows at these places among so many, with copies of them between: of zeros a module may make what is no number."""
    others = torch.arange(rows, device=x.device) % max(len(x), 1)
    between = x.detach()[others] if len(x) else x.new_zeros(rows, *x.shape[1:])
    return between.nan_to_num_(0.0, 0.0, 0.0).index_put((numbers,), x)


def stand_otherwise(x: Tensor, picked: Picked) -> bool:
    """Whether a tensor has all of some rows, and not these, of which there are as many by accident."""
    rows = known_rows(x)
    if rows is None or rows.by or rows.numbers is None or picked.numbers is None:
        return False
    own, others = (x.flatten(1)[:, 0] if x.dim() > 1 else x for x in (rows.numbers, picked.numbers))
    return not torch.equal(own, others)


class OfCopy(Tap):
    """The tap of a copy, where rows are always followed.

    Attributes:
        picked: the numbers of the rows that it runs on, where they were picked.
    """

    follows = trial = True
    picked: Tensor | None = None
    _had: Picked | None = None  # in the forward pass, if it is the only one

    def rows_picked(self, inputs: Any) -> Picked | None:
        """In what a checkpoint runs again, where nobody follows rows, those of the forward pass."""
        picked = super().rows_picked(inputs)
        if in_backward() is None:
            self._had = picked if self._had is None else NOT_FOLLOWED
        elif picked is not None and picked.of is None and self._had is not None:
            picked = self._had
        return picked

    def run_picked(
        self, picked: Picked, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Each row at its place among all, and each sample that was picked whole: the bits of none depend on how many
        others were picked."""
        leaves, structure = tree_flatten((args, kwargs))
        tensors, given = [x for x in leaves if isinstance(x, Tensor)], picked
        packed = packed_in((*args, *kwargs.values())) is not None
        recurrent = isinstance(self.module, nn.RNNBase)
        if not (recurrent and (not self.module.batch_first or len(tensors) > 1)):
            picked = picked.by_samples() or picked
        if picked.numbers is None or picked.of is None or packed or not tensors:
            return self._as_picked(picked, forward, args, kwargs)
        if picked.numbers.dim() > 1 and any(x.dim() > 2 for x in tensors):
            return self._as_picked(picked, forward, args, kwargs)
        if picked.numbers.shape == tensors[0].shape:  # entries, of tokens for a table
            return self._as_picked(picked, forward, args, kwargs)
        numbers, rows = picked.numbers.flatten(), picked.of.shape.numel()

        def at_places(x: Any) -> Any:  # what goes with the rows too (an expert's weight of each)
            if not isinstance(x, Tensor) or x.shape[:1] != numbers.shape or stand_otherwise(x, given):
                return x
            return among_all(x, numbers, rows)

        args_of_all, kwargs_of_all = tree_unflatten(list(map(at_places, leaves)), structure)
        with with_picked(picked):
            output = self.caught(forward, args_of_all, kwargs_of_all)
        gave, structure = tree_flatten(output)
        dims = [0, *[1] * (len(gave) - 1)] if recurrent else [0] * len(gave)  # states are (layers, N, H)
        of_rows = [(x, d) for x, d in zip(gave, dims, strict=True) if isinstance(x, Tensor) and x.dim()]
        if not of_rows or any(x.shape[d : d + 1] != (rows,) for x, d in of_rows):
            return self._as_picked(picked, forward, args, kwargs)
        chosen = {id(x): x.index_select(d, numbers) for x, d in of_rows}  # not what a router's loss is made of
        return tree_unflatten([chosen.get(id(x), x) for x in gave], structure)

    def _as_picked(
        self, picked: Picked, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.picked = picked.numbers[:, :1] if picked.packed and picked.numbers is not None else picked.numbers
        try:
            return self.caught(forward, args, kwargs)
        finally:
            self.picked = None

    def tapped(self, output: Any, *_: Any, **__: Any) -> Any:
        return output
