"""Which rows dpfast refuses, by reason, and which show a fault of it. A row that is not here must be right."""

from harness import MIXES, Refused

_BY_REASON: dict[Refused, dict[str, str]] = {
    Refused(
        r"samples meet in",
        MIXES,
    ): {
        "timm": "csatv2",
    },
    Refused(
        r"takes positions for samples",
        "a layer whose own options take positions for samples",
    ): {
        "Opacus": "DPMultiheadAttention",
    },
}

REFUSED = {
    (package, name): refused
    for refused, models in _BY_REASON.items()
    for package, names in models.items()
    for name in names.split(", ")
}

FAULTS: dict[tuple[str, str], str] = {}
"""Not yet mended. Each must still fail, so that none stays here once it is."""
