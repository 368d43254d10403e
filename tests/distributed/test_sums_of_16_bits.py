"""An optimizer takes sums over ranks of parameters of 16 bits as they were before they were rounded."""

import pytest
import sixteen_bits_worker
import torch
from processes import run_ranks
from sixteen_bits_worker import WAYS, C


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(sixteen_bits_worker.__file__, tmp_path_factory.mktemp("bits"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapper", ["DDP", "DDP with views", "DDP in two passes", "FSDP2"])
def test_no_sample_moves_them_by_more_than_it_may(ranks, wrapper, way, dtype):
    found = [rank[wrapper, way, dtype] for rank in ranks]
    for one in found:
        assert not isinstance(one, str), one
        assert {dtype for _, dtype in one[1]} == {torch.float32}
    sums = torch.cat([one[0] for one in found], 1) if wrapper == "FSDP2" else found[0][0]
    assert wrapper == "FSDP2" or torch.equal(sums, found[1][0])
    assert sums[0].norm() > 300.0
    moves = (sums[1:] - sums[:-1]).norm(dim=1)
    assert moves.max() <= C * (1.0 + 1e-3) and moves.min() > 0.9 * C
