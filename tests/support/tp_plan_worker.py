"""One rank of tests/distributed/test_tp_plan.py: models of transformers that are loaded with ``tp_plan="auto"``."""

import os
import tempfile

import torch
import torch.distributed as dist
import transformers
from processes import attempt, rank_main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from tp_worker import whole, wrapped

SIZES = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
}
NAMES = {"Llama": {}, "Qwen2": {}, "Qwen3": {}, "Mixtral": {"num_local_experts": 2}}


def built(name="Llama", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **NAMES[name], **options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def case(name="Llama", n=5, **options):
    """(model, tokens): norms' weights are not all alike."""
    model = built(name, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model, torch.randint(13, (n, 6))


def losses(model, x):
    logits = model(input_ids=x).logits[:, :-1]
    own = nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    return own.view(len(x), -1).mean(1)


def loaded(folder, name="Llama", n=5, **options):
    """The model, saved by the first rank and loaded by all, each a part; tokens."""
    model, x = case(name, n, **options)
    box = [tempfile.mkdtemp(dir=folder) if dist.get_rank() == 0 else None]
    if dist.get_rank() == 0:
        model.save_pretrained(box[0])
    dist.broadcast_object_list(box)
    model = type(model).from_pretrained(box[0], tp_plan="auto")
    if name == "Mixtral":
        model.set_experts_implementation("eager")
    return model, x


def step(module, x, passes=1):
    own = losses(module, x)
    own.sum().backward(retain_graph=passes == 2)
    if passes == 2:
        factors = module.get_clipping_coef()
        module.disable_hooks()
        (factors * own).sum().backward()
        module.enable_hooks()


def sums(folder, *what, passes=1, steps=1, **options):
    """({name: p.grad of all parts}, norms, clip factors, whether an evaluation between steps gave the same)."""
    model, x = loaded(folder, *what, **options)
    losses(model, x).sum().backward()  # without privacy, which hangs up hooks
    with torch.no_grad():
        before = model(input_ids=x).logits
    module = wrapped(model, passes=passes)
    same = True
    for _ in range(steps):
        module.zero_grad()
        step(module, x, passes)
        with torch.no_grad():
            same &= torch.equal(module(input_ids=x).logits, before)
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    return gradients, module.get_norm_sample(), module._clip_factors, same


def taken_off(folder):
    """Ordinary gradients, with the hooks removed; of how many parameters there is a part."""
    model, x = loaded(folder, "Qwen3")
    module = wrapped(model)
    step(module, x)
    module.zero_grad()
    module.to_standard_module()
    losses(model, x).sum().backward()
    parts = sum(isinstance(p, DTensor) for p in model.parameters())
    return {name: whole(p.grad) for name, p in model.named_parameters()}, parts


def plain_parts():
    """As transformers before 5.23 leave a layer."""
    model, x = case()
    model.model.layers[0].mlp.up_proj._hf_device_mesh = init_device_mesh("cpu", (2,))
    step(wrapped(model), x)


def main():
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE="2")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            found[name] = attempt(sums, folder, name, steps=2)
        found["two passes"] = attempt(sums, folder, passes=2)
        found["tied"] = attempt(sums, folder, tie_word_embeddings=True)
        found["biases"] = attempt(sums, folder, attention_bias=True, mlp_bias=True)
        found["taken off"] = attempt(taken_off, folder)
        found["plain parts"] = attempt(plain_parts)
        dist.barrier()
    return found


if __name__ == "__main__":
    rank_main(main)
