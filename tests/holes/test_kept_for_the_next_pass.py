"""What a forward pass keeps of its samples, wherever that is and of whichever, and a later one uses."""

import collections
import copy
import functools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error
from dpfast.trials import kept

H = 8


class Slots:
    __slots__ = ("mean",)

    def __init__(self):
        self.mean = torch.zeros(H)


class Net(nn.Module):
    def __init__(self, between, **kept):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(5, H), nn.Linear(H, 3), between
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.last(self.between(self, self.first(x).tanh()))


def mean(h):
    return h.detach().mean(0)


def in_an_array(m, h):
    out = h - torch.from_numpy(m.kept).to(h)
    m.kept = 0.9 * m.kept + 0.1 * mean(h).cpu().numpy()
    return out


def in_place_in_an_array(m, h):
    out = h - torch.from_numpy(m.kept.copy()).to(h)
    m.kept *= 0.9
    m.kept += 0.1 * mean(h).cpu().numpy()
    return out


def in_slots(m, h):
    out, m.kept.mean = h - m.kept.mean, mean(h)
    return out


def in_a_set(m, h):
    out = h * (1.0 + sum(m.kept))
    m.kept.add(float(mean(h).sum()))
    return out


def the_largest(m, h):
    out = h / (1.0 + m.kept)
    m.kept = float(h.detach().abs().max())
    return out


def of_the_last_sample(m, h):
    out, m.kept = h - m.kept, h[-1].detach()
    return out


def of_the_pass_before(m, h):
    out = h - m.kept.popleft()
    m.kept.append(mean(h))
    return out


def in_training_alone(m, h):
    """By what autograd does, not by the mode."""
    out = h - m.kept
    if torch.is_grad_enabled() and h.requires_grad:
        m.kept = mean(h)
    return out


def in_a_module_of_a_list(m, h):
    out = m.kept[0](h)
    m.kept[0][0].bias.data.lerp_(mean(h), 0.1)
    return out


class Tracker:
    def __init__(self):
        self.mean = torch.zeros(H)

    def subtract(self, h):
        out, self.mean = h - self.mean, mean(h)
        return out

    def subtract_for(self, module, h):
        return self.subtract(h)


def by_a_method(m, h):
    return m.kept(h)


def on_a_buffer(m, h):
    out = h - getattr(m.kept, "of_batches", 0.0)
    m.kept.of_batches = mean(h)
    return out


def on_a_parameter(m, h):
    out = h - getattr(m.last.bias, "kept", 0.0)
    m.last.bias.kept = mean(h)
    return out


def a_number_of_two(m, h):
    out = h * m.kept.real
    m.kept = complex(float(mean(h).sum()), 1.0)
    return out


def by_name(m, h):
    out = h * float(m.kept)
    m.kept = str(float(mean(h).sum()))
    return out


def the_range_so_far(m, h):
    """A pass that stays within it keeps nothing."""
    out = h / (1.0 + m.kept)
    m.kept = max(m.kept, float(h.detach().abs().max()))
    return out


def in_a_loss_alone(m, h):
    m.loss, m.kept = (h * m.kept).sum(1), mean(h)
    return h


def in_losses_in_a_list(m, h):
    m.kept = [(h * m.kept[1]).sum(1), mean(h)]
    return h


def in_a_gradient_alone(m, h):
    out, m.kept = h.detach() + (h - h.detach()) * m.kept, mean(h)
    return out


ZEROS = np.zeros(H, dtype=np.float32)
KEEP = [
    (in_an_array, ZEROS),
    (in_place_in_an_array, ZEROS.copy()),
    (in_slots, Slots()),
    (in_a_set, set()),
    (the_largest, 0.0),
    (of_the_last_sample, torch.zeros(H)),
    (in_training_alone, torch.zeros(H)),
    (in_a_module_of_a_list, [nn.Sequential(nn.Linear(H, H)).requires_grad_(False)]),
    (of_the_pass_before, collections.deque([torch.zeros(H), torch.zeros(H)])),
    (by_a_method, Tracker().subtract),
    (by_a_method, functools.partial(Tracker().subtract_for, None)),
    (on_a_buffer, torch.zeros(H)),
    (on_a_parameter, torch.zeros(H)),
    (a_number_of_two, 1.0 + 0.0j),
    (by_name, "1.0"),
    (the_range_so_far, 0.0),
    (in_a_loss_alone, torch.zeros(H)),
    (in_losses_in_a_list, [torch.zeros(4), torch.zeros(H)]),
    (in_a_gradient_alone, torch.ones(H)),
]


@pytest.mark.parametrize(("between", "kept"), KEEP, ids=lambda x: getattr(x, "__name__", ""))
def test_what_moves_later_sums_is_refused(between, kept):
    torch.manual_seed(0)
    model = GradSampleModuleFastGradientClipping(Net(between, kept=kept), loss_reduction="sum")
    with pytest.raises(
        UnsupportedModuleError, match=r"^Net: what a forward pass keeps .*\(.*(kept|last.bias).*Keep nothing"
    ):
        model(torch.randn(4, 5))


@pytest.mark.parametrize(
    "beside", [torch.eye(3).to_sparse(), torch.empty(2, device="meta"), 2**64 - 1], ids=["sparse", "meta", "whole"]
)
def test_what_cannot_be_compared_stands_in_no_ones_way(beside):
    """One sample moved a later sum by 9.3 C where an adjacency matrix stood beside the queue."""
    torch.manual_seed(0)
    model = GradSampleModuleFastGradientClipping(
        Net(of_the_last_sample, kept=torch.zeros(H), beside=beside), loss_reduction="sum"
    )
    with pytest.raises(UnsupportedModuleError, match=r"^Net: what a forward pass keeps of its samples \(kept\) "):
        model(torch.randn(4, 5))


def until_it_is_full(m, h):
    if len(m.kept) == 1:
        raise RuntimeError("clear it first")
    m.kept.append(mean(h))
    return h


def goes_by_itself(m, h):
    m.kept.append(mean(h))
    return h * (1.0 + next(TIMES)) if len(m.kept) > 1 else h


TIMES = iter(range(10**6))


@pytest.mark.parametrize(
    ("between", "why"), [(until_it_is_full, "clear it first"), (goes_by_itself, "differ from run to run")]
)
def test_what_is_not_told_is_said(between, why):
    torch.manual_seed(0)
    net, x = Net(between, kept=[]), torch.randn(4, 5)
    model = GradSampleModuleFastGradientClipping(net, loss_reduction="sum")
    with pytest.warns(DpfastWarning, match=rf"Net keeps something of a forward pass, and could not be .*{why}"):
        model(x).square().sum().backward()
    assert len(net.kept) == 1


def in_a_large_queue(m, h):
    out = h - m.kept[0]
    m.kept.data[:] = torch.cat([h.detach(), m.kept[: -len(h)]])
    return out


def test_what_is_in_a_large_tensor_is_seen_without_a_copy_of_it(monkeypatch):
    monkeypatch.setattr(kept, "_LARGE", 512)
    torch.manual_seed(0)
    model = GradSampleModuleFastGradientClipping(Net(in_a_large_queue, kept=torch.randn(200, H)), loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match=r"^Net: what a forward pass keeps of its samples \(kept\) "):
        model(torch.randn(4, 5))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int16, torch.float64]
)
def test_any_change_in_a_large_tensor_shows(dtype):
    torch.manual_seed(0)
    x = torch.randn(2**16 + 3, 17).abs().to(dtype) if dtype is not torch.bool else torch.rand(2**16 + 3, 17) > 0.5
    before, memory = kept._copy(x), x.numel() * x.itemsize
    assert before.numel() * before.itemsize < memory / 20 and torch.equal(before, kept._copy(x.clone()))
    other = x.logical_not() if dtype is torch.bool else x + 1
    for place in (0, 1020, 17 * 2**15 + 5, x.numel() - 1):
        y = x.clone()
        y.view(-1)[place] = other.view(-1)[place]
        assert not torch.equal(before, kept._copy(y))
    assert not torch.equal(before, kept._copy(x.roll(1, 0)))
    parts = kept._copy(torch.cat([x.view(-1)[:1], x.view(-1)])[1:])  # which begins between two words
    assert parts.numel() in (before.numel(), x.numel())


def counts_and_records(m, h):
    m.steps += 1
    m.array[m.steps % 4] = float(h.detach().max())
    m.largest, m.seen.mean = max(m.largest, float(h.detach().abs().max())), mean(h)
    m.names.add(m.steps)
    return h * torch.from_numpy(m.scale).to(h)


def test_what_moves_none_is_right():
    torch.manual_seed(0)
    kept = {"steps": 0, "array": ZEROS.copy(), "largest": 0.0, "seen": Slots(), "names": set(), "scale": ZEROS + 2.0}
    net, x = Net(counts_and_records, **kept), torch.randn(4, 5)
    exact = norms_of(loop_over_samples(net, lambda m, x: m(x).square().sum(), x))
    model = GradSampleModuleFastGradientClipping(net, loss_reduction="sum")
    for _ in range(3):
        model(x).square().sum().backward()
        assert relative_error(model.get_norm_sample(), exact) <= 1e-5
        model.zero_grad()


class Follows(nn.Module):
    """What its forward subtracts follows the batches, in a way that ``update`` has: past its version, as a frozen or a
    trained parameter, in a layer, or in place of what was there."""

    def __init__(self, update):
        super().__init__()
        self.first, self.last, self.table = nn.Linear(5, H), nn.Linear(H, 3), nn.Embedding(1, H).requires_grad_(False)
        self.register_buffer("buffer", torch.zeros(H))
        self.frozen, self.trained = nn.Parameter(torch.zeros(H), requires_grad=False), nn.Parameter(torch.zeros(H))
        self.update = update

    def forward(self, x):
        h = self.first(x).tanh()
        y = self.last(h - self.buffer - self.frozen - self.trained - self.table.weight[0])
        with torch.no_grad():
            self.update(self, mean(h))
        return y


def of(m, name):
    return m.get_buffer(name) if name == "buffer" else m.get_parameter(name)


UPDATES = {
    f"{how}, {name}": (lambda m, mean, write=write, name=name: write(of(m, name), mean), name)
    for how, write in {
        "by data": lambda x, mean: x.data.mul_(0.9).add_(mean),
        "new data": lambda x, mean: setattr(x, "data", 0.9 * x.data + mean),
        "in place": lambda x, mean: x.mul_(0.9).add_(mean),
    }.items()
    for name in ("buffer", "frozen", "trained", "table.weight", "first.bias")
} | {
    "by numpy": (lambda m, mean: m.buffer.numpy().__iadd__(mean.cpu().numpy()), "buffer"),
    "another": (lambda m, mean: setattr(m, "frozen", nn.Parameter(m.frozen + mean, requires_grad=False)), "frozen"),
}


@pytest.mark.parametrize("how", UPDATES)
def test_what_a_parameter_or_buffer_keeps_is_seen_however_it_is_written(how):
    """A sample of the second step moved the sum of the third one by 5.8 C."""
    torch.manual_seed(0)
    update, name = UPDATES[how]
    model = GradSampleModuleFastGradientClipping(Follows(update), loss_reduction="sum")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(UnsupportedModuleError, match=rf"^Follows: what a forward pass keeps .*\({name}.*Keep nothing"):
        model(torch.randn(4, 5))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("write", ["add_", "data"])
def test_a_parameter_that_counts_is_right_and_counts_once_a_step(write):
    def count(m, mean):
        if write == "data":
            m.frozen.data = m.frozen.data + 1.0
        else:
            m.frozen.add_(1.0)

    torch.manual_seed(0)
    net, x = Follows(count), torch.randn(4, 5)
    net.trained.requires_grad_(False)  # a module that trains its own parameters has copies of them in its forward
    plain = copy.deepcopy(net)
    model = GradSampleModuleFastGradientClipping(net, loss_reduction="sum")
    for step in range(3):
        exact = norms_of(loop_over_samples(_at(plain, float(step)), lambda m, x: m(x).square().sum(), x))
        model(x).square().sum().backward()
        assert relative_error(model.get_norm_sample(), exact) <= 1e-5
        model.zero_grad()
        assert torch.equal(net.frozen, torch.full((H,), step + 1.0))


def _at(net, count):
    """A copy that counts no further."""
    copied = copy.deepcopy(net)
    copied.update = lambda m, mean: None
    copied.frozen.data.fill_(count)
    return copied


def test_numbers_that_torch_does_not_compare_stay_out_of_it():
    """Packed weights of four bits beside a layer."""
    torch.manual_seed(0)
    net, x = Net(lambda m, h: h, kept=torch.empty(4, dtype=torch.float4_e2m1fn_x2)), torch.randn(4, 5)
    exact = norms_of(loop_over_samples(net, lambda m, x: m(x).square().sum(), x))
    model = GradSampleModuleFastGradientClipping(net, loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).square().sum().backward()
    assert relative_error(model.get_norm_sample(), exact) <= 1e-5
