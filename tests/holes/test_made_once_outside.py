"""What a forward makes once, under a switch or where there is none yet: after looks it is made once too, by the model's
own forward."""

import numpy
import pytest
import torch
from torch import nn
from two_linears import D, N, Net, clipping, step

HOOKED = nn.Linear(7, 7)
STATE = {"hooked": False, "doubled": False}
TEACHER = None


def scale(h):
    return h


def hooks_a_module(self, h):
    if not STATE["hooked"]:
        HOOKED.register_forward_hook(lambda module, inputs, output: output)
        STATE["hooked"] = True
    assert len(HOOKED._forward_hooks) == 1
    return h


def wraps_a_function(self, h):
    global scale
    if not STATE["doubled"]:
        before = scale
        scale, STATE["doubled"] = lambda h: 2 * before(h), True
    return scale(h)


def makes_a_module(self, h):
    global TEACHER
    if TEACHER is None:
        TEACHER = nn.Linear(7, 7).requires_grad_(False)
    return h + 0 * TEACHER(h)


def makes_one_in_its_class(self, h):
    if not hasattr(type(self), "teacher"):
        type(self).teacher = nn.Linear(7, 7).requires_grad_(False)
    return h + 0 * type(self).teacher(h)


@pytest.mark.parametrize("how", [hooks_a_module, wraps_a_function, makes_a_module, makes_one_in_its_class])
def test_what_is_made_once(how):
    class Own(Net):
        def forward(self, x):
            return self.last(how(self, self.first(x)))

    model, plain = clipping(Own()), Net()
    plain.load_state_dict(model._module.state_dict())
    for _ in range(3):
        x = torch.randn(N, D)
        expected = plain.last(plain.first(x) * (2 if how is wraps_a_function else 1))
        assert torch.allclose(model(x), expected, atol=1e-6)
        step(model, x)


@pytest.mark.filterwarnings("ignore:The given (buffer|NumPy array) is not writable")
def test_memory_that_nobody_may_write_to(tmp_path):
    """With a NaN it is unequal to itself, and was written to: the end of the process."""
    numpy.save(tmp_path / "table.npy", numpy.full(7, numpy.nan, numpy.float32))
    mapped = torch.from_numpy(numpy.load(tmp_path / "table.npy", mmap_mode="r"))

    class Own(Net):
        def forward(self, x):
            return self.last(self.first(x) + mapped.nan_to_num())

    step(clipping(Own()), torch.randn(N, D))


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("edges", torch.eye(3).to_sparse())

    def forward(self, x):
        return torch.cdist(torch.sparse.mm(self.edges, x.T).T, self.weight.diag())


def test_a_sparse_buffer_of_a_layer_that_runs_again():
    step(clipping(nn.Sequential(nn.Linear(D, 3), Graph())), torch.randn(N, D))
