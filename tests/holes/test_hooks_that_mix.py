"""Forward hooks of the user's that hang on layers when the model is first called are part of what it computes."""

import functools
import types

import pytest
import torch
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

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


class Centres:
    def __init__(self):
        self.part = torch.ones(())

    def __call__(self, module, inputs, output):
        return output - self.part * output.mean(0)


def centre(net, module, inputs, output):
    return output - net.part * output.mean(0)


PART = torch.ones(())


def by_a_global(module, inputs, output):
    return output - PART * output.mean(0)


def of_a_part(module, inputs, output, part):
    return output - part * output.mean(0)


def by_a_method(net):
    net.part = torch.ones(())
    net.first.register_forward_hook(types.MethodType(centre, net))


def by_a_closure(net):
    eps = torch.tensor(1e-3)
    net.first.register_forward_hook(lambda module, inputs, output: output / (output.std(0) + eps))


def by_another_layer(net):
    other = net.last
    net.first.register_forward_hook(lambda module, inputs, output: output - output.mean(0) * other.bias.sum().detach())


def by_an_object(net):
    net.first.register_forward_hook(Centres())


def by_an_objects_method(net):
    net.first.register_forward_hook(Centres().__call__)


def by_parts(net):
    net.first.register_forward_hook(functools.partial(of_a_part, part=torch.ones(())))


def by_what_is_global(net):
    net.first.register_forward_hook(by_a_global)


def behind_one_that_records(net):
    seen = []
    net.first.register_forward_hook(lambda module, inputs, output: seen.append(output))
    by_a_closure(net)


HOLD = [
    *(by_a_method, by_a_closure, by_another_layer, by_an_object, by_an_objects_method, by_parts, by_what_is_global),
    behind_one_that_records,
]


@pytest.mark.parametrize("hang", [normalises, centres, with_arguments, *HOLD])
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


SEEN = []


def test_hooks_that_keep_what_comes_by_keep_nothing_of_a_look():
    torch.manual_seed(0)
    net, counts, large, x = Net(), {"passes": 0}, torch.zeros(2**20 + 1), torch.randn(4, 5)
    exact = loop_over_samples(net, lambda m, x: m.last((2.0 * m.first(x)).tanh() + 1.0).pow(2).sum(), x)

    def count(module, inputs, output):
        counts["passes"] += 1
        assert len(output) == 4  # fails where fewer samples run
        return 2.0 * output

    class Recorder:
        def __init__(self):
            self.file, self.shapes = open(__file__), []  # noqa: SIM115  # which has no copy

        def __call__(self, module, inputs, output):
            self.shapes.append(output.shape)

    def records(module, inputs, output):
        SEEN.append(output)  # with its graph, so from the second pass on there is no copy of it

    recorder = Recorder()
    net.first.register_forward_hook(count)
    net.first.register_forward_hook(recorder)
    net.first.register_forward_hook(records)
    net.last.register_forward_pre_hook(lambda module, inputs: None if large[0] else (inputs[0] + 1.0,))
    model = GradSampleModuleFastGradientClipping(net, loss_reduction="sum")
    for number in (1, 2, 3):
        model(x).pow(2).sum().backward()
        assert counts["passes"] == len(recorder.shapes) == len(SEEN) == number
        assert relative_error(model.get_norm_sample(), norms_of(exact)) <= 1e-5
    recorder.file.close()
