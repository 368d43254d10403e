"""What a private run needs to go on, beside model and optimizer, for torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Any

from dpfast.distributed import PoissonBatches
from dpfast.errors import InputError
from dpfast.opacus.optimizers import DPOptimizerFast


class PrivateState:
    """The accountant's history, the steps of noise and batches, and the secret's fingerprint (not the secret).

    torch.distributed.checkpoint's ``Stateful``: ``dcp.save({"private": PrivateState(...), ...})`` and ``dcp.load``, on
    any number of ranks. Steps taken again since the checkpoint have the batches and the noise that they had; a loader
    whose workers fetch ahead has drawn more batches than were taken, and those are left out.

    Args:
        optimizer: has a ``secret``. accountant: Opacus's. batches: as the optimizer's own, if None.

    Raises:
        InputError: the optimizer has no secret; on loading, it has another one or another stream.
    """

    def __init__(self, optimizer: DPOptimizerFast, accountant: Any, batches: PoissonBatches | None = None):
        if optimizer.stream is None:
            raise InputError("the optimizer draws noise that cannot be drawn again; give it secret=SharedSecret(...)")
        self._optimizer, self._accountant = optimizer, accountant
        self._batches = optimizer.batches if batches is None else batches

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and names."""
        return {
            "accountant": dict(self._accountant.state_dict()),
            "noise": self._optimizer.stream,
            "noised_steps": self._optimizer.noised_steps,
            "batch": None if self._batches is None else self._batches.step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where :meth:`state_dict` was."""
        if tuple(state_dict["noise"]) != self._optimizer.stream:
            raise InputError(
                "this checkpoint was written with another secret, or by another of its optimizers: steps since then "
                "would be taken again with other noise, and count twice. Give SharedSecret the bytes that it had"
            )
        self._accountant.load_state_dict(state_dict["accountant"])
        self._optimizer.noised_steps = state_dict["noised_steps"]
        if self._batches is not None:
            self._batches.step = state_dict["batch"]
