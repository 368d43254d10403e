"""Validation, the cost model and signatures. Launching itself is what every other file here tests."""

from types import SimpleNamespace

import pytest
import torch
from ahead import specialize

from dpfast.kernels import _launch


def test_flops_of_products_count_a_multiply_add_twice():
    for verb in ("outer_product", "outer_norm", "weighted_sum"):
        assert _launch.flops(verb, N=3, T=5, D=7, P=11) == 2 * 3 * 5 * 7 * 11
    assert _launch.flops("row_sq_norm", N=3, T=5, D=7, P=0) == 2 * 3 * 5 * 7


def test_flops_of_a_gram_norm_count_the_triangle_in_blocks():
    D, P = 7, 11
    # one position a block: 5·6/2 inner products
    assert _launch.flops("gram_norm", 3, 5, D, P) == 2 * 3 * 15 * (D + P)
    # blocks {0, 1}, {2, 3}, {4}: three diagonal ones of 4, 4 and 1, below them 4, 2 and 2
    assert _launch.flops("gram_norm", 3, 5, D, P, block_t=2) == 2 * 3 * 17 * (D + P)
    # one block is the whole square
    assert _launch.flops("gram_norm", 3, 5, D, P, block_t=128) == 2 * 3 * 25 * (D + P)


def test_bytes_count_each_input_and_output_once():
    N, T, D, P = 3, 5, 7, 11
    read = N * T * (D + P) * 2
    assert _launch.bytes_moved("row_sq_norm", N, T, D, P) == N * T * D * 2 + N * T * 4
    assert _launch.bytes_moved("outer_product", N, T, D, P) == read + N * D * P * 4
    assert _launch.bytes_moved("outer_product", N, T, D, P, out_itemsize=2) == read + N * D * P * 2
    assert _launch.bytes_moved("outer_norm", N, T, D, P) == read + N * 4
    assert _launch.bytes_moved("gram_norm", N, T, D, P, itemsize=4) == 2 * read + N * 4
    assert _launch.bytes_moved("weighted_sum", N, T, D, P) == read + N * 4 + D * P * 4


@pytest.mark.parametrize("model", [_launch.flops, _launch.bytes_moved])
def test_no_cost_of_an_unknown_verb(model):
    with pytest.raises(ValueError, match="no verb"):
        model("norm", 1, 1, 1, 1)


def test_a_single_feature_may_have_any_stride():
    _launch.validate(torch.ones(2, 3, 5)[:, :, ::5])


def test_only_a_mixed_pair_is_copied():
    half, single = torch.ones(2, 3, 4, dtype=torch.bfloat16), torch.ones(2, 3, 5)
    assert all(x is half for x in _launch.promote(half, half))
    a, b = _launch.promote(half, single)
    assert a.dtype == torch.float32
    assert b is single
    assert [x.dtype for x in _launch.promote(half, half.half())] == [torch.float32] * 2
    # Positions before samples, as a batch-second model has them: the copy's rows are whole too.
    a, _ = _launch.promote(half.transpose(0, 1), single.transpose(0, 1))
    _launch.validate(a)


def parameter(name, is_constexpr=False, do_not_specialize=False):
    return SimpleNamespace(name=name, is_constexpr=is_constexpr, do_not_specialize=do_not_specialize)


def test_a_signature_specializes_as_the_just_in_time_compiler_does():
    kernel = SimpleNamespace(
        params=[
            parameter("a_ptr"),
            parameter("b_ptr"),
            parameter("absent_ptr"),
            parameter("one"),
            parameter("sixteen"),
            parameter("T", do_not_specialize=True),
            parameter("far"),
            parameter("BLOCK", is_constexpr=True),
        ]
    )
    buffer = torch.empty(64, dtype=torch.bfloat16)
    arguments = {
        "a_ptr": buffer,
        "b_ptr": buffer[1:],
        "absent_ptr": None,
        "one": 1,
        "sixteen": 16,
        "T": 1,
        "far": 2**31 + 1,
        "BLOCK": 16,
    }
    signature, constexprs, aligned = specialize(kernel, arguments)
    assert signature == {
        "a_ptr": "*bf16",
        "b_ptr": "*bf16",
        "absent_ptr": "constexpr",
        "one": "constexpr",
        "sixteen": "i32",
        "T": "i32",
        "far": "i64",
        "BLOCK": "constexpr",
    }
    assert constexprs == {"absent_ptr": None, "one": 1, "BLOCK": 16}
    assert aligned == ["a_ptr", "sixteen"]
