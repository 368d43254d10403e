"""What carries a model's clipped sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from dpfast.distributed.placements import any_shard
from dpfast.distributed.wrappers import Wrapper
from dpfast.errors import StateError, UnsupportedModuleError
from dpfast.taps import Activations, sees_its_own_heads

if TYPE_CHECKING:  # they import torch.distributed.tensor
    from dpfast.distributed.local_part import LocalPart
    from dpfast.distributed.tensor_parallel import TensorParallel


class Sums(Protocol):
    """Carries clipped sums over the ranks of one wrapper of torch.distributed.

    Attributes:
        by_unit: whole sums are made as they leave, a few at a time, because ranks have no room for all of them.
    """

    by_unit: bool

    @property
    def crosses(self) -> bool:
        """Whether the sums of the backward pass that runs are to cross ranks."""

    @property
    def number(self) -> int:
        """Of ranks."""

    def is_of(self, wrapper: Any) -> bool:
        """Whether it was made for that wrapper."""

    def on_forward(self) -> None:
        """A forward pass begins. Raises StateError where its sums could not be carried."""

    def hold(self, sums: Mapping[nn.Parameter, Tensor | None]) -> bool:
        """Keeps sums that are not to cross ranks yet, beside those kept before, where ``p.grad`` has no room for them.
        Returns whether it did."""

    def held(self, p: nn.Parameter) -> Tensor | None:
        """This rank's sum of earlier passes, which has not crossed; asked once, of such a parameter."""

    def put_anew(self, gradients: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Of these, which stood in ``p.grad`` when the backward pass that runs began, those that the wrapper itself had
        put there, and what had stood there before. Asked once a pass, at its end."""

    def keep_promises(self, then: Callable[[], None]) -> None:
        """The backward pass is over and leaves no sums (the first of two); ``then`` is called when nobody writes to
        ``p.grad`` any more."""

    def reduce(
        self,
        parameters: Sequence[nn.Parameter],
        total: Callable[[nn.Parameter], Tensor | None],
        settled: Callable[[nn.Parameter, Tensor], Tensor],
        then: Callable[[], None],
        *settings: object,
    ) -> None:
        """Leaves the sums over all ranks in ``p.grad``.

        Args:
            parameters: all that are trainable. total: this rank's sum, asked once for each; None for zeros. settled:
                what ``p.grad``, or this rank's part of it, is to be, of the sum over ranks, in p's dtype.
            then: called when every ``p.grad`` is there. settings: what all ranks must have alike.

        Raises:
            StateError: the pass cannot be carried, or ranks do not have the same settings.
        """


@contextmanager
def told_to_all(sums: Sums | None, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """An error within it, which some ranks alone may have, becomes one of all ranks that wait for their sums."""
    try:
        yield
    except StateError:
        if sums is not None and sums.crosses and sums.number > 1:
            with suppress(StateError):  # as no two ranks have these settings
                sums.reduce(list(parameters), lambda p: None, lambda p, total: total, lambda: None, dist.get_rank())
        raise


class Tapped(Protocol):
    """What is asked of a tapped model."""

    def withholds(self) -> bool:
        """Whether the backward pass that runs in this thread is one whose sums come at its end."""

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """The model's own, where this one stands in for it while a pass runs."""


def sums_of(wrapper: Wrapper, model: nn.Module, tapped: Tapped) -> Sums:
    """For a DDP or FSDP2 that was found. Its errors are those of the classes."""
    if wrapper.kind == "FSDP2":
        from dpfast.distributed.fsdp import ShardedSums

        return ShardedSums(model, tapped.own, wrapper.module)
    from dpfast.distributed.ddp import DDPSums

    return DDPSums(wrapper.module, model.parameters(), tapped.withholds)


def parts_of(wrapper: Wrapper | None, model: nn.Module, tapped: Tapped) -> TensorParallel | None:
    """For a model with parameters that tensor parallel has parted, under FSDP2 too. Its errors are those of the
    class."""
    if wrapper is None or wrapper.kind not in ("DTensor", "FSDP2"):
        return None
    from dpfast.distributed.tensor_parallel import TensorParallel

    parts = TensorParallel(model, tapped.own, sharded=wrapper.kind == "FSDP2")
    return parts if parts.number > 0 else None


def part_of(
    layer: str, module: nn.Module, activations: Activations, backprops: Sequence[Tensor], samples: object
) -> LocalPart | None:
    """This rank's part of a use of the layer; None where nothing of it is a DTensor.

    Args:
        samples: the dimension that they are in; anything else where they are in none alone.

    Raises:
        UnsupportedModuleError: placements whose gradients have no such parts.
    """
    if not any_shard((*backprops, *module._parameters.values())) and not sees_its_own_heads(module):
        return None
    from dpfast.distributed.local_part import local_part

    try:
        return local_part(module, activations, tuple(backprops), samples if isinstance(samples, int) else None)
    except UnsupportedModuleError as error:
        raise UnsupportedModuleError(f"{layer}: {error}") from error
