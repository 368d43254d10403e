"""Nothing escapes: gradients may reach parameters from taps alone, and any other gradient is an error."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from dpfast.errors import EscapedGradientError, UnsupportedModuleError
from dpfast.modes.accumulation import note_ordinary, note_unwatched
from dpfast.taps import DetachableParameters, has_hooks, in_backward, owned_modules
from dpfast.trials import trained_beside


class Trainable:
    """A model's trainable parameters, as ``parameters()`` has them, one that is there twice twice; that takes several
    times as long, and this is asked twice in each step."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._modules: list[nn.Module] = []
        self._seen: list[nn.Module | None] = []  # their children, then

    def __call__(self) -> list[nn.Parameter]:
        """Those of now."""
        children = list(chain.from_iterable(map(dict.values, map(_children, self._modules))))
        if children != self._seen or not self._modules:  # modules are equal where they are the same
            self._modules = list(self._model.modules())
            self._seen = list(chain.from_iterable(map(dict.values, map(_children, self._modules))))
        of_all = chain.from_iterable(map(dict.values, map(_parameters, self._modules)))
        found = [p for p in of_all if p is not None]
        return list(compress(found, map(_is_trained, found)))


# Without a line of Python for each.
_children, _parameters, _hooks = attrgetter("_modules"), attrgetter("_parameters"), attrgetter("_backward_hooks")
_later_hooks = attrgetter("_post_accumulate_grad_hooks")
_is_trained: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # torch's stubs have a bool

_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "transformers.distributed.")
"""Packages whose hooks on parameters bring gradients over ranks."""


class Guards:
    """A hook on each trainable parameter of a model that refuses gradients that do not come from taps.

    Args:
        is_fine: asked when a gradient arrives; None where it is an ordinary one, and these are wanted.
        hooks: whether others' hooks on parameters see gradients.
    """

    def __init__(self, model: nn.Module, is_fine: Callable[[nn.Parameter, Tensor], bool | None], *, hooks: bool):
        self._model = model
        self.trainable = Trainable(model)
        self._hooks = hooks
        self._is_fine = is_fine
        self._handles: dict[int, tuple[nn.Parameter, RemovableHandle]] = {}  # by id, which the parameter itself keeps
        self._beside: dict[str, tuple[weakref.ref[Tensor], RemovableHandle]] = {}
        self._ordinary: tuple[int | None, list[tuple[nn.Parameter, Tensor | None, int]]] = (None, [])
        self._seen: list[int] = []
        self._trainable = b""

    def set(self, found: list[nn.Parameter] | None = None) -> bytes:
        """On every parameter that is trainable now; asked again before each step, because that may change. Returns a
        byte for each of the model's parameters, whether it is.

        Args:
            found: the trainable ones, where they are known.

        Raises:
            as :func:`check_parameters`.
        """
        found = self.trainable() if found is None else found
        seen = list(map(id, found))
        if not self._handles.keys() >= set(seen) or (not self._hooks and _more_hooks(found)):
            check_parameters(self._model, found, hooks=self._hooks)
            for p in found:
                if id(p) not in self._handles:
                    self.guard(p)
        if seen != self._seen:
            self._seen, self._trainable = seen, bytes(p.requires_grad for p in self._model.parameters())
        return self._trainable

    def guard(self, parameter: nn.Parameter) -> None:
        """One that is not the model's own, but stands in for one while a pass runs."""
        self._handles[id(parameter)] = parameter, _register_first(parameter, partial(self._refuse, parameter))

    def set_beside(self, inputs: Iterable[Any], clips: Callable[[], bool]) -> None:
        """On what the model's modules hold and train beside its parameters.

        Args:
            inputs: of the call; they may be kept from one before, and their gradients are the caller's.
            clips: whether the backward pass that runs goes through the model, and taps catch what comes by.
        """
        given = set(map(id, inputs))
        for name, x in trained_beside(self._model).items():
            if id(x) in given:
                continue
            before, handle = self._beside.get(name, (None, None))
            if before is None or before() is not x:
                if handle is not None:
                    handle.remove()
                hook: Any = unserializable_hook(partial(_refuse_beside, clips, name))  # a pickle leaves it out
                self._beside[name] = weakref.ref(x), x.register_hook(hook)

    def drop(self) -> None:
        """Lets ordinary gradients reach the parameters."""
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def remove(self) -> None:
        """The same for good: what has been left in ``p.grad`` is watched no more."""
        note_unwatched(p for p, _ in self._handles.values())
        self.drop()
        for _, handle in self._beside.values():
            handle.remove()
        self._beside.clear()

    def _expect_ordinary(self, parameter: nn.Parameter) -> None:
        """At the end of this pass a note stands on the gradient, so that no optimizer takes it for a clipped sum."""
        of_pass, grad = in_backward(), parameter.grad
        if self._ordinary[0] != of_pass:
            self._ordinary = of_pass, []
            torch.autograd.Variable._execution_engine.queue_callback(partial(_note_ordinary, self._ordinary[1]))
        self._ordinary[1].append((parameter, grad, -1 if grad is None else grad._version))

    def _refuse(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        if grad is None:
            return
        fine = self._is_fine(parameter, grad)
        if fine:
            return
        if fine is None:
            self._expect_ordinary(parameter)
            return
        name = next((n for n, p in self._model.named_parameters() if p is parameter), "of another model")
        if name != "of another model" and not _is_tapped(self._model, parameter):
            raise EscapedGradientError(
                f"a gradient reached parameter {name} {tuple(parameter.shape)} without being clipped, or parted by "
                "samples: its module, or a parametrization of that, was put into the model after that was wrapped, and "
                "nothing catches it. Wrap the model again, or call remove_hooks() and add_hooks() on the wrapped one"
            )
        raise EscapedGradientError(
            f"a gradient reached parameter {name} {tuple(parameter.shape)} without being clipped, or parted by "
            "samples: it is used outside its own module's forward (functionally by another module, in a penalty on the "
            "weights, or by another wrapped model). Call the module instead, register a rule for the module that uses "
            "it, or freeze it; weight decay belongs in the optimizer"
        )


def _refuse_beside(clips: Callable[[], bool], name: str, grad: Tensor) -> None:
    if clips():
        raise EscapedGradientError(
            f"a gradient reached {name} {tuple(grad.shape)} without being clipped, or parted by samples: a module of "
            "the model holds it, and it is no parameter of the model (a tensor in an attribute, a module in a list). "
            "Make it an nn.Parameter, register the module (nn.ModuleList), or freeze it (requires_grad_(False))"
        )


def _is_tapped(model: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a module that is caught answers for it, as it has been wrapped: a parametrization may be new."""
    owned = chain.from_iterable(owned_modules(m) for m in model.modules() if has_hooks(m))
    wrapped = (m._parameters for m in owned if isinstance(m._parameters, DetachableParameters))
    return any(p is parameter for parameters in wrapped for p in parameters.values())


def _note_ordinary(came: list[tuple[nn.Parameter, Tensor | None, int]]) -> None:
    """On the gradients of those whose gradient is another tensor than it was, or has been added to."""
    for p, grad, version in came:
        if p.grad is not None and (p.grad is not grad or grad._version != version):
            note_ordinary(p.grad)
    came.clear()


def check_parameters(model: nn.Module, trainable: Iterable[nn.Parameter], *, hooks: bool) -> None:
    """Raises UnsupportedModuleError where one of a model's is complex, or has a hook that would see no gradient.

    Args:
        hooks: whether hooks see gradients.
    """
    names = {id(p): f"parameter {name} {tuple(p.shape)}" for name, p in model.named_parameters()}
    for p in trainable:
        if p.is_complex():
            raise UnsupportedModuleError(
                f"{names[id(p)]} is {p.dtype}, and norms are of real numbers; make it a real parameter {(*p.shape, 2)} "
                "and take torch.view_as_complex of it, or freeze it"
            )
        if not hooks and any(map(_is_others, _later(p))):
            raise UnsupportedModuleError(
                f"{names[id(p)]} has a hook (register_post_accumulate_grad_hook), which would be called before the "
                "clipped sum is in p.grad. Take the hook off, and have the optimizer step after loss.backward(), once "
                "noise has been added; or take GradSampleModule, whose ordinary gradients it sees"
            )
        if not hooks and not all(map(_is_guard, (p._backward_hooks or {}).values())):
            raise UnsupportedModuleError(
                f"{names[id(p)]} has a hook (register_hook), which would never see a gradient: autograd computes none "
                "here, and the clipped sum is left in p.grad. Take the hook off and look at p.grad after "
                "loss.backward(), or take GradSampleModule, whose ordinary gradients it sees"
            )


def _more_hooks(trainable: list[nn.Parameter]) -> bool:
    """Whether there may be others than guards, of which each has one."""
    if any(map(_later_hooks, trainable)) and any(map(_is_others, chain.from_iterable(map(_later, trainable)))):
        return True
    return sum(map(len, filter(None, map(_hooks, trainable)))) > len(trainable)


def _later(parameter: nn.Parameter) -> Iterable[object]:
    """Its hooks of ``register_post_accumulate_grad_hook``."""
    return (_later_hooks(parameter) or {}).values()


def _is_others(hook: Any) -> bool:
    """Whether such a hook is no wrapper's, which knows of its own what reaches it here."""
    module = getattr(getattr(hook, "func", hook), "__module__", None)
    return not str(module).startswith(_WRAPPERS)


def _is_guard(hook: object) -> bool:
    """Of this model or another that has the parameter too, or holds the model that has it (an actor its critic)."""
    function = getattr(hook, "func", None)
    return function is _refuse_beside or getattr(function, "__func__", None) is Guards._refuse


def _register_first(parameter: nn.Parameter, hook: Callable[[Tensor | None], None]) -> RemovableHandle:
    """Before those that are there, which may change the gradient."""
    hooks: Any = parameter._backward_hooks or {}
    before = dict(hooks)
    hooks.clear()
    handle = parameter.register_hook(hook)
    assert parameter._backward_hooks is not None
    parameter._backward_hooks.update(before)
    return handle
