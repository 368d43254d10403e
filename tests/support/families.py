"""One row a layer family: what stands in docs/layers.md, and the cases that prove it."""

import pytest
import torch
from torch import nn

N = 5


class PackedLstm(nn.Module):
    """Samples of different lengths, a given first state, two layers, both directions."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(4, 3, 2, bidirectional=True)

    def forward(self, x, lengths, h, c):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, state = self.inner(packed, (h.movedim(0, 1).contiguous(), c.movedim(0, 1).contiguous()))
        return nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0].sum(1), *(s.movedim(1, 0) for s in state)


class Masked(nn.Module):
    """Attention with both kinds of mask, samples in the second dimension."""

    def __init__(self, need_weights):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2)
        self.need_weights = need_weights

    def forward(self, x, padding):
        x = x.transpose(0, 1)
        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        options = {"need_weights": self.need_weights, "average_attn_weights": False}
        output, weights = self.inner(x, x, x, key_padding_mask=padding, attn_mask=mask, **options)
        return output.transpose(0, 1), weights


class TimeFirst(nn.Module):
    """A stack that has its samples in the second dimension, inside a model that has them in the first."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        output = self.inner(*(x.transpose(0, 1) for x in inputs))
        output = output[0] if isinstance(output, tuple) else output
        return output.transpose(0, 1)


class Bags(nn.Module):
    """Bags of different sizes, one of them empty, with weights."""

    def __init__(self, **options):
        super().__init__()
        self.inner = nn.EmbeddingBag(7, 3, mode="sum", include_last_offset=True, **options)

    def forward(self, indices, lengths, weights):
        inside = torch.arange(indices.shape[1]) < lengths.unsqueeze(1)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return self.inner(indices[inside], offsets, per_sample_weights=weights[inside])


class Free(nn.Module):
    """A cls token, a position table that is broadcast, LayerScale, lists of parameters, a mask given by keyword."""

    def __init__(self):
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(6, 4))
        self.scale = nn.Parameter(torch.zeros(4))
        self.biases = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.randn(()))})
        self.inner = nn.Linear(4, 4)

    def forward(self, x, *, mask):
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.positions
        x = x + self.biases[0] * self.biases[1] * self.table["a"]
        return x + self.scale * (mask @ torch.tanh(self.inner(x)))


class OfFree(nn.Module):
    """``Free`` behind a layer; the mask is (T, T) and T = N."""

    def __init__(self):
        super().__init__()
        self.first, self.free = nn.Linear(4, 4), Free()

    def forward(self, x):
        mask = torch.ones(6, 6, dtype=x.dtype).tril() * torch.arange(1.0, 7.0, dtype=x.dtype)
        return self.free(self.first(x), mask=mask)


def _floats(*shape):
    return torch.randn(N, *shape)


def _indices(*shape):
    return torch.randint(0, 7, (N, *shape))


_PADDING = torch.arange(3) > torch.tensor([[0], [1], [2], [0], [1]])
_STATE = (_floats(3), _floats(3))

# family: (rule as explain names it, [(what, module, inputs)])
FAMILIES = {
    "nn.Linear": ("linear", lambda: [
        ("2-D", nn.Linear(3, 4), (_floats(3),)),
        ("5-D", nn.Linear(3, 4, bias=False), (_floats(2, 3, 2, 3),)),
    ]),
    "Conv1D of Hugging Face": ("transposed_linear", lambda: [
        ("3-D", pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 3), (_floats(2, 3),)),
    ]),
    "nn.Bilinear": ("bilinear", lambda: [
        ("2-D", nn.Bilinear(3, 4, 2), (_floats(3), _floats(4))),
        ("3-D", nn.Bilinear(3, 4, 2, bias=False), (_floats(6, 3), _floats(6, 4))),
    ]),
    "nn.Conv1d": ("convolution", lambda: [
        ("stride, padding, groups", nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (_floats(4, 11),)),
        ("'same', circular", nn.Conv1d(4, 6, 4, padding="same", padding_mode="circular"), (_floats(4, 11),)),
    ]),
    "nn.Conv2d": ("convolution", lambda: [
        ("stride, padding, dilation", nn.Conv2d(4, 6, 3, (2, 1), (1, 2), (1, 2)), (_floats(4, 8, 9),)),
        ("depthwise, reflect, channels last", nn.Conv2d(4, 8, 3, padding=1, groups=4, padding_mode="reflect"),
         (_floats(4, 6, 5).to(memory_format=torch.channels_last),)),
    ]),
    "nn.Conv3d": ("convolution", lambda: [
        ("'same', replicate", nn.Conv3d(2, 3, (1, 2, 3), padding="same", padding_mode="replicate"),
         (_floats(2, 4, 3, 5),)),
        ("'valid'", nn.Conv3d(2, 3, 2, padding="valid", bias=False), (_floats(2, 3, 3, 4),)),
    ]),
    "nn.ConvTranspose1d, 2d, 3d": ("transposed_convolution", lambda: [
        ("groups, output padding", nn.ConvTranspose1d(4, 6, 3, 2, 1, output_padding=1, groups=2), (_floats(4, 7),)),
        ("dilation", nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (0, 1), dilation=2), (_floats(4, 4, 5),)),
        ("3d", nn.ConvTranspose3d(2, 3, 2, stride=2), (_floats(2, 2, 3, 2),)),
    ]),
    "nn.Embedding": ("embedding", lambda: [
        ("padding_idx, repeats, expanded", nn.Embedding(7, 3, padding_idx=2), (_indices(1).expand(N, 4),)),
        ("3-D", nn.Embedding(7, 3), (_indices(3, 4),)),
    ]),
    "nn.EmbeddingBag": ("embedding_bag", lambda: [
        ("sum, padding_idx", nn.EmbeddingBag(7, 3, mode="sum", padding_idx=2), (_indices(6),)),
        ("mean, padding_idx", nn.EmbeddingBag(7, 3, mode="mean", padding_idx=2), (_indices(6),)),
        ("max", nn.EmbeddingBag(7, 3, mode="max"), (_indices(6),)),
        ("offsets, weights, an empty bag", Bags(padding_idx=2),
         (_indices(4), torch.tensor([3, 0, 4, 1, 2]), _floats(4))),
    ]),
    "nn.LayerNorm": ("layer_norm", lambda: [
        ("over two dimensions", nn.LayerNorm((3, 4)), (_floats(6, 3, 4),)),
        ("bias=False", nn.LayerNorm(4, bias=False), (_floats(4),)),
    ]),
    "nn.RMSNorm": ("torch_rms_norm", lambda: [("3-D", nn.RMSNorm(4, eps=1e-3), (_floats(6, 4),))]),
    "nn.GroupNorm": ("group_norm_of_copies", lambda: [
        ("4-D", nn.GroupNorm(2, 6), (_floats(6, 3, 4),)),
        ("2-D", nn.GroupNorm(2, 6), (_floats(6),)),
    ]),
    "nn.InstanceNorm1d, 2d, 3d": ("instance_norm", lambda: [
        ("2d", nn.InstanceNorm2d(3, affine=True), (_floats(3, 4, 5),)),
        ("1d", nn.InstanceNorm1d(3, affine=True), (_floats(3, 5),)),
    ]),
    "nn.MultiheadAttention": ("multihead_attention", lambda: [
        ("self-attention", nn.MultiheadAttention(8, 2, batch_first=True), (_floats(3, 8),) * 3),
        ("other keys and values, bias_kv, zero_attn",
         nn.MultiheadAttention(8, 2, kdim=5, vdim=6, add_bias_kv=True, add_zero_attn=True, batch_first=True),
         (_floats(3, 8), _floats(4, 5), _floats(4, 6))),
        ("cross-attention, bias=False", nn.MultiheadAttention(8, 2, bias=False, batch_first=True),
         (_floats(3, 8), _floats(4, 8), _floats(4, 8))),
        ("masks, batch_first=False", Masked(True), (_floats(3, 8), _PADDING)),
        ("masks, no weights", Masked(False), (_floats(3, 8), _PADDING)),
    ]),
    "nn.TransformerEncoder, Decoder and their layers": ("of their layers", lambda: [
        ("encoder layer", nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True), (_floats(3, 8),)),
        ("decoder layer", nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True), (_floats(3, 8), _floats(4, 8))),
        ("encoder, batch_first=False", TimeFirst(nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12, 0.0), 1, nn.LayerNorm(8), enable_nested_tensor=False)),
         (_floats(3, 8),)),
    ]),
    "nn.LSTM": ("recurrent", lambda: [
        ("2 layers, both directions", nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True), (_floats(5, 4),)),
        ("projection, batch_first=False", TimeFirst(nn.LSTM(4, 3, proj_size=2)), (_floats(5, 4),)),
        ("packed, given states", PackedLstm(),
         (_floats(5, 4), torch.tensor([2, 5, 1, 4, 5]), _floats(4, 3), _floats(4, 3))),
    ]),
    "nn.GRU": ("recurrent", lambda: [
        ("2 layers, bias=False", nn.GRU(4, 3, 2, bias=False, batch_first=True), (_floats(5, 4),)),
    ]),
    "nn.RNN": ("recurrent", lambda: [
        ("relu", nn.RNN(4, 3, nonlinearity="relu", batch_first=True, bidirectional=True), (_floats(5, 4),)),
        ("tanh", nn.RNN(4, 3, batch_first=True), (_floats(5, 4),)),
    ]),
    "nn.LSTMCell, GRUCell, RNNCell": ("cell", lambda: [
        ("LSTM", nn.LSTMCell(4, 3), (_floats(4), _STATE)),
        ("GRU", nn.GRUCell(4, 3), (_floats(4),)),
        ("RNN", nn.RNNCell(4, 3, bias=False), (_floats(4), _floats(3))),
    ]),
    "free parameters (cls token, position table, LayerScale)": ("copies", lambda: [
        ("as many positions as samples", OfFree(), (torch.randn(6, 5, 4),)),
    ]),
    "parametrized layers": ("linear", lambda: [
        ("weight_norm", nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (_floats(4),)),
    ]),
    "nn.PReLU and any other layer without a rule": ("functorch (vmap; no rule)", lambda: [
        ("PReLU", nn.PReLU(3), (_floats(3, 4),)),
    ]),
}  # fmt: skip
