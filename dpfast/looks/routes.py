"""Taps where rows are picked: a module whose forward picks some of all samples' rows, and those that it calls with
them, as runs on data have shown."""

from __future__ import annotations

from typing import Any

from dpfast.looks.picks import Routes
from dpfast.taps import Tap, TappedForward, layouts, owned_modules


def add_routes(receiver: Any, taps: list[Tap], routes: Routes) -> bool:
    """Follows the rows there from now on. Returns whether that is new.

    Args:
        receiver: the tapped model. taps: its taps, to which others may come.
    """
    if not (routes.senders or routes.receivers):
        return False
    before = [(tap.sends, tap.receives, tap.gathers) for tap in taps], receiver.picks_rows
    inner = {id(m) for module in receiver.model.modules() for m in owned_modules(module)[1:]}
    tapped = {id(tap.module): tap for tap in taps if isinstance(tap.module.__dict__.get("forward"), TappedForward)}
    within: set[int] = set()
    for name, module, layout in layouts(receiver.model, receiver.batch_dim):
        sends, receives = name in routes.senders, name in routes.receivers
        if not name and sends:
            receiver.picks_rows = True
        elif (sends or receives) and id(module) not in tapped and id(module) not in inner:
            tap = tapped[id(module)] = Tap(receiver, name, module, **layout._asdict())
            module.forward = TappedForward(tap, module.__dict__.get("forward"))
            taps.append(tap)
        if sends and id(module) in tapped:
            tapped[id(module)].sends = True
        if receives:
            within |= {id(m) for m in module.modules()}
    for tap in taps:
        if id(tap.module) in within:
            tap.receives = tap.gathers = True
    return before != ([(tap.sends, tap.receives, tap.gathers) for tap in taps], receiver.picks_rows)


def routes_of(receiver: Any, taps: list[Tap]) -> Routes:
    """Those that have been added to a model's taps."""
    senders = {tap.name for tap in taps if tap.sends} | ({""} if receiver.picks_rows else set())
    return Routes(frozenset(senders), frozenset(tap.name for tap in taps if tap.gathers))
