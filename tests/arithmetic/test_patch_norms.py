"""Gram norms of convolutions from the pixels: as from patches, never too small, the same bits in any batch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dpfast.arithmetic import finished, unfinished_gram_of_patches
from dpfast.factors.patch_product import PatchProduct


def finished_of_patches(*inputs):
    return finished(unfinished_gram_of_patches(*inputs))


def exact(image, rows, kernel, dilation):
    """From the patches, in fp64."""
    image, rows = image.double(), rows.double()
    for i, (k, d) in enumerate(zip(kernel, dilation, strict=True)):
        image = image.unfold(2 + i, d * (k - 1) + 1, 1)[..., ::d]
    dims = len(kernel)
    patches = image.movedim(tuple(range(2 + dims, 2 + 2 * dims)), tuple(range(2, 2 + dims))).flatten(2 + dims)
    return torch.einsum("npt,ndt->npd", rows.flatten(2), patches.flatten(1, -2)).square().sum((1, 2))


@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 14)), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.sampled_from([1.0, 1e-12, 1e15]),
    st.integers(0, 2**16),
)
def test_the_bound_is_above_the_exact_norm_and_near_it(n, channels, p, sides, dtype, scale, seed):
    kernel, dilation, positions = zip(*sides, strict=True)
    sizes = [t + d * (k - 1) for k, d, t in sides]
    generator = torch.Generator().manual_seed(seed)
    image = (scale * torch.randn(n, channels, *sizes, generator=generator, dtype=torch.float64)).to(dtype)
    rows = torch.randn(n, p, *positions, generator=generator, dtype=torch.float64).to(dtype)
    norm, truth = finished_of_patches(image, rows, kernel, dilation), exact(image, rows, kernel, dilation)
    assert (norm.upper >= truth * (1 - 1e-12)).all()
    # Beside what is added up: terms may cancel.
    most = image.double().flatten(1).norm(dim=1) * rows.double().flatten(1).norm(dim=1)
    room = 1e-9 if dtype is torch.float64 else 1e-3
    assert (norm.upper <= truth + room * torch.tensor(kernel).prod() * most.square()).all()


def test_cancelling_positions_stay_below_the_bound():
    """What adds up to next to nothing is where errors are largest beside the norm."""
    torch.manual_seed(0)
    image = torch.randn(4, 16, 6, 6).repeat(1, 1, 1, 2)
    rows = torch.randn(4, 8, 4, 4)
    rows = torch.cat([rows, rows.new_zeros(4, 8, 4, 2), -rows * (1 + 1e-5)], dim=3)
    norm = finished_of_patches(image, rows, (3, 3), (1, 1))
    assert (norm.upper >= exact(image, rows, (3, 3), (1, 1))).all()


@pytest.mark.on_cpu
@pytest.mark.parametrize("size", [8, 14])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_has_the_same_bits_in_any_batch(size, dtype):
    torch.manual_seed(0)
    image, rows = torch.randn(19, 64, size + 2, size + 2, dtype=dtype), torch.randn(19, 32, size, size, dtype=dtype)
    whole = finished_of_patches(image, rows, (3, 3), (1, 1))
    for samples in (slice(0, 1), slice(18, 19), slice(3, 8)):
        part = finished_of_patches(image[samples], rows[samples], (3, 3), (1, 1))
        assert torch.equal(part.value, whole.value[samples]) and torch.equal(part.upper, whole.upper[samples])


@pytest.mark.on_cpu  # which alone goes by pixels
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_take_it_where_it_is_less(groups):
    torch.manual_seed(0)
    image, rows = torch.randn(3, 128, 8, 8), torch.randn(3, 128, 8, 8)
    geometry = {"kernel": (3, 3), "dilation": (1, 1), "groups": groups}
    factor = PatchProduct(image, rows, stride=(1, 1), padding=(1, 1), **geometry)
    assert factor._by_pixels
    padded = F.pad(image, (1, 1, 1, 1)).view(3 * groups, 128 // groups, 10, 10)
    by_group = exact(padded, rows.view(3 * groups, -1, 8, 8), (3, 3), (1, 1)).view(3, groups).sum(1)
    norm = factor.sq_norm()
    assert (norm.upper >= by_group).all() and (norm.upper <= by_group * 1.001).all()
    sparse = PatchProduct(image, torch.randn(3, 128, 4, 4), stride=(2, 2), padding=(1, 1), **geometry)
    assert not sparse._by_pixels
