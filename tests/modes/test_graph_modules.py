"""Models of torch.fx, which makes its modules anew where they are copied, without what hangs on them."""

import copy
import pickle

import pytest
import torch
from torch import fx, nn
from two_linears import C, D, N, Net, clipping, step

from dpfast.testing import clipped_sum, loop_over_samples, relative_error

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")


class Scaled(Net):
    """With a parameter that the graph takes itself."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(7) + 0.5)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) * self.scale)


MODELS = {
    "layers": lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, 3))),
    "a parameter": lambda: fx.symbolic_trace(Scaled()),
    "inside": lambda: nn.Sequential(fx.symbolic_trace(Scaled()), nn.Linear(3, 2)),
}
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_copies_are_wrapped_as_the_model_is(make, copied, steps_before):
    model, x = make(), torch.randn(N, D)
    exact = clipped_sum(loop_over_samples(copy.deepcopy(model), lambda m, x: m(x).square().sum(), x), C)
    wrapped = clipping(model)
    for _ in range(steps_before):
        step(wrapped, torch.randn(N, D))
    wrapped.zero_grad()
    other = copied(wrapped)
    assert type(other) is type(wrapped)
    for some in (other, wrapped):
        step(some, x)
        for name, p in some._module.named_parameters():
            assert relative_error(p.grad, exact[name]) < 1e-4, name
    standard = other.to_standard_module()
    standard(x).sum().backward()  # nothing of ours is left there
    assert not any("forward" in vars(m) for m in standard.modules())
