"""Noise by blocks: Gaussian, the same with any number of threads, and only where nobody has asked for other numbers."""

import threading

import pytest
import torch
from opacus_cases import clipped_by_hand
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpfast.distributed import SharedSecret
from dpfast.opacus import DPOptimizerFast
from dpfast.opacus import noise as noise_module
from dpfast.opacus.noise import WORTH_BLOCKS, add_noise_by_blocks, add_noise_together

pytestmark = pytest.mark.on_cpu

SHAPES = [(1000, 700), (700,), (3,), (500, 999), (0, 4), (1,), (65536,)]  # of 1.3 million, no block ends with one
SECRET = SharedSecret(bytes(range(32)))


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def noise(shapes=SHAPES, sigma=0.5, seed=0, steps=1, secret=None, **options):
    """What is in p.grad where the clipped sum is zero, C = 2."""
    torch.manual_seed(seed)
    params = nn.ParameterList(torch.zeros(shape) for shape in shapes)
    sgd = torch.optim.SGD(params, lr=1.0)
    options = {"max_grad_norm": 2.0, "expected_batch_size": 1, "loss_reduction": "sum", "secret": secret, **options}
    optimizer = DPOptimizerFast(sgd, noise_multiplier=sigma, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        for p in params:
            p.grad = torch.zeros_like(p)
        assert optimizer.pre_step()
    return [p.grad.clone() for p in params]


def flat(tensors):
    return torch.cat([x.flatten() for x in tensors])


def test_any_number_of_threads_draws_the_same(threads):
    found = flat(noise())
    torch.set_num_threads(1)
    assert len(found) >= WORTH_BLOCKS and torch.equal(found, flat(noise()))


def test_it_is_gaussian_and_no_block_is_another_s():
    values = flat(noise(sigma=0.5)).double()  # σC = 1
    n = len(values)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(values.pow(power).mean() - moment) < 5 * (variance / n) ** 0.5, power
    beyond = (values.abs() > 3.0).double().mean()
    assert abs(beyond - 0.0026998) < 5 * (0.0027 / n) ** 0.5
    assert len(values.unique()) > 0.8 * n  # 24 bits of a uniform number make each
    rows = values[: n // 2**15 * 2**15].view(-1, 2**15)
    correlations = (rows @ rows.T / 2**15).fill_diagonal_(0.0).abs()
    assert correlations.max() < 6 / 2**7.5


def test_it_is_added_to_the_sum_of_every_entry():
    sums = [torch.full((300, 1000), 5.0), torch.full((7,), 5.0), torch.full((1000, 800), 5.0)]
    drawn = [torch.zeros_like(x) for x in sums]
    for x in (sums, drawn):
        add_noise_by_blocks(x, 0.25, lambda block: SECRET.generator("test", block))
    for total, alone in zip(sums, drawn, strict=True):
        assert torch.equal(total, alone + 5.0) and (alone != 0.0).float().mean() > 0.999
        if alone.numel() > 7:
            assert abs(alone.std() - 0.25) < 1e-3


def test_manual_seed_decides_it_and_steps_differ():
    first, again, other, second = noise(), noise(), noise(seed=1), noise(steps=2)
    assert torch.equal(flat(first), flat(again))
    assert not (flat(first) == flat(other)).float().mean() > 1e-3
    assert not (flat(first) == flat(second)).float().mean() > 1e-3


def test_a_generator_s_numbers_are_opacus_s():
    found = noise(generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    for x in found:
        assert torch.equal(x, torch.normal(0.0, 1.0, x.shape, generator=generator))


def test_few_numbers_are_opacus_s():
    shapes = [(1000, 1000), (5,)]
    found = noise(shapes)
    torch.manual_seed(0)
    for x in found:
        assert torch.equal(x, torch.normal(0.0, 1.0, x.shape))


def test_ranks_that_share_a_secret_draw_the_same(threads):
    first, second = (noise(secret=SharedSecret(bytes(32)), seed=seed) for seed in (0, 1))
    assert torch.equal(flat(first), flat(second))
    assert not (flat(first) == flat(noise(secret=SharedSecret(b"x" * 32)))).float().mean() > 1e-3
    assert not (flat(first) == flat(noise(secret=SharedSecret(bytes(32)), steps=2))).float().mean() > 1e-3


def test_two_secrets_of_the_same_bytes_draw_other_noise():
    secrets = [SharedSecret(b"y" * 32) for _ in range(2)]
    first, second = (flat(noise(secret=secret)) for secret in secrets)
    assert not (first == second).float().mean() > 1e-3


def test_no_noise_is_none():
    assert not any(x.any() for x in noise(sigma=0.0))


def test_what_a_thread_raises_is_raised(threads):
    def generator(block):
        if block == 3:
            raise KeyError(block)
        return SECRET.generator(block)

    before = threading.active_count()
    with pytest.raises(KeyError):
        add_noise_by_blocks([torch.zeros(2**20)], 1.0, generator)
    assert threading.active_count() == before


@pytest.mark.parametrize("shapes", [SHAPES, [(1000, 100), (5,)]], ids=["many", "few"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64, "meta"])
def test_whatever_the_default_dtype_and_device_are(shapes, default):
    expected = flat(noise(shapes))
    torch.manual_seed(0)
    params = nn.ParameterList(torch.zeros(shape) for shape in shapes)
    options = {"noise_multiplier": 0.5, "max_grad_norm": 2.0, "expected_batch_size": 1, "loss_reduction": "sum"}
    optimizer = DPOptimizerFast(torch.optim.SGD(params, lr=1.0), **options)
    for p in params:
        p.grad = torch.zeros_like(p)
    before = torch.get_default_dtype()
    try:
        if default == "meta":
            with torch.device("meta"):  # set_default_device(None) leaves torch 2.8 without one to ask for
                optimizer.pre_step()
        else:
            torch.set_default_dtype(default)
            optimizer.pre_step()
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(flat(p.grad for p in params), expected)


def of_ones(sigma, divide_beside, *, n=3):
    """The step's gradients of sums of 5, divided by n with the noise, or by itself as Opacus does."""
    torch.manual_seed(0)
    params = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)
    options = {"noise_multiplier": sigma, "max_grad_norm": 2.0, "expected_batch_size": n}
    optimizer = DPOptimizerFast(torch.optim.SGD(params, lr=1.0), **options)
    if not divide_beside:
        of_class = optimizer.scale_grad
        optimizer.scale_grad = lambda: of_class()
    for step in range(2):
        optimizer.zero_grad()
        torch.manual_seed(step)
        clipped_by_hand(params, [torch.full_like(p, 5.0) for p in params], 2.0)
        assert optimizer.pre_step()
    return [p.grad for p in params]


def test_the_division_takes_no_reading_of_its_own_and_makes_no_other_gradient(monkeypatch):
    """Nor is it taken twice where somebody has put another one in its place."""
    divided, divide = [], torch._foreach_div_
    monkeypatch.setattr(torch, "_foreach_div_", lambda *of: divided.append(of) or divide(*of))
    of_ones(0.5, True)
    assert not divided
    for sigma in (0.5, 0.0):
        for beside, alone in zip(of_ones(sigma, True), of_ones(sigma, False), strict=True):
            assert torch.allclose(beside, alone, rtol=0.0, atol=1e-6) and alone.isfinite().all()


def test_noise_by_itself_is_not_divided():
    params = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)
    options = {"noise_multiplier": 0.5, "max_grad_norm": 2.0, "expected_batch_size": 100}
    optimizer = DPOptimizerFast(torch.optim.SGD(params, lr=1.0), **options)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.accumulate()
    optimizer.add_noise()
    assert abs(flat([p.grad for p in params]).std() - 1.0) < 0.01
    optimizer.scale_grad()
    assert abs(flat([p.grad for p in params]).std() - 0.01) < 1e-4


def test_noise_drawn_together():
    sums = [torch.zeros(300, 100), torch.full((7,), 5.0), torch.zeros(2**16)]
    views = [x.data_ptr() for x in sums]
    add_noise_together(sums, 0.5, generator=torch.Generator().manual_seed(3))
    assert [x.data_ptr() for x in sums] == views
    assert abs(float(sums[1].mean()) - 5.0) < 2.0  # added, not written over it
    whole = torch.cat([sums[0].flatten(), sums[2]])
    assert float(whole.std()) == pytest.approx(0.5, rel=0.02)
    assert float(whole.mean()) == pytest.approx(0.0, abs=0.01)
    assert whole.unique().numel() > 0.9 * whole.numel()  # no tensor has another one's numbers


def test_only_so_many_numbers_stand_in_memory(monkeypatch):
    monkeypatch.setattr(noise_module, "_TOGETHER", 100)
    sizes = [60, 60, 30, 300, 5]
    assert [sum(x.numel() for x in some) for some in noise_module._up_to([torch.zeros(n) for n in sizes], 100)] == [
        60,
        90,
        300,
        5,
    ]
    sums = [torch.zeros(n) for n in sizes]
    add_noise_together(sums, 1.0, generator=None)
    assert all(bool((x != 0).all()) for x in sums)


class Bytes(TorchDispatchMode):
    """Bytes that operations read and write, views and empty tensors left out."""

    def __init__(self):
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        found = func(*args, **kwargs)
        made = [x for x in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(x, torch.Tensor)]
        if func.is_view or "empty" in func.name():
            return found
        writes = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
        named = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
        draws = func.name().startswith("aten::normal_")
        for name, value in named.items():
            of = [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, torch.Tensor)]
            size = sum(x.nbytes for x in of)
            self.written += size if name in writes else 0
            self.read += 0 if name == "out" or draws or ("copy" in func.name() and name in writes) else size
        if not writes:
            self.written += sum(x.nbytes for x in made)
        return found


def divided_with_noise(dtype, *, shapes, sigma=0.5, n=3.0, seed=0):
    """The gradients of a step whose sums are drawn as a GPU's are, and how many bytes each number moved."""
    torch.manual_seed(seed)
    params = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)
    options = {"noise_multiplier": sigma, "max_grad_norm": 2.0, "expected_batch_size": n}
    optimizer = DPOptimizerFast(torch.optim.SGD(params, lr=1.0), **options)
    clipped_by_hand(params, [torch.full_like(p, 1.7) for p in params], 2.0)
    with Bytes() as bytes_moved:
        assert optimizer.pre_step()
    return [p.grad for p in params], (bytes_moved.read + bytes_moved.written) / sum(p.numel() for p in params)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(noise_module, "can_be_together", lambda x: type(x) is torch.Tensor)
    monkeypatch.setattr(noise_module, "are_worth_blocks", lambda sums: False)
    monkeypatch.setattr("dpfast.opacus.optimizers.are_worth_blocks", lambda sums: False)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 16), (torch.bfloat16, 12)])
def test_noise_drawn_together_reads_the_sums_once(as_on_a_gpu, dtype, expected):
    """The draw writes, and one operation adds and divides."""
    _, bytes_moved = divided_with_noise(dtype, shapes=[(500, 900), (300, 1000), (7,)])
    assert bytes_moved == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("shape", [(600, 500), (30, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_drawn_together_is_rounded_once(as_on_a_gpu, dtype, shape):
    """Numbers rounded to 16 bits before they are added would show what they were added to."""
    n = 3.0
    [found], _ = divided_with_noise(dtype, shapes=[shape], n=n)
    torch.manual_seed(0)
    noise = torch.empty(shape, dtype=torch.promote_types(dtype, torch.float32)).normal_(0.0, 1.0 / n).double()
    exact = noise + float(torch.tensor(1.7, dtype=dtype)) / n
    of_std = 2.0**-22 * (noise.abs() + 1.0)  # which is 2⁻²³ larger than 1 / n
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() * 1.01 + of_std).all()


def test_a_mean_of_noise_is_never_too_small(as_on_a_gpu):
    for n in (3.0, 7.0, 49.0):
        share, std = noise_module._shares(1.0, n)
        assert std >= float(torch.tensor(share, dtype=torch.float32))


def test_what_is_drawn_in_order_beside_keeps_the_division_apart(monkeypatch):
    """Where some sums are not drawn together nothing is divided on the way, and everything once."""
    monkeypatch.setattr("dpfast.opacus.optimizers.are_worth_blocks", lambda sums: False)
    monkeypatch.setattr(noise_module, "can_be_together", lambda x: x.dim() == 2)
    found, _ = divided_with_noise(torch.float32, shapes=[(500, 900), (300000,)], n=100.0)
    for x in found:
        assert abs(float(x.std()) - 0.01) < 1e-4 and abs(float(x.mean()) - 0.017) < 1e-4
