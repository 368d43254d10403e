"""Forward hooks of the user's that hang on layers when the model is first called are part of what it computes."""

import pytest
import torch
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

C = 0.01


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def normalises(net):
    net.first.register_forward_hook(lambda module, inputs, output: (output - output.mean(0)) / (output.std(0) + 1e-3))


def centres(net):
    net.last.register_forward_pre_hook(lambda module, inputs: (inputs[0] - inputs[0].mean(0),))


def with_arguments(net):
    net.last.register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0] - args[0].mean(0),), kwargs), with_kwargs=True
    )


@pytest.mark.parametrize("hang", [normalises, centres, with_arguments])
def test_hooks_that_mix_samples_are_refused(hang):
    """The look did not run them, and took what they mix for each sample's own."""
    torch.manual_seed(0)
    net = Net()
    hang(net)
    model = GradSampleModuleFastGradientClipping(net, max_grad_norm=C, loss_reduction="sum")
    with pytest.raises(UnsupportedModuleError, match=r"samples meet in (first|last) \(Linear\)"):
        model(torch.randn(4, 5)).pow(2).sum().backward()


def test_hooks_that_do_not_are_right():
    torch.manual_seed(0)
    net, seen = Net(), []
    net.first.register_forward_hook(lambda module, inputs, output: output / (1 + output.abs()))
    net.last.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    net.last.register_forward_hook(lambda module, inputs, output: seen.append(output))
    net.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    x = torch.randn(4, 5)
    exact = clipped_sum(loop_over_samples(net, lambda m, x: m(x).pow(2).sum(), x), C)
    seen.clear()
    model = GradSampleModuleFastGradientClipping(net, max_grad_norm=C, loss_reduction="sum")
    model(x).pow(2).sum().backward()
    assert [len(output) for output in seen] == [4]
    for name, total in exact.items():
        assert relative_error(net.get_parameter(name).grad, total) < 1e-4, name
