"""Losses that are a mean over what is not left out: targets (``ignore_index``), rows that were picked, masks.

Its divisor is the other samples' too where they have different numbers of it, so a sample's gradient changes with them.
No derivative shows that. It is looked for in every backward pass, among the operations next to the loss, as counts
differ from batch to batch.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dpfast.arithmetic import in_cuda_graph
from dpfast.errors import StateError, UnsupportedModuleError, warn_caller
from dpfast.taps import is_of_tap, nodes_behind

_CROSS_ENTROPY = ("NllLossBackward0", "NllLoss2DBackward0")
_MEANS = frozenset(
    f"{name}Backward0"
    for name in ("Mean", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
)
_PICKS = ("IndexBackward0", "IndexSelectBackward0", "MaskedSelectBackward0")
_PARTS = ("Select", "Unbind", "Split")
_VIEWS = frozenset(f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze"))
_NEAR = 32  # so many operations in front of the loss
_SAME = 1e-5  # sums of weights are rounded

_DIFFER = (
    "the loss is a mean over the targets or entries of all {} samples that are picked and not left out (ignore_index, "
    "a mask), or over their weights, and the samples have different numbers of them ({:g} to {:g}): a sample's "
    "gradient in it changes with another sample, by whose it is divided, and clipping bounds nothing; take "
    "reduction='none', each sample's own mean, and the mean of these"
)
_MAY_DIFFER = (
    "the loss is divided by {:g}, as much as a mask leaves of all {} samples' entries, and the samples have different "
    "numbers of them ({:g} to {:g}). If it is a count of this batch (mask.sum()), a sample's gradient changes with "
    "another sample and clipping bounds nothing: take each sample's own mean, and the mean of these, or divide by a "
    "number that no batch changes. Seen again in the next backward pass, with another count, it is an error"
)
_IN_A_GRAPH = (
    "the loss is F.cross_entropy's mean, or a mean over what is picked or masked, and the step is captured in a CUDA "
    "graph: no replay could tell whether something is left out (ignore_index), with which samples would share a "
    "divisor; take reduction='none' and the mean of what it gives, each sample's own where it has several targets"
)

_divided: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
"""By tapped model what its last loss was divided by, where that was as much as a mask left."""


def check_counts(loss: Tensor) -> None:
    """Warns where it is so in this batch, and may be by accident.

    Raises:
        UnsupportedModuleError: the loss is such a mean, and samples have different numbers. StateError: that cannot be
            asked, as the step is captured in a CUDA graph.
    """
    quotients: list[Any] = []
    for node in itertools.islice(nodes_behind([loss.grad_fn], lambda node: not hasattr(node, "record")), _NEAR):
        name = type(node).__name__
        if name in _CROSS_ENTROPY and node._saved_reduction == 1:
            _check_cross_entropy(loss, node)
        elif name in _MEANS and getattr(node, "_saved_reduction", 1) == 1:
            _check_mean(loss, node)
        elif name == "DivBackward0" and node.next_functions[1][0] is None:
            quotients.append(node)
    if quotients:
        _check_quotients(loss, quotients)


def _check_cross_entropy(loss: Tensor, mean: Any) -> None:
    if isinstance(mean._saved_target, FakeTensor) or _is_in_a_graph(loss):
        return
    picks, counted = _picks_before(mean), _counted(mean)
    if mean._saved_weight is None and picks is None and bool(counted.all()):
        return
    shares = _of_targets(mean, counted)
    for _, n, of_samples in _of_samples(
        loss, picks or mean, shares, None if picks is None else _Picked(picks, classes=1)
    ):
        _refuse_different(n, of_samples)


def _counted(mean: Any) -> Tensor:
    """Whether each target is."""
    target, left_out = mean._saved_target, mean._saved_ignore_index
    return target != (left_out - 2**64 if left_out >= 2**63 else left_out)  # torch gives it without its sign


def _of_targets(mean: Any, counted: Tensor) -> Tensor:
    """What each counts in the divisor of F.cross_entropy's mean."""
    weight = mean._saved_weight
    return counted.double() if weight is None else weight.double()[mean._saved_target.where(counted, 0)] * counted


def _check_mean(loss: Tensor, mean: Any) -> None:
    """Of rows that were picked, or of what was made of each of them."""
    picks = _picks_before(mean)
    if picks is None or _is_in_a_graph(loss):
        return
    for _, n, of_samples in _of_samples(loss, picks, None, _Picked(picks)):
        _refuse_different(n, of_samples)


def _check_quotients(loss: Tensor, quotients: Sequence[Any]) -> None:
    """By numbers that no gradient goes to: of this batch, or the same in all, which two batches tell."""
    found: dict[Any, tuple[float, int, float, float]] = {}
    for quotient in quotients:
        found |= dict(_divided_by_counts(loss, quotient))
    before = {taps: _divided.pop(taps, None) for taps in {r.tap.taps for r in behind_losses([loss])[0]}}
    for taps, (divisor, n, least, most) in found.items():
        known = before[taps]
        _divided[taps] = divisor if known is None else known  # whoever tries again what was refused is told again
        if known is None:
            warn_caller(_MAY_DIFFER.format(divisor, n, least, most))
        elif known != divisor:
            raise UnsupportedModuleError(_DIFFER.format(n, least, most))


def _divided_by_counts(loss: Tensor, quotient: Any) -> Iterator[tuple[Any, tuple[float, int, float, float]]]:
    """The tapped models of which it is so, by what, and how much is left of how many samples, at least and at most."""
    found, node = next(((x, node) for node in _in_front_of(quotient) if (x := _masked(node)) is not None), (None, None))
    if found is None:
        return
    by = quotient._saved_other
    if by.numel() != 1 or isinstance(by, FakeTensor) or (by.device.type == "cpu" and in_cuda_graph()):
        return
    if _is_in_a_graph(loss):
        return
    shares, picked = (None, found) if isinstance(found, _Picked) else (found(), None)
    divisor = float(by)
    if shares is not None and not _are_same(by, shares.sum(), shares.numel()):  # nearly always, and soon known
        return
    for taps, n, of_samples in _of_samples(loss, node, shares, picked):
        least, most = _least_and_most(of_samples)
        is_count = shares is not None or _are_same(by, of_samples.sum())
        if is_count and divisor != n and most - least > _SAME * most:
            yield taps, (divisor, n, least, most)


def _are_same(by: Tensor, total: Tensor, entries: int = 1) -> bool:
    """Whether it is the total, or, of so many entries, their mean, as its dtype rounds it."""
    same = max(_SAME, torch.finfo(by.dtype).eps if by.dtype.is_floating_point else 0.0)
    return any(abs(x - float(by)) <= same * abs(x) for x in (float(total), float(total) / max(entries, 1)))


def _refuse_different(n: int, of_samples: Tensor) -> None:
    least, most = _least_and_most(of_samples)
    if most - least > 1e-6 * most:
        raise UnsupportedModuleError(_DIFFER.format(n, least, most))


def _least_and_most(of_samples: Tensor) -> tuple[float, float]:
    least, most = of_samples.aminmax() if len(of_samples) else (torch.ones(()), torch.ones(()))
    return float(least), float(most)


def _is_in_a_graph(loss: Tensor) -> bool:
    """Whether somebody's ordinary loss is captured in a CUDA graph. Raises StateError where it is a tapped model's."""
    if not in_cuda_graph():
        return False
    if any(record.tap.taps.enabled for record in behind_losses([loss])[0]):
        raise StateError(_IN_A_GRAPH)
    return True


def _of_samples(
    loss: Tensor, node: Any, shares: Tensor | None, picked: _Picked | None
) -> Iterator[tuple[Any, int, Tensor]]:
    """The tapped models that it comes of, and how much of what is divided by is each of their samples'.

    Args:
        node: of the operation that leaves something out.
        shares: of entries, or of rows; None: one of each row that is picked.
    """
    for taps, n, valid in {(r.tap.taps, r.batch_size, r.valid) for r in behind_losses([loss])[0]}:
        if not taps.enabled or not n or not _is_of_all(node, taps.batch_dim):
            continue
        whose = None if picked is None else picked.whose(n, taps.batch_dim)
        if whose is not None and (shares is None or whose.numel() == shares.numel()):
            some = torch.ones(whose.shape, device=whose.device) if shares is None else shares
            of_samples = some.new_zeros(n).index_add(0, whose.flatten(), some.flatten())
        elif shares is None or shares.numel() % n:
            continue
        else:
            of_samples = shares.reshape(n, -1).sum(1) if taps.batch_dim == 0 else shares.reshape(-1, n).sum(0)
        if valid is not None and valid.shape == of_samples.shape:
            of_samples = of_samples[valid]
        yield taps, n, of_samples


def _in_front_of(node: Any) -> Iterator[Any]:
    """The operations in front of it, by their first tensor with a gradient, up to a tapped layer."""
    for _ in range(_NEAR):
        node = next((x for x, _ in node.next_functions if x is not None), None)
        if node is None or hasattr(node, "record") or not node.next_functions:
            return
        yield node


def _is_of_all(node: Any, batch_dim: int) -> bool:
    """Whether nothing has parted samples in front of it, as who goes over them one by one does: its rows are one's."""
    for x in _in_front_of(node):
        name = type(x).__name__
        if name in _PICKS:
            return False
        if name.startswith(_PARTS):
            dim = x._saved_dim - 2**64 if x._saved_dim >= 2**63 else x._saved_dim  # torch gives it without its sign
            before, number = x.next_functions[0]
            if dim % len(before._input_metadata[number].shape) == batch_dim:
                return False
    return True


def _masked(node: Any) -> Any:
    """What gives the shares of a masked tensor's entries, or the rows that were picked; None: another operation."""
    name, has = type(node).__name__, [x is not None for x, _ in node.next_functions]
    shape = tuple(node._input_metadata[0].shape)
    if name in _PICKS:
        return _Picked(node)
    if name in _CROSS_ENTROPY and node._saved_reduction == 2:
        return lambda: _of_targets(node, _counted(node))
    if name == "MulBackward0" and sum(has) == 1 and shape:
        mask = node._saved_other if has[0] else node._saved_self
        return (lambda: mask.detach().float().expand(shape)) if mask.numel() > 1 else None
    if name == "MaskedFillBackward0" and shape:
        return lambda: (~node._saved_mask).float().expand(shape)
    if name == "WhereBackward0" and sum(has) == 1 and shape:
        return lambda: (node._saved_condition == has[0]).float().expand(shape)
    return None


class _Picked:
    """Rows or entries of a tensor.

    Args:
        picks: the node of the operation that picked them. classes: so many of its last dimensions are each row's own.
    """

    def __init__(self, picks: Any, classes: int = 0):
        self._picks, self._classes = picks, classes

    def whose(self, n: int, batch_dim: int) -> Tensor | None:
        """The samples of what was picked; None where that is not known."""
        picks = self._picks
        is_masked = type(picks).__name__ == "MaskedSelectBackward0"
        sizes = list(picks._saved_self.shape if is_masked else picks._saved_self_sym_sizes)
        if type(picks).__name__ == "IndexSelectBackward0":
            dim, index = picks._saved_dim, picks._saved_index
            indices: Sequence[Any] = [*[None] * dim, index] if 0 <= dim < len(sizes) else []
        elif is_masked:
            mask = picks._saved_mask
            indices = [mask.expand(sizes)[..., 0] if self._classes and mask.shape[-1] == 1 else mask.expand(sizes)]
        else:
            indices = picks._saved_indices
        given = [x for x in indices if x is not None]
        taken = sum(x.dim() if x is not None and x.dtype is torch.bool else 1 for x in indices)
        has_samples = len(sizes) > batch_dim and sizes[batch_dim] == n
        sizes = sizes[: len(sizes) - self._classes if self._classes else taken]
        if not given or taken > len(sizes) or (has_samples and not self._classes and taken <= batch_dim):
            return None  # of each sample the same
        if len(sizes) > batch_dim and sizes[batch_dim] == n:
            whose = torch.arange(n).view(-1, *[1] * (len(sizes) - batch_dim - 1)).expand(sizes)
        elif len(sizes) == 1 and sizes[0] % n == 0:
            whose = torch.arange(sizes[0]) // (sizes[0] // n) if batch_dim == 0 else torch.arange(sizes[0]) % n
        else:
            return None
        return whose.to(given[0].device)[tuple(slice(None) if x is None else x for x in indices)]


def _picks_before(mean: Any) -> Any:
    """The node of the operation that picked the rows of which there is a mean, if each is gone on with by itself."""
    in_front = [*_in_front_of(mean)]
    if not any(type(node).__name__ in _PICKS for node in in_front):  # nearly always; shapes take longer
        return None
    for node in in_front:
        name = type(node).__name__
        if name in _PICKS:
            return node
        rows = [x._input_metadata[i].shape[:1] for x, i in ((node, 0), *node.next_functions) if x is not None]
        if name not in _VIEWS and any(x != rows[0] for x in rows):
            return None
    return None


def behind_losses(losses: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
    """The records of the tapped layers that are next to the losses in their graph, and the nodes between."""
    taps, between = [], []
    for node in nodes_behind((loss.grad_fn for loss in losses), lambda node: not is_of_tap(node)):
        if is_of_tap(node):
            taps.append(node.record)
        else:
            between.append(node)
    return taps, between
