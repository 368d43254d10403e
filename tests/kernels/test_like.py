"""Calls on tensors that are known to be alike do what the launcher does, and go its way where they cannot be known."""

import sys

import pytest
import torch
from kernel_cases import DEVICE

from dpfast import kernels
from dpfast.kernels import _repeat
from dpfast.kernels._launch import launch

N, T, D, P = 2, 5, 16, 48  # multiples of 16: Triton 3.4's interpreter asks that of a descriptor's rows
OF_PRODUCT = {"norm": True, "row_products": True, "partials": True}


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(_repeat, "_DEVICES", {"cpu", "cuda"})


@pytest.fixture
def asked(monkeypatch):
    """Launches that a launcher's own lines have started, and looks at what tensors are."""
    seen = []

    def counted(kernel, *of, **arguments):
        seen.append("launch")
        launch(kernel, *of, **arguments)

    def looked(*of):
        seen.append("look")
        return kind(*of)

    kind = _repeat._kind
    monkeypatch.setattr(_repeat, "_kind", looked)
    for name, module in list(sys.modules.items()):
        if name.startswith("dpfast.kernels.") and hasattr(module, "launch") and name != "dpfast.kernels._launch":
            monkeypatch.setattr(module, "launch", counted)
    return seen


def rows(seed, *shape, dtype=torch.bfloat16, offset=0):
    values = torch.randn(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(seed)).to(dtype)
    buffer = torch.zeros(len(values) + offset, dtype=dtype, device=DEVICE)
    buffer[offset:] = values.to(DEVICE)
    return buffer[offset:].view(shape)


def pair(seed, n=N, **of):
    return rows(seed, n, T, D, **of), rows(seed + 50, n, T, P, **of)


def fresh(launcher):
    return _repeat.repeats(launcher.__wrapped__)


def same(one, other):
    one, other = ((x,) if isinstance(x, torch.Tensor) else x for x in (one, other))
    assert type(one) is type(other)
    for x, y in zip(one, other, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (x.shape == y.shape and x.stride() == y.stride() and torch.equal(x, y))


def test_one_is_made_without_a_look(asked):
    like = kernels.Like(fresh(kernels.outer_product), **OF_PRODUCT)
    for seed in (1, 2, 3):
        asked.clear()
        found = like(*pair(seed))
        assert bool(asked) == (seed == 1)
        same(found, kernels.outer_product.__wrapped__(*pair(seed), **OF_PRODUCT))


def test_tensors_have_names(asked):
    like = kernels.Like(fresh(kernels.gram_partials), "row_norm_activations", "row_norm_backprops")
    for seed in (1, 2, 3):
        a, b = pair(seed)
        norms = kernels.row_norm.__wrapped__(a), kernels.row_norm.__wrapped__(b)
        asked.clear()
        found = like(a, b, *norms)
        assert bool(asked) == (seed == 1)
        by_name = {"row_norm_activations": norms[0], "row_norm_backprops": norms[1]}
        same(found, kernels.gram_partials.__wrapped__(a, b, **by_name))


def test_another_number_of_samples_is_another_call(asked):
    like = kernels.Like(fresh(kernels.outer_product), **OF_PRODUCT)
    for n in (2, 3, 1, 3, 2, 1):
        same(like(*pair(n, n)), kernels.outer_product.__wrapped__(*pair(n, n), **OF_PRODUCT))
    asked.clear()
    like(*pair(7, 3))
    assert not asked


def test_so_is_one_of_other_layers(asked):
    """Several layers' rows of one number of samples stand behind a first dimension that is always 1."""
    like = kernels.Like(fresh(kernels.weighted_rows))
    for n in (2, 3, 2, 3):
        values, weights = rows(n, 1, n, 8, dtype=torch.float32), rows(9, n, dtype=torch.float32)
        same(like(values, weights), kernels.weighted_rows.__wrapped__(values, weights))


def test_a_tensor_off_its_alignment_is_looked_at(asked):
    like = kernels.Like(fresh(kernels.outer_product), **OF_PRODUCT)
    like(*pair(1))
    inputs = pair(2, offset=1)
    asked.clear()
    same(like(*inputs), kernels.outer_product.__wrapped__(*inputs, **OF_PRODUCT))
    assert asked


def test_a_call_that_does_more_than_launch_is_never_known(asked):
    tile = kernels._tiles.Tile(16, 16, 16, 0, 4, 1, "a test's")
    like = kernels.Like(fresh(kernels.outer_norm), tile=tile)  # of two tiles, whose sums are added up
    for seed in (1, 2, 3):
        asked.clear()
        same(like(*pair(seed)), kernels.outer_norm.__wrapped__(*pair(seed), tile=tile))
        assert asked


def test_a_part_of_a_call_is_written_down_with_it():
    """Else what is written down of the whole would lack it."""
    like = kernels.Like(kernels.row_norm)
    like(rows(1, N, T, D))
    whole = _repeat.repeats(lambda x: like(x))
    for seed in (1, 2, 3):
        same(whole(rows(seed, N, T, D)), kernels.row_norm.__wrapped__(rows(seed, N, T, D)))


def test_several_at_once(asked):
    """Known ones, one of another number of samples, and one off its alignment, in the order in which they came."""
    like = kernels.Like(fresh(kernels.outer_product), **OF_PRODUCT)
    like(*pair(1))
    calls = [pair(1), pair(2), pair(3, 4), pair(4, offset=1), pair(5), pair(6, 4)]
    asked.clear()
    found = like.each(calls)
    assert asked
    for one, inputs in zip(found, calls, strict=True):
        same(one, kernels.outer_product.__wrapped__(*inputs, **OF_PRODUCT))
    assert len({x.data_ptr() for of in found for x in (of.grad_sample, of.sq_norm)}) == 2 * len(calls)
    asked.clear()
    assert len(like.each([pair(1), pair(2)])) == 2 and like.each([]) == []
    assert not asked
