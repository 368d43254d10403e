"""Models of Hugging Face whose layers see sizes that are no batch: right, whatever N is."""

import huggingface
import pytest
import torch

import dpfast
from dpfast.testing import loop_over_samples, norms_of, relative_error

_SIZES = {"vocab_size": 29, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5 = {"vocab_size": 29, "d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
_SPEECH = {"hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0}
TRANSFORMERS = {  # name: (configuration, head, inputs)
    "MPNet": (_SIZES | _NO_DROPOUT, "ForSequenceClassification", "ids"),
    "T5": (_T5 | {"decoder_start_token_id": 0}, "ForConditionalGeneration", "both"),
    "UMT5": (_T5 | {"decoder_start_token_id": 0}, "ForConditionalGeneration", "both"),
    "DebertaV2": (
        _SIZES | _NO_DROPOUT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True},
        "ForSequenceClassification", "ids",
    ),
    "Bloom": ({"vocab_size": 29, "n_layer": 2, "n_head": 2}, "ForCausalLM", "ids"),
    "Wav2Vec2Bert": (
        _SIZES | _SPEECH | {"feature_projection_input_dim": 6, "layerdrop": 0.0, "mask_time_prob": 0.0,
        "conformer_conv_dropout": 0.0}, "ForSequenceClassification", "features",
    ),
    "Beit": (
        _SIZES | _NO_DROPOUT | {"image_size": 8, "patch_size": 4, "use_relative_position_bias": True,
        "drop_path_rate": 0.0}, "ForImageClassification", "images",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n", [3, 7, 2])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_hugging_face_are_right(name, n):
    """T = 7; heads, layers and N = 2."""
    options, head, kind = TRANSFORMERS[name]
    torch.manual_seed(0)
    options = options if "d_model" in options else options | {"hidden_size": 12}
    library = huggingface.transformers
    model = getattr(library, name + head)(getattr(library, f"{name}Config")(**options)).train()
    ids = torch.randint(3, 29, (n, 7))
    inputs = {
        "ids": {"input_ids": ids},
        "both": {"input_ids": ids, "decoder_input_ids": ids},
        "features": {"input_features": torch.randn(n, 7, 6)},
        "images": {"pixel_values": torch.randn(n, 3, 8, 8)},
    }[kind]
    exact = loop_over_samples(model, huggingface.summed_loss, inputs)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    huggingface.summed_loss(wrapped, inputs).backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
