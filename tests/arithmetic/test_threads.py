"""Several threads: the same bits of a sample, and sums of rows that are shared out."""

import pytest
import torch

from dpfast.arithmetic import instruction_set, ops, products, reference
from dpfast.factors import Dense, OuterProduct
from dpfast.taps import Activations, find_rule
from dpfast.testing import relative_error

pytestmark = pytest.mark.on_cpu


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("t", "d", "p"), [(128, 256, 768), (128, 256, 256), (300, 64, 200), (100, 256, 8), (1, 40, 50)]
)
@pytest.mark.parametrize("onednn", [False, True])
def test_the_same_bits_with_any_number(monkeypatch, threads, t, d, p, onednn):
    if onednn and not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr("dpfast.arithmetic.products.onednn_is_faster", lambda: onednn)
    torch.manual_seed(0)
    a, b = torch.randn(9, t, d), torch.randn(9, t, p)
    found = []
    for n in (1, 2, 3):
        threads(n)
        kept = OuterProduct(a, b).kept()
        norms = [ops.certified_sq_norm(a, b, way=way).upper for way in ("direct", "gram")]
        found.append((kept.materialize(), kept.sq_norm().upper, *norms))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("rows", "threads", "chunks"), [(1024, 1, 1), (1024, 2, 2), (1024, 3, 8), (1024, 64, 8), (97, 2, 1)]
)
def test_as_few_chunks_as_give_each_thread_the_same_to_do(rows, threads, chunks):
    assert products._chunks(rows, threads) == chunks


@pytest.mark.parametrize(("r", "k", "c"), [(256, 128, 1024), (200, 70, 300), (768, 513, 800), (290, 17, 290)])
def test_products_in_few_chunks_have_the_bits_of_those_in_many(monkeypatch, threads, r, k, c):
    """One thread takes a product whole, more in as few chunks as give each the same to do."""
    monkeypatch.setattr("dpfast.arithmetic.products.onednn_is_faster", lambda: False)
    torch.manual_seed(0)
    x, y = torch.randn(3, k, r), torch.randn(3, k, c)
    assert products._chunks(r, r) > products._chunks(r, 1) == 1
    threads(1)
    whole = [products.in_chunks(x, y)(i) for i in range(3)]
    own = instruction_set.of_mkl()
    for mkl in {own, instruction_set.UNKNOWN} if own == instruction_set.AVX2 else {own}:
        monkeypatch.setattr("dpfast.arithmetic.instruction_set.of_mkl", lambda mkl=mkl: mkl)
        for n in (1, 2, 3, 4):
            threads(n)
            assert all(torch.equal(products.in_chunks(x, y)(i), whole[i]) for i in range(3))
    exact = torch.einsum("nkr,nkc->nrc", x.double(), y.double())
    assert relative_error(torch.stack(whole), exact) <= 1e-6


@pytest.mark.parametrize("shape", [(5, 64 * 2048), (5, 3, 2048 * 2), (1, 2047), (4, 0), (3, 128, 100), (7, 6144 * 33)])
def test_sums_of_rows_in_slices(shape):
    torch.manual_seed(0)
    values, c = torch.randn(shape), torch.rand(shape[0])
    truth = torch.einsum("n,n...->...", c.double(), values.double())
    assert relative_error(Dense(values).weighted_sum(c), truth) <= 1e-6
    blocks = list(values.split(2))
    assert relative_error(reference.weighted_rows(blocks, c), truth) <= 1e-6
    values[0], c[0] = float("nan"), 0.0
    assert reference.weighted_rows(list(values.split(2)), c).isfinite().all()


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm])
@pytest.mark.parametrize("shape", [(7, 128, 256), (3, 60, 64), (5, 100, 37), (9, 1, 2**15)])
def test_norm_layers_have_the_same_bits_with_any_number(threads, norm, shape):
    """In fp64 as many samples are taken at a time as all threads have room for."""
    torch.manual_seed(0)
    layer, x, backprops = norm(shape[-1], eps=1e-5), torch.randn(shape), torch.randn(shape)
    found = []
    for n in (1, 2, 3):
        threads(n)
        factors = find_rule(layer)(layer, Activations([x]), backprops)
        found.append([(f.materialized().values, f.sq_norm().upper) for f in factors.values()])
        alone = find_rule(layer)(layer, Activations([x[2:3]]), backprops[2:3])
        for factor, (values, _) in zip(alone.values(), found[0], strict=True):
            assert torch.equal(factor.materialized().values[0], values[2])
    for other in found[1:]:
        for some, like in zip(found[0], other, strict=True):
            assert all(map(torch.equal, some, like))
