"""Large layers in a graph: their norms, factors and sums are one operation, which runs the eager step's code."""

import copy

import pytest
import torch
import torch.nn.functional as F
from in_turn import everything_in_turn
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning
from dpfast.modes.clippers import NormClipper
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

pytestmark = pytest.mark.on_cpu

LIMIT = 0.2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.head = (
            nn.LayerNorm(40),
            nn.Linear(40, 72),
            nn.Linear(72, 40, bias=False),
            nn.Linear(40, 3),
        )

    def forward(self, x):
        return self.head(x + self.down(F.gelu(self.up(self.norm(x))))).mean(1)


def losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def batch(n, t=20):
    return torch.randn(n, t, 40), torch.randint(3, (n,))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("n", [6, 4, 1, 0, 13])
def test_as_a_loop_over_samples(backend, n):
    if backend == "inductor" and n != 4:
        pytest.skip("compiling takes long")
    torch.manual_seed(0)
    net, (x, y) = Net(), batch(n)
    with everything_in_turn() as taken:
        step = dpfast.compile_step(net, losses, max_grad_norm=LIMIT, batch_size=6, backend=backend)
        step(x, y)
    assert set(taken) <= {3} and (n == 0 or taken)
    exact = loop_over_samples(net, lambda m, x, y: losses(m, x, y).sum(), x, y)
    norms = norms_of(exact)
    assert relative_error(step.norms, norms) <= 1e-5 and (step.clip_factors.double() * norms <= LIMIT).all()
    for name, total in clipped_sum(exact, LIMIT).items():
        assert relative_error(dict(net.named_parameters())[name].grad, total) <= 1e-3, name


def test_the_eager_step_s_own_numbers():
    torch.manual_seed(0)
    net, (x, y) = Net(), batch(5)
    with everything_in_turn() as taken:
        eager = dpfast.GradSampleModuleFastGradientClipping(
            copy.deepcopy(net), max_grad_norm=LIMIT, loss_reduction="sum"
        )
        losses(eager, x, y).sum().backward()
        assert taken == [3]
        step = dpfast.compile_step(net, losses, max_grad_norm=LIMIT, batch_size=5, backend="aot_eager")
        step(x, y)
    assert torch.allclose(step.clip_factors, eager.get_clipping_coef(), rtol=1e-6)
    for p, q in zip(net.parameters(), eager._module.parameters(), strict=True):
        assert relative_error(p.grad, q.grad) <= 1e-6


def test_padding_and_samples_that_are_not_finite_add_exactly_nothing():
    torch.manual_seed(0)
    net, (x, y) = Net(), batch(5)
    found = []
    with everything_in_turn():
        step = dpfast.compile_step(net, losses, max_grad_norm=LIMIT, batch_size=5, backend="aot_eager")
        step(x, y)
        for padding in (0.0, 3.0, float("nan")):
            net.zero_grad()
            x[1] = padding
            step(x, y, valid=torch.tensor([True, False, True, True, True]))
            assert len(step.norms) == 4 and step.clip_factors.all() and step.dropped == 0
            found.append([p.grad.clone() for p in net.parameters()])
        net.zero_grad()
        with pytest.warns(DpfastWarning, match="1 of 5 samples"):
            step(x, y)
        assert step.dropped == 1 and step.clip_factors[1] == 0
        found.append([p.grad for p in net.parameters()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


class Median(NormClipper):
    """Looks at the whole batch."""

    thresholds = torch.tensor([LIMIT])

    def calc_clipping_factors(self, norms):
        return [(norms[0].median() / norms[0]).clamp(max=1.0)]


def test_another_clipper_is_captured_again():
    torch.manual_seed(0)
    net, (x, y) = Net(), batch(5)
    with everything_in_turn() as taken:
        step = dpfast.compile_step(net, losses, max_grad_norm=LIMIT, batch_size=5, backend="aot_eager")
        step(x, y)
        number = len(taken)
        for clipper, factors in ((dpfast.AutomaticClipper(LIMIT), None), (Median(), "median")):
            net.zero_grad()
            step.norm_clipper = clipper
            step(x, y)
            if factors is not None:
                wanted = (step.norms.median() / step.norms).clamp(max=1.0)
                wanted = torch.minimum(wanted, LIMIT / step.norms)
                assert torch.allclose(step.clip_factors, wanted, rtol=1e-3)
        assert number and len(taken) == number  # the first of them takes the same graph, the other none
