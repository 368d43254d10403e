"""Units of any number of positions, as runs of one list of rows, against the kernels on each unit as a sample.

A run has the bits of a sample with as many positions, whoever stands beside it; nobody's rows, which are never read,
hold NaN here.
"""

import pytest
import torch
from kernel_cases import BF16, DEVICE, FP16, FP32, Guarded, assert_close, call, identical, same_sums, wide

from dpfast.kernels import gram_norm, grouped_outer_norm, outer_norm, outer_product, sum_runs
from dpfast.kernels._tiles import Tile

# None, one, a tile's border with one less and one more, more than a chain; not in the order of their rows.
LENGTHS = [0, 1, 32, 31, 33, 0, 130]
BEFORE = [0, 3, 0, 0, 1, 0, 5]  # nobody's


def equal_bits(x, y):
    assert identical(x, y)


class Rows:
    """Guarded lists of rows, NaN where they are nobody's, and whose they are."""

    def __init__(self, dtypes, D=32, P=48, lengths=LENGTHS, layout="contiguous"):
        firsts = [sum(lengths[:u]) + sum(BEFORE[: u + 1]) for u in range(len(lengths))]
        R = firsts[-1] + lengths[-1] + 4
        self.inputs = [Guarded(1, R, F, dtype, layout, seed=F) for F, dtype in zip((D, P), dtypes, strict=True)]
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist()
        self.places = [(firsts[u], firsts[u] + lengths[u]) for u in order]
        nobodys = torch.ones(R, dtype=torch.bool)
        for first, last in self.places:
            nobodys[first:last] = False
        self.spoil(nobodys.to(DEVICE))
        self.options = {"runs": torch.tensor(self.places, device=DEVICE), "longest": max(lengths)}

    def spoil(self, rows):
        for x in self.inputs:
            x.tensor[0, rows] = float("nan")
            x.before = x.buffer.clone()

    def units(self):
        """(number, the rows as a sample) of each that has any."""
        for n, (first, last) in enumerate(self.places):
            if last > first:
                yield n, [x.tensor[:, first:last].clone() for x in self.inputs]


def assert_same_as_samples(found, rows, launcher, *, same=equal_bits, **options):
    """`found` of the runs, (..., U, ·) each."""
    empty = [n for n, (first, last) in enumerate(rows.places) if first == last]
    assert all(x is None or not x[empty].any() for x in found)
    for n, pair in rows.units():
        for actual, expected in zip(found, launcher(*pair, **options), strict=True):
            assert (actual is None) == (expected is None)
            if actual is not None:
                same(actual[n], expected[0])


@pytest.mark.parametrize(
    ("dtypes", "layout", "tile", "lengths"),
    [
        ((BF16, BF16), "contiguous", Tile(16, 16, 64, 16, 4, 1, "test"), LENGTHS),
        ((FP16, FP16), "contiguous", Tile(32, 16, 64, 32, 4, 1, "test", TMA=True), LENGTHS),
        ((FP32, FP32), "padded", Tile(32, 64, 16, 32, 4, 1, "test", TMA=True), LENGTHS),
        ((BF16, FP32), "padded", Tile(16, 32, 32, 16, 4, 1, "test"), LENGTHS),
        ((BF16, BF16), "contiguous", Tile(64, 32, 64, 32, 4, 1, "test", PART=128), [257, 0, 384]),  # in parts
    ],
    ids=str,
)
def test_outer_products_and_direct_norms(dtypes, layout, tile, lengths):
    rows = Rows(dtypes, D=24 if dtypes == (FP32, FP32) else 32, lengths=lengths, layout=layout)
    options = {"row_products": True, "tile": tile}
    found = call(outer_product, *rows.inputs, norm=True, scale=0.5, **options, **rows.options)
    # Samples are copies, whose rows a descriptor takes where those of padded runs go through pointers.
    same = same_sums if layout == "padded" and tile.TMA else equal_bits
    assert_same_as_samples(found, rows, outer_product, same=same, norm=True, scale=0.5, **options)
    norms = call(outer_norm, *rows.inputs, **options, **rows.options)
    assert identical(0.25 * norms.sq_norm, found.sq_norm) and identical(norms.row_products, found.row_products)
    for n, (a, b) in rows.units():
        exact = 0.5 * torch.einsum("tp,td->pd", wide(b)[0], wide(a)[0])
        assert_close(found.grad_sample[n], exact, 0.5 * torch.einsum("tp,td->pd", wide(b)[0].abs(), wide(a)[0].abs()))


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP16), (BF16, FP32)], ids=str)
def test_gram_norms(dtypes):
    rows = Rows(dtypes, layout="padded" if FP32 in dtypes else "contiguous")
    tile = Tile(32, 0, 0, 32, 4, 1, "test", TMA=True)
    names = ("row_norm_activations", "row_norm_backprops")
    norms = {name: wide(x).norm(dim=2).float().to(DEVICE) for name, x in zip(names, rows.inputs, strict=True)}
    found = call(gram_norm, *rows.inputs, tile=tile, **norms, **rows.options)

    def of_sample(a, b):
        norms = {name: wide(x).norm(dim=2).float().to(DEVICE) for name, x in zip(names, (a, b), strict=True)}
        return gram_norm(a, b, tile=tile, **norms)

    assert_same_as_samples(found, rows, of_sample)


def grouped(a, b, **options):
    return grouped_outer_norm([a], [b], **options)


@pytest.mark.parametrize(("dtypes", "D", "P"), [((BF16, BF16), 70, 8), ((FP32, FP32), 3, 24), ((FP16, FP32), 16, 16)])
def test_grouped_norms(dtypes, D, P):
    rows = Rows(dtypes, D=D, P=P)
    found = call(
        lambda a, b, **options: grouped_outer_norm([a], [b], **options), *rows.inputs, keep=True, **rows.options
    )
    three = [x[0] for x in found[:3]]
    # A sample of no positions has no launch; one in a launch has what squares may lose.
    for n, (first, last) in enumerate(rows.places):
        assert last > first or (not three[0][n] and not three[2][n].any())
    for n, (a, b) in rows.units():
        for actual, expected in zip(three, grouped_outer_norm([a], [b], keep=True)[:3], strict=True):
            assert identical(actual[n], expected[0, 0])


@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_sums(dtype):
    values = torch.rand(700, dtype=dtype, device=DEVICE)
    places = [(3, 3), (0, 1), (650, 700), (1, 600), (0, 256), (9, 266)]
    found = sum_runs(values, torch.tensor(places, device=DEVICE))
    for actual, (first, last) in zip(found, places, strict=True):
        assert (actual - values[first:last].double().sum()).abs() <= 1e-12 * actual
        alone = sum_runs(values[first:last].clone(), torch.tensor([(0, last - first)], device=DEVICE))
        assert torch.equal(actual, alone[0])
    assert len(sum_runs(values, torch.zeros(0, 2, dtype=torch.int64, device=DEVICE))) == 0


@pytest.mark.parametrize("launcher", [outer_norm, gram_norm, grouped])
def test_a_neighbours_nan_reaches_nobody(launcher):
    rows = Rows((BF16, BF16), P=16)
    before = launcher(*(x.tensor for x in rows.inputs), **rows.options)[0].flatten()
    for spoilt in (1, 2):
        first, last = rows.places[spoilt]
        rows.spoil(slice(first, last))
    after = launcher(*(x.tensor for x in rows.inputs), **rows.options)[0].flatten()
    others = [n for n in range(len(before)) if n not in (1, 2)]
    assert identical(before[others], after[others])
    assert all(after[n].isnan() == (rows.places[n][1] > rows.places[n][0]) for n in (1, 2))


def test_no_units_and_only_empty_ones():
    a, b = torch.ones(1, 4, 5, device=DEVICE), torch.ones(1, 4, 3, device=DEVICE)
    none = outer_norm(a, b, runs=torch.zeros(0, 2, dtype=torch.int64, device=DEVICE), longest=0)
    assert none.sq_norm.shape == (0,)
    empty = outer_norm(a, b, runs=torch.tensor([[4, 4], [0, 0]], device=DEVICE), longest=0)
    assert torch.equal(empty.sq_norm, torch.zeros(2, device=DEVICE))


@pytest.mark.parametrize(
    ("runs", "shape", "match"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), (1, 4, 5), "runs are"),
        (torch.zeros(2, 2, dtype=torch.int32), (1, 4, 5), "runs are"),
        (torch.zeros(2, 2, dtype=torch.int64), (2, 4, 5), "one list of rows"),
    ],
)
def test_runs_that_are_none(runs, shape, match):
    for launcher in (outer_norm, gram_norm):
        with pytest.raises(ValueError, match=match):
            launcher(
                torch.ones(shape, device=DEVICE), torch.ones(shape, device=DEVICE), runs=runs.to(DEVICE), longest=4
            )


def test_no_bias_of_runs():
    a = torch.ones(1, 4, 5, device=DEVICE)
    with pytest.raises(ValueError, match="no bias of runs"):
        outer_norm(a, a, bias=True, runs=torch.tensor([[0, 4]], device=DEVICE), longest=4)


def test_many_units():
    lengths = torch.arange(150) % 4
    ends = lengths.cumsum(0)
    ids = torch.arange(150).repeat_interleave(lengths)
    a, b = torch.randn(1, len(ids), 5), torch.randn(1, len(ids), 3)
    exact = torch.zeros(150, 3, 5, dtype=torch.float64)
    exact.index_add_(0, ids, torch.einsum("rp,rd->rpd", b[0].double(), a[0].double()))
    runs = torch.stack([ends - lengths, ends], dim=1).to(DEVICE)
    found = outer_product(a.to(DEVICE), b.to(DEVICE), norm=True, runs=runs, longest=3)
    assert_close(found.grad_sample, exact)
    assert_close(found.sq_norm, exact.square().sum((1, 2)))
