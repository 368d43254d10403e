"""Clipped sums of convolutions' gradients against autograd's, in fp64; whichever operand is scaled."""

import pytest
import torch
import torch.nn.functional as F
from standing_for import assert_stands_for, ordinary

from dpfast.factors import Dense, PatchProduct, weighted_together

N = 5


def gradients(image, rows, shape, stride, padding, groups):
    """(N, *shape) fp64."""
    found = []
    for x, r in zip(image.double(), rows.double(), strict=True):
        weight = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        y = F.conv2d(x.unsqueeze(0), weight, None, stride, padding, 1, groups)
        found += torch.autograd.grad(y, weight, r.unsqueeze(0))
    return torch.stack(found)


@pytest.mark.parametrize("poison", [None, "image", "rows"])
@pytest.mark.parametrize(
    ("d", "p", "kernel", "size", "stride", "groups"),
    [
        (3, 40, 3, 9, 1, 1),  # the image is the smaller operand
        (40, 3, 3, 9, 1, 1),
        (128, 200, 1, 4, 1, 1),  # a product of pixels
        (200, 128, 1, 4, 2, 1),
        (128, 136, 3, 4, 1, 1),  # a product of patches
        (6, 12, 3, 8, 2, 3),
        (12, 12, 5, 8, 1, 12),  # depthwise
        (12, 24, 3, 8, 2, 12),
    ],
)
def test_weighted_sums(d, p, kernel, size, stride, groups, poison):
    image, padding = ordinary(N, d, size, size, seed=0), kernel // 2
    positions = (size + 2 * padding - kernel) // stride + 1
    rows, shape = ordinary(N, p, positions, positions, seed=1), (p, d // groups, kernel, kernel)
    exact = gradients(image, rows, shape, stride, padding, groups)
    geometry = {"stride": (stride,) * 2, "dilation": (1, 1), "padding": (padding,) * 2, "groups": groups}

    def factor():
        return PatchProduct(image, rows, kernel=(kernel, kernel), **geometry)

    if poison is None:
        assert_stands_for(factor(), exact)
        return
    {"image": image, "rows": rows}[poison][2] = torch.nan
    c = torch.tensor([0.5, 0.0, 0.0, 1.0, 2e-3])
    total = torch.einsum("n,n...->...", c.double()[c != 0], exact[c != 0])
    assert (factor().weighted_sum(c).double() - total).abs().max() <= 1e-5 * total.abs().max()


def test_norms_of_kernels_of_many_channels():
    """The entries of a 3 × 3 kernel times 128 channels are more than one sum may add up."""
    values = ordinary(2, 128, 128, 3, 3, seed=0)
    assert_stands_for(Dense(values), values.double())
    assert_stands_for(Dense(values[:, :, :, :, :1]), values[:, :, :, :, :1].double())


def test_sums_in_one_product():
    values = [ordinary(N, *shape, seed=i) for i, shape in enumerate([(3,), (), (4, 5), (1,), (2, 0)])]
    values[2][1] = torch.inf
    c = torch.tensor([0.5, 0.0, 1.0, 1.0, 2e-3])
    found = weighted_together([Dense(v) for v in values], c)
    for total, of in zip(found, values, strict=True):
        exact = torch.einsum("n,n...->...", c.double()[c != 0], of.double()[c != 0])
        assert total.shape == of.shape[1:] and torch.allclose(total.double(), exact, rtol=1e-6, atol=1e-6)
