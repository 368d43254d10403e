"""What one run of a copy shows of packed documents: each layer's rows of tokens, and these in another order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dpfast.looks.fingerprints import fingerprints
from dpfast.looks.seen import Key
from dpfast.looks.witness import replaced
from dpfast.taps import Place, Rows, Tap, find_by_row, find_forward, in_backward, picked_here, tokens_in
from dpfast.trials import OfCopy

_SAME = 0.02
"""How far, in norm, a layer's rows may be from those of its tokens in another order: rounding, in 16 bits too."""


class DocumentRun(NamedTuple):
    calls: dict[Key, list[Tensor | None]]  # fingerprints by token, of each use
    outputs: list[Tensor | None]  # by token, or by sample
    losses: set[int]  # those of the outputs that are one number
    not_rowwise: set[Key]
    caught: list[tuple[Key, Place, Tensor]]  # outputs of layers, until there are
    grads: dict[Key, list[Tensor | None]]  # as calls, of the gradients that come back to them
    held: list[str]  # names of what modules keep in attributes; these are the last of the outputs


class DocumentWitness(OfCopy):
    """The tap of a copy, which notes fingerprints of tokens' rows."""

    number: int
    seen: DocumentRun
    how: tuple[Any, ...]

    @classmethod
    def of(cls, tap: Tap, number: int, seen: DocumentRun, *how: Any) -> None:
        tap.__class__ = cls
        tap.__dict__.update(number=number, seen=seen, how=how)

    def known_place(self, rank: int | None) -> Any:
        return self.how[0].get((self.number, rank))

    def caught(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places, shape, mask, inert, rowwise = self.how
        if isinstance(self.module, nn.Embedding):
            args, kwargs, _ = self.with_whole_batch(args, kwargs, shape[0])
        by_row = find_by_row(self.module)
        forward = forward if by_row is None else partial(by_row, self.module)
        output = forward(*args, **kwargs)
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        if not outputs or in_backward() is not None:  # repeated there, where it is checkpointed
            return output
        key = (self.number, outputs[0].dim() if find_forward(self.module) is None else None)
        rows, among = self._tokens(outputs[0], places.get(key)), picked_here()
        own = rows if among is None or rows is None else self._tokens(among.alone(outputs[0]), places.get(key))
        self.seen.calls.setdefault(key, []).append(None if own is None else fingerprints(own, 0).cpu())
        if outputs[0].requires_grad and among is None:
            self.seen.caught.append((key, places.get(key), outputs[0]))
            output = replaced(output, outputs[0], outputs[0].view_as(outputs[0]))  # hooks on its node run before
        if rows is not None and rowwise and not self._is_rowwise(forward, args, kwargs, places.get(key), rows):
            self.seen.not_rowwise.add(key)
        if rows is not None and mask is not None and key in inert and isinstance(output, Tensor):
            return torch.where(self._in_layout(mask, output, places.get(key)), 0.5 * output, output)
        return output

    def _tokens(self, x: Tensor, place: Place) -> Tensor | None:
        """One row for each token; within an expert rows stand at their places among all that were there to be
        picked."""
        shape, picked = self.how[1], picked_here()
        if picked is None:
            return tokens_in(x, place, shape)
        if picked.of is None or not x.dim() or x.shape[0] != picked.of.shape.numel():
            return None
        return tokens_in(x.unflatten(0, picked.of.shape), picked.of.place, shape)

    def _in_layout(self, mask: Tensor, output: Tensor, place: Place) -> Tensor:
        """The tokens' mask, as the output has them."""
        picked = picked_here()
        if picked is not None and picked.of is not None:
            order = picked.of.tokens(self.how[1])
            if order is not None:
                mask = torch.empty_like(mask.flatten()).index_copy(0, order, mask.flatten())
            elif not picked.each:  # else whole samples
                mask = mask.flatten()
        else:
            mask = (
                mask.flatten() if isinstance(place, Rows) else mask.movedim(0, place if isinstance(place, int) else 0)
            )
        return mask.view(*mask.shape, *[1] * (output.dim() - mask.dim())).to(output.device)

    def _is_rowwise(self, forward: Any, args: Any, kwargs: Any, place: Place, rows: Tensor) -> bool:
        """Whether the module, given its tokens backwards as a batch, gives the same rows."""

        def backwards(x: Tensor) -> Tensor:
            found = self._tokens(x, place)
            return x if found is None else found.flip(0)

        try:
            output = forward(*tree_map_only(Tensor, backwards, args), **tree_map_only(Tensor, backwards, kwargs))
        except Exception:  # it wants them in rows
            return False
        output = next((x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if output is None or output.shape != rows.shape:
            return False
        return bool((output.flip(0).double() - rows.double()).norm() <= _SAME * rows.double().norm())
