"""Products of batches: right, the same bits in every batch, and by oneDNN where it is the faster way."""

import pytest
import torch
import torch.nn.functional as F

from dpfast.arithmetic import products, reference
from dpfast.testing import relative_error

pytestmark = pytest.mark.on_cpu

SHAPES = [(128, 64, 640), (256, 256, 65), (64, 1030, 64)]  # (r, k, c), each worth a call of oneDNN


@pytest.fixture(params=["as chosen", "oneDNN", "MKL"])
def backend(request, monkeypatch):
    if request.param == "oneDNN":
        if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
            pytest.skip("this torch has no oneDNN")
        monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    if request.param == "MKL":
        monkeypatch.setattr(products, "onednn_is_faster", lambda: False)


@pytest.mark.parametrize("shape", SHAPES)
def test_products(backend, shape):
    r, k, c = shape
    torch.manual_seed(0)
    x, y = torch.randn(5, k, r).mT, torch.randn(5, k, c)
    truth = x.double() @ y.double()
    whole = products.batched(x, y, scale=3.0)
    assert relative_error(whole, 3 * truth) <= 1e-6
    added = products.batched(x, y, add_to=whole.clone(), scale=2.0)
    assert relative_error(added, 5 * truth) <= 1e-6
    for n in range(5):
        alone = products.batched(x[n : n + 1].clone(), y[n : n + 1].clone(), scale=3.0)
        assert torch.equal(alone[0], whole[n])


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("shape", [(64, 64, 64), (20, 30, 17), (33, 700, 90), (512, 256, 1025)])
def test_fewer_samples_than_threads(monkeypatch, threads, shape):
    """MKL splits a sample between threads that have none of their own."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    r, k, c = shape
    torch.manual_seed(0)
    x, y = torch.randn(4, k, r).mT, torch.randn(4, k, c)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = products.batched(x, y, scale=3.0)
        for n in (1, 2, 3):
            assert torch.equal(
                products.batched(x[1 : n + 1].clone(), y[1 : n + 1].clone(), scale=3.0), whole[1 : n + 1]
            )
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape",
    [
        *[(8, 256, 256), (704, 256, 8), (5, 127, 333), (15, 64, 1024), (3, 256, 645), (762, 256, 1)],
        *[(17, 127, 333), (1, 700, 40)],
    ],
)
@pytest.mark.parametrize("transposed", ["x", "y", "both", "neither"])
def test_narrow_products(shape, dtype, transposed):
    """Like LoRA's: the same bits in any company, whatever lies around a sample in memory."""
    r, k, c = shape
    torch.manual_seed(0)
    x, y = torch.randn(11, k, r + 3, dtype=dtype)[..., 1 : r + 1].mT, torch.randn(11, k, c, dtype=dtype)
    x = x if transposed in ("x", "both") else x.contiguous()
    y = y.mT.contiguous().mT if transposed in ("y", "both") else y
    whole = products.batched(x, y)
    assert whole.is_contiguous()
    assert relative_error(whole, x.double() @ y.double()) <= 1e-6
    assert relative_error(products.batched(x, y, scale=2.0, add_to=whole.clone()), 3 * whole) <= 1e-6
    for n in range(1, 12):
        company = torch.randperm(11)[:n]
        assert torch.equal(products.batched(x[company], y[company]), whole[company])
        assert torch.equal(products.batched(x[-n:], y[-n:]), whole[-n:])


def test_narrow_products_of_bad_samples():
    x, y = torch.ones(6, 8, 256), torch.ones(6, 256, 256)
    clean = products.batched(x, y)
    x[2], y[5, 0] = float("nan"), float("inf")
    found = products.batched(x, y)
    for n in (0, 1, 3, 4):
        assert torch.equal(found[n], clean[n])
    assert found[2].isnan().all() and found[5].isinf().all()


@pytest.mark.parametrize(("d", "p"), [(70, 300), (300, 70)])
def test_weighted_sum_a_workspace_at_a_time(backend, monkeypatch, d, p):
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", 0)  # so 1024 rows
    torch.manual_seed(0)
    a, b, c = torch.randn(9, 250, d), torch.randn(9, 250, p), torch.rand(9)
    a[4], b[5, 3], c[4:6] = float("nan"), float("inf"), 0.0
    kept = [n for n in range(9) if n not in (4, 5)]
    truth = torch.einsum("n,ntp,ntd->pd", c[kept].double(), b[kept].double(), a[kept].double())
    before = a.clone(), b.clone()
    found = reference.weighted_sum(a, b, c)
    assert found.is_contiguous() and relative_error(found, truth) <= 1e-6
    assert torch.equal(a.nan_to_num(), before[0].nan_to_num()) and torch.equal(b, before[1])


def test_only_what_gains_goes_to_onednn(monkeypatch):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    like = torch.ones(1)
    assert products.by_onednn(256, 128, 256, like)
    assert not products.by_onednn(64, 64, 64, like)
    assert not products.by_onednn(8, 4096, 4096, like)
    assert not products.by_onednn(256, 128, 256, like.double())
    assert not products.by_onednn(256, 128, 256, like.to("meta"))


@pytest.mark.parametrize("shape", [(256, 256, 256), (64, 256, 64), (16, 256, 16), (8, 256, 8), (5, 200, 333)])
def test_a_block_is_added_up_before_what_it_is_added_to(backend, shape):
    """The bounds' chains are a block long and then one a block, not all positions: 2^24 swallows ones that come one by
    one, and not their sum."""
    r, k, c = shape
    x, y = torch.ones(3, r, k), torch.ones(3, k, c)
    out = products.batched(x, y, add_to=torch.full((3, r, c), 2.0**24))
    assert (out - 2.0**24 >= 0.99 * k).all()


@pytest.fixture
def by_onednn(monkeypatch):
    """As where MKL is slow."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", [(4096, 16, 17), (64, 128, 128), (3, 40, 300, 70), (1024, 384, 10)])
def test_a_layers_product(by_onednn, shape, transposed, bias):
    torch.manual_seed(0)
    *rows, d, p = shape
    x, weight = torch.randn(*rows, d), torch.randn(d, p).mT if transposed else torch.randn(p, d)
    b = torch.randn(p) if bias else None
    found = products.of_layer(x, weight, b)
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    assert found is not None and found.shape == exact.shape and relative_error(found, exact) <= 1e-6
    assert torch.equal(products.of_layer(x, weight.mT, b, transposed=True), found)
    flat = x.view(-1, d)
    flat[5], flat[7] = float("nan"), float("inf")
    others = [i for i in range(len(flat)) if i not in (5, 7)]
    again = products.of_layer(x, weight, b).view(-1, p)
    assert torch.equal(again[others], found.view(-1, p)[others]), "a row has changed another one"
    assert not again[[5, 7]].isfinite().any()


@pytest.mark.parametrize(("d", "p"), [(128, 384), (300, 200), (768, 2304), (1024, 1000)])
def test_a_row_of_a_layers_product_has_the_same_bits_among_any(by_onednn, d, p):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2048, d), torch.randn(p, d), torch.randn(p)
    for of in ((x, weight, bias), (torch.randn(2048, p), weight.mT, None)):
        whole = products.of_layer(*of)
        enough = -(-products._LAYER_WORTH_ONEDNN // (d * p))
        for rows in (16, 17, 31, 64, 100, 256, 1000):
            if rows >= enough:
                assert torch.equal(products.of_layer(of[0][:rows], *of[1:]), whole[:rows])
                assert torch.equal(products.of_layer(of[0][-rows:], *of[1:]), whole[-rows:])


def test_a_layers_product_is_torchs_own_where_onednn_would_not_do(by_onednn):
    x, weight, bias = torch.ones(64, 128), torch.ones(256, 128), torch.ones(256)
    assert products.of_layer(x, weight, bias) is not None
    others = {
        "few rows": (x[:15], weight.repeat(9, 1)),
        "few columns": (x.repeat(999, 1), weight[:3]),
        "little to multiply": (x[:31], weight),
        "another width": (x, weight[:, :127].contiguous()),
        "an input with gaps": (torch.ones(64, 256)[:, :128], weight),
        "a transposed input": (torch.ones(128, 64).mT, weight),
        "a weight with gaps": (x, torch.ones(256, 256)[:, :128]),
        "a bias of another size": (x, weight, torch.ones(1)),
        "a bias with gaps": (x, weight, torch.ones(512)[::2]),
        "fp64": (x.double(), weight.double()),
        "an fp64 input": (x.double(), weight),
        "an fp64 weight": (x, weight.double()),
        "an fp64 bias": (x, weight, bias.double()),
        "bf16": (x.bfloat16(), weight.bfloat16()),
        "meta": (x.to("meta"), weight.to("meta")),
    }
    assert {name: products.of_layer(*of) for name, of in others.items()} == dict.fromkeys(others)


def test_no_product_is_onednns_where_it_is_switched_off(by_onednn):
    with torch.backends.mkldnn.flags(enabled=False):
        assert products.of_layer(torch.ones(64, 128), torch.ones(256, 128)) is None
        assert not products.by_onednn(256, 128, 256, torch.ones(1))
    assert products.by_onednn(256, 128, 256, torch.ones(1))


def test_a_layers_product_is_torchs_own_where_that_is_as_fast(monkeypatch):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    assert products.of_layer(torch.ones(64, 128), torch.ones(256, 128)) is None


@pytest.mark.parametrize(
    ("n", "t", "d", "p"), [(16, 32, 96, 96), (70, 10, 64, 128), (700, 1, 128, 64), (9, 128, 64, 64)]
)
def test_clipped_sums_of_layers_are_those_of_each(by_onednn, monkeypatch, n, t, d, p):
    calls, call = [], products.onednn
    monkeypatch.setattr(products, "onednn", lambda *of: calls.append(of) or call(*of))
    torch.manual_seed(0)
    a, b, c = torch.randn(3 * n, t, d), torch.randn(3 * n, t, p), torch.rand(n)
    a[4], c[4] = float("nan"), 0.0
    found = reference.weighted_sums(a, b, c, 3)
    assert len(calls) == 3
    for i, total in enumerate(found):
        of = slice(i * n, (i + 1) * n)
        assert torch.equal(total, reference.weighted_sum(a[of], b[of], c))
        truth = torch.einsum("n,ntp,ntd->pd", c.double(), b[of].double(), a[of].double().nan_to_num())
        assert relative_error(total, truth) <= 1e-6
