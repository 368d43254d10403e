"""Whose rows are whose where a sample holds the tokens of several units (packed documents).

A copy of the model runs with the tokens of some units exchanged for others: rows of other units' tokens must stay as
they are, to the bit, or one unit's tokens have a part in another's gradient (attention that is not masked by document).
Each pair of a sample's units is parted by one of the runs. Then every layer runs once on its tokens in another order,
as a batch of them: what comes out must be the same rows, or its gradient is no sum over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfast.errors import DpfastError, InputError, UnsupportedModuleError
from dpfast.looks.boundaries import steps
from dpfast.looks.document_witness import DocumentRun, DocumentWitness
from dpfast.looks.fingerprints import fingerprints
from dpfast.looks.run_on import copied
from dpfast.looks.seen import Key, in_reentrant_checkpoint, said_by
from dpfast.taps import Structure, Tap, begun_anew, following_model, results_in, tokens_in
from dpfast.trials import (
    attention_written_out,
    kept,
    leaves_of_copy,
    put_back,
    same_kernels,
    same_random_numbers,
    stand_ins,
)

_MASKED = -1e4
"""What an additive mask has, or less, where it masks."""

_LOST = 2.0**-10
"""What is added to gradients, so that what torch's flash attention on a CPU lets through a mask of -1e9 is lost in
rounding: its exponential ends at 1e-38 and not at 0."""

_OF_ALL = (
    "it is one number of all units' tokens (a mean divides one unit's gradient by how many the others have; take what "
    "the model gives for each token, and units.sums(losses of tokens))"
)

_OF_SEVERAL = "each of its entries depends on several units' tokens"

_IN_BACKWARD = (
    "{}: the gradient at a token's row of its output changes with another unit's tokens, and what the forward pass "
    "gives does not; units meet in the backward pass, behind it (a hook on a tensor or module, or a function with a "
    "backward of its own, that looks at whole rows: make it look at each token)"
)

_Prints = dict[Key, list[Tensor | None]]


class Told(NamedTuple):
    """What the runs tell.

    Attributes:
        layers: of taps, by identity, and the rank of their output: why their rows are not the tokens; None: they are.
        outputs: of the model's outputs, by number, why a loss that is made of one has no gradients by unit.
        of_nobody: those in which nobody's tokens have entries that depend on several units' tokens.
        failed: why no backward pass ran.
    """

    layers: dict[tuple[int, Any], str | None]
    outputs: dict[int | str, str]
    of_nobody: frozenset[int]
    failed: str | None

    def joined(self, later: Told) -> Told:
        """With what a later look tells: what either finds wrong is wrong."""
        layers = {key: self.layers.get(key) or why for key, why in later.layers.items()}
        outputs = {**later.outputs, **self.outputs}
        return Told({**self.layers, **layers}, outputs, self.of_nobody | later.of_nobody, later.failed)


class DocumentLook:
    """One look at a model.

    Args:
        taps: its taps. inputs: (args, kwargs). ids: the unit of each token, in the layout of the model's inputs.
    """

    def __init__(self, receiver: Any, taps: Sequence[Tap], inputs: Any, ids: Tensor):
        self.model, self.taps, self.dim = receiver.model, taps, receiver.batch_dim
        self.others = stand_ins(self.model)  # what starts at zeros hides who meets before it
        self._failed: str | None = None  # why no backward pass ran
        self.structure, self.raw = Structure(inputs), ids
        self.leaves = self.structure.leaves
        self.ids = ids.movedim(self.dim, 0)
        self.places = {
            (i, rank): tap.known(rank) if tap.places.get(rank) is not None else self.dim
            for i, tap in enumerate(taps)
            for rank in (*tap.places, *range(1, 6))
        }

    @begun_anew
    def told(self) -> Told:
        tokens = [x for x in self.leaves if isinstance(x, Tensor) and x.shape[: self.raw.dim()] == self.raw.shape]
        if not tokens:
            shapes = ", ".join(str(tuple(x.shape)) for x in self.leaves if isinstance(x, Tensor))
            raise InputError(
                f"ids {tuple(self.raw.shape)} fit none of the model's inputs {shapes}: give the unit of each token, "
                "in the shape of the tokens, or one of each sample (N,)"
            )
        try:
            first, other = attention_written_out()
            try:
                return self._told(attention=first)
            except torch.OutOfMemoryError:  # of scores written out, it may be
                return self._told(attention=other)
        except DpfastError:
            raise
        except Exception as error:  # whatever a model raises
            raise InputError(
                "whose tokens are whose could not be found out, because a copy of the model did not run with some of "
                f"them exchanged ({type(error).__name__}: {error}); give ids (N,) and a document a row (padded)"
            ) from error

    def _told(self, *, attention: bool) -> Told:
        with same_random_numbers() as again, same_kernels(attention=attention):
            base, masks = self._run(None, again, backwards=True), self._masks()
            runs = [self._run(mask, again, backwards=True) for mask in masks]
            changed = {key for run in runs for key in base.calls if self._changes(base.calls, run.calls, key).any()}
            met = self._mixed(base.grads, masks, [run.grads for run in runs])
            if masks and not changed:
                raise ValueError("no layer's output changed")
            if inert := base.calls.keys() - changed:  # what the exchange does not reach is exchanged itself
                masks = [*masks, *masks]
                runs += [self._run(mask, again, inert) for mask in masks[len(runs) :]]
            mixed = self._mixed(base.calls, masks, [run.calls for run in runs])
            found = {i: self._output(i, base, masks, runs) for i in range(len(base.outputs))}
            of_nobody = {i for i in range(len(base.outputs)) if self._meet_in_nobodys(i, base, runs)}
            own, held = len(base.outputs) - len(base.held), base.held
            found |= {i: _OF_SEVERAL for i in of_nobody if i >= own}  # nobody will part these
            found |= dict.fromkeys(base.losses, _OF_ALL)
            outputs: dict[int | str, str] = {i if i < own else held[i - own]: why for i, why in found.items() if why}
            if (mixed or outputs or met) and not _alike(base, self._run(None, again, backwards=True)):
                raise ValueError("the same inputs gave other numbers when repeated")
            not_rowwise = self._run(None, again, rowwise=True).not_rowwise
        if mixed:
            raise UnsupportedModuleError(
                f"{self.taps[mixed[0][0]].layer}: a token's row of its output changes with another unit's tokens; "
                "units meet in it, or between it and the layer before, and clipping bounds nothing. Mask attention by "
                "document (Hugging Face: position_ids that start again at 0, no attention_mask, use_cache=False)"
            )
        if met and not outputs:  # the last that ran is the first that gradients come to
            last = [key for key in base.calls if key in met][-1]
            raise UnsupportedModuleError(_IN_BACKWARD.format(self.taps[last[0]].layer))
        layers: dict[tuple[int, Any], str | None] = {}
        for key, calls in base.calls.items():
            why = None
            if any(x is None for x in calls):
                why = f"its output's rows are not the tokens that ids {tuple(self.raw.shape)} speak of"
            elif key in not_rowwise:
                why = "its row for a token depends on which tokens stand beside, so they have no gradients apart"
            layers[id(self.taps[key[0]]), key[1]] = why
        return Told(layers, outputs, frozenset(i for i in of_nobody if i < own), self._failed)

    def _others(self, mask: Tensor) -> Tensor:
        """Tokens of units that are not exchanged."""
        return (~mask & (self.ids >= 0)).flatten()

    def _mixed(self, base: _Prints, masks: Sequence[Tensor], runs: Sequence[_Prints]) -> list[Key]:
        """Layers where a unit's rows changed with another's tokens."""
        pairs = list(zip(masks, runs, strict=True))
        return [k for k in base if any((self._changes(base, run, k) & self._others(m)).any() for m, run in pairs)]

    def _changes(self, base: _Prints, run: _Prints, key: Key) -> Tensor:
        """By token: whether one of a layer's uses has changed."""
        found = torch.zeros(self.ids.numel(), dtype=torch.bool)
        for one, two in zip(base[key], run.get(key, []), strict=False):
            if one is not None and two is not None:
                found |= one != two
        return found

    def _output(self, i: int, base: DocumentRun, masks: Sequence[Tensor], runs: Sequence[DocumentRun]) -> str | None:
        """What is wrong with an output of the model."""
        one = base.outputs[i]
        if one is None or any(i < len(run.outputs) and _length(run.outputs[i]) != len(one) for run in runs):
            return None  # rows that were picked by the tokens' numbers
        changes = [one != two if (two := run.outputs[i]) is not None else one != one for run in runs]
        if len(one) == self.ids.numel():
            if any(bool((c & self._others(mask)).any()) for c, mask in zip(changes, masks, strict=True)):
                return "a token's entries depend on other units' tokens"
        elif any(bool((x & y).any()) for x, y in zip(changes[::2], changes[1::2], strict=True)):
            return _OF_SEVERAL
        return None

    def _meet_in_nobodys(self, i: int, base: DocumentRun, runs: Sequence[DocumentRun]) -> bool:
        """Whether an entry of an output that is of nobody's tokens depends on several units' tokens."""
        one, nobodys = base.outputs[i], (self.ids < 0).flatten()
        if one is None or len(one) != len(nobodys) or any(_length(run.outputs[i]) != len(one) for run in runs):
            return False
        changes = [one != run.outputs[i] for run in runs]
        return any(bool((x & y & nobodys).any()) for x, y in zip(changes[::2], changes[1::2], strict=True))

    def _masks(self) -> list[Tensor]:
        """Of tokens that are exchanged together, such that of each two units in a sample there is one with the first
        alone."""
        rows = self.ids.flatten(1)
        numbers = torch.stack([row.unique(return_inverse=True)[1] for row in rows]) if len(rows) else rows
        numbers = numbers.view(self.ids.shape)
        bits = int(numbers.max()).bit_length() if numbers.numel() else 0
        by_bit = [(numbers >> b) & 1 == one for b in range(bits) for one in (0, 1)]
        return [mask & (self.ids >= 0) for mask in by_bit]

    def _run(
        self,
        mask: Tensor | None,
        again: Callable[[], None],
        inert: frozenset[Key] | set[Key] = frozenset(),
        *,
        rowwise: bool = False,
        backwards: bool = False,
    ) -> DocumentRun:
        leaves = [_clone(x) if isinstance(x, Tensor) else x for x in self.leaves]
        if mask is not None and not inert:
            raw = mask.movedim(0, self.dim)
            for i, x in enumerate(leaves):
                if isinstance(x, Tensor) and x.shape[: raw.dim()] == raw.shape and not self._is_structure(x):
                    leaves[i] = _exchanged(x, raw.to(x.device))
        model, taps = copied(self.model, self.taps, leaves_of_copy(self.model) | self.others)
        run = DocumentRun({}, [], set(), set(), [], {}, [])
        whole = all(not hasattr(p, "device_mesh") for p in self.model.parameters())
        for i, tap in enumerate(taps):
            DocumentWitness.of(tap, i, run, self.places, self.ids.shape, mask if inert else None, inert, rowwise)
        again()
        args, kwargs = self.structure.unflatten(leaves)
        with (
            put_back(self.model),
            following_model(taps[0].taps, model, leaves),
            torch.set_grad_enabled(whole),
        ):
            outputs = results_in(model(*args, **kwargs))
        left = kept.differentiable(model, outputs)
        run.held.extend(left)
        outputs += left.values()
        for i, x in enumerate(outputs):
            prints = None
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim() <= 1 == x.numel():
                run.losses.add(i)
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > self.dim:
                rows = tokens_in(x, self.dim, self.ids.shape)
                prints = fingerprints(x, self.dim) if rows is None else fingerprints(rows, 0)
            run.outputs.append(None if prints is None else prints.cpu())
        if backwards and whole:
            self._note_gradients(run, outputs)
        run.caught.clear()
        return run

    def _note_gradients(self, run: DocumentRun, outputs: Sequence[Any]) -> None:
        """Those of a loss whose gradient at a token's entries of the outputs depends on these alone."""
        nobodys = (self.raw < 0).flatten()
        of_tokens = [
            x for x, p in zip(outputs, run.outputs, strict=True) if _length(p) == len(nobodys) and x.requires_grad
        ]
        own = [torch.where(x.detach().isfinite(), x.detach().cos(), 0.0) for x in of_tokens]
        for x in own:
            x.view(len(nobodys), -1)[nobodys.to(x.device)] = 0.0
        tensors = [x for *_, x in run.caught]
        given: list[Tensor | None] = [None] * len(tensors)
        try:
            if tensors and in_reentrant_checkpoint(of_tokens):  # the copy's parameters keep no gradient
                for i, x in enumerate(tensors):
                    x.register_hook(partial(given.__setitem__, i))
                torch.autograd.backward(of_tokens, own)
            elif tensors and of_tokens:
                given = list(torch.autograd.grad(of_tokens, tensors, own, allow_unused=True))
        except Exception as error:  # whatever somebody's functions raise
            self._failed = said_by(error)
        for (key, place, _), grad in zip(run.caught, given, strict=True):
            rows = None if grad is None else tokens_in(grad, place, self.ids.shape)
            run.grads.setdefault(key, []).append(None if rows is None else fingerprints(rows + _LOST, 0).cpu())

    def _is_structure(self, x: Tensor) -> bool:
        """Whether it says which documents there are: masks (additive ones too), document numbers, positions that count
        up by one within each unit's tokens."""
        if x.dtype == torch.bool:  # of tokens: padding, unless it parts what is somebody's
            return x.dim() > self.raw.dim() or len(x[(self.raw >= 0).to(x.device)].unique()) < 2
        if x.is_floating_point() and bool(((x == 0) | (x <= _MASKED)).all()):
            return True
        if x.dim() > self.raw.dim() or x.is_floating_point():
            return False
        within = steps(x, self.ids, self.dim)[0]
        alike = [bool(len(within)) and bool((within == step).all()) for step in (0, 1)]
        return alike[1] or (alike[0] and self._are_numbers(x.movedim(self.dim, 0)))

    def _are_numbers(self, x: Tensor) -> bool:
        """Whether what is one number in each unit is another in each unit of a sample: no property of units."""
        rows = zip(self.ids.flatten(1), x.to(self.ids.device).flatten(1), strict=True)
        pairs = [torch.stack([ids, some], 1)[ids >= 0].unique(dim=0) for ids, some in rows]
        return all(len(some[:, 1].unique()) == len(some) for some in pairs)


def _clone(x: Tensor) -> Tensor:
    """Another of the same numbers, by which no gradient comes to this one."""
    return x.detach().requires_grad_(x.requires_grad).clone()


def _exchanged(x: Tensor, mask: Tensor) -> Tensor:
    """With other tokens where the mask says so, of those that are there."""
    if not x.is_floating_point() and not x.is_complex():
        values, which = x.unique(return_inverse=True)
        other = values[(which + 1) % len(values)]
    else:
        other = x.flatten(0, mask.dim() - 1).roll(1, 0).view_as(x)
        other = torch.where(other == x, 0.5 * x, other)
    return torch.where(mask.view(*mask.shape, *[1] * (x.dim() - mask.dim())), other, x)


def _length(x: Tensor | None) -> int:
    return -1 if x is None else len(x)


def _alike(one: DocumentRun, two: DocumentRun) -> bool:
    """Whether two runs gave the same."""

    def equal(x: Tensor | None, y: Tensor | None) -> bool:
        return x is y if x is None or y is None else torch.equal(x, y)

    both = [(one.calls, two.calls), (one.grads, two.grads)]
    pairs = [(x, there.get(k, [])) for here, there in both for k, x in here.items()]
    calls = all(len(x) == len(y) and all(map(equal, x, y)) for x, y in pairs)
    return calls and all(map(equal, one.outputs, two.outputs))
