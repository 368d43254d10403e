"""Models of torchaudio, with its compiled parts off."""

import torch
from harness import Model


def _of(name, **options):
    def build():
        import torchaudio

        return getattr(torchaudio.models, name)(**options)

    return build


def _lengths(n, t):
    return (torch.randn(n, t, 8), torch.full((n,), t))


MODELS = {
    "Conformer": Model(
        _of(
            "Conformer",
            input_dim=8,
            num_heads=2,
            ffn_dim=12,
            num_layers=2,
            depthwise_conv_kernel_size=3,
            use_group_norm=True,
        ),
        _lengths,
    ),
    "Emformer": Model(
        _of("Emformer", input_dim=8, num_heads=2, ffn_dim=12, num_layers=2, segment_length=2, right_context_length=1),
        lambda n, t: (torch.randn(n, t, 8), torch.full((n,), t - 1)),
    ),
    "DeepSpeech": Model(_of("DeepSpeech", n_feature=6, n_hidden=8, n_class=3), lambda n, t: (torch.randn(n, 1, t, 6),)),
    "ConvTasNet": Model(
        _of(
            "ConvTasNet",
            enc_kernel_size=4,
            enc_num_feats=8,
            msk_num_feats=8,
            msk_num_hidden_feats=8,
            msk_num_layers=2,
            msk_num_stacks=1,
        ),
        lambda n, t: (torch.randn(n, 1, 32),),
    ),
    "WaveRNN": Model(
        _of(
            "WaveRNN",
            upsample_scales=[2, 2],
            n_classes=8,
            hop_length=4,
            n_res_block=1,
            n_rnn=8,
            n_fc=8,
            kernel_size=3,
            n_freq=6,
            n_hidden=8,
            n_output=8,
        ),
        lambda n, t: (torch.randn(n, 1, 4 * (t - 2)), torch.randn(n, 1, 6, t)),
    ),
    "wav2vec2": Model(
        _of(
            "wav2vec2_model",
            extractor_mode="layer_norm",
            extractor_conv_layer_config=[(8, 4, 2), (8, 3, 2)],
            extractor_conv_bias=False,
            encoder_embed_dim=8,
            encoder_projection_dropout=0.0,
            encoder_pos_conv_kernel=4,
            encoder_pos_conv_groups=2,
            encoder_num_layers=2,
            encoder_num_heads=2,
            encoder_attention_dropout=0.0,
            encoder_ff_interm_features=12,
            encoder_ff_interm_dropout=0.0,
            encoder_dropout=0.0,
            encoder_layer_norm_first=True,
            encoder_layer_drop=0.0,
            aux_num_out=3,
        ),
        lambda n, t: (torch.randn(n, 64),),
    ),
}
