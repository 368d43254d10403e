"""A compiled step on a GPU as one CUDA graph: one call starts all that it launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from dpfast.errors import DpfastWarning

Run = Callable[..., Sequence[Tensor]]

_FIRST = 2  # runs as they come: kernels are compiled and chosen, libraries make their workspaces
_MOST = 3  # captures; of parameters that stand elsewhere in each step, as sharded ones do, a graph is of no use


class Replay:
    """``run(*state, *inputs)``, recorded in its third call and replayed from then on.

    A recorded kernel reads and writes fixed addresses. Those of the state are the model's own, and where one of them is
    another the step is recorded anew. Inputs are copied to where the recorded ones stand. Results are copied from
    there: they are the caller's, who may keep them while the next step runs, and may have them rounded on the way.
    What is drawn at random is drawn anew by each replay, from torch's generator, as any CUDA graph does.

    Args:
        run: on tensors of one GPU and of shapes that do not change; waits for no kernel.
    """

    def __init__(self, run: Run):
        self._run = run
        self._runs = self._captures = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._addresses: list[int] = []
        self._inputs: list[Tensor] = []
        self._results: Sequence[Tensor] = ()

    def __call__(
        self, state: Sequence[Tensor], inputs: Sequence[Tensor], dtypes: Sequence[torch.dtype | None] = ()
    ) -> Sequence[Tensor]:
        """The results; of a replay the first ones in ``dtypes``, rounded to nearest, where that is not None."""
        device = inputs[0].device
        self._runs += 1
        if self._runs <= _FIRST or torch.cuda.is_current_stream_capturing():  # in a graph of somebody else's
            return self._run(*state, *inputs)
        with torch.cuda.device(device):
            addresses = [x.data_ptr() for x in state]
            if self._graph is None or addresses != self._addresses:
                self._graph, self._results = None, ()
                if self._captures >= _MOST or not self._is_captured(state, inputs):
                    return self._run(*state, *inputs)
                self._addresses = addresses
            for own, x in zip(self._inputs, inputs, strict=True):
                own.copy_(x)
            self._graph.replay()  # type: ignore[union-attr]  # it has been captured
            return _copies(self._results, dtypes)

    def _is_captured(self, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
        """Whether the step is recorded now. Nothing of it has run then."""
        self._captures += 1
        self._inputs = [x.clone() for x in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            # What other threads do meanwhile, such as a loader's that pins memory, is none of its business.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._results = self._run(*state, *self._inputs)
        except RuntimeError as error:
            self._captures, self._results = _MOST, ()
            warnings.warn(
                f"the compiled step does not go into a CUDA graph: {str(error).splitlines()[0]}. Its kernels are "
                "started one by one, as before",
                DpfastWarning,
                stacklevel=2,
            )
            return False
        self._graph = graph
        return True


def _copies(results: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]) -> list[Tensor]:
    found = [torch.empty_like(x, dtype=dtype) for x, dtype in zip_longest(results, dtypes)]
    by_dtype: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}
    for copy, x in zip(found, results, strict=True):
        copies, originals = by_dtype.setdefault((copy.dtype, x.dtype), ([], []))
        copies.append(copy)
        originals.append(x)
    for copies, originals in by_dtype.values():
        torch._foreach_copy_(copies, originals)
    return found
