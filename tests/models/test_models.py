"""Every row of the tables: right in every mode with every N, or refused as its row says, never wrong, no crash.

make test-models                                                    # all
python -m pytest tests/models --packages=build/models/site-packages -k swin       # some
"""

import torch
from harness import PLAIN_N, SECONDS, Case, Model, Refused, T, at_most, faults, outcomes
from models_page import PAGE, rendered
from tables import ALL, FAST, PACKAGES
from torch import nn

import dpfast
from dpfast.taps import registry


def pytest_generate_tests(metafunc):
    if "package" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--packages", default=None)
        metafunc.parametrize(("package", "name"), ALL if everything else FAST)


def test_model(package, name):
    row = PACKAGES[package][name]
    with at_most(SECONDS):
        case = Case(row)
        wrong = faults(row, outcomes(case), case.mixes_samples())
    assert not wrong, f"{package}, {name} (N = {case.samples}):\n" + "\n".join(wrong)


def test_the_page_is_current():
    """Run `make test-models WRITE=--write-models` where it is not."""
    assert PAGE.read_text() == rendered()


class Centred(nn.Module):
    """Mixes samples."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        x = self.inner(x)
        return x - 0.5 * x.mean(0)


class Halved(nn.Module):
    """Its rule forgets half of the gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight


def test_the_harness_notices_what_is_wrong():
    dpfast.register_grad_sampler(Halved)(lambda layer, a, b: {layer.weight: 0.5 * a[0] * b})
    try:
        row = Model(Halved, lambda n, t: (torch.randn(n, 3),))
        case = Case(row)
        found = outcomes(case)
    finally:
        registry.RULES.pop(Halved)
    assert {o.kind for o in found} == {"wrong"} and not case.mixes_samples()
    assert len(faults(row, found, mixes=False)) == len(found) == 3 * len(case.samples)


def test_the_harness_notices_that_samples_mix():
    case = Case(Model(Centred, lambda n, t: (torch.randn(n, 3),)))
    assert case.mixes_samples()


def test_the_harness_notices_what_is_right():
    build, inputs = (lambda: nn.Linear(3, 3)), (lambda n, t: (torch.randn(n, t, 3),))
    case = Case(Model(build, inputs))
    found = outcomes(case)
    assert T in case.samples and PLAIN_N in case.samples and 3 in case.samples
    assert not faults(Model(build, inputs), found, mixes=False)
    refused = Model(build, inputs, refused=Refused("experts", "experts"))
    assert faults(refused, found, mixes=False) == ["it is right now: its row need not say refused any more"]
    found[0] = found[0]._replace(kind="refused", message="another error")
    assert ["not the refusal expected" in line for line in faults(refused, found, mixes=False)] == [True]
    assert len(faults(Model(build, inputs), found, mixes=False)) == 1
