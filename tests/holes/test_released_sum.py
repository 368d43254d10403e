"""The sum as it is left in ``p.grad``, roundings included: a batch in which one sample has a gradient moves it by C.

Bounded: the exact norm of ``p.grad``. Where a GPU would round the operands of a product, ``Rounded`` does that here.
"""

import pytest
import torch
from released import MARGIN, gradients, norm_over
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpfast import GradSampleModuleFastGradientClipping


def largest(layer, inputs, thresholds, dtype=None, backprop=64.0) -> float:
    """The largest ``‖p.grad‖ / C`` for some C; the second of two samples has a gradient of zero."""
    most, alone = 0.0, torch.tensor([1.0, 0.0]).view(2, *[1] * (inputs.dim() - 1))
    for limit in thresholds:
        model = GradSampleModuleFastGradientClipping(layer(), loss_reduction="sum", max_grad_norm=limit)
        with torch.autocast(inputs.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            outputs = model(inputs)
        (outputs.float() * backprop * alone).sum().backward()
        most = max(most, norm_over(gradients(model), limit))
    return most


@pytest.mark.parametrize(
    ("dtype", "value", "limit"),
    [(torch.bfloat16, 1.0, 1.24), (torch.float16, 1.0048828125, 1.29), (torch.float16, 1.0048828125, 1.008795869)],
)
def test_factors_split_in_two_bf16_parts(monkeypatch, dtype, value, limit):
    """The kernel's ``c·b = hi + lo + O(2⁻¹⁷)``: what the parts are too large by stays inside the margin of c.
    In fp16 the product of the low parts, which is left out, may be below 0."""
    monkeypatch.setenv("DPFAST_BACKEND", "triton")
    inputs = torch.zeros(2, 16, dtype=dtype)
    inputs[0] = value
    assert largest(lambda: nn.Linear(16, 16, bias=False), inputs, [limit], dtype) <= 1.0 + MARGIN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_p_grad_of_16_bit_parameters(dtype):
    """Rounding ``p.grad`` to the parameter's 16 bits never makes it larger than C."""
    inputs = torch.tensor([[1.0], [0.0]], dtype=dtype)
    thresholds = [0.7 + 0.002 * i for i in range(300)]
    assert largest(lambda: nn.Linear(1, 1, bias=False).to(dtype), inputs, thresholds) <= 1.0 + MARGIN


class Rounded(TorchDispatchMode):
    """Products as a GPU takes them that may use fewer bits: operands rounded where torch's switches let it."""

    MATRIX = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "_linear_pointwise")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        bits = 24
        if name in self.MATRIX:
            bits = {"highest": 24, "high": 11, "medium": 8}[torch.get_float32_matmul_precision()]
        elif name == "convolution_backward" and torch.backends.cudnn.allow_tf32 and args[9] == 1:
            bits = 11  # cuDNN's default; on a GPU the sum alone is a convolution (norms, here, have a group a sample)
        if bits < 24:
            args = [self._round(x, bits) if isinstance(x, torch.Tensor) else x for x in args]
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _round(x: torch.Tensor, bits: int) -> torch.Tensor:
        mantissa, exponent = torch.frexp(x.double())
        return torch.ldexp(torch.round(mantissa * 2.0**bits) / 2.0**bits, exponent).to(x.dtype)


JUST_ABOVE_HALF = 1.0 + 2.0**-8 + 2.0**-11 + 2.0**-13  # rounds up in bf16 and in TF32


@pytest.fixture
def precision():
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("setting", ["high", "medium"])
def test_products_of_the_sum_in_less_than_fp32(precision, setting):
    """``torch.set_float32_matmul_precision``: the clipped sum's operands are rounded, norms of rank one are not."""
    precision(setting)
    inputs = torch.zeros(2, 64)
    inputs[0] = JUST_ABOVE_HALF
    with Rounded():
        most = largest(lambda: nn.Linear(64, 64, bias=False), inputs, [1.0, 1.1, 1.3], backprop=JUST_ABOVE_HALF)
    assert most <= 1.0 + MARGIN


def test_convolutions_of_the_sum_in_tf32(monkeypatch):
    """cuDNN may take fp32 convolutions in TF32 unless told otherwise: not the one that adds up clipped gradients."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # torch's default
    inputs = torch.zeros(2, 8, 2, 2)
    inputs[0] = JUST_ABOVE_HALF
    with Rounded():
        assert largest(lambda: nn.Conv2d(8, 32, 2, bias=False), inputs, [1.0, 1.1, 1.3]) <= 1.0 + MARGIN
