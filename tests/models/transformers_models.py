"""Models of transformers, from configurations shrunk to a few kilobytes."""

import contextlib
from functools import partial

import torch
from harness import Model

SIZES = {
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "num_key_value_heads num_key_value_groups num_encoder_layers encoder_n_layers num_blocks n_kv_heads "
    "encoder_num_attention_heads num_experts_per_tok num_conv_pos_embedding_groups moe_k window_size "
    "num_groups decoder_num_attention_heads num_codebooks",
    1: "n_group topk_group first_k_dense_replace",
    4: "head_dim d_kv kv_channels rotary_dim num_experts num_local_experts n_routed_experts qk_rope_head_dim "
    "qk_nope_head_dim v_head_dim attention_head_size global_head_dim",
    8: "hidden_size d_model n_embd dim embedding_size patch_size word_embed_proj_dim embed_dim hidden_dim emb_dim "
    "kv_lora_rank q_lora_rank projection_dim encoder_hidden_size decoder_hidden_size cross_attention_hidden_size",
    11: "max_position_embeddings n_positions n_ctx max_source_positions",
    12: "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff n_inner ffn_hidden_size moe_intermediate_size",
    16: "image_size d_inner",
    29: "vocab_size",
    0: "dropout attention_dropout hidden_dropout_prob attention_probs_dropout_prob pad_token_id",
}
"""What a configuration's numbers become, wherever it has them: small sizes, most of them no other's."""

LISTS = {
    1: "depths layers num_blocks decoder_depths depth",
    2: "num_heads num_attention_heads",
    8: "hidden_sizes embed_dims embed_dim conv_dim encoder_hidden_sizes decoder_hidden_sizes neck_hidden_sizes dims",
}
"""What each entry of a list becomes."""

_SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}


def shrink(config, options):
    """Changes a configuration, and those inside it, in place."""
    for name, inner in list(vars(config).items()):
        if name not in options and hasattr(inner, "model_type"):
            shrink(inner, options.get(f"inside {name}", {}))
    for name, size in _SIZE_OF.items():
        if name not in options and type(_value(config, name)) in (int, float):
            _set(config, name, type(_value(config, name))(size))
    for size, names in LISTS.items():
        for name in names.split():
            value = _value(config, name)
            if name not in options and isinstance(value, (list, tuple)):
                _set(config, name, type(value)(size for _ in value))
    for name, value in options.items():
        setattr(config, name, value)
    config.use_cache, config._experts_implementation = False, "eager"
    return config


def _value(config, name):
    with contextlib.suppress(Exception):  # some are of a layer, and say so by an error
        return getattr(config, name, None)


def _set(config, name, value):
    with contextlib.suppress(Exception):  # some are computed from others
        setattr(config, name, value)


def build(kind, head, options):
    def of():
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        config = shrink(CONFIG_MAPPING[kind](), options)
        return getattr(transformers, head).from_config(config)

    return of


def ids(n, t):
    return {"input_ids": torch.randint(3, 29, (n, t))}


def choices(n, t):
    return {"input_ids": torch.randint(3, 29, (n, 3, t))}


def both(n, t):
    return ids(n, t) | {"decoder_input_ids": torch.randint(3, 29, (n, t))}


def pixels(n, t, size=16):
    return {"pixel_values": torch.randn(n, 3, size, size)}


def audio(n, t):
    return {"input_values": torch.randn(n, 400)}


# head: (inputs, kinds)
HEADS = {
    "AutoModelForImageClassification": (
        pixels,
        "vit resnet convnext beit clip convnextv2 data2vec-vision dinov2 dinov2_with_registers bit focalnet "
        "swin swinv2",
    ),
    "AutoModelForCausalLM": (
        ids,
        "gpt2 llama mamba gpt-sw3 apertus arcee bart beam bert bert-generation big_bird bigbird_pegasus biogpt "
        "bitnet blenderbot blenderbot-small bloom camembert cohere cohere2 ctrl cwm data2vec-text deepseek_v3 "
        "deepseek_v32 diffllama electra emu3 ernie ernie4_5 exaone4 falcon_mamba flint doge falcon fuyu gemma "
        "gemma2 gemma3 gemma3_text gemma4_unified gemma4_unified_text git glm glm4 gpt_neox opt roberta mistral "
        "qwen2 whisper mixtral rwkv xlnet xlm gpt_neo gptj gpt_bigcode granite aria_text axk1 axk2 cohere2_moe "
        "gpt_oss qwen2_moe qwen3_moe olmoe deepseek_v2 qwen3 qwen3_next qwen3_5_text smollm3 phi phi3 olmo2 olmo3 "
        "olmo_hybrid starcoder2 stablelm nanochat lfm2 seed_oss minimax_m2 ministral3 helium jamba glm4_moe granitemoe "
        "modernbert-decoder internlm3 persimmon",
    ),
    "AutoModel (images)": (
        pixels,
        "aimv2_vision_model chinese_clip_vision_model clip_vision_model dinov3_vit dpt",
    ),
    "AutoModelForMaskedLM": (
        ids,
        "albert convbert deberta deberta-v2 distilbert esmc eurobert flaubert fnet mpnet ibert layoutlm xlm-roberta "
        "nomic_bert mobilebert rembert squeezebert funnel",
    ),
    "AutoModelForSeq2SeqLM": (
        both,
        "t5 audioflamingo3 encoder-decoder umt5 longt5 switch_transformers pegasus_x qwen3_asr voxtral",
    ),
    "AutoModel (text)": (
        ids,
        "aya_vision clip_text_model deepseek_vl dpr embedding_gemma2 embedding_gemma2_text fun_asr_nano aria "
        "higgs_audio_v2",
    ),
    "AutoModel (texts)": (
        both,
        "florence2",
    ),
    "AutoModelForMultipleChoice": (
        choices,
        "megatron-bert roberta-prelayernorm",
    ),
    "AutoModel (sound)": (
        audio,
        "wav2vec2 wavlm",
    ),
}

_SWIN = {"image_size": 32, "patch_size": 4, "window_size": 2, "depths": [2, 1], "num_heads": [2, 2], "embed_dim": 8}

_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}  # of the two that are left

OPTIONS = {
    "gemma4_unified": {"inside text_config": _LAYERS},
    "gemma4_unified_text": _LAYERS,
    "swin": _SWIN,
    "swinv2": _SWIN,
    "segformer": {"image_size": 64},
    "efficientnet": {"image_size": 64},
    "dinov3_convnext": {"image_size": 64},
    "longformer": {"attention_window": [2, 2]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "switch_transformers": {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "dropout_rate": 0.0},
}


def _row(kind, head, inputs):
    options = OPTIONS.get(kind, {})
    if "image_size" in options:
        inputs = partial(pixels, size=options["image_size"])
    return Model(build(kind, head.split()[0], options), inputs)


MODELS = {kind: _row(kind, head, inputs) for head, (inputs, kinds) in HEADS.items() for kind in kinds.split()}
