"""PEFT's methods on a tiny Llama of transformers."""

from harness import Model
from transformers_models import build as _base
from transformers_models import ids

_LAYERS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}


def _method(config, **options):
    def build():
        import peft

        model = _base("llama", "AutoModelForCausalLM", {})()
        options.setdefault("task_type", "CAUSAL_LM")
        return peft.get_peft_model(model, getattr(peft, config)(**options))

    return build


_METHODS = {
    "LoRA": ("LoraConfig", {"r": 2, **_LAYERS, "init_lora_weights": False}),
    "LoRA on embeddings": ("LoraConfig", {"r": 2, "target_modules": ["embed_tokens"], "init_lora_weights": False}),
    "LoRA with a saved head": ("LoraConfig", {"r": 2, **_LAYERS, "modules_to_save": ["lm_head"]}),
    "rsLoRA": ("LoraConfig", {"r": 2, **_LAYERS, "use_rslora": True, "init_lora_weights": False}),
    "DoRA": ("LoraConfig", {"r": 2, **_LAYERS, "use_dora": True, "init_lora_weights": False}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 3, "target_r": 2, "total_step": 10, **_LAYERS}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LoHa": ("LoHaConfig", {"r": 2, **_LAYERS, "init_weights": False}),
    "LoKr": ("LoKrConfig", {"r": 2, **_LAYERS, "init_weights": False}),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "r": 0, "target_modules": ["q_proj", "v_proj"]}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4, "target_modules": ["q_proj", "v_proj"]}),
    "HRA": ("HRAConfig", {"r": 2, "target_modules": ["q_proj", "v_proj"]}),
    "VeRA": ("VeraConfig", {"r": 2, "target_modules": ["q_proj", "v_proj"]}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 6, "target_modules": ["q_proj", "v_proj"]}),
    "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "P-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 6}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
}

MODELS = {name: Model(_method(config, **options), ids) for name, (config, options) in _METHODS.items()}
