"""x-transformers: options that change the computation, one or a few at a time."""

import torch
from harness import Model


def _decoder(wrapper=None, encoder=False, **options):
    def build():
        import x_transformers as x

        layers = (x.Encoder if encoder else x.Decoder)(dim=8, depth=2, heads=2, attn_dim_head=4, **options)
        return x.TransformerWrapper(num_tokens=29, max_seq_len=11, attn_layers=layers, **(wrapper or {}))

    return build


def _vit():
    import x_transformers as x

    layers = x.Encoder(dim=8, depth=2, heads=2, attn_dim_head=4)
    return x.ViTransformerWrapper(image_size=16, patch_size=8, num_classes=3, attn_layers=layers)


def _continuous():
    import x_transformers as x

    layers = x.Encoder(dim=8, depth=2, heads=2, attn_dim_head=4)
    return x.ContinuousTransformerWrapper(dim_in=6, dim_out=3, max_seq_len=11, attn_layers=layers)


def _tokens(n, t):
    return (torch.randint(0, 29, (n, t)),)


_OPTIONS = {
    "decoder": {},
    "encoder": {"encoder": True},
    "rotary": {"rotary_pos_emb": True, "rotary_emb_dim": 4},
    "ALiBi": {"alibi_pos_bias": True},
    "T5's relative positions": {"rel_pos_bias": True},
    "GLU and Swish": {"ff_glu": True, "ff_swish": True},
    "ReLU squared without biases": {"ff_relu_squared": True, "ff_no_bias": True},
    "RMSNorm": {"use_rmsnorm": True},
    "simple RMSNorm": {"use_simple_rmsnorm": True},
    "ScaleNorm": {"use_scalenorm": True},
    "sandwich norm": {"sandwich_norm": True},
    "grouped queries": {"attn_kv_heads": 1},
    "memory keys": {"attn_num_mem_kv": 3},
    "talking heads": {"attn_pre_talking_heads": True},
    "gated values": {"attn_gate_values": True},
    "heads' scales": {"attn_head_scale": True},
    "query and key norm": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "sparse top k": {"attn_sparse_topk": 2},
    "shifted tokens": {"shift_tokens": 1},
    "gated residual": {"gate_residual": True},
    "scaled residual": {"scale_residual": True},
    "macaron": {"macaron": True},
    "memory tokens": {"wrapper": {"num_memory_tokens": 3}},
    "tied table": {"wrapper": {"tie_embedding": True}},
    "no positions": {"wrapper": {"use_abs_pos_emb": False}},
    "sinusoidal positions": {"wrapper": {"scaled_sinu_pos_emb": True}},
}

MODELS = {name: Model(_decoder(**options), _tokens) for name, options in _OPTIONS.items()} | {
    "ViTransformerWrapper": Model(_vit, lambda n, t: (torch.randn(n, 3, 16, 16),)),
    "ContinuousTransformerWrapper": Model(_continuous, lambda n, t: (torch.randn(n, t, 6),)),
}
