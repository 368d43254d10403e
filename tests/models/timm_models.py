"""Models of timm, one or two a family, made small by the arguments of their own constructors."""

import torch
from harness import Model

_VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 2}
_STAGES = {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16)}
_DIMS = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
_RESNET = {"layers": (1, 1, 1, 1), "channels": (4, 6, 8, 12)}
_WINDOWS = {"img_size": 32, "patch_size": 4, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2)}

TABLE = {  # name: (arguments, size of the images)
    "test_vit": (_VIT, 16),
    "test_vit2": (_VIT, 16),
    "test_vit3": (_VIT, 16),
    "deit3_small_patch16_224": (_VIT, 16),
    "flexivit_small": (_VIT, 16),
    "beit_base_patch16_224": (_VIT, 16),
    "beitv2_base_patch16_224": (_VIT | {"use_shared_rel_pos_bias": True, "use_rel_pos_bias": False}, 16),
    "cait_xs24_384": (_VIT, 16),
    "convit_tiny": (_VIT | {"local_up_to_layer": 1}, 16),
    "vit_small_patch16_dinov3": (_VIT, 16),
    "eva02_tiny_patch14_224": (_VIT, 16),
    "vit_relpos_small_patch16_224": (_VIT, 16),
    "test_vit_relpos": (_VIT, 16),
    "vit_srelpos_small_patch16_224": (_VIT, 16),
    "samvit_base_patch16_224": (
        _VIT | {"window_size": 2, "img_size": 32, "global_attn_indexes": (1,), "neck_chans": 8},
        32,
    ),
    "deepseek_vit_412m": (_VIT, 16),
    "gemma4_vit_167m": (
        _VIT | {"head_dim": 4, "num_kv_heads": 2, "intermediate_size": 12, "img_size": 24, "patch_size": 8},
        24,
    ),
    "qwen3_vit_88m": (_VIT, 16),
    "tnt_s_patch16_224": (
        _VIT
        | {
            "num_heads": None,
            "inner_dim": 4,
            "num_heads_inner": 2,
            "num_heads_outer": 2,
            "patch_size": 16,
            "img_size": 32,
        },
        32,
    ),
    "swin_tiny_patch4_window7_224": (_WINDOWS | {"window_size": 4}, 32),
    "swinv2_tiny_window8_256": (_WINDOWS | {"window_size": 4}, 32),
    "swinv2_cr_tiny_224": (_WINDOWS | {"window_size": 4}, 32),
    "davit_tiny": (_STAGES | {"num_heads": (2, 2, 2, 2), "window_size": 2}, 32),
    "pvt_v2_b0": (_STAGES | {"num_heads": (2, 2, 2, 2)}, 32),
    "twins_svt_small": (
        _STAGES | {"img_size": 32, "num_heads": (2, 2, 2, 2), "wss": (2, 2, 1, 1), "sr_ratios": (2, 2, 1, 1)},
        32,
    ),
    "twins_pcpvt_small": (_STAGES | {"img_size": 32, "num_heads": (2, 2, 2, 2), "sr_ratios": (2, 2, 1, 1)}, 32),
    "hiera_tiny_224": ({"img_size": 32, "embed_dim": 8, "num_heads": 1, "stages": (1, 1, 1), "q_pool": 2}, 32),
    "visformer_tiny": ({"img_size": 32, "embed_dim": 16, "init_channels": 8, "depth": (1, 1, 1), "num_heads": 2}, 32),
    "pit_ti_224": (
        {"img_size": 32, "patch_size": 8, "stride": 4, "base_dims": (4, 4, 4), "depth": (1, 1, 1), "heads": (2, 2, 2)},
        32,
    ),
    "swiftformer_xs": ({"img_size": 32, "layers": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16)}, 32),
    "edgenext_xx_small": (_DIMS | {"heads": (2, 2, 2, 2)}, 32),
    "test_mambaout": (_DIMS, 32),
    "test_convnext": (_DIMS, 32),
    "convnextv2_atto": (_DIMS, 32),
    "inception_next_atto": ({"depths": (1, 1, 1, 1), "dims": (16, 16, 16, 16)}, 32),
    "sequencer2d_s": (
        {
            "img_size": 32,
            "layers": (1, 1, 1, 1),
            "embed_dims": (8, 8, 8, 8),
            "hidden_sizes": (4, 4, 4, 4),
            "patch_sizes": (4, 2, 1, 1),
        },
        32,
    ),
    "densenet121": ({"growth_rate": 4, "block_config": (1, 1), "bn_size": 2}, 32),
    "dla34": ({"levels": (1, 1, 1, 1, 1, 1), "channels": (4, 4, 8, 8, 8, 8)}, 32),
    "dpn48b": ({"k_sec": (1, 1, 1, 1), "inc_sec": (4, 4, 4, 4), "k_r": 4, "groups": 2, "num_init_features": 8}, 32),
    "resnet18": (_RESNET, 32),
    "resnet26": (_RESNET, 32),
    "test_resnet": (_RESNET, 32),
    "seresnet18": (_RESNET, 32),
    "ecaresnet26t": (_RESNET, 32),
    "resnetblur18": (_RESNET, 32),
    "skresnet18": (_RESNET | {"channels": (8, 8, 8, 8)}, 32),
    "res2net50_14w_8s": (_RESNET | {"channels": (8, 8, 8, 8)}, 32),
    "resnest14d": (_RESNET | {"channels": (8, 8, 8, 8)}, 32),
    "resnetv2_18": ({"layers": (1, 1), "channels": (8, 8), "stem_chs": 8}, 32),
    "legacy_seresnet18": ({"layers": (1, 1, 1, 1)}, 32),
    "starnet_s050": ({"base_dim": 8, "depths": (1, 1, 1, 1)}, 32),
    "fasternet_t0": ({"embed_dim": 8, "depths": (1, 1, 1, 1), "feature_dim": 16}, 32),
    "fastvit_t8": ({"layers": (1, 1, 1, 1), "embed_dims": (8, 8, 8, 8)}, 64),
    "repvit_m0_9": ({"embed_dim": (8, 8), "depth": (1, 1)}, 32),
    "shvit_s1": ({"embed_dim": (16, 32, 48), "partial_dim": (8, 8, 8), "depth": (1, 1, 1)}, 64),
    "efficientvim_m1": ({"embed_dim": (8, 8, 8), "depths": (1, 1, 1), "state_dim": (4, 4, 4)}, 64),
    "efficientvit_b0": (
        {"widths": (8, 8, 8, 8, 8), "depths": (1, 1, 1, 1, 1), "head_dim": 4, "head_widths": (12, 12)},
        32,
    ),
    "efficientvit_l1": (
        {"widths": (8, 8, 8, 8, 8), "depths": (1, 1, 1, 1, 1), "head_dim": 4, "head_widths": (12, 12)},
        32,
    ),
    "cspnext_s": ({"deepen_factor": 0.2, "widen_factor": 0.125}, 32),
    "rexnet_100": ({"width_mult": 0.25, "depth_mult": 0.34}, 32),
    "csatv2": ({"dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1), "transformer_depths": (0, 0, 1, 1)}, 64),
    "crossvit_tiny_240": (
        _VIT
        | {
            "img_scale": (1.0, 1.0),
            "patch_size": (4, 8),
            "embed_dim": (8, 12),
            "depth": ((1, 1, 0),),
            "num_heads": (2, 2),
        },
        16,
    ),
    "coat_lite_tiny": ({"img_size": 32, "embed_dims": (8, 8, 8, 8), "serial_depths": (1, 1, 1, 1), "num_heads": 8}, 32),
    "coat_tiny": (
        {
            "img_size": 32,
            "embed_dims": (8, 8, 8, 8),
            "serial_depths": (1, 1, 1, 1),
            "num_heads": 8,
            "parallel_depth": 1,
        },
        32,
    ),
    "tiny_vit_5m_224": (
        _STAGES | {"num_heads": (2, 2, 2, 2), "window_sizes": (2, 2, 2, 1), "drop_path_rate": 0.0},
        32,
        True,
    ),
    "efficientformerv2_s0": (_STAGES | {"img_size": 64, "num_vit": 1, "drop_path_rate": 0.0}, 64, True),
    "efficientvit_m0": (
        {
            "img_size": 64,
            "embed_dim": (8, 8, 8),
            "key_dim": (4, 4, 4),
            "depth": (1, 1, 1),
            "num_heads": (2, 2, 2),
            "window_size": (2, 2, 2),
        },
        64,
        True,
    ),
    "rdnet_tiny": (
        {
            "growth_rates": (16, 16),
            "num_blocks_list": (1, 1),
            "is_downsample_block": (None, True),
            "block_type": ("Block", "BlockESE"),
            "num_init_features": 16,
        },
        32,
    ),
    "test_efficientnet": ({}, 32),
    "test_efficientnet_ln": ({}, 32),
    "test_efficientnet_evos": ({}, 32),
    "test_efficientnet_gn": ({}, 32),
    "test_byobnet": ({}, 32),
    "test_nfnet": ({}, 32),
    "test_maxvit": ({"img_size": 32}, 32),
    "test_coatnet": ({"img_size": 32}, 32),
    "tinynet_e": ({}, 32),
    "lcnet_035": ({}, 32),
    "mobilenetv3_small_050": ({}, 32),
    "ghostnet_050": ({}, 32),
    "mobilevit_xxs": ({}, 32),
    "mobilevitv2_050": ({}, 32),
    "regnetx_002": ({}, 32),
    "regnety_002": ({}, 32),
    "ese_vovnet19b_slim_dw": ({}, 32),
    "mixnet_s": ({}, 32),
}


def _built(module, name, **options):
    """A class of timm's, where the function that has the model's name takes no other sizes."""

    def build():
        from importlib import import_module

        models = import_module(f"timm.models.{module}")
        given = {key: getattr(models, value[1:]) if _is_name(value) else value for key, value in options.items()}
        return getattr(models, name)(num_classes=3, **given)

    return build


def _is_name(value):
    return isinstance(value, str) and value.startswith(".")


_MIXER = {"img_size": 16, "patch_size": 8, "embed_dim": 8, "num_blocks": 2}

CLASSES = {  # name: (what builds it, size of the images, in training mode)
    "MlpMixer": (_built("mlp_mixer", "MlpMixer", **_MIXER), 16, False),
    "ConvMixer": (_built("convmixer", "ConvMixer", dim=8, depth=2, kernel_size=3, patch_size=4), 16, False),
    "GlobalContextVit": (
        _built(
            "gcvit",
            "GlobalContextVit",
            img_size=64,
            window_ratio=None,
            window_size=(2, 2, 2, 2),
            embed_dim=8,
            depths=(2, 1, 1, 1),
            num_heads=(1, 2, 2, 2),
        ),
        64,
        False,
    ),
    "FocalNet": (_built("focalnet", "FocalNet", embed_dim=8, depths=(1, 1)), 32, False),
    "Nest": (
        _built("nest", "Nest", img_size=32, num_levels=2, embed_dims=(8, 8), num_heads=(2, 2), depths=(1, 1)),
        32,
        False,
    ),
    "VOLO": (
        _built(
            "volo",
            "VOLO",
            layers=(1, 1),
            img_size=32,
            embed_dims=(8, 8),
            num_heads=(2, 2),
            stem_hidden_dim=8,
            downsamples=(True, False),
            outlook_attention=(True, False),
            use_mix_token=False,
        ),
        32,
        False,
    ),
    "MetaFormer (ConvFormer)": (
        _built("metaformer", "MetaFormer", depths=(1, 1), dims=(8, 8), token_mixers=".SepConv"),
        32,
        False,
    ),
    "MetaFormer (PoolFormer)": (_built("metaformer", "MetaFormer", depths=(1, 1), dims=(8, 8)), 32, False),
    "ResNetV2 (BiT)": (
        _built("resnetv2", "ResNetV2", layers=(1, 1), channels=(128, 128), stem_chs=32, conv_layer=".StdConv2d"),
        32,
        False,
    ),
}


def _row(name, options, size, training=False):
    def build():
        import timm

        given = {key: value for key, value in options.items() if value is not None}
        return timm.create_model(name, num_classes=3, **given)

    return Model(build, _images(size), training=training)


def _images(size):
    return lambda n, t: (torch.randn(n, 3, size, size),)


MODELS = {name: _row(name, *row) for name, row in TABLE.items()} | {
    name: Model(build, _images(size), training=training) for name, (build, size, training) in CLASSES.items()
}
