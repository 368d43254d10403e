"""The Linear samplers by the contract of Opacus's: shapes, dtypes, frozen parameters, nothing written to."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import dpfast
from dpfast.errors import InputError
from dpfast.testing import relative_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@settings(max_examples=60)
@given(
    n=st.integers(0, 5),
    middle=st.sampled_from([(), (1,), (7,), (40,), (2, 3), (0,)]),
    d=st.integers(1, 60),
    p=st.integers(1, 60),
    bias=st.booleans(),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    as_list=st.booleans(),
)
def test_samplers_equal_fp64(n, middle, d, p, bias, dtypes, as_list):
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(d, p, bias=bias)
    a, b = (
        (torch.randn((n, *middle, w), generator=generator) + 0.5).to(t) for w, t in zip((d, p), dtypes, strict=True)
    )
    before = a.clone(), b.clone()
    samples = dpfast.compute_linear_grad_sample(layer, [a] if as_list else a, b)
    norms = dpfast.compute_linear_norm_sample(layer, [a] if as_list else a, b)
    expected = torch.float64 if torch.float64 in dtypes else torch.float32
    exact = {layer.weight: torch.einsum("n...p,n...d->npd", b.double(), a.double())}
    if bias:
        exact[layer.bias] = torch.einsum("n...p->np", b.double())
    assert set(samples) == set(norms) == set(exact)
    for parameter, g in exact.items():
        assert samples[parameter].shape == (n, *parameter.shape)
        assert samples[parameter].dtype == norms[parameter].dtype == expected
        assert relative_error(samples[parameter], g) <= 1e-5
        assert norms[parameter].shape == (n,)
        assert relative_error(norms[parameter], torch.linalg.vector_norm(g, dim=tuple(range(1, g.dim())))) <= 1e-5
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])
    assert (a.dtype, b.dtype) == dtypes


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")])
def test_frozen_parameters_are_left_out(frozen):
    layer = nn.Linear(3, 2)
    for name in frozen:
        getattr(layer, name).requires_grad = False
    expected = {p for p in (layer.weight, layer.bias) if p.requires_grad}
    for sampler in (dpfast.compute_linear_grad_sample, dpfast.compute_linear_norm_sample):
        assert set(sampler(layer, [torch.ones(4, 3)], torch.ones(4, 2))) == expected


def test_answers_share_no_memory_with_the_inputs():
    layer = nn.Linear(3, 2)
    b = torch.ones(4, 2)
    layer.weight.requires_grad = False
    dpfast.compute_linear_grad_sample(layer, [torch.ones(4, 3)], b)[layer.bias].zero_()
    assert (b == 1.0).all()


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (torch.ones(4, 3), torch.ones(5, 2), ["(4, 3)", "(5, 2)"]),
        (torch.ones(4, 6, 3), torch.ones(4, 7, 2), ["(4, 6, 3)", "(4, 7, 2)"]),
        (torch.ones(4, 9), torch.ones(4, 2), ["(4, 9)", "(4, 2)", "3 in-features"]),
        (torch.ones(4, 3), torch.ones(4, 9), ["(4, 3)", "(4, 9)", "2 out-features"]),
        (torch.ones(4, 3, device="meta"), torch.ones(4, 2, device="cpu"), ["meta", "cpu"]),
        (torch.ones(4, 3, dtype=torch.int64), torch.ones(4, 2), ["int64", "float32"]),
    ],
)
def test_bad_input_names_the_layer_and_both_shapes(a, b, words):
    layer = nn.Linear(3, 2)
    for sampler in (dpfast.compute_linear_grad_sample, dpfast.compute_linear_norm_sample):
        with pytest.raises(InputError) as error:
            sampler(layer, [a], b)
        assert "Linear(in_features=3, out_features=2" in str(error.value)
        assert all(word in str(error.value) for word in words)
