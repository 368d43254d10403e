"""One page of what a step costs and why: no script, nothing from elsewhere."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

import torch

from dpfast.report.frontier import picture
from dpfast.report.measure import Cost, Measured, Way

_STYLE = """
:root { color-scheme: light dark; --ground: #fbfbfd; --card: #fff; --text: #1b1d24; --soft: #646b7d; --line: #e3e6ee;
  --forward: #7a8cf0; --input: #a9b8d8; --weight: #d7a86e; --norm: #1aa387; --sum: #0d6e8a; --saved: #a9b8d8;
  --held: #0d6e8a; --bad: #c4252f; --bad-ground: #fdeeee; --good: #12805f;
  --rest: #c9cedb; --taps: #8d6bd1 }
@media (prefers-color-scheme: dark) { :root { --ground: #14161c; --card: #1c1f28; --text: #e7e9f0; --soft: #98a0b4;
  --line: #2e3340; --forward: #8496ff; --input: #54648a; --weight: #b98545; --norm: #2cc2a2; --sum: #2f96b8;
  --saved: #54648a; --held: #2f96b8; --bad: #ff7a80; --bad-ground: #3a1d22; --good: #4fd1a5;
  --rest: #3d4457; --taps: #a685ea } }
* { box-sizing: border-box } body { margin: 0 auto; max-width: 1080px; padding: 32px 24px 64px;
  background: var(--ground); color: var(--text); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif }
h1 { font-size: 26px; margin: 0 } h2 { font-size: 18px; margin: 40px 0 4px } p { margin: 4px 0 12px }
.soft, th { color: var(--soft); font-weight: 400 } .num { font-variant-numeric: tabular-nums; white-space: nowrap }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 14px; margin: 22px 0 }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px }
.tile b { display: block; font-size: 26px; font-weight: 650; line-height: 1.25 }
.card { padding: 14px 18px; overflow-x: auto } .bad { border-color: var(--bad); background: var(--bad-ground) }
.bad strong { color: var(--bad) } code { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace }
.bad code { display: block; margin: 4px 0 10px }
.row { display: grid; grid-template-columns: minmax(150px, 260px) 1fr 132px; gap: 3px 14px; align-items: center;
  padding: 5px 0; border-top: 1px solid var(--line) } .row:first-of-type { border-top: 0 }
.name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap }
.bar { display: flex; height: 11px; margin: 2px 0; border-radius: 3px; overflow: hidden } .bar i { height: 100% }
.right { text-align: right } .key { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 10px }
.key span { display: inline-flex; align-items: center; gap: 7px }
.key i { width: 12px; height: 12px; border-radius: 3px } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: 5px 14px 5px 0; vertical-align: top;
  border-top: 1px solid var(--line) } tr:first-child th { border-top: 0 } td.taken { font-weight: 650 }
td.slow::after { content: " ▾"; color: var(--good) } .forward { background: var(--forward) }
.input { background: var(--input) } .weight { background: var(--weight) } .norm { background: var(--norm) }
.sum { background: var(--sum) } .saved { background: var(--saved) } .held { background: var(--held) }
svg { width: 100%; display: block } svg text { font-size: 13px; fill: var(--soft) } .end { text-anchor: end }
.middle { text-anchor: middle } .grid { stroke: var(--line); fill: none } .now { fill: var(--weight) }
.two { fill: var(--taps) } circle { fill: var(--sum); stroke: var(--card) }
polyline { fill: none; stroke: var(--sum); stroke-width: 2 }
.rest { background: var(--rest) } .taps { background: var(--taps) }
"""

_TIME = {
    "forward": "forward",
    "input": "gradient of its input",
    "weight": "gradient of its weights (plain alone)",
    "norm": "norms (private alone)",
    "sum": "clipped sums (private alone)",
    "rest": "the rest",
    "taps": "catching: taps and rules (private alone)",
}
_MEMORY = {
    "saved": "plain: what autograd keeps for the backward pass",
    "held": "private: what is held from the norm to the clipped sum",
}
_NOTABLY = 0.9  # another way is pointed at where it takes at most this share of the time


class Fallback(NamedTuple):
    """A layer that costs more than it must, why, and the line that mends it."""

    layer: str
    why: str
    line: str


def page(title: str, num_samples: int, fallbacks: Sequence[Fallback], measured: Measured) -> str:
    """The whole page."""
    where = escape(_machine(measured.device))
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=soft>What a step costs, plain and private, with {num_samples} samples on {where}. "
        "Forward and backward pass; noise and optimizer not counted.</p>",
        _tiles(measured),
        _fallbacks(fallbacks),
        "<h2>Time by layer</h2><p class=soft>Above the plain step, below the private one, each layer measured by "
        "itself. Attention, activations and all that has no trainable parameters of its own is the rest.</p>",
        f"<div class=card>{_key(_TIME)}{_times(measured)}</div>",
        "<h2>Memory by layer</h2><p class=soft>A tensor that several layers keep is counted at each.</p>",
        f"<div class=card>{_key(_MEMORY)}{_memory(measured)}</div>",
        "<h2>Time against memory</h2><p class=soft>What a private step would take, and what its layers would hold "
        "between norms and clipped sums, with each plan that memory_budget=(bytes a sample) makes: more memory, more "
        "layers that write their gradients. Less than the least takes a second backward pass.</p>",
        f"<div class=card>{picture(measured)}</div>",
        "<h2>Ways</h2><p class=soft>Norm and clipped sum of each parameter, in every way that it has, as measured: "
        f"milliseconds, and what is held. The way taken is bold; ▾ where another took less than {_NOTABLY:.0%} of its "
        "time.</p>",
        f"<div class=card>{_ways(measured.costs)}</div>",
    ]
    head = f'<meta charset=utf-8><meta name=viewport content="width=device-width"><title>{escape(title)}</title>'
    return (
        f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _machine(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}"


def _tiles(m: Measured) -> str:
    def tile(name: str, figure: str, more: str) -> str:
        name, more = (f"<span class=soft>{text}</span>" for text in (name, more))
        return f"<div class=tile>{name}<b class=num>{figure}</b>{more}</div>"

    return (
        "<div class=tiles>"
        + tile("plain step", f"{_ms(m.plain)} ms", f"{_mb(m.plain_peak)} MB of tensors at most")
        + tile(
            "private step",
            f"{m.private / m.plain:.2f} × plain",
            f"{_ms(m.private)} ms; predicted {m.predicted / m.plain:.2f} × ({_ms(m.predicted)} ms)",
        )
        + tile(
            "its memory",
            f"{m.private_peak / m.plain_peak:.2f} × plain",
            f"{_mb(m.private_peak)} MB; predicted {m.predicted_peak / m.plain_peak:.2f} × ({_mb(m.predicted_peak)} MB)",
        )
        + "</div>"
    )


def _fallbacks(fallbacks: Sequence[Fallback]) -> str:
    if not fallbacks:
        return ""
    found = "".join(
        f"<div><strong>{escape(f.layer)}</strong> {escape(f.why)}<code>{escape(f.line)}</code></div>" for f in fallbacks
    )
    return f"<h2>Fallbacks</h2><div class='card bad'>{found}</div>"


def _key(names: dict[str, str]) -> str:
    return "<div class=key>" + "".join(f"<span><i class={c}></i>{text}</span>" for c, text in names.items()) + "</div>"


Bar = dict[str, float]


def _bars(rows: Iterable[tuple[str, Bar, Bar, str, str]]) -> str:
    rows = list(rows)
    longest = max([sum(bar.values()) for _, one, two, _, _ in rows for bar in (one, two)], default=0.0) or 1.0
    return "".join(
        f"<div class=row><span class=name title='{escape(name, quote=True)}'>{escape(name)}</span>"
        f"<span>{_bar(one, longest)}{_bar(two, longest)}</span>"
        f"<span class='num right'><span class=soft>{first}</span> → {second}</span></div>"
        for name, one, two, first, second in rows
    )


def _bar(parts: Bar, longest: float) -> str:
    drawn = "".join(f"<i class={c} style='width:{100 * x / longest:.2f}%'></i>" for c, x in parts.items() if x > 0)
    return f"<span class=bar>{drawn}</span>"


def _by_layer(costs: Sequence[Cost]) -> dict[str, list[Way]]:
    found: dict[str, list[Way]] = defaultdict(list)
    for cost in reversed(costs):
        found[cost.layer].append(cost.way)
    return found


def _times(m: Measured) -> str:
    ways, layers = _by_layer(m.costs), {layer.name: layer for layer in m.layers}
    rows: list[tuple[str, Bar, Bar, str, str]] = []
    rest_plain, rest_private = m.plain, m.caught
    for name in dict.fromkeys([*layers, *ways]):
        both: Bar = {}
        plain: Bar = {}
        if name in layers:
            layer = layers[name]
            both = {"forward": layer.forward, "input": layer.input_gradient}
            plain = {**both, "weight": layer.weight_gradient}
        private = {**both, "norm": sum(w.norm for w in ways[name]), "sum": sum(w.sum for w in ways[name])}
        rest_plain -= sum(plain.values())
        rest_private -= sum(both.values())
        rows.append((name, plain, private, _ms(sum(plain.values())), f"{_ms(sum(private.values()))} ms"))
    rest = min(max(0.0, rest_plain), max(0.0, rest_private))
    private = {"rest": rest, "taps": max(0.0, rest_private - rest)}
    rows.append(("the rest", {"rest": rest}, private, _ms(rest), f"{_ms(sum(private.values()))} ms"))
    return _bars(rows)


def _memory(m: Measured) -> str:
    ways, saved = _by_layer(m.costs), {layer.name: layer.saved for layer in m.layers}
    rows = []
    for name in dict.fromkeys([*saved, *ways]):
        held = sum(w.held for w in ways[name])
        before = saved.get(name, 0)
        rows.append((name, {"saved": float(before)}, {"held": float(held)}, _mb(before), f"{_mb(held)} MB"))
    return _bars(rows)


def _ways(costs: Sequence[Cost]) -> str:
    names = list(dict.fromkeys(way for cost in costs if len(cost.ways) > 1 for way in cost.ways))
    lines = [f"<tr><th>parameter{''.join(f'<th>{escape(name)}' for name in names)}<th>the only way"]
    for cost in reversed(costs):
        best = min(way.seconds for way in cost.ways.values())
        cells = []
        for name in names:
            way = cost.ways.get(name) if len(cost.ways) > 1 else None
            kind = "num"
            if way is not None and name == cost.taken:
                kind += " taken" + (" slow" if best < _NOTABLY * cost.way.seconds else "")
            cells.append(f"<td class='{kind}'>{'' if way is None else _way(way)}")
        alone = f"{_way(cost.way)}, {escape(cost.taken)}" if len(cost.ways) == 1 else ""
        lines.append(f"<tr><td>{escape(cost.parameter)}{''.join(cells)}<td class='num soft'>{alone}")
    return f"<table>{''.join(lines)}</table>"


def _way(way: Way) -> str:
    return f"{_ms(way.seconds)}<span class=soft> · {_mb(way.held)} MB</span>"


def _ms(seconds: float) -> str:
    return _short(1e3 * seconds)


def _mb(nbytes: float) -> str:
    return _short(nbytes / 2**20)


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"
