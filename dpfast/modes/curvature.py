"""Whether a loss keeps samples apart behind the model's outputs, where no exchanged sample is seen.

Of a sum of samples' own losses, a sample's gradient at the outputs changes with that sample's outputs alone: second
derivatives between two samples are zero, to the bit, as each is computed from its own rows. Their product with noise on
half of the samples takes one backward pass more of the loss's own graph, and no forward pass (Pearlmutter, "Fast exact
multiplication by the Hessian", 1994). It must stay away from the other half.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpfast.arithmetic import buffers, is_traced
from dpfast.errors import StateError, UnsupportedModuleError, warn_caller
from dpfast.looks import said_by
from dpfast.modes.between_passes import check_between
from dpfast.modes.cut_graph import Cut
from dpfast.modes.loss_ends import Looked, Output, dims_of, find_ends, mark, marks, unmark
from dpfast.modes.ranked import bent_where_samples_meet, ranked_samples
from dpfast.modes.spread import spread_over_samples
from dpfast.taps import Shared, is_of_tap, nodes_behind
from dpfast.trials import noise_like

_MEET = (
    "behind {}, {}, samples meet in the loss: a sample's gradient there changes with the outputs "
    "of another one (statistics of the batch, a root or logarithm of the mean loss, comparisons of samples), and "
    "clipping bounds nothing; make losses of shape (N,), each from its own sample, and take their mean or sum"
)

_ALONE = " (made of parameters alone; have the forward pass give each sample its own, x.expand(n, ...))"

_RANKED = (
    "samples meet in the loss, behind the model's outputs: {} ranks the samples of the batch, so whether a sample has "
    "a gradient there depends on the others (hard examples, the largest loss, a median), and clipping bounds nothing; "
    "take the mean or sum of all samples' losses, or choose by each sample's own (a fixed threshold)"
)
_BENT = (
    "samples meet in the loss, behind the model's outputs: {} takes an entry that comes of several of them (a hinge of "
    "their difference, the larger of two, the mean loss above a floor), so a sample's gradient there depends on the "
    "others, and clipping bounds nothing; take the mean or sum of all samples' losses, each made from its own sample"
)
_NOT_SEEN = (
    "whether samples meet in the loss, behind the model's outputs, cannot be seen: it has no second derivatives, {}. "
    "That it is a sum or mean of samples' own losses is taken on trust: if it is not so, clipping bounds nothing "
    "(docs/layouts.md)"
)
_SPREAD = (
    "behind the model's outputs, the loss spreads a tensor {} over {}, as long as the batch's {} samples in two of its "
    "dimensions, beside one without gradients. Outputs (N, 1) and targets (N,) do that, and give each sample's loss "
    "the targets of all, so clipping bounds nothing: give both one shape, y.squeeze(1) or targets.unsqueeze(1). Where "
    "what is beside it is as long by accident, and the same for all samples, nothing is wrong"
)
_ONCE = ("Error", "CompiledFunctionBackwardBackward")  # torch's classes; what these come from is behind no edge
_AT_ONCE = 2**20  # numbers of second derivatives


class _First(NamedTuple):
    """A gradient at one of them, of which nothing but derivatives is asked, so it is not held.

    Attributes:
        at: in its graph; None: it has none. like: a tensor of its shape, dtype and device, of one number.
    """

    at: GradientEdge | None
    like: Tensor
    output: Output

    @classmethod
    def of(cls, g: Tensor, output: Output) -> _First:
        at = get_gradient_edge(g) if g.requires_grad else None
        return cls(at, g.new_empty(()).expand(g.shape), output)


def mark_outputs(
    outputs: Sequence[Any],
    whose: Sequence[int],
    batch_dim: int,
    parted: Mapping[int, Sequence[int]],
    mixed: Collection[int | str],
    graph: Any,
) -> None:
    """The loss that is made of a forward pass is to be looked at.

    Args:
        outputs: which have hooks. whose: the number of each sample, or of its unit; ``batch_dim`` of inputs has them.
            parted: the dimensions of each output, by its number, in which these are. mixed: numbers of those whose
            gradients are refused. graph: of the pass (``steps.Graph``).
    """
    if len(set(whose)) < 2 or graph is None:
        return
    graph.looked = forward = Looked.ended(whose, batch_dim, graph.begun)
    for i, x in enumerate(outputs):
        if isinstance(x, Tensor) and x.grad_fn is not None:
            dims = None if x.is_complex() else dims_of(x.shape, parted.get(i, ()), forward.n)
            name = f"output {i} of the model{_ALONE if isinstance(x, Shared) else ''}"
            output = Output(weakref.ref(x), x._backward_hooks, name, forward, dims, i in mixed)
            mark(x, output)


def check_apart(losses: Sequence[Tensor], grads: Sequence[Tensor | None], *, is_last: bool) -> None:
    """Raises UnsupportedModuleError where samples meet between what the model gave and the losses. Warns where these
    have no second derivatives (functions of one's own, code of torch.compile).

    Args:
        grads: what their gradients start from; ones where it is not given. is_last: whether no other loss of the same
            forward pass is to be looked at.
    """
    made: list[tuple[Any, Looked]] = []
    marked: dict[Any, dict[int, Output]] = {}
    for node in nodes_behind((loss.grad_fn for loss in losses), _is_behind_outputs):
        if some := marks(node):
            marked[node] = some
            made += [(node, x.forward) for x in some.values()]
        elif is_of_tap(node) and node.record.graph is not None and node.record.graph.looked is not None:
            made.append((node, node.record.graph.looked))
    if made and not is_traced():
        check_between(made)
        with _hooks_off([x for some in marked.values() for x in some.values()]):
            _look(losses, grads, marked, list(dict.fromkeys(forward for _, forward in made)))
    for node in marked if is_last else ():  # whoever takes what was refused again is told again
        unmark(node)


def _look(
    losses: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    marked: dict[Any, dict[int, Output]],
    forwards: Sequence[Looked],
) -> None:
    nodes, outputs = find_ends(losses, marked, forwards)
    told = {edge: x for edge, x in outputs.items() if x.dims is not None}
    if not told:
        return
    cut = Cut(list(outputs), by_hand=any(x.tensor is None for x in outputs.values()))
    _check_choices(nodes, told, cut)
    if (shapes := spread_over_samples(nodes, forwards[0].n)) is not None:
        warn_caller(_SPREAD.format(*shapes, forwards[0].n))
    buffers.give_back()  # what is free between activations is too small for what follows, and would stay beside it
    try:
        with torch.enable_grad():
            met = _met(losses, grads, told, cut)
    except (StateError, UnsupportedModuleError):  # as the backward pass itself would: an output that is not to be used
        raise
    except Exception as error:  # whatever functions raise that have no second derivative
        warn_caller(_NOT_SEEN.format(said_by(error)))
        return
    finally:
        buffers.give_back()  # a step takes less
    if met is not None:
        raise UnsupportedModuleError(_MEET.format(*met))


def _check_choices(nodes: Sequence[Any], outputs: dict[GradientEdge, Output], cut: Cut) -> None:
    """What second derivatives of straight pieces do not show."""
    ranked = bent = None
    try:
        ranked = ranked_samples(nodes, {edge: x for edge, x in outputs.items() if x.dims}, cut)
        bent = bent_where_samples_meet(nodes, outputs, cut) if ranked is None else None
    except Exception:  # of what has no gradients, the look at second derivatives says why
        return
    if ranked is not None:
        raise UnsupportedModuleError(_RANKED.format(ranked))
    if bent is not None:
        raise UnsupportedModuleError(_BENT.format(bent))


@contextmanager
def _hooks_off(outputs: Iterable[Output]) -> Iterator[None]:
    """No hook on these gradients runs, and none is kept."""
    hooks = [(output.hooks, dict(output.hooks)) for output in outputs]
    tensors = [output.tensor() for output in outputs if output.tensor is not None]
    kept = [(x, x.grad) for x in tensors if x is not None and x.retains_grad]
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
    return not (marks(node) or is_of_tap(node))


def _met(
    losses: Sequence[Tensor], grads: Sequence[Tensor | None], outputs: dict[GradientEdge, Output], cut: Cut
) -> tuple[str, tuple[int, ...]] | None:
    """The name and the shape of an output behind which samples meet."""
    # Which have gradients, or functions that are differentiable once would pass for linear.
    given = [
        (torch.ones_like(x) if g is None else g.detach().clone()).requires_grad_()
        for x, g in zip(losses, grads, strict=True)
    ]
    first = cut.gradients(losses, given, list(outputs), create_graph=True)
    used = {edge: _First.of(g, outputs[edge]) for edge, g in zip(outputs, first, strict=True) if g is not None}
    del first
    for node in nodes_behind((x.at.node for x in used.values() if x.at), lambda node: node not in cut.nodes):
        if type(node).__name__ in _ONCE:  # torch 2.8's do not all tell their name()
            raise NotImplementedError("a function is differentiable once (once_differentiable, torch.compile)")
    by_sample = {edge: x for edge, x in used.items() if x.output.dims}
    numbers = {edge: x for edge, x in used.items() if not x.output.dims}
    found = _met_in(numbers, 0, 0, cut)
    looks = max((len(x.output.dims or ()) for x in by_sample.values()), default=0)
    for which in range(2):
        for look in range(looks if found is None else 0):
            found = _met_in(by_sample, which, look, cut)
            if found is None:  # where an output is as long as the batch in two dimensions, it may be either
                break
    return found


def _met_in(used: dict[GradientEdge, _First], which: int, look: int, cut: Cut) -> tuple[str, tuple[int, ...]] | None:
    seconds: Sequence[Tensor | None] = ()
    if used:
        grads = [x.at for x in used.values() if x.at]
        if len(grads) < len(used):
            raise NotImplementedError("a gradient is no function of the one that it was made of")
        noise = [_noise(x, which, look) for x in used.values()]
        seconds = cut.gradients(grads, noise, list(used))
        del noise
    for second, (_, like, output) in zip(seconds, used.values(), strict=True):
        if second is not None and _is_anything(second, output, which, look):
            return output.name, tuple(like.shape)
    return None


def _is_anything(second: Tensor, output: Output, which: int, look: int) -> bool:
    """Whether any of the samples without noise has a number that is none of zero, inf and NaN; some at a time, as the
    whole forward pass is still held."""
    if not output.dims:
        return bool(((second != 0) & second.isfinite()).any())
    rows = second.movedim(output.dims[min(look, len(output.dims) - 1)], 0)
    others = (~output.half(which)).nonzero().flatten().to(second.device)
    for some in others.split(max(1, _AT_ONCE * len(rows) // max(1, rows.numel()))):
        part = rows.index_select(0, some)
        if bool(((part != 0) & part.isfinite()).any()):
            return True
    return False


def _noise(first: _First, which: int, look: int) -> Tensor:
    """At half of the samples; at an output of one number one."""
    _, like, output = first
    if not output.dims:
        return torch.ones_like(like, memory_format=torch.contiguous_format)
    dim = output.dims[min(look, len(output.dims) - 1)]
    return noise_like(like, 0).mul_(output.half(which).to(like).view(-1, *[1] * (like.dim() - dim - 1)))
