"""Hugging Face models of tiny sizes with random weights, and inputs of n samples; nothing is downloaded."""

import torch
from torch import nn

transformers = __import__("pytest").importorskip("transformers")

T = 7
VOCABULARY = 29
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
_BERT = {**_TEXT, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA = {**_BERT, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_VISION = {"image_size": 8, "patch_size": 4, "num_channels": 3}


def tokens(n):
    return {"input_ids": torch.randint(3, VOCABULARY, (n, T))}


def padded_tokens(n):
    mask = (torch.arange(T) < torch.randint(2, T + 1, (n, 1))).long()
    return {"input_ids": torch.randint(3, VOCABULARY, (n, T)), "attention_mask": mask}


def pixels(n):
    return {"pixel_values": torch.randn(n, 3, 8, 8)}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=12, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(**_BERT, **_NO_DROPOUT, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def roberta():
    config = transformers.RobertaConfig(**_BERT, **_NO_DROPOUT, pad_token_id=1)
    return transformers.RobertaForMaskedLM(config)


def distilbert():
    config = transformers.DistilBertConfig(
        **_TEXT,
        dim=12,
        n_layers=2,
        n_heads=2,
        hidden_dim=20,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
    )
    return transformers.DistilBertForSequenceClassification(config)


def vit():
    config = transformers.ViTConfig(
        **_VISION, **_NO_DROPOUT, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20
    )
    return transformers.ViTForImageClassification(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA))


def qwen2():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_LLAMA))


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_LLAMA, sliding_window=4))


def t5():
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def opt():
    config = transformers.OPTConfig(
        **_TEXT,
        hidden_size=12,
        word_embed_proj_dim=12,
        ffn_dim=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        dropout=0.0,
    )
    return transformers.OPTForCausalLM(config)


def gpt_neox():
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_BERT, attention_dropout=0.0))


class WhisperEncoder(nn.Module):
    """The audio encoder of Whisper alone, with a head."""

    def __init__(self):
        super().__init__()
        config = transformers.WhisperConfig(
            d_model=12, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=20, num_mel_bins=4,
            max_source_positions=6, dropout=0.0,
        )  # fmt: skip
        self.encoder = transformers.models.whisper.modeling_whisper.WhisperEncoder(config)
        self.head = nn.Linear(12, 3)

    def forward(self, input_features):
        return self.head(self.encoder(input_features).last_hidden_state.mean(1))


class Scale(nn.Module):
    """A learned temperature."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return x * self.value.exp()


class DualTower(nn.Module):
    """CLIP's two towers, the similarity of each pair and a temperature."""

    def __init__(self):
        super().__init__()
        layers = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
        text = transformers.CLIPTextConfig(**_TEXT, **layers, projection_dim=6, eos_token_id=2)
        vision = transformers.CLIPVisionConfig(**_VISION, **layers, projection_dim=6)
        self.text = transformers.CLIPTextModelWithProjection(text)
        self.vision = transformers.CLIPVisionModelWithProjection(vision)
        self.scale = Scale()

    def forward(self, input_ids, pixel_values):
        text, image = self.text(input_ids).text_embeds, self.vision(pixel_values).image_embeds
        return self.scale(nn.functional.cosine_similarity(text, image).unsqueeze(1))


MODELS = {
    "GPT-2 (tied head)": (gpt2, tokens),
    "BERT": (bert, padded_tokens),
    "RoBERTa": (roberta, padded_tokens),
    "DistilBERT": (distilbert, padded_tokens),
    "ViT": (vit, pixels),
    "Llama": (llama, padded_tokens),
    "Qwen2": (qwen2, tokens),
    "Mistral": (mistral, tokens),
    "T5": (t5, lambda n: {**padded_tokens(n), "decoder_input_ids": torch.randint(3, VOCABULARY, (n, 5))}),
    "OPT": (opt, padded_tokens),
    "GPT-NeoX": (gpt_neox, tokens),
    "Whisper encoder": (WhisperEncoder, lambda n: {"input_features": torch.randn(n, 4, 12)}),
    "CLIP (two towers)": (DualTower, lambda n: {**tokens(n), **pixels(n)}),
}


def example(name, n=4):
    """(model in training mode, inputs)"""
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    return build().train(), inputs(n)


def losses(model, inputs):
    """(N,): a loss of each sample."""
    output = model(**inputs)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return torch.sin(3.0 * logits).flatten(1).mean(1)


def summed_loss(model, inputs):
    return losses(model, inputs).sum()
