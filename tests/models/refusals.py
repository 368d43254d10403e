"""Which rows dpfast refuses, by reason, and which show a fault of it. A row that is not here must be right."""

from harness import EXPERTS, Refused

_BY_REASON: dict[Refused, dict[str, str]] = {
    Refused(
        r"routes the|experts",
        EXPERTS,
    ): {
        "litgpt": "mixture of experts",
        "transformers": "mixtral, aria_text, axk1, axk2, cohere2_moe, aria, deepseek_v3",
    },
    Refused(
        r"counts up by one",
        "positions (T,) that the forward makes itself, where N = T",
    ): {
        "transformers": "blenderbot, blenderbot-small",
    },
    Refused(
        r"used outside its own module's forward|a gradient reached a parameter of it",
        "a weight used outside its module's forward in a way that has no rule",
    ): {
        "PEFT": "LoHa",
        "timm": "test_maxvit",
        "torchvision": "SwinTransformer, SwinTransformer V2, SwinTransformer3d",
    },
    Refused(
        r"saw a batch of|samples are in di|the batch in several dimensions|its batch_first says|samples folded|"
        r"cannot be repeated sample by sample|samples run one by one|has no rule|its output is the same",
        "samples folded into windows or chunks in a layer without a rule, or in several orders",
    ): {
        "timm": "swin_tiny_patch4_window7_224, efficientvit_m0, swinv2_tiny_window8_256, swinv2_cr_tiny_224",
        "transformers": "xlnet",
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

FAULTS: dict[tuple[str, str], str] = {
    ("timm", "csatv2"): "wrong: the model mixes samples (an attention over the batch, by its authors' mistake), unseen",
    ("transformers", "wav2vec2"): "crash at even N in fp64: torch's convolution of a weight that the forward makes",
}
"""Not yet mended. Each must still fail, so that none stays here once it is."""
