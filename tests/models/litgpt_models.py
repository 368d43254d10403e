"""litgpt: its one GPT with the options of the families that it knows."""

import torch
from harness import Model

_SIZES = {"block_size": 11, "vocab_size": 29, "padded_vocab_size": 29, "n_layer": 2, "n_head": 2, "n_embd": 8}
_LLAMA = {
    "rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP", "intermediate_size": 12,
}  # fmt: skip

_OPTIONS = {
    "pythia": {"rotary_percentage": 0.5},
    "llama": _LLAMA,
    "llama with grouped queries": _LLAMA | {"n_query_groups": 1},
    "falcon": {"rotary_percentage": 1.0, "n_query_groups": 1, "bias": False, "shared_attention_norm": True},
    "gemma": _LLAMA | {"mlp_class_name": "GemmaMLP", "scale_embeddings": True, "head_size": 6},
    "gemma 2": _LLAMA | {
        "mlp_class_name": "GemmaMLP", "scale_embeddings": True, "attention_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "post_attention_norm": True, "post_mlp_norm": True, "sliding_window_size": 3,
        "sliding_window_indices": [1, 0],
    },
    "phi": {"rotary_percentage": 0.5, "shared_attention_norm": True, "lm_head_bias": True, "gelu_approximate": "tanh"},
    "qwen 3": _LLAMA | {"norm_qk": True},
    "mixture of experts": _LLAMA | {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2},
}  # fmt: skip


def _gpt(options):
    def build():
        from litgpt import GPT, Config

        return GPT(Config(**_SIZES, **options))

    return build


MODELS = {
    name: Model(_gpt(options), lambda n, t: (torch.randint(0, 29, (n, t)),)) for name, options in _OPTIONS.items()
}
