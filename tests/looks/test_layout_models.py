"""Models whose layers see sizes that are no batch, most of Hugging Face: right, whatever N is."""

import huggingface
import pytest
import torch
from torch import nn

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


class Twice(nn.Module):
    """One layer, called with its samples where they are and somewhere else."""

    def __init__(self, turn, back):
        super().__init__()
        self.first, self.lin, self.turn, self.back = nn.Linear(6, 6), nn.Linear(6, 6), turn, back

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.lin(h) + self.back(self.lin(self.turn(h)), h)


TURNED = (lambda h: h.transpose(0, 1), lambda y, h: y.transpose(0, 1))
FOLDED = (lambda h: h.flatten(0, 1), lambda y, h: y.view_as(h))
POOLED = (lambda h: h.mean(1), lambda y, h: y.unsqueeze(1))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("n", "t"), [(4, 5), (5, 5), (6, 6), (1, 5)])
@pytest.mark.parametrize("ways", [TURNED, FOLDED, POOLED], ids=["turned", "folded", "pooled"])
def test_one_layer_with_its_samples_in_two_places(ways, n, t, passes):
    """Right, or refused by name where outputs of one rank have them in two dimensions; T = N and T = N = D too."""
    torch.manual_seed(0)
    model, x = Twice(*ways), torch.randn(n, t, 6)
    exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", passes=passes)
    loss = wrapped(x).square().sum()
    if ways is TURNED:
        with pytest.raises(dpfast.DpfastError, match=r"^lin \(Linear\): its samples are in different dimensions"):
            loss.backward()
        return
    loss.backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
