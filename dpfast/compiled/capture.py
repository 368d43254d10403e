"""Captures a private step: the eager mode runs once on a copy of the model without values, and every operation of its
forward, backward, norms and sums is written down."""

from __future__ import annotations

import copy
import inspect
import os
import traceback
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from dpfast.arithmetic import capturing
from dpfast.compiled.batches import Batch
from dpfast.compiled.draws import same_draws
from dpfast.compiled.mode import GraphMode, running
from dpfast.compiled.onednn import multiply_by_onednn
from dpfast.compiled.pins import pin_where_made
from dpfast.compiled.plain import plain
from dpfast.errors import DpfastError, InputError, UnsupportedModuleError
from dpfast.taps import nodes_behind, refuses
from dpfast.trials import LeftBehind, put_back, taking_back

Losses = Callable[..., Tensor]


@dataclass(frozen=True)
class Captured:
    """A step as a graph.

    Attributes:
        graph: (*parameters, *buffers, *others, *batch's tensors, valid or ids, C) -> (*sums, norms, factors, measured),
            the first of them ``plain``, the last three as of ``modes.Clipped``.
        others: tensors beside its parameters and buffers that its modules hold, those of other models among them.
        of: the trainable parameters that have a sum, in the graph's order.
        counts: whether whoever runs it counts what it drops.
    """

    graph: fx.GraphModule
    others: list[Tensor]
    of: list[nn.Parameter]
    counts: bool


@taking_back
def capture(
    left: LeftBehind,
    model: nn.Module,
    losses: Losses,
    batch: Batch,
    n: int,
    learned: GraphMode,
    options: dict[str, Any],
    num_units: int | None,
) -> Captured:
    """The step of ``losses(model, *batch) -> (n,)``.

    Args:
        left: what is made; given by the decorator.
        batch: padded to n samples. learned: knows where the model's samples are. options: of :class:`GraphMode`.
        num_units: U, where units are clipped.

    Raises:
        InputError: losses are not (n,). UnsupportedModuleError: the model reads values, or cannot be copied; what else
            an eager step raises.
    """
    with torch.compiler.set_stance("force_eager"), put_back(model, losses):
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        generators = (x for m in model.modules() for x in vars(m).values() if isinstance(x, torch.Generator))
        known: dict[int, Any] = {id(x): x for x in generators}  # whose state no fake tensor can hold
        with _FakeCopy(fakes) as copying:
            copied = _copied(model, known, copying)
        own = [*model.parameters(), *model.buffers()]
        # Parameters are copied past the mode; copy.deepcopy keeps what it has copied in its memo, under the memo's id.
        parameters = {id(x): x for x in known.get(id(known), ()) if isinstance(x, nn.Parameter)}
        others = [x for x in {**copying.copied, **parameters}.values() if all(x is not y for y in own)]
        state = plain(known[id(x)] for x in (*own, *others))
        mode = GraphMode(copied, loss_reduction="sum", **options)
        mode.knows(learned)
        mode.num_units = num_units
        names = {p: name for name, p in copied.named_parameters()}
        tensors = [fakes.from_tensor(x) for x in batch.tensors]
        kind = torch.bool if mode.num_units is None else torch.int64
        whose = fakes.from_tensor(torch.ones(n, dtype=kind, device=tensors[0].device))
        limit = fakes.from_tensor(torch.zeros((), dtype=torch.float64, device=tensors[0].device))
        of: list[str] = []

        def step(*flat: Tensor) -> list[Tensor]:
            *inputs, of_samples, mode.limit = flat[len(state) :]
            with torch.enable_grad(), mode.of(of_samples), left.noting(), same_draws(), _WithoutWorkspace():
                found = losses(mode, *batch.of(inputs))
                _check_losses(found, n)
                _check_leaves(found, losses, model)
                found.sum().backward()
            _check_others(known[id(x)] for x in others)
            of[:] = [names[p] for p, total in mode.sums.items() if total is not None]
            clipped = mode.clipped.norms, mode.clipped.factors, mode.clipped.measured
            return [*(total for total in mode.sums.values() if total is not None), *clipped]

        try:
            with fakes, capturing(), running(mode), torch.autograd.set_multithreading_enabled(False):
                graph = make_fx(step)(*state, *tensors, whose, limit)
        except DpfastError:
            raise
        except Exception as error:
            raise _refusal(error) from error
        finally:
            torch.clear_autocast_cache()  # of copies without values
    _check_buffers(model, copied, known)
    _check_written(graph, losses, model)
    _without_aliases(graph.graph)
    pin_where_made(graph.graph)
    multiply_by_onednn(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return Captured(graph, others, [dict(model.named_parameters())[name] for name in of], mode.counts)


def _without_aliases(graph: fx.Graph) -> None:
    """A twelfth of the operations only name a tensor anew for autograd, and each takes torch.compile milliseconds."""
    for node in graph.nodes:
        if node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


class _WithoutWorkspace(TorchFunctionMode):
    """oneDNN's LSTM gives what its backward reads only where autograd records, and nothing does when a graph runs: one
    whose backward is to come is captured as torch's own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.lstm or isinstance(args[1], Tensor):  # packed: no oneDNN there
            return func(*args, **(kwargs or {}))
        x, states, _, _, layers, *_ = args
        if layers == 1 and not any(t.requires_grad for t in (x, *states)):
            return func(*args, **(kwargs or {}))
        onednn: Any = torch.backends.mkldnn
        before = onednn.enabled
        onednn.enabled = False
        try:
            return func(*args, **(kwargs or {}))
        finally:
            onednn.enabled = before


def _copied(model: nn.Module, known: dict[int, Any], copying: _FakeCopy) -> nn.Module:
    """Raises UnsupportedModuleError where a class of tensors has a way of its own to be copied (bitsandbytes')."""
    try:
        copied = copy.deepcopy(model, known)
    except Exception as error:  # whatever somebody's own class raises
        said = f": {type(error).__name__}: {error}"
    else:
        if copying.copied.keys() <= known.keys():
            return copied
        said = ""
    kinds = [type(x) for x in (*model.parameters(), *model.buffers())]
    own = {kind.__name__ for kind in kinds if kind.__deepcopy__ not in (Tensor.__deepcopy__, nn.Parameter.__deepcopy__)}
    of = f" (which holds tensors of class {', '.join(sorted(own))})" if own else ""
    raise UnsupportedModuleError(
        f"the model{of} cannot be copied without its values{said}; take GradSampleModuleFastGradientClipping, the same "
        "step without a graph"
    )


class _FakeCopy(FakeCopyMode):
    """Notes which tensors have been copied, apart from parameters."""

    def __init__(self, fakes: FakeTensorMode):
        super().__init__(fakes)
        self.copied: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            self.copied[id(args[0])] = args[0]
        return super().__torch_function__(func, types, args, kwargs)


def _check_buffers(model: nn.Module, copied: nn.Module, known: dict[int, Any]) -> None:
    """Raises UnsupportedModuleError where the forward put another tensor in a buffer's place: a graph would not."""
    for (name, before), (_, now) in zip(model.named_buffers(), copied.named_buffers(), strict=True):
        if known[id(before)] is not now:
            raise UnsupportedModuleError(
                f"the forward puts another tensor in the place of buffer {name} {tuple(before.shape)}; write into it "
                "(copy_()), or take GradSampleModuleFastGradientClipping, the same step without a graph"
            )


def _check_others(others: Iterable[Tensor]) -> None:
    """Raises UnsupportedModuleError where a gradient has come to one, which no step clips."""
    for x in others:
        if x.is_leaf and x.grad is not None:
            raise UnsupportedModuleError(
                f"a gradient reached a tensor {tuple(x.shape)} that a module holds and that is no parameter of the "
                "model (a module that is kept in a list?): it would not be clipped. Make it the model's own, or freeze "
                "it"
            )


_GENERATOR = (
    "the step draws from a torch.Generator of its own{}, and a graph from torch's default one alone; leave generator= "
    "out, or take GradSampleModuleFastGradientClipping, the same step without a graph"
)


def _check_written(graph: fx.GraphModule, function: Losses, model: nn.Module) -> None:
    """Raises UnsupportedModuleError where the step draws from a generator of its own, or writes to a tensor that it
    reaches by a closure or a global: that may keep something of the samples for the next batch, or the next pass over
    part of this one."""
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(graph, str(node.target), None), torch.Generator):
            raise UnsupportedModuleError(_GENERATOR.format(""))
        schema = getattr(node.target, "_schema", None)
        for i, argument in enumerate(schema.arguments if schema is not None and schema.is_mutable else ()):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            for x in written if isinstance(written, (list, tuple)) else [written]:
                place = _viewed(x)
                if isinstance(place, fx.Node) and place.op == "get_attr":
                    constant = getattr(graph, str(place.target))
                    raise UnsupportedModuleError(
                        f"losses(model, *batch) write to {_said(constant, function, model)} {tuple(constant.shape)}, "
                        "which they reach by a closure or a global: what it keeps of one batch goes into the losses of "
                        "the next. Make it a buffer of the model, where it is looked at whether other samples' losses "
                        "change with it; or write to it outside of the step"
                    )


def _viewed(x: Any) -> Any:
    """What a node is a view of."""
    while isinstance(x, fx.Node) and x.op == "call_function":
        returns = getattr(getattr(x.target, "_schema", None), "returns", ())
        if not (returns and returns[0].alias_info is not None and x.args):
            break
        x = x.args[0]
    return x


def _check_leaves(losses: Tensor, function: Losses, model: nn.Module) -> None:
    """Raises UnsupportedModuleError where a gradient would come to a tensor that is no copy: what a function reaches by
    a closure or a global is none of the graph's, and would be left one without values."""
    for node in nodes_behind([losses.grad_fn]):
        x = getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None
        if isinstance(x, Tensor) and not (isinstance(x, FakeTensor) or refuses(x)):
            raise UnsupportedModuleError(
                f"losses(model, *batch): a gradient reaches {_said(x, function, model)} {tuple(x.shape)}, which is no "
                "parameter of the model (it comes by a closure or a global): it would not be clipped. Make it the "
                "model's own, or freeze it"
            )


def _said(x: Tensor, function: Losses, model: nn.Module) -> str:
    """The name by which the losses or a forward reach a tensor."""
    for code in (function, *(type(m).forward for m in model.modules())):
        if isinstance(code, types.FunctionType):
            reached = inspect.getclosurevars(code)
            for name, value in {**reached.globals, **reached.nonlocals}.items():
                if value is x:
                    return name
                of_module = isinstance(value, nn.Module)
                for own, p in chain(value.named_parameters(), value.named_buffers()) if of_module else ():
                    if p is x:
                        return f"{name}.{own}"
    return "a tensor"


def _check_losses(losses: object, n: int) -> None:
    what = f"a {type(losses).__name__}"
    if isinstance(losses, Tensor):
        if losses.shape == (n,) and losses.is_floating_point() and losses.requires_grad:
            return
        what = f"{tuple(losses.shape)} ({losses.dtype})"
        if losses.shape == (n,) and losses.is_floating_point():
            what += " that no parameter's gradient comes from"
    raise InputError(
        f"losses(model, *batch) gave {what}; it must give one loss a sample, ({n},), computed by the model that it is "
        'given: take reduction="none" and a mean over all dimensions but the first'
    )


_IN_HERE = tuple(os.path.join(os.path.dirname(path), "") for path in (torch.__file__, os.path.dirname(__file__)))
"""Folders, to the separator: torchvision's begins as torch's does."""


def _refusal(error: Exception) -> UnsupportedModuleError:
    """The error of a step that cannot be captured, with the line of the user's that it comes from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_IN_HERE)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else ""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)) or "_local_scalar" in str(error):
        return UnsupportedModuleError(
            f"the step reads a tensor's values{where} (.item(), a branch on values, shapes that follow from them): a "
            "graph has none while it is captured. Compute without them (torch.where), or take "
            "GradSampleModuleFastGradientClipping, the same step without a graph"
        )
    if "torch._C.Generator" in str(error):  # of torch 2.11, whose graphs hold none
        return UnsupportedModuleError(_GENERATOR.format(where))
    said = next(iter(str(error).splitlines()), "")
    return UnsupportedModuleError(
        f"the step cannot be captured{where}: {type(error).__name__}: {said}"
        "; GradSampleModuleFastGradientClipping is the same step without a graph"
    )
