"""Time against memory: what each plan that a ``memory_budget`` makes would take, and two passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dpfast.arithmetic import cost
from dpfast.modes import held_one_by_one, plans
from dpfast.report.measure import Cost, Measured
from dpfast.report.takes import IN_TURN

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 1000, 300, 62, 32, 44, 30


class Point(NamedTuple):
    """A private step: bytes that all layers hold a sample and together, seconds, and how many write their gradients."""

    budget: int
    held: int
    seconds: float
    written: int


def points(m: Measured) -> tuple[list[Point], Point]:
    """Of every plan, from the least memory to the most; and of the step without a budget."""
    found = []
    for plan in plans([c.size for c in m.costs]):
        seconds = m.caught
        in_turn = _in_turn(m.costs, plan.written)
        for c, written, turn in zip(m.costs, plan.written, in_turn, strict=True):
            way = "keep" if written and "keep" in c.ways else IN_TURN if turn else c.unwritten
            seconds += c.ways[way].seconds
        found.append(Point(plan.held, plan.held * m.num_samples, seconds, sum(plan.written)))
    taken = [c.taken == "keep" for c in m.costs]
    held = sum(c.size.gradient if w else c.size.inputs for c, w in zip(m.costs, taken, strict=True))
    return found, Point(held, held * m.num_samples, m.predicted, sum(taken))


def _in_turn(costs: Sequence[Cost], written: Sequence[bool]) -> list[bool]:
    uses = Counter(c.parameter for c in costs)
    may = [i for i, c in enumerate(costs) if IN_TURN in c.ways and uses[c.parameter] == 1 and not written[i]]
    chosen = dict(zip(may, cost.in_turn([costs[i].size for i in may]), strict=True))
    return [chosen.get(i, False) for i in range(len(costs))]


def in_two_passes(m: Measured) -> Point | None:
    """A step with ``passes=2``, as it took; None where the model is refused there."""
    if m.two_passes is None:
        return None
    uses = Counter(c.parameter for c in m.costs)
    held = held_one_by_one((c.parameter, c.size, uses[c.parameter] == 1) for c in m.costs)
    return Point(held, held * m.num_samples, m.two_passes, 0)


def picture(m: Measured) -> str:
    """An SVG, and a line about its ends."""
    found, now = points(m)
    two = in_two_passes(m)
    shown = [p for p in (*found, now, two) if p is not None]
    best = min(found, key=lambda p: (p.seconds, p.held))
    x0, x1 = _range([p.held / 2**20 for p in shown])
    y0, y1 = _range([1e3 * p.seconds for p in shown], least=0.05)

    def at(p: Point) -> tuple[float, float]:
        x = _LEFT + (p.held / 2**20 - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (y1 - 1e3 * p.seconds) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)
        return x, y

    drawn = [f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='time against memory'>"]
    for i in range(5):
        x = _LEFT + i / 4 * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - i / 4 * (_HEIGHT - _TOP - _BOTTOM)
        drawn.append(f"<path class=grid d='M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}'/>")
        drawn.append(f"<text x={_LEFT - 8} y={y + 4:.1f} class=end>{y0 + i / 4 * (y1 - y0):.4g}</text>")
        drawn.append(f"<text x={x:.1f} y={_HEIGHT - _BOTTOM + 18} class=middle>{x0 + i / 4 * (x1 - x0):.3g}</text>")
    drawn.append(f"<text x={_WIDTH - _RIGHT} y={_HEIGHT - 6} class=end>MB held by all layers</text>")
    drawn.append("<text x=4 y=14>ms a step</text>")
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, found))
    drawn.append(f"<polyline points='{line}'/>")
    for p in found:
        x, y = at(p)
        drawn.append(f"<circle cx={x:.1f} cy={y:.1f} r=5><title>{_said(p)}</title></circle>")
    x, y = at(now)
    drawn.append(
        f"<path class=now d='M{x:.1f} {y - 9:.1f}l9 9l-9 9l-9 -9z'><title>no budget: {_said(now)}</title></path>"
    )
    said = (
        f"Least: memory_budget={found[0].budget}. Fastest here: memory_budget={best.budget}. The diamond is the step "
    )
    said += "without a budget"
    if two is not None:
        x, y = at(two)
        drawn.append(
            f"<path class=two d='M{x - 6:.1f} {y - 6:.1f}h12v12h-12z'><title>passes=2: {1e3 * two.seconds:.4g} ms, "
            f"{two.held / 2**20:.3g} MB</title></path>"
        )
        said += f", the square passes=2, as measured: at most {two.budget} bytes a sample, one layer at a time"
    return f"{''.join(drawn)}</svg><p class=soft>{said}.</p>"


def _said(p: Point) -> str:
    return f"memory_budget={p.budget}: {1e3 * p.seconds:.4g} ms, {p.held / 2**20:.3g} MB, {p.written} written"


def _range(values: Sequence[float], least: float = 0.01) -> tuple[float, float]:
    """With some room around; ``least``: a share of the values, so that noise is not drawn as if it were much."""
    low, high = min(values), max(values)
    room = max(0.08 * (high - low), least * high) or 1.0
    return max(0.0, low - room), high + room
