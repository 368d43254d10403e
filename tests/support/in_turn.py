"""Small layers taken as large ones are: norm, factor and clipped sum of one sample after the other."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from dpfast.arithmetic import cost
from dpfast.modes import deferred, in_turn


class Taken(list):
    """How many parameters each step took so; ``places``: which."""

    def __init__(self):
        super().__init__()
        self.places = []


@contextmanager
def everything_in_turn(*, as_it_is=False, keep_ratio=0.0):
    """Every outer product for which that is possible; gives :class:`Taken`.

    Args:
        as_it_is: by what it saves, as ever.
    """
    taken, find_in_turn = Taken(), in_turn.find_in_turn

    def find(entries):
        found = find_in_turn(entries)
        taken.append(len(found))
        taken.places.append(list(found))
        return found

    with ExitStack() as stack:
        stack.enter_context(patch("dpfast.modes.fast_gradient_clipping.find_in_turn", find))
        if not as_it_is:
            stack.enter_context(patch.object(cost, "IN_TURN_SAVES", (-float("inf"), -float("inf"))))
            stack.enter_context(patch.object(cost, "KEEP_RATIO", keep_ratio))
            stack.enter_context(patch.dict(deferred.SMALL, cpu=0))  # else they would wait for others alike
        yield taken
