"""sum_partials against fp64."""

import pytest
import torch
from kernel_cases import DEVICE, assert_close, guarded_outputs, identical

from dpfast.kernels._partials import sum_partials


@pytest.mark.parametrize(("length", "slots"), [(1, 1), (1, 2), (3, 3), (3, 5), (256, 512), (300, 601)])
def test_runs_of_a_row(length, slots):
    generator = torch.Generator().manual_seed(0)
    partials = torch.randn(4, slots, generator=generator).to(DEVICE)
    with guarded_outputs():
        sums = sum_partials(partials, length)
    runs = partials.cpu().double().split(length, dim=1)
    assert len(sums) == len(runs)
    for actual, run in zip(sums, runs, strict=True):
        assert_close(actual, run.sum(1), run.abs().sum(1), tolerance=1e-7)


@pytest.mark.parametrize(("length", "slots"), [(1, 2), (3, 5), (300, 601)])
def test_where_they_are_to_stand(length, slots):
    partials = torch.randn(4, slots, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    sums = sum_partials(partials, length)
    out = partials.new_full((len(sums), 4), float("nan"))
    found = sum_partials(partials, length, out=out)
    assert identical(out, torch.stack(sums))
    assert [x.data_ptr() for x in found] == [x.data_ptr() for x in out]


def test_a_row_is_bitwise_the_same_in_any_batch():
    partials = torch.randn(5, 700, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    (whole,) = sum_partials(partials, 700)
    for n in range(5):
        assert identical(sum_partials(partials[n : n + 1].clone(), 700)[0], whole[n : n + 1])


def test_adds_in_fp64():
    partials = torch.tensor([[1e10, 1.0, -1e10]], device=DEVICE)
    assert sum_partials(partials, 3)[0].item() == 1.0
