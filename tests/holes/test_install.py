"""``dpfast.opacus.install()``: what Opacus's ghost clipping releases with our norms is at most C.

Bounded: the exact norm of ``p.grad`` after ``DPTensorFastGradientClipping.backward()``, to which one sample adds.
"""

import pytest
import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModuleFastGradientClipping as OpacusGhostModule
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from released import MARGIN, gradients, keeps_or_refuses, norm_over
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpfast.opacus
from dpfast import DpfastError

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


def test_its_own_second_pass_under_autocast():
    """bf16 autocast and a graph that needs Opacus's second pass: its gradients are held to C too, or refused."""
    most = 0.0
    for seed in range(30):
        torch.manual_seed(seed)
        model, backward = ghost(Unusual(), max_grad_norm=0.1)
        inputs, targets = torch.randn(4, 16), torch.randint(0, 10, (4,))

        def step(model=model, backward=backward, inputs=inputs, targets=targets):
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(inputs)
            losses = F.cross_entropy(outputs.float(), targets, reduction="none")
            backward(losses * torch.tensor([1.0, 0.0, 0.0, 0.0]))

        most = max(most, keeps_or_refuses(step, model, 0.1))
    assert most <= 1.0 + MARGIN


def test_a_loss_of_shape_n_by_1_is_an_error():
    """(N, 1) times factors (N,) is (N, N): every sample weighted by the factors of all, and nothing would tell."""
    model, backward = ghost(nn.Linear(3, 1))
    with pytest.raises(DpfastError, match=r"\(4, 1\)"):
        backward(model(torch.full((4, 3), 10.0)))


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
