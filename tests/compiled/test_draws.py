"""Random numbers in a graph: a checkpointed region that runs again sees the masks that it saw, or activations of one
mask would meet the gradients of another. Other steps and other samples have others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import UnsupportedModuleError

H = 40


class Net(nn.Module):
    """Linear but for its masks, so that the last layer's gradient shows them."""

    def __init__(self, between, reentrant, depth=1):
        super().__init__()
        self.first, self.last = nn.Linear(3, H, bias=False), nn.Linear(H, 1, bias=False)
        self.between, self.reentrant, self.depth = between, reentrant, depth

    def forward(self, x):
        run = self.between
        for _ in range(self.depth):
            run = self.checkpointed(run)
        return self.last(run(self.first(x)))

    def checkpointed(self, run):
        return lambda x: checkpoint(run, x, use_reentrant=self.reentrant)


def rand_changed_in_place(x):
    return x * torch.rand_like(x).mul_(2.0).add_(0.1)


def twice(x):
    return F.dropout(torch.where(torch.rand_like(x) < 0.3, 0.0, x), 0.3)


BETWEEN = {
    "dropout": nn.Dropout(0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "a draw that is written to": rand_changed_in_place,
    "two draws": twice,
}


def sum_of(model, x):
    return model(x).sum(1)


def check(net, step, x):
    """One sample, whose gradient by hand is that of the masks which the last layer has seen."""
    net.zero_grad()
    step(x)
    hidden = (x @ net.first.weight.T).double()
    mask = net.last.weight.grad.double() / hidden
    by_hand = (net.last.weight.double() * mask).T @ x.double()
    norm = torch.cat([by_hand.flatten(), net.last.weight.grad.double().flatten()]).norm()
    assert (net.first.weight.grad - by_hand).norm() <= 1e-5 * norm
    assert (step.norms.double() - norm).abs() <= 1e-5 * norm
    return mask


@pytest.mark.parametrize("between, depth", [*((between, 1) for between in BETWEEN), ("dropout", 2)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_that_runs_again_has_its_own_numbers(between, depth, reentrant):
    torch.manual_seed(0)
    net, x = Net(BETWEEN[between], reentrant, depth), torch.rand(1, 3) + 0.5
    with torch.no_grad():
        net.first.weight.abs_().add_(0.1)
    step = dpfast.compile_step(net, sum_of, max_grad_norm=1e6, batch_size=1, backend="eager")
    masks = [check(net, step, x) for _ in range(3)]
    assert not torch.equal(masks[1], masks[2])


def test_by_inductor():
    torch.manual_seed(0)
    net, x = Net(nn.Dropout(0.5), False), torch.rand(1, 3) + 0.5
    with torch.no_grad():
        net.first.weight.abs_().add_(0.1)
    step = dpfast.compile_step(net, sum_of, max_grad_norm=1e6, batch_size=1)
    masks = [check(net, step, x) for _ in range(3)]
    assert not torch.equal(masks[1], masks[2])


def test_two_regions_have_two_masks():
    torch.manual_seed(0)

    class Two(Net):
        def forward(self, x):
            h = self.first(x)
            a, b = (checkpoint(self.between, h, use_reentrant=False) for _ in range(2))
            return self.last(torch.where(a == b, 0.0, 1.0) * h)  # where one mask alone has dropped

    net = Two(nn.Dropout(0.5), False)
    with torch.no_grad():
        net.first.weight.abs_().add_(0.1)
    step = dpfast.compile_step(net, sum_of, max_grad_norm=1e6, batch_size=1, backend="eager")
    step(torch.rand(1, 3) + 0.5)
    assert 0.2 < (net.last.weight.grad != 0).double().mean() < 0.8


def test_samples_have_masks_of_their_own():
    torch.manual_seed(0)
    net = Net(nn.Dropout(0.5), False)
    step = dpfast.compile_step(net, sum_of, max_grad_norm=1e6, batch_size=4, backend="eager")
    step(torch.ones(4, 3))
    assert len(step.norms.unique()) == 4


class SetBack(nn.Module):
    """Draws twice from one state: masks that two branches share."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.draw = nn.Linear(3, H, bias=False), draw

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            a = self.draw(x)
        return self.first(a - self.draw(x + 0.0))


def test_numbers_that_the_step_sets_back_itself_are_the_same():
    net = SetBack(lambda x: x * torch.rand_like(x))
    step = dpfast.compile_step(net, sum_of, max_grad_norm=1e6, batch_size=2, backend="eager")
    step(torch.ones(2, 3))
    assert not net.first.weight.grad.any()


def test_what_is_drawn_again_for_other_values_is_refused():
    """As torch has dropout in one operation on a GPU."""
    net = SetBack(lambda x: torch.native_dropout(x, 0.5, True)[0])
    with pytest.raises(UnsupportedModuleError, match=r"sets torch's random numbers back.*native_dropout"):
        dpfast.compile_step(net, sum_of, max_grad_norm=1e6, batch_size=2, backend="eager")(torch.ones(2, 3))


def test_a_capture_takes_none_of_torch_s_numbers():
    """As in other steps what a graph draws follows from torch.manual_seed."""
    net = Net(nn.Dropout(0.5), True)
    x, gradients = torch.rand(1, 3), []
    for _ in range(2):
        torch.manual_seed(3)
        net.zero_grad()
        dpfast.compile_step(net, sum_of, max_grad_norm=1e6, batch_size=1, backend="eager")(x)
        gradients.append(net.last.weight.grad)
    assert torch.equal(*gradients)
    torch.manual_seed(3)
    assert torch.equal(gradients[0], F.dropout(net.first(x), 0.5))
