"""Whether a loss keeps samples apart behind the model's outputs, where no exchanged sample is seen.

Of a sum of samples' own losses, a sample's gradient at the outputs changes with that sample's outputs alone: second
derivatives between two samples are zero, to the bit, as each is computed from its own rows. Their product with noise on
half of the samples takes one backward pass more of the loss's own graph, and no forward pass (Pearlmutter, "Fast exact
multiplication by the Hessian", 1994). It must stay away from the other half.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpfast.arithmetic import buffers, is_traced
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.modes.ranked import ranked_samples
from dpfast.taps import is_of_tap, nodes_behind, noise_like, said_by

_MARK = "dpfast_outputs"  # in the metadata of autograd's nodes, which live as long as their graph

_MEET = (
    "behind output {} of the model, {}, samples meet in the loss: a sample's gradient there changes with the outputs "
    "of another one (statistics of the batch, a root or logarithm of the mean loss, comparisons of samples), and "
    "clipping bounds nothing; make losses of shape (N,), each from its own sample, and take their mean or sum"
)


_RANKED = (
    "samples meet in the loss, behind the model's outputs: {} ranks the samples of the batch, so whether a sample has "
    "a gradient there depends on the others (hard examples, the largest loss, a median), and clipping bounds nothing; "
    "take the mean or sum of all samples' losses, or choose by each sample's own (a fixed threshold)"
)
_NOT_SEEN = (
    "whether samples meet in the loss, behind the model's outputs, cannot be seen: it has no second derivatives, {}. "
    "That it is a sum or mean of samples' own losses is taken on trust: if it is not so, clipping bounds nothing "
    "(docs/layouts.md)"
)
_ONCE = ("Error", "CompiledFunctionBackwardBackward")  # torch's classes; what these come from is behind no edge
_AT_ONCE = 2**20  # numbers of second derivatives
_CALLER = 5  # frames from a warning to who called loss.backward()


class _Output(NamedTuple):
    """One of a model's.

    Attributes:
        hooks: on its gradient, which are for the step's. dims: where its samples may be; none where it is one number.
    """

    tensor: weakref.ref[Tensor]
    hooks: Any
    number: int
    n: int
    dims: Sequence[int]


class _First(NamedTuple):
    """A gradient at one of them, of which nothing but derivatives is asked, so it is not held.

    Attributes:
        at: in its graph; None: it has none. like: a tensor of its shape, dtype and device, of one number.
    """

    at: GradientEdge | None
    like: Tensor
    output: _Output

    @classmethod
    def of(cls, g: Tensor, output: _Output) -> _First:
        at = get_gradient_edge(g) if g.requires_grad else None
        return cls(at, g.new_empty(()).expand(g.shape), output)


def mark_outputs(outputs: Sequence[Any], n: int, parted: Mapping[int, Sequence[int]]) -> None:
    """The loss that is made of these, which have hooks, is to be looked at.

    Args:
        n: their number of samples. parted: the dimensions of each output, by its number, in which these are.
    """
    for i, x in enumerate(outputs):
        if n < 2 or not isinstance(x, Tensor) or x.grad_fn is None or x.is_complex():
            continue
        dims = [d for d in parted.get(i, ()) if d < x.dim() and x.shape[d] == n]
        if dims or x.numel() == 1:
            node: Any = x.grad_fn
            node.metadata.setdefault(_MARK, {})[x.output_nr] = _Output(weakref.ref(x), x._backward_hooks, i, n, dims)


def check_apart(losses: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Raises UnsupportedModuleError where samples meet between marked outputs and the losses. Warns where these have no
    second derivatives (functions of one's own, code of torch.compile).

    Args:
        grads: what their gradients start from; ones where it is not given.
    """
    nodes = list(nodes_behind((loss.grad_fn for loss in losses), _is_behind_outputs))
    marked: dict[Any, dict[int, _Output]] = {x: x.metadata.pop(_MARK) for x in nodes if _MARK in x.metadata}
    if not marked or is_traced():
        return
    if len(marked) > 1:  # the way from one to another is the model's own
        behind = {node for one in marked for node in nodes_behind(x for x, _ in one.next_functions)}
        marked = {node: outputs for node, outputs in marked.items() if node not in behind}
    outputs = {GradientEdge(node, number): x for node, some in marked.items() for number, x in some.items()}
    _check_ranks(nodes, outputs)
    buffers.give_back()  # what is free between activations is too small for what follows, and would stay beside it
    try:
        with _hooks_off(outputs.values()), torch.enable_grad():
            met = _met(losses, grads, outputs)
    except Exception as error:  # whatever functions raise that have no second derivative
        warnings.warn(_NOT_SEEN.format(said_by(error)), DpfastWarning, stacklevel=_CALLER)
        return
    finally:
        buffers.give_back()  # a step takes less
    if met is not None:
        raise UnsupportedModuleError(_MEET.format(*met))


def _check_ranks(nodes: Sequence[Any], outputs: dict[GradientEdge, _Output]) -> None:
    n = next(iter(outputs.values())).n if outputs else 0
    dims = {edge: x.dims for edge, x in outputs.items() if x.n == n}
    try:
        with _hooks_off(outputs.values()):
            name = ranked_samples(nodes, dims, _half(n))
    except Exception:  # of what has no gradients, the look at second derivatives says why
        return
    if name is not None:
        raise UnsupportedModuleError(_RANKED.format(name))


@contextmanager
def _hooks_off(outputs: Iterable[_Output]) -> Iterator[None]:
    """No hook on these gradients runs, and none is kept."""
    hooks = [(output.hooks, dict(output.hooks)) for output in outputs]
    kept = [(x, x.grad) for x in (output.tensor() for output in outputs) if x is not None and x.retains_grad]
    for of_output, _ in hooks:
        of_output.clear()
    try:
        yield
    finally:
        for of_output, before in hooks:
            of_output.update(before)
        for x, grad in kept:
            x.grad = grad


def _is_behind_outputs(node: Any) -> bool:
    return not (_MARK in node.metadata or is_of_tap(node))


def _met(
    losses: Sequence[Tensor], grads: Sequence[Tensor | None], outputs: dict[GradientEdge, _Output]
) -> tuple[int, tuple[int, ...]] | None:
    """The number and the shape of an output behind which samples meet."""
    # Which have gradients, or functions that are differentiable once would pass for linear.
    given = [
        (torch.ones_like(x) if g is None else g.detach().clone()).requires_grad_()
        for x, g in zip(losses, grads, strict=True)
    ]
    first = torch.autograd.grad(losses, list(outputs), given, create_graph=True, allow_unused=True)
    used = {edge: _First.of(g, outputs[edge]) for edge, g in zip(outputs, first, strict=True) if g is not None}
    del first
    ends = {edge.node for edge in outputs}
    for node in nodes_behind((x.at.node for x in used.values() if x.at), lambda node: node not in ends):
        if type(node).__name__ in _ONCE:  # torch 2.8's do not all tell their name()
            raise NotImplementedError("a function is differentiable once (once_differentiable, torch.compile)")
    by_sample = {edge: x for edge, x in used.items() if x.output.dims}
    looks = max((len(x.output.dims) for x in by_sample.values()), default=1)
    found = None
    for look in range(looks):  # where an output is as long as the batch in two dimensions, it may be either
        found = _met_in(by_sample or used, look)
        if found is None:
            break
    return found


def _met_in(used: dict[GradientEdge, _First], look: int) -> tuple[int, tuple[int, ...]] | None:
    seconds: Sequence[Tensor | None] = ()
    if used:
        grads = [x.at for x in used.values() if x.at]
        if len(grads) < len(used):
            raise NotImplementedError("a gradient is no function of the one that it was made of")
        noise = [_noise(x, look) for x in used.values()]
        seconds = torch.autograd.grad(grads, list(used), noise, retain_graph=True, allow_unused=True)
        del noise
    for second, (_, like, output) in zip(seconds, used.values(), strict=True):
        if second is not None and _is_anything(second, output, look):
            return output.number, tuple(like.shape)
    return None


def _is_anything(second: Tensor, output: _Output, look: int) -> bool:
    """Whether any of the samples without noise has a number that is none of zero, inf and NaN; some at a time, as the
    whole forward pass is still held."""
    if not output.dims:
        return bool(((second != 0) & second.isfinite()).any())
    rows = second.movedim(output.dims[min(look, len(output.dims) - 1)], 0)
    others = (~_half(output.n)).nonzero().flatten().to(second.device)
    for some in others.split(max(1, _AT_ONCE * len(rows) // max(1, rows.numel()))):
        part = rows.index_select(0, some)
        if bool(((part != 0) & part.isfinite()).any()):
            return True
    return False


def _noise(first: _First, look: int) -> Tensor:
    """At half of the samples; at an output of one number one."""
    _, like, output = first
    if not output.dims:
        return torch.ones_like(like, memory_format=torch.contiguous_format)
    dim = output.dims[min(look, len(output.dims) - 1)]
    return noise_like(like, 0).mul_(_half(output.n).to(like).view(-1, *[1] * (like.dim() - dim - 1)))


def _half(n: int) -> Tensor:
    """The samples with an odd number of ones in their number's binary digits (the Thue-Morse sequence), which parts
    neighbours, those half a batch apart, and the first from the last."""
    number = torch.arange(n)
    odd = torch.zeros(n, dtype=torch.bool)
    while bool(number.any()):
        odd ^= (number & 1).bool()
        number = number >> 1
    return odd
