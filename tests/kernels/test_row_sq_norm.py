"""row_sq_norm against fp64."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from kernel_cases import BF16, DEVICE, FP16, FP32, LAYOUTS, Guarded, assert_close, call, few, identical, wide

from dpfast.kernels import row_sq_norm


@few
@given(
    N=st.integers(0, 5),
    T=st.integers(0, 70),
    D=st.integers(1, 130) | st.sampled_from([512, 513, 1030]),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    layout=st.sampled_from(LAYOUTS),
)
def test_any_shape_and_layout(N, T, D, dtype, layout):
    x = Guarded(N, T, D, dtype, layout)
    out = call(row_sq_norm, x)
    assert out.dtype == FP32
    assert_close(out, wide(x).square().sum(2))


def test_no_features():
    assert torch.equal(row_sq_norm(torch.ones(2, 3, 0)), torch.zeros(2, 3))


@pytest.mark.parametrize("D", [7, 600])
def test_a_row_is_bitwise_the_same_in_any_batch(D):
    x = Guarded(5, 9, D, BF16).tensor
    out = row_sq_norm(x)
    permutation = torch.tensor([3, 0, 4, 1, 2], device=DEVICE)
    assert identical(row_sq_norm(x[permutation]), out[permutation])
    for n in range(5):
        assert identical(row_sq_norm(x[n : n + 1].clone()), out[n : n + 1])


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 3, 4, dtype=torch.float64),
        torch.ones(2, 3),
        torch.ones(2, 4, 3).transpose(1, 2),
        torch.ones(2, 3, 1).expand(2, 3, 4),
    ],
    ids=["fp64", "2-D", "transposed", "expanded features"],
)
def test_refuses_what_it_would_read_wrongly(x):
    with pytest.raises(ValueError):
        row_sq_norm(x)
