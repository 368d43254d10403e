"""What a private run needs to go on, beside model and optimizer, for torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Any

from dpfast.distributed import PoissonBatches
from dpfast.errors import InputError
from dpfast.opacus.optimizers import DPOptimizerFast


class PrivateState:
    """The accountant's history, the steps of noise and batches, and the secret's fingerprint (not the secret).

    torch.distributed.checkpoint's ``Stateful``: ``dcp.save({"private": PrivateState(...), ...})`` and ``dcp.load``, on
    any number of ranks. Steps taken again since the checkpoint have the batches and the noise that they had, wherever
    in the loop it was written and however far a loader's workers have fetched ahead. Noise follows from the numbers of
    the draws that the loop was given since the last step and the noise's size, of all steps so far: a step that gets
    another draw than it had (a loop was left early, a batch was skipped or looked at) has other noise, and so have
    those behind it.

    Of other randomness (dropout, augmentation) nothing is known here: keep its generators' states beside this one, or a
    step that is taken again has the same noise on another sum, and the two give samples away. So would another model,
    loss or clipper.

    Args:
        optimizer: has a ``secret``; its ``batches`` are these from now on. accountant: Opacus's. batches: as the
            optimizer's own, if None; without any, it is up to the loop to take the same batches again.

    Raises:
        InputError: the optimizer has no secret; on loading, it has another one or another stream.
    """

    def __init__(self, optimizer: DPOptimizerFast, accountant: Any, batches: PoissonBatches | None = None):
        if optimizer.stream is None:
            raise InputError("the optimizer draws noise that cannot be drawn again; give it secret=SharedSecret(...)")
        self._optimizer, self._accountant = optimizer, accountant
        if batches is not None:
            optimizer.batches = batches

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and names. What an unfinished step has taken is not among them: it is taken again from its
        beginning."""
        batches = self._optimizer.batches
        return {
            "accountant": dict(self._accountant.state_dict()),
            "noise": self._optimizer.stream,
            "noised_steps": self._optimizer.noised_steps,
            "past": self._optimizer._past,
            "batch": None if batches is None else batches.untaken,
            "given": () if batches is None else batches.given,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where :meth:`state_dict` was; what waits for a step to end is dropped. Begin to iterate after it."""
        fingerprint, number, among = state_dict["noise"]
        if (fingerprint, number) != self._optimizer.stream[:2]:  # type: ignore[index]  # it has a secret
            raise InputError(
                "this checkpoint was written with another secret, or by another of its optimizers: steps since then "
                "would be taken again with other noise, and count twice. Give SharedSecret the bytes that it had"
            )
        self._optimizer._secret.go_on_as(among)  # type: ignore[union-attr]
        self._optimizer._stream = number, among
        self._accountant.load_state_dict(state_dict["accountant"])
        self._optimizer.noised_steps, self._optimizer._past = state_dict["noised_steps"], state_dict["past"]
        self._optimizer._step_skip_queue.give_up()
        if self._optimizer.batches is not None:
            self._optimizer.batches.step = state_dict["batch"]
            self._optimizer.batches.given = tuple(map(tuple, state_dict["given"]))
