"""``dpfast.opacus.install()``: what Opacus's ghost clipping releases with our norms is at most C.

Bounded: the exact norm of ``p.grad`` after ``DPTensorFastGradientClipping.backward()``, to which one sample adds.
"""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModuleFastGradientClipping as OpacusGhostModule
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import (
    DPTensorFastGradientAdaptiveClipping,
    PrivacyEngineAdaptiveClipping,
)
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from released import MARGIN, gradients, norm_over
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpfast.opacus
from dpfast.errors import DpfastError, DpfastWarning, InputError
from dpfast.opacus import clip_factors
from dpfast.testing import relative_error

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook"),
    pytest.mark.filterwarnings("ignore:Secure RNG"),
]


@pytest.fixture(autouse=True)
def _installed():
    dpfast.opacus.install()
    yield
    dpfast.opacus.uninstall()


def ghost(model: nn.Module, max_grad_norm: float = 1.0):
    module = OpacusGhostModule(model, max_grad_norm=max_grad_norm, strict=False)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=max_grad_norm,
        expected_batch_size=1,
        loss_reduction="mean",
    )
    return module, lambda losses: DPTensorFastGradientClipping(module, optimizer, losses).backward()


class Beside(nn.Module):
    """Many layers of one weight, added up."""

    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(layers))

    def forward(self, x):
        return sum(layer(x[:, i : i + 1]) for i, layer in enumerate(self.layers))


@pytest.mark.parametrize(("layers", "value"), [(1000, 1.3542234897613525), (2000, 2.1206836700439453)])
def test_norms_over_many_small_layers(layers, value):
    """Opacus adds their squares in fp32 and divides in fp32; what it is handed makes up for that."""
    model, backward = ghost(Beside(layers))
    inputs = torch.zeros(4, layers)
    inputs[0] = value  # the norm of one layer
    backward(model(inputs)[:, 0])
    assert norm_over(gradients(model), 1.0) <= 1.0 + MARGIN


class _Identity(torch.autograd.Function):
    """A node of a user's own, under which nothing can be known: Opacus's own second pass runs."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Unusual(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())]
        self.layers = nn.Sequential(*hidden, nn.Linear(16, 10))

    def forward(self, x):
        return _Identity.apply(self.layers(x))


@pytest.mark.parametrize("way", ["autocast", "parameters", "neither"])
def test_its_own_second_pass_in_16_bits_is_warned_about(way):
    """A graph that needs Opacus's second pass: in bf16 its gradients are not those whose norms were taken (a sample
    adds up to 1.004·C), and dpfast can only say so, once a module."""
    torch.manual_seed(0)
    model, backward = ghost(Unusual().to(torch.bfloat16 if way == "parameters" else torch.float32), max_grad_norm=0.1)
    inputs, targets = torch.randn(4, 16), torch.randint(0, 10, (4,))

    def step():
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=way == "autocast"):
            outputs = model(inputs.to(torch.bfloat16 if way == "parameters" else torch.float32))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backward(F.cross_entropy(outputs.float(), targets, reduction="none"))
        return [str(w.message) for w in caught if issubclass(w.category, DpfastWarning)]

    first, second = step(), step()
    assert [("Unusual" in m, "bfloat16" in m, "PrivacyEngine" in m) for m in first] == [(True,) * 3] * (
        way != "neither"
    )
    assert not second


def test_its_own_second_pass_in_16_bits_where_warnings_are_errors():
    """Whoever tries again is told again."""
    model, backward = ghost(Unusual().to(torch.bfloat16), max_grad_norm=0.1)
    for _ in range(2):
        outputs = model(torch.randn(4, 16, dtype=torch.bfloat16)).float()
        with warnings.catch_warnings(), pytest.raises(DpfastWarning, match="bfloat16"):
            warnings.simplefilter("error", DpfastWarning)
            backward(F.cross_entropy(outputs, torch.zeros(4, dtype=torch.int64), reduction="none"))


def test_its_own_second_pass_in_fp32_holds():
    """The same graph without 16 bits."""
    torch.manual_seed(0)
    model, backward = ghost(Unusual(), max_grad_norm=0.1)
    inputs, targets = torch.randn(4, 16), torch.randint(0, 10, (4,))
    backward(F.cross_entropy(model(inputs), targets, reduction="none") * torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert norm_over(gradients(model), 0.1) <= 1.0 + MARGIN


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-40, 1e-30, 1.0, 1e30])
def test_clip_factors_of_any_size(dtype, size):
    """Norms and factors of Opacus's module, also where squares or factors leave the dtype's range: c·norm is at most C,
    and no smaller than need be."""
    model, _ = ghost(nn.Linear(3, 2), max_grad_norm=size)
    norms = torch.tensor([0.0, 0.3, 0.9, 1.1, 7.0], dtype=dtype) * size
    for p in model.parameters():
        p._norm_sample = norms
    total, factors = model.get_norm_sample(), model.get_clipping_coef()
    assert total.dtype == factors.dtype == dtype and torch.equal(total, model.per_sample_gradient_norms)
    exact = [math.hypot(x, x) for x in norms.tolist()]
    assert all(x <= y for x, y in zip(exact, total.tolist(), strict=True))
    for c, norm in zip(factors.tolist(), exact, strict=True):
        assert c * norm <= size
        assert c == pytest.approx(min(1.0, size / (norm + 1e-6)), rel=1e-6 if size > 1e-38 else 1e-3, abs=0.0)


@pytest.mark.filterwarnings("ignore::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_gets_factor_0(bad):
    model, _ = ghost(nn.Linear(3, 2))
    for p in model.parameters():
        p._norm_sample = torch.tensor([1.0, bad, 0.1])
    found = model.get_clipping_coef()
    assert found[1] == 0 and found[2] == 1 and 0.7 < found[0] < 0.71


def test_a_sample_that_is_not_finite_adds_nothing():
    """Opacus's own step leaves NaN in ``p.grad``."""
    torch.manual_seed(0)
    layer, inputs = nn.Linear(3, 2), torch.randn(4, 3)
    model, backward = ghost(layer)
    inputs[1] = torch.inf
    with pytest.warns(DpfastWarning, match="1 of 4 samples have a gradient norm that is inf or NaN"):
        backward(model(inputs).sum(1))
        assert clip_factors._DROPPED[model].count == 1  # which a GPU tells when it is asked
    found = layer.weight.grad.clone()
    layer.zero_grad()
    backward(model(inputs[[0, 2, 3]]).sum(1))
    assert torch.isfinite(found).all() and relative_error(found, layer.weight.grad) < 1e-5


def test_subclasses_of_opacus_keep_their_norms():
    """FSDP's are on modules, not on parameters."""
    fsdp = pytest.importorskip("opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp")
    assert fsdp.GradSampleModuleFastGradientClippingFSDP.get_norm_sample.__module__.startswith("opacus.")


def test_a_loss_of_shape_n_by_1_is_an_error():
    """(N, 1) times factors (N,) is (N, N): every sample weighted by the factors of all, and nothing would tell."""
    model, backward = ghost(nn.Linear(3, 1))
    with pytest.raises(DpfastError, match=r"\(4, 1\)"):
        backward(model(torch.full((4, 3), 10.0)))


def test_a_loss_of_shape_n_by_1_is_an_error_in_a_loop_of_ones_own():
    model, _ = ghost(nn.Linear(3, 1))
    losses = model(torch.full((4, 3), 10.0))
    losses.mean().backward(retain_graph=True)
    with pytest.raises(DpfastError, match=r"\(4, 1\)"):
        model.get_clipping_coef() * losses


@pytest.mark.parametrize("install", [False, True])
def test_a_loss_of_shape_n_by_1_is_an_error_with_our_engine_in_mode_ghost(install):
    """``grad_sample_mode="ghost"`` of dpfast's engine is Opacus's path and, with or without install(), ours too."""
    if not install:
        dpfast.opacus.uninstall()
    layer = nn.Linear(3, 1)
    data = DataLoader(TensorDataset(torch.full((4, 3), 10.0), torch.zeros(4, 1)), batch_size=4)
    model, optimizer, criterion, _ = dpfast.opacus.PrivacyEngine().make_private(
        module=layer,
        optimizer=torch.optim.SGD(layer.parameters(), lr=0.1),
        data_loader=data,
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        criterion=nn.MSELoss(),
        poisson_sampling=False,
        grad_sample_mode="ghost",
    )
    optimizer.zero_grad()
    with pytest.raises(DpfastError, match=r"\(4, 1\)"):
        criterion(model(torch.full((4, 3), 10.0)), torch.zeros(4, 1)).backward()


def adaptive(model: nn.Module, module=None, max_grad_norm: float = 1.0):
    """Opacus's adaptive clipping; the threshold it has moved to is ``optimizer.max_grad_norm``."""
    module = OpacusGhostModule(model, max_grad_norm=max_grad_norm) if module is None else module
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.1,
        max_grad_norm=max_grad_norm,
        expected_batch_size=1,
        loss_reduction="mean",
    )

    def backward(losses):
        DPTensorFastGradientAdaptiveClipping(
            module, optimizer, losses, min_clipbound=1e-3, initial_noise_multiplier=0.1
        ).backward()

    return module, optimizer, backward


@pytest.mark.parametrize("last", [nn.Identity, Unusual], ids=["one pass", "two passes"])
def test_adaptive_clipping_holds_to_the_threshold_it_moves_to(last):
    """In one pass, and where Opacus's own second one runs."""
    most = 0.0
    for seed in range(5):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(1, 16, bias=False), last()) if last is Unusual else nn.Linear(1, 1, bias=False)
        module, optimizer, backward = adaptive(net)
        inputs = torch.zeros(8, 1)
        inputs[0] = 10.0 * torch.rand(()) + 5.0
        backward(module(inputs).sum(1) * F.one_hot(torch.tensor(0), 8))
        assert optimizer.max_grad_norm == module.max_grad_norm != 1.0
        most = max(most, norm_over(gradients(module), module.max_grad_norm))
    assert 0.9 < most <= 1.0 + MARGIN


@pytest.mark.filterwarnings("ignore::dpfast.errors.DpfastWarning")
def test_adaptive_clipping_of_a_sample_that_is_not_finite():
    """It left NaN in ``p.grad``; the others stay as they are."""
    module, _, backward = adaptive(nn.Linear(1, 1, bias=False))
    backward(module(torch.tensor([[0.5], [math.inf], [0.25], [0.0]]))[:, 0])
    (grad,) = gradients(module)
    assert torch.isfinite(grad).all() and grad.ne(0).all()


def test_adaptive_clipping_of_a_loss_of_shape_n_by_1_is_an_error():
    """It released more than N·C: factors (N,) times losses (N, 1)."""
    module, _, backward = adaptive(nn.Linear(3, 1))
    with pytest.raises(DpfastError, match=r"\(4, 1\)"):
        backward(module(torch.full((4, 3), 10.0)))


def adaptive_by_engine():
    layer = nn.Linear(3, 2)
    return PrivacyEngineAdaptiveClipping().make_private(
        module=layer,
        optimizer=torch.optim.SGD(layer.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(4, 3)), batch_size=4),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=0.1,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost",
        target_unclipped_quantile=0.5,
        min_clipbound=1e-3,
        max_clipbound=10.0,
        clipbound_learning_rate=0.2,
        max_clipbound_growth=1.05,
        unclipped_num_std=2.0,
    )


def test_adaptive_clipping_by_opacus_own_engine():
    """Opacus 1.6's leaves the criterion its mean, and multiplies one number by N factors; 1.5.4's does not."""
    x, y = torch.full((4, 3), 10.0), torch.tensor([0, 1, 1, 0])
    module, _, criterion, _ = adaptive_by_engine()
    if criterion.criterion.reduction != "none":
        with pytest.raises(InputError, match="reduction = 'none'"):
            criterion(module(x), y).backward()
    module, optimizer, criterion, _ = adaptive_by_engine()
    criterion.criterion.reduction = "none"
    criterion(module(x), y).backward()
    assert optimizer.max_grad_norm != 1.0
    assert norm_over(gradients(module), optimizer.max_grad_norm) <= len(x) * (1.0 + MARGIN)


@pytest.mark.parametrize("passes", [1, 2])
def test_adaptive_clipping_of_our_own_module_is_an_error(passes):
    """Its factors are those of the threshold before; with Opacus's in its place nothing was bounded."""
    layer = nn.Linear(3, 1)
    module = dpfast.GradSampleModuleFastGradientClipping(layer, passes=passes)
    module, _, backward = adaptive(layer, module)
    with pytest.raises(DpfastError, match="moves max_grad_norm once the norms are known"):
        backward(module(torch.full((4, 3), 10.0))[:, 0])
