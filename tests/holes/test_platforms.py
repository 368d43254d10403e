"""Hardware and switches that compute with less than the bounds assume: the bound is widened, or the way refused."""

import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping, ops
from dpfast.errors import BackendError

REDUCED = 2.0**-8
"""The least by which a norm must be widened whose products may be of bf16 operands."""

SLACK = """
import json, torch
from dpfast.factors import OuterProduct
torch.manual_seed(0)
a, b = torch.randn(2, 4, 256, 64)
norm = OuterProduct(a, b).sq_norm()
print(json.dumps(float(((norm.upper / norm.value).sqrt() - 1.0).min())))
"""


@pytest.mark.parametrize("value", ["BF16", "ANY"])
@pytest.mark.parametrize("variable", ["ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_onednn_told_by_the_environment_to_round_its_operands(variable, value):
    """oneDNN multiplies fp32 matrices as bf16 where the variable says so, whatever torch's own switches say."""
    environment = {**os.environ, variable: value}
    run = subprocess.run([sys.executable, "-c", SLACK], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) >= REDUCED


SWITCHES = ["", "mkldnn", "mkldnn.matmul", "cudnn", "cuda.matmul"]


@pytest.fixture
def switch(request):
    """Sets ``torch.backends[.name].fp32_precision`` and puts it back."""
    undo = []

    def set_(name: str, value: str) -> None:
        holder = torch.backends
        for part in filter(None, name.split(".")):
            holder = getattr(holder, part, None)
        if not hasattr(holder, "fp32_precision"):
            pytest.skip("this torch has no such switch")
        undo.append((holder, holder.fp32_precision))
        holder.fp32_precision = value

    yield set_
    for holder, before in undo:
        holder.fp32_precision = before


@pytest.mark.parametrize("name", SWITCHES)
def test_a_step_runs_whatever_the_new_switches_say(switch, name):
    """``torch.get_float32_matmul_precision()`` raises once they are mixed with the old one; a step goes on."""
    switch(name, "tf32")
    model = GradSampleModuleFastGradientClipping(nn.Linear(64, 64))
    model(torch.randn(2, 256, 64)).sum().backward()
    assert torch.isfinite(model.weight.grad).all()


@pytest.mark.on_cpu
@pytest.mark.parametrize(("name", "value"), list(itertools.product(["", "mkldnn", "mkldnn.matmul"], ["bf16", "tf32"])))
def test_the_new_switches_widen_the_bound(switch, name, value):
    """On a CPU those of all backends and of oneDNN let products be rounded: the bound says so."""
    switch(name, value)
    model = GradSampleModuleFastGradientClipping(nn.Linear(64, 64, bias=False))
    model(torch.randn(2, 256, 64)).sum().backward()
    assert float(model.norm_slack.min()) >= REDUCED


NUMBERS = itertools.count(8)


@pytest.fixture
def amd(monkeypatch):
    """Pretends that there is an AMD GPU of that architecture; a device of another number each, for caches' sake."""

    def pretend(arch: str) -> torch.device:
        properties = SimpleNamespace(gcnArchName=f"{arch}:sramecc+:xnack-", name=arch, major=9, minor=0)
        monkeypatch.setattr(torch.version, "hip", "6.4")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        return torch.device("cuda", next(NUMBERS))

    monkeypatch.delenv("DPFAST_BACKEND", raising=False)
    return pretend


@pytest.mark.filterwarnings("ignore:dpfast takes the reference backend")
@pytest.mark.parametrize("arch", ["gfx90a", "gfx1100"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_of_16_bits_are_refused_where_matrix_cores_flush_subnormals(amd, arch, dtype):
    """gfx90a's MFMA takes subnormal fp16 and bf16 numbers for zero; of other parts nothing is proven but gfx942."""
    device = amd(arch)
    with pytest.raises(BackendError, match=arch):
        ops.choose_backend("triton", device, dtype)
    assert ops.choose_backend("auto", device, dtype) == "reference"
