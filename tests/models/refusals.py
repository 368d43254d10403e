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
        r"used outside its own module's forward|a gradient reached a parameter of it",
        "a weight used outside its module's forward in a way that has no rule",
    ): {
        "PEFT": "LoHa",
    },
    Refused(
        r"it gets rows that .* makes out of its input in a way that is not followed",
        "a layer's rows are picked by the data in a way that is not followed",
    ): {
        "transformers": "higgs_audio_v2",
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
