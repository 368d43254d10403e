"""What stands in a copy of a model where the tapped model is in itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class Nobody:
    """Stands where the tapped model is, in a copy: catches nothing."""

    active = inserts = picks_rows = False
    gives_batches = True
    batch_dim = 0
    shared: Sequence[tuple[nn.Parameter, Tensor]] = ()  # the model's parameters, and what the copy has in their place

    def hang_up_again(self) -> None:
        """A model may refer to what it is wrapped by, of which a copy is a copy then."""

    def is_input(self, x: Tensor, *, whole: bool = False) -> bool:
        return True  # what a 1-D input is is found out here, and no value is looked at
