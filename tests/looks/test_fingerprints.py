"""One number for a row's bits: it changes with any of them."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from dpfast.looks.fingerprints import _AT_ONCE, fingerprints

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 3, 5, 8, 31, 4 * _AT_ONCE + 3]


@pytest.mark.parametrize("dtype", DTYPES)
@given(width=st.sampled_from(WIDTHS), data=st.data())
def test_any_change_shows_in_its_row_alone(dtype, width, data):
    """Of one entry or two, in the last bit or the sign, in entries that change places."""
    torch.manual_seed(0)
    x = torch.randn(3, width).to(dtype)
    y = x.clone()
    bits = y.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    places = data.draw(st.lists(st.integers(0, width - 1), min_size=1, max_size=2, unique=True))
    how = data.draw(st.sampled_from(["last bit", "sign", "exchanged"]))
    if how == "exchanged":
        y[1, places] = y[1, places[::-1]]
    else:
        bits[1, places] ^= 1 if how == "last bit" else torch.iinfo(bits.dtype).min
    changed = (fingerprints(x, 0) != fingerprints(y, 0)).tolist()
    assert changed == [False, not torch.equal(x[1], y[1]), False]


def test_of_a_whole_row_of_other_signs():
    for width in (2, 4, 64):
        x = torch.randn(2, width)
        some = torch.ones(width)
        some[1::2] = -1.0  # the upper halves of words
        assert not torch.equal(fingerprints(x, 0), fingerprints(x * some, 0))


def test_zeros_have_no_sign_and_strides_do_not_count():
    x = torch.randn(4, 6, 5)
    assert torch.equal(fingerprints(torch.zeros(2, 3), 0), fingerprints(-torch.zeros(2, 3), 0))
    assert torch.equal(fingerprints(x, 1), fingerprints(x.transpose(0, 1).contiguous(), 0))
    assert torch.equal(fingerprints(x.permute(2, 0, 1), 1), fingerprints(x.permute(0, 2, 1).contiguous(), 0))
    assert torch.equal(fingerprints(x[:1].expand(3, 6, 5), 0), fingerprints(x[0].repeat(3, 1, 1), 0))
    assert fingerprints(torch.zeros(3, 0), 0).tolist() == [0, 0, 0]
    assert fingerprints(torch.zeros(0, 3), 0).tolist() == []  # an expert that nothing was sent to
