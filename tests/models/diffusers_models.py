"""Networks of diffusers: UNets, diffusion transformers, autoencoders. Every sample has a time step of its own."""

import torch
from harness import Model


def _of(name, **options):
    def build():
        import diffusers

        return getattr(diffusers, name)(**options)

    return build


def _noisy(n, t):
    return {"sample": torch.randn(n, 3, 8, 8), "timestep": torch.randint(0, 100, (n,))}


def _conditioned(n, t):
    return _noisy(n, t) | {"encoder_hidden_states": torch.randn(n, t, 8)}


def _classes(n, t):
    return {
        "hidden_states": torch.randn(n, 3, 8, 8),
        "timestep": torch.randint(0, 100, (n,)),
        "class_labels": torch.randint(0, 5, (n,)),
    }


def _images(n, t):
    return {"sample": torch.randn(n, 3, 8, 8)}


def _text(n, t):
    return {
        "hidden_states": torch.randn(n, 4, 8, 8),
        "timestep": torch.randint(0, 100, (n,)),
        "encoder_hidden_states": torch.randn(n, t, 8),
    }


def _flux(**options):
    """The places of tokens are the same for all samples, and no input of a row may be."""

    def build():
        import diffusers

        class Placed(diffusers.FluxTransformer2DModel):
            def forward(self, hidden_states, encoder_hidden_states, **given):
                places = [torch.arange(3.0 * x.shape[1]).view(-1, 3) for x in (hidden_states, encoder_hidden_states)]
                return super().forward(
                    hidden_states, encoder_hidden_states, img_ids=places[0], txt_ids=places[1], **given
                )

        return Placed(**options)

    return build


def _flux_inputs(n, t):
    return {
        "hidden_states": torch.randn(n, 6, 4),
        "encoder_hidden_states": torch.randn(n, t, 8),
        "pooled_projections": torch.randn(n, 6),
        "timestep": torch.rand(n),
    }


_BLOCKS = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}
_UNET = {"sample_size": 8, "in_channels": 3, "out_channels": 3, **_BLOCKS}
_CROSS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 8,
    "attention_head_dim": 2,
}
_CODER = {
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "latent_channels": 4,
    **_BLOCKS,
}
_TRANSFORMER = {"sample_size": 8, "patch_size": 2, "num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 2}

MODELS = {
    "UNet2DModel": Model(
        _of(
            "UNet2DModel",
            **_UNET,
            attention_head_dim=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        _noisy,
    ),
    "UNet2DModel (ResNet sampling)": Model(
        _of(
            "UNet2DModel",
            **_UNET,
            attention_head_dim=4,
            down_block_types=("ResnetDownsampleBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "ResnetUpsampleBlock2D"),
            resnet_time_scale_shift="scale_shift",
        ),
        _noisy,
    ),
    "UNet2DConditionModel": Model(_of("UNet2DConditionModel", **_UNET, **_CROSS), _conditioned),
    "UNet2DConditionModel (linear projection)": Model(
        _of("UNet2DConditionModel", **_UNET, **_CROSS, use_linear_projection=True, only_cross_attention=True),
        _conditioned,
    ),
    "DiTTransformer2DModel": Model(
        _of(
            "DiTTransformer2DModel",
            **_TRANSFORMER,
            in_channels=3,
            out_channels=3,
            num_embeds_ada_norm=5,
            norm_type="ada_norm_zero",
            norm_elementwise_affine=False,
            norm_num_groups=1,
        ),
        _classes,
    ),
    "Transformer2DModel": Model(
        _of(
            "Transformer2DModel",
            num_attention_heads=2,
            attention_head_dim=4,
            in_channels=8,
            num_layers=2,
            norm_num_groups=4,
            cross_attention_dim=8,
        ),
        lambda n, t: {"hidden_states": torch.randn(n, 8, 4, 4), "encoder_hidden_states": torch.randn(n, t, 8)},
    ),
    "PixArtTransformer2DModel": Model(
        _of(
            "PixArtTransformer2DModel",
            **_TRANSFORMER,
            in_channels=4,
            out_channels=4,
            cross_attention_dim=8,
            caption_channels=8,
            norm_num_groups=1,
            norm_elementwise_affine=False,
            norm_type="ada_norm_single",
            use_additional_conditions=False,
        ),
        _text,
    ),
    "SD3Transformer2DModel": Model(
        _of(
            "SD3Transformer2DModel",
            **_TRANSFORMER,
            in_channels=4,
            out_channels=4,
            joint_attention_dim=8,
            caption_projection_dim=8,
            pooled_projection_dim=6,
            pos_embed_max_size=8,
        ),
        lambda n, t: _text(n, t) | {"pooled_projections": torch.randn(n, 6)},
    ),
    "FluxTransformer2DModel": Model(
        _flux(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=8,
            pooled_projection_dim=6,
            axes_dims_rope=(2, 2, 4),
        ),
        _flux_inputs,
    ),
    "AuraFlowTransformer2DModel": Model(
        _of(
            "AuraFlowTransformer2DModel",
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=4,
            num_attention_heads=2,
            joint_attention_dim=8,
            caption_projection_dim=8,
            out_channels=4,
            pos_embed_max_size=16,
        ),
        lambda n, t: _text(n, t) | {"timestep": torch.rand(n)},
    ),
    "UVit2DModel": Model(
        _of(
            "UVit2DModel",
            hidden_size=8,
            cond_embed_dim=8,
            encoder_hidden_size=8,
            vocab_size=20,
            codebook_size=18,
            in_channels=8,
            block_out_channels=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            micro_cond_encode_dim=4,
            micro_cond_embed_dim=20,
            intermediate_size=12,
            block_num_heads=2,
            sample_size=4,
            num_res_blocks=1,
        ),
        lambda n, t: {
            "input_ids": torch.randint(0, 18, (n, 4, 4)),
            "encoder_hidden_states": torch.randn(n, t, 8),
            "pooled_text_emb": torch.randn(n, 8),
            "micro_conds": torch.rand(n, 5),
        },
    ),
    "PriorTransformer": Model(
        _of(
            "PriorTransformer",
            num_attention_heads=2,
            attention_head_dim=4,
            num_layers=2,
            embedding_dim=8,
            num_embeddings=5,
            additional_embeddings=4,
        ),
        lambda n, t: {
            "hidden_states": torch.randn(n, 8),
            "timestep": torch.randint(0, 100, (n,)),
            "proj_embedding": torch.randn(n, 8),
            "encoder_hidden_states": torch.randn(n, 5, 8),
        },
    ),
    "AutoencoderKL": Model(_of("AutoencoderKL", **_CODER), _images),
    "VQModel": Model(_of("VQModel", **{**_CODER, "latent_channels": 3}, num_vq_embeddings=12), _images),
    "AsymmetricAutoencoderKL": Model(
        _of(
            "AsymmetricAutoencoderKL",
            down_block_types=_CODER["down_block_types"],
            up_block_types=_CODER["up_block_types"],
            down_block_out_channels=(8, 8),
            up_block_out_channels=(8, 8),
            layers_per_down_block=1,
            layers_per_up_block=1,
            norm_num_groups=4,
            latent_channels=4,
        ),
        _images,
    ),
    "ControlNetModel": Model(
        _of(
            "ControlNetModel",
            in_channels=3,
            down_block_types=_CROSS["down_block_types"],
            cross_attention_dim=8,
            attention_head_dim=2,
            conditioning_embedding_out_channels=(8, 8),
            **_BLOCKS,
        ),
        lambda n, t: _conditioned(n, t) | {"controlnet_cond": torch.randn(n, 3, 16, 16)},
    ),
}
