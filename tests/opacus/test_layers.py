"""Opacus's own layers in dpfast's modules, against Opacus's modules and a loop over samples."""

import copy

import pytest
import torch
from cases import assert_gradients, clipped_as_told, joined_error
from opacus.grad_sample import GradSampleModule as OpacusModule
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dpfast
from dpfast.testing import loop_over_samples

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook")


class Recurrent(nn.Module):
    def __init__(self, cls, packed, batch_first=True, **options):
        super().__init__()
        self.rnn, self.packed = cls(3, 4, batch_first=batch_first, **options), packed
        self.head = nn.Linear(4 * (2 if self.rnn.bidirectional else 1), 2)

    def forward(self, x, lengths):
        if not self.packed:
            x = x if self.rnn.batch_first else x.transpose(0, 1)
            out = self.rnn(x)[0]
            out = out if self.rnn.batch_first else out.transpose(0, 1)
        else:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            out = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
        return self.head(out.sum(1))


def loss(model, x, lengths):
    return model(x, lengths).square().sum()


def tolerance_beside_cudnn(model, options, exact, x, lengths):
    """1e-5, or on a GPU twice what a loop over samples is off that runs torch's own layer, as dpfast does there."""
    if not x.is_cuda:
        return 1e-5
    ours = Recurrent(getattr(nn, type(model.rnn).__name__.removeprefix("DP")), model.packed, **options)
    ours.load_state_dict(dict(model.named_parameters()))
    return max(1e-5, 2 * joined_error(loop_over_samples(ours, loss, x, lengths, dtype=torch.float32), exact))


@pytest.mark.parametrize("cls", [DPRNN, DPGRU, DPLSTM])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_recurrent_layers(cls, packed, options):
    """Packed sequences reach a layer with ever fewer samples, and in another order than the head sees them."""
    model = Recurrent(cls, packed, **options)
    x, lengths = torch.randn(4, 5, 3), torch.tensor([2, 5, 1, 4])
    exact = loop_over_samples(model, loss, x, lengths)
    tolerance = tolerance_beside_cudnn(model, options, exact, x, lengths)
    keys = list(model.state_dict())
    wrapped = dpfast.GradSampleModule(model, loss_reduction="sum")
    loss(wrapped, x, lengths).backward()
    assert_gradients({name: p.grad_sample for name, p in model.named_parameters()}, exact, tolerance)
    wrapped.zero_grad()
    wrapped.to_standard_module()
    assert list(model.state_dict()) == keys
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=0.5)
    loss(wrapped, x, lengths).backward()
    clipped = clipped_as_told(wrapped.get_clipping_coef(), exact, 0.5, 1e-7 if x.is_cpu else tolerance)
    assert_gradients({name: p.grad for name, p in model.named_parameters()}, clipped, tolerance)


def test_recurrent_layer_with_samples_in_the_second_dimension():
    model = Recurrent(DPLSTM, packed=False, batch_first=False)
    x, lengths = torch.randn(4, 5, 3), torch.tensor([5] * 4)
    exact = loop_over_samples(model, loss, x, lengths)
    loss(dpfast.GradSampleModule(model, loss_reduction="sum"), x, lengths).backward()
    assert_gradients({name: p.grad_sample for name, p in model.named_parameters()}, exact)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_attention(options):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attention = nn.Linear(3, 8), DPMultiheadAttention(8, 2, **options)

        def forward(self, x):
            x = self.embed(x)
            return self.attention(x, x, x)[0]

    model, x = Attending(), torch.randn(5, 4, 3)
    other = copy.deepcopy(model)
    OpacusModule(other, batch_first=False, loss_reduction="sum")(x).square().sum().backward()
    dpfast.GradSampleModule(model, batch_first=False, loss_reduction="sum")(x).square().sum().backward()
    exact = {name: p.grad_sample for name, p in other.named_parameters()}
    assert_gradients({name: p.grad_sample for name, p in model.named_parameters()}, exact)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_zero_attn": True}])
@pytest.mark.parametrize("positions", [3, 4])
def test_attention_with_samples_first(options, positions):
    model, x = DPMultiheadAttention(8, 2, batch_first=True, **options), torch.randn(4, positions, 8)

    def attend(m, x):
        return m(x, x.flip(1), x.cos())[0].square().sum()

    exact = loop_over_samples(model, attend, x)
    attend(dpfast.GradSampleModule(model, loss_reduction="sum"), x).backward()
    found = {name: p.grad_sample for name, p in model.named_parameters()}
    exact.pop("klinear.bias", None), found.pop("klinear.bias", None)  # softmax cancels it: zero but for rounding
    assert_gradients(found, exact)


def test_attention_whose_layers_disagree_on_where_samples_are():
    with pytest.raises(NotImplementedError, match=r"use nn\.MultiheadAttention"):
        dpfast.GradSampleModule(DPMultiheadAttention(8, 2, batch_first=True, add_bias_kv=True))
