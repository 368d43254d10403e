"""docs/models.md, from the tables; `make test-models WRITE=--write-models` writes it when every row has passed."""

from pathlib import Path

from harness import EXPERTS, LARGEST_N, MIXES, OTHER_SIZES, PLAIN_N, Model, T
from tables import PACKAGES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

_INTRODUCTION = """# Other people's models

`make test-models WRITE=--write-models` writes this page when every row has passed; do not edit. The tables are in
`tests/models/`.

Models of real packages, tiny and with random weights, as their authors wrote them. Each is wrapped in all modes
(`GradSampleModule`, one pass, two passes) and compared with a loop over samples in fp64: per-sample gradients, norms,
clip factors, clipped sums and `p.grad`, to 1e-5, and no bound is below its norm. N is 1, {t} (where a text has as many
positions), {n}, and up to {others} sizes up to {largest} that the model has inside, such as heads, windows, patches and
channels. Batch norms, which mix samples, are frozen, as their error advises; nothing else is changed.

*Right* is right in every mode with every N. *Refused* is an error of dpfast's, with some N at least, and right with the
others. *Faults* are wrong numbers or other errors: known, not yet mended, and each has its line below.

The share is that of the right ones among those that neither mix samples nor are experts.

| package | models | right | mix samples | experts | refused for another reason | faults | share |
|---|---|---|---|---|---|---|---|
"""


def rendered() -> str:
    page = _INTRODUCTION.format(t=T, n=PLAIN_N, others=OTHER_SIZES, largest=LARGEST_N)
    kinds = {package: [_kind(row) for row in models.values()] for package, models in PACKAGES.items()}
    for name, found in (kinds | {"all": [kind for each in kinds.values() for kind in each]}).items():
        counts = [found.count(kind) for kind in ("right", MIXES, EXPERTS, "refused", "fault")]
        share = counts[0] / (len(found) - counts[1] - counts[2])
        page += f"| {name} | {len(found)} | {' | '.join(map(str, counts))} | {share:.0%} |\n"
    for package, models in PACKAGES.items():
        page += (
            f"\n## {package}\n\nRight: {', '.join(name for name, row in models.items() if _kind(row) == 'right')}.\n"
        )
        others = {name: row.fault or row.refused.why for name, row in models.items() if _kind(row) != "right"}
        if others:
            page += "\n| not right | why |\n|---|---|\n"
        page += "".join(
            f"| {name} | {'FAULT, ' if models[name].fault else 'refused: '}{why} |\n" for name, why in others.items()
        )
    return page


def _kind(row: Model) -> str:
    if row.fault:
        return "fault"
    if row.refused:
        return row.refused.why if row.refused.why in (MIXES, EXPERTS) else "refused"
    return "right"
