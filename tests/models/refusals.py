"""Which rows dpfast refuses, by reason, and which show a fault of it. A row that is not here must be right."""

from harness import EXPERTS, Refused

_BY_REASON: dict[Refused, dict[str, str]] = {
    Refused(
        r"routes the|experts",
        EXPERTS,
    ): {
        "litgpt": "mixture of experts",
        "transformers": "mixtral, aria_text, axk1, axk2, cohere2_moe, aria",
    },
    Refused(
        r"its output is the same whatever the batch",
        "a table or layer that the model broadcasts over its samples",
    ): {
        "timm": (
            "vit_relpos_small_patch16_224, test_vit_relpos, vit_srelpos_small_patch16_224, "
            "swinv2_tiny_window8_256, swinv2_cr_tiny_224"
        ),
        "transformers": "bart, bigbird_pegasus, biogpt, blenderbot, blenderbot-small, mpnet, umt5, longt5, florence2",
        "x-transformers": (
            "decoder, encoder, ALiBi, T5's relative positions, GLU and Swish, ReLU squared without biases, "
            "RMSNorm, simple RMSNorm, ScaleNorm, sandwich norm, grouped queries, memory keys, talking heads, "
            "gated values, heads' scales, query and key norm, sparse top k, shifted tokens, scaled residual, "
            "macaron, memory tokens, tied table, sinusoidal positions, ContinuousTransformerWrapper"
        ),
    },
    Refused(
        r"used outside its own module's forward",
        "a weight used outside its module's forward",
    ): {
        "timm": "beit_base_patch16_224, eva02_tiny_patch14_224, test_maxvit, test_coatnet",
        "torchvision": "SwinTransformer, SwinTransformer V2, SwinTransformer3d",
        "transformers": "mamba, falcon_mamba",
    },
    Refused(
        r"used outside its own module's forward|"
        r"cannot be repeated sample by sample|samples run one by one|has no rule",
        "a weight used outside its module's forward; a layer without a rule that functorch cannot run",
    ): {
        "timm": "beitv2_base_patch16_224",
    },
    Refused(
        r"saw a batch of|samples are in di|the batch in several dimensions|its batch_first says",
        "samples folded into windows, patches or chunks, or not first in a layer's input",
    ): {
        "timm": (
            "samvit_base_patch16_224, tnt_s_patch16_224, davit_tiny, sequencer2d_s, tiny_vit_5m_224, "
            "efficientvit_m0, mobilevit_xxs, GlobalContextVit"
        ),
        "torchaudio": "ConvTasNet",
        "transformers": "xlnet",
        "x-transformers": "gated residual",
    },
    Refused(
        r"saw a batch of|samples are in di|the batch in several dimensions|its batch_first says|"
        r"cannot be repeated sample by sample|samples run one by one|has no rule",
        (
            "samples folded into windows, patches or chunks, or not first in a layer's input; a layer "
            "without a rule that functorch cannot run"
        ),
    ): {
        "timm": "swin_tiny_patch4_window7_224",
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
    ("timm", "coat_lite_tiny"): "crash: a refused backward pass leaves the model without some of its parameters",
    ("timm", "coat_tiny"): "crash: a refused backward pass leaves the model without some of its parameters",
    ("PEFT", "prompt tuning"): "crash: a table that is read once and then expanded over the samples",
    ("PEFT", "P-tuning"): "crash: a table that is read once and then expanded over the samples",
    ("torchaudio", "Conformer"): "wrong where N = T: time comes first in layers inside, and the lengths are values",
    ("torchaudio", "Emformer"): "wrong where N is the number of positions of a segment: time comes first inside",
}
"""Not yet mended. Each must still fail, so that none stays here once it is."""
