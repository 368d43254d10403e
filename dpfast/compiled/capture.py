"""Captures a private step: the eager mode runs once on a copy of the model without values, and every operation of its
forward, backward, norms and sums is written down."""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx

from dpfast.arithmetic import capturing
from dpfast.compiled.batches import Batch
from dpfast.compiled.mode import GraphMode, running
from dpfast.errors import DpfastError, InputError, UnsupportedModuleError

Losses = Callable[..., Tensor]


@dataclass(frozen=True)
class Captured:
    """A step as a graph.

    Attributes:
        graph: (*parameters, *buffers, *others, *batch's tensors, valid or ids) -> (*sums, *what ``modes.Clipped``
            holds).
        others: tensors beside parameters and buffers that its modules hold.
        of: the trainable parameters that have a sum, in the graph's order.
    """

    graph: fx.GraphModule
    others: list[Tensor]
    of: list[nn.Parameter]


def capture(
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
        batch: padded to n samples. learned: knows where the model's samples are. options: of :class:`GraphMode`.
        num_units: U, where units are clipped.

    Raises:
        InputError: losses are not (n,). UnsupportedModuleError: the model reads values, or cannot be copied; what else
            an eager step raises.
    """
    with torch.compiler.set_stance("force_eager"):
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        known: dict[int, Any] = {}
        with _FakeCopy(fakes) as copying:
            copied = copy.deepcopy(model, known)
        own = [*model.parameters(), *model.buffers()]
        others = [x for x in copying.copied.values() if all(x is not y for y in own)]
        state = [*own, *others]
        mode = GraphMode(copied, loss_reduction="sum", **options)
        mode.knows(learned)
        mode.num_units = num_units
        names = {p: name for name, p in copied.named_parameters()}
        tensors = [fakes.from_tensor(x) for x in batch.tensors]
        kind = torch.bool if mode.num_units is None else torch.int64
        whose = fakes.from_tensor(torch.ones(n, dtype=kind, device=tensors[0].device))
        of: list[str] = []

        def step(*flat: Tensor) -> list[Tensor]:
            *inputs, of_samples = flat[len(state) :]
            with torch.enable_grad(), mode.of(of_samples):
                found = losses(mode, *batch.of(inputs))
                _check_losses(found, n)
                found.sum().backward()
            of[:] = [names[p] for p, total in mode.sums.items() if total is not None]
            return [*(total for total in mode.sums.values() if total is not None), *mode.clipped]

        try:
            with fakes, capturing(), running(mode), torch.autograd.set_multithreading_enabled(False):
                graph = make_fx(step)(*(known[id(x)] for x in state), *tensors, whose)
        except DpfastError:
            raise
        except Exception as error:
            raise _refusal(error) from error
        finally:
            torch.clear_autocast_cache()  # of copies without values
    _check_buffers(model, copied, known)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return Captured(graph, others, [dict(model.named_parameters())[name] for name in of])


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


_IN_HERE = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))


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
    said = next(iter(str(error).splitlines()), "")
    return UnsupportedModuleError(
        f"the step cannot be captured{where}: {type(error).__name__}: {said}"
        "; GradSampleModuleFastGradientClipping is the same step without a graph"
    )
