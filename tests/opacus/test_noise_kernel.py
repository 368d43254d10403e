"""Noise where kernels run, as on a GPU: drawn where it is added, from numbers of torch's generator on the device."""

import pytest
import torch
from opacus_cases import clipped_by_hand
from philox import numbers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpfast.arithmetic.kernel_norms import import_kernels
from dpfast.distributed import SharedSecret
from dpfast.opacus import DPOptimizerFast
from dpfast.opacus import noise as noise_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(600, 500), (7,), (3, 5), (512, 513), (2**18,)]  # large ones are taken by themselves, small ones together
SIGMA, C, N = 0.5, 2.0, 3.0


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch, kernels_run):
    monkeypatch.setattr(noise_module, "can_be_together", lambda x: type(x) is torch.Tensor)
    monkeypatch.setattr("dpfast.opacus.optimizers.are_worth_blocks", lambda sums: False)


def optimizer_of(dtype, *, shapes=SHAPES, **options):
    params = nn.ParameterList(torch.zeros(shape, dtype=dtype, device=DEVICE) for shape in shapes)
    options = {"noise_multiplier": SIGMA, "max_grad_norm": C, "expected_batch_size": N, **options}
    optimizer = DPOptimizerFast(torch.optim.SGD(params, lr=1.0), **options)
    clipped_by_hand(params, [torch.full_like(p, 1.7) for p in params], C)
    return list(params), optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_s_gradients(dtype):
    """(sum + σC z) / N of every entry, no two of which share their z, rounded once, in the sum's own memory."""
    params, optimizer = optimizer_of(dtype)
    places, versions = [p.grad.data_ptr() for p in params], [p.grad._version for p in params]
    torch.manual_seed(3)
    assert optimizer.pre_step()
    torch.manual_seed(3)
    seeds = torch.empty(2, dtype=torch.int64, device=DEVICE).random_()
    small = [p for p in params if p.numel() <= 2**18]
    expected, first = {}, 0
    sizes = [sum(p.numel() for p in small), *(p.numel() for p in params if p.numel() > 2**18)]
    drawn = []
    for size in sizes:
        drawn.append(numbers(size, seeds.cpu(), first))
        first += -(-size // 4096)
    expected = dict(zip(small, drawn[0].split([p.numel() for p in small]), strict=True))
    expected |= dict(zip((p for p in params if p.numel() > 2**18), drawn[1:], strict=True))
    cut = DEVICE == "cpu" and dtype == torch.bfloat16  # by the interpreter
    for p, place, version in zip(params, places, versions, strict=True):
        exact = (1.7 if dtype == torch.float32 else float(torch.tensor(1.7, dtype=dtype))) / N
        exact = exact + expected[p] * SIGMA * C / N
        error = (p.grad.double().cpu().flatten() - exact).abs()
        assert (error <= torch.finfo(dtype).eps / (1 if cut else 2) * exact.abs() + 2e-6).all()
        assert p.grad.data_ptr() == place and p.grad._version > version


class Asked(TorchDispatchMode):
    """Operations by name, with the most entries that one of their tensors has."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        flat = torch.utils._pytree.tree_leaves((args, kwargs, found))
        sizes = [x.numel() for x in flat if isinstance(x, torch.Tensor)]
        if not func.is_view:
            self.found.append((func.name().split("::")[1].split(".")[0], max(sizes, default=0)))
        return found


@pytest.fixture
def calls(monkeypatch):
    """(entries, number of the first block) of each of the kernel's, which are not launched."""
    found = []

    def add_noise(x, seeds, std, *, share, first):
        found.append((x.numel(), first))
        return first + -(-x.numel() // 4096)

    monkeypatch.setattr(import_kernels()[0], "add_noise", add_noise)
    return found


def test_numbers_are_drawn_on_the_device_and_nobody_reads_them(calls):
    """A graph in which the host had read what it is drawn from would have the same noise with each replay."""
    _, optimizer = optimizer_of(torch.bfloat16)
    with Asked() as asked:
        assert optimizer.pre_step()
    assert [name for name, _ in asked.found].count("random_") == 1
    assert not {"_local_scalar_dense", "item", "normal_", "div_", "_foreach_div_"} & {name for name, _ in asked.found}
    assert calls == [(2**18 + 7 + 15, 0), (300000, 65), (512 * 513, 139)]
    # Nothing else goes over what is large.
    assert {name for name, size in asked.found if size > 2**18 + 22} <= {"detach", "view", "is_same_size", "alias"}


def test_blocks_are_counted_on_from_kind_to_kind(calls):
    """Default generators of two GPUs begin alike: with the same blocks, what is on them would have the same noise."""
    sums = [torch.zeros(300000, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16)]
    noise_module.add_noise_to_all(sums, 1.0, generator=None, secure_mode=False, in_order=False)
    assert calls == [(300000, 0), (300000, 74)]


def test_a_generator_s_numbers_stay_opacus_s():
    generator = torch.Generator(DEVICE).manual_seed(3)
    params, optimizer = optimizer_of(torch.float32, generator=generator)
    assert optimizer.pre_step()
    generator.manual_seed(3)
    for p in params:
        noise = torch.normal(0.0, SIGMA * C, p.shape, generator=generator, device=DEVICE)
        assert torch.allclose(p.grad, (1.7 + noise) / N, rtol=1e-6, atol=1e-6)


def test_steps_differ_and_manual_seed_decides_them():
    def noise(seed, steps=1):
        params, optimizer = optimizer_of(torch.float32, shapes=[(300, 400)], expected_batch_size=1)
        torch.manual_seed(seed)
        for _ in range(steps):
            optimizer.zero_grad()
            clipped_by_hand(params, [torch.zeros_like(p) for p in params], C)
            assert optimizer.pre_step()
        return params[0].grad.cpu()

    first = noise(0)
    assert float(first.std()) == pytest.approx(SIGMA * C, rel=0.01)
    assert torch.equal(first, noise(0))
    for other in (noise(1), noise(0, steps=2)):
        assert (first == other).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_the_kernel_does_not_take_is_drawn_by_torch(dtype):
    """fp64, and sums whose entries do not follow each other."""
    x = torch.full((600, 500), 1.7, dtype=dtype, device=DEVICE)
    x = x if dtype == torch.float64 else x.T
    assert noise_module.add_noise_to_all([x], 1.0, generator=None, secure_mode=False, in_order=False, divisor=10.0)
    assert float(x.double().std()) == pytest.approx(0.1, rel=0.02)
    assert float(x.double().mean()) == pytest.approx(0.17, abs=0.002)


def test_ranks_draw_alike_or_are_refused(monkeypatch):
    """One with kernels and one without would add other noise to one sum."""
    _, optimizer = optimizer_of(torch.float32, secret=SharedSecret(bytes(32)))
    with_kernels = optimizer.must_agree()
    monkeypatch.setenv("DPFAST_BACKEND", "reference")
    assert optimizer.must_agree() != with_kernels
