"""PEFT's LoRA beside weights that others have quantised, on a tiny Llama."""

import logging

from harness import Model
from torch import nn
from transformers_models import build as _base
from transformers_models import ids

_LINEAR = ("q_proj", "v_proj", "up_proj", "down_proj")


def _llama():
    return _base("llama", "AutoModelForCausalLM", {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32})()


def _adapted(model):
    import peft

    config = peft.LoraConfig(r=2, target_modules=list(_LINEAR), init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def _is_quantised(module, name):
    return isinstance(module, nn.Linear) and name.rpartition(".")[2] in _LINEAR


def _bitsandbytes(kind):
    def build():
        import bitsandbytes

        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # inputs in fp64 are rounded, it says for each
        model = _llama().requires_grad_(False)
        for name, module in list(model.named_modules()):
            if _is_quantised(module, name):
                bias = module.bias is not None
                if kind == "nf4":
                    new = bitsandbytes.nn.Linear4bit(
                        module.in_features, module.out_features, bias, module.weight.dtype, quant_type="nf4"
                    )
                else:
                    new = bitsandbytes.nn.Linear8bitLt(
                        module.in_features, module.out_features, bias, has_fp16_weights=False
                    )
                new.load_state_dict(module.state_dict())
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, new.to("cpu"))
        return _adapted(model)

    return build


def _torchao():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = _llama().requires_grad_(False)
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=_is_quantised)
    return _adapted(model)


_BUILDS = {
    "LoRA on 4 bits (bitsandbytes' NF4)": _bitsandbytes("nf4"),
    "LoRA on 8 bits (bitsandbytes)": _bitsandbytes("int8"),
    "LoRA on int8 weights (torchao)": _torchao,
}

MODELS = {name: Model(build, ids, training=True) for name, build in _BUILDS.items()}
"""Training, because in evaluation bitsandbytes lays 4 bits out anew where no gradient comes by."""
