"""What a factor holds is in memory once, as it was rounded, and what reads it reads that."""

import copy

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import dpfast
from dpfast.compiled.pins import pin_where_made

pinned = torch.ops.dpfast.pinned.default


def captured(function, *inputs):
    module = make_fx(function, tracing_mode="fake")(*inputs)
    pin_where_made(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def pins(module):
    return module.graph.find_nodes(op="call_function", target=pinned)


def test_it_is_pinned_where_it_is_made_and_read_from_there():
    """Views of one tensor have one pin, which what has been written down before reads too."""

    def function(x):
        made = x.sin()
        first = made.cos()
        return first, pinned(made.view(6, 2)).exp(), pinned(made.t()).tan()

    x = torch.randn(3, 4).bfloat16()
    module = captured(function, x)
    (pin,) = pins(module)
    assert pin.args[0].target is torch.ops.aten.sin.default and list(pin.args[0].users) == [pin]
    assert torch.ops.aten.cos.default in {user.target for user in pin.users}
    for found, expected in zip(module(x), function(x), strict=True):
        assert torch.equal(found, expected)


def in_place_of_a_view(x):
    made = x.sin()
    kept = pinned(made.t())
    made.view(12).mul_(2)
    return kept, made


def beside_it(x):
    """What is pinned is a part of what is written to before that."""
    made = x.sin()
    some, _ = made.split(2, 1)
    made[:, 0] = 0.0
    return pinned(some.t()), some


@pytest.mark.parametrize(
    "function",
    [
        beside_it,
        in_place_of_a_view,  # the pin is what it was before
        lambda x: pinned(x.t()),  # somebody else's, who may write to it
        lambda x: pinned(x.float().sin().t()),  # 32 bits are the same to all readers
        lambda x: pinned(x.sin()[:2]),  # a part
    ],
)
def test_what_stays_where_it_is(function):
    x = torch.randn(3, 4).bfloat16()
    module = captured(function, x)
    assert pins(captured(lambda x: pinned(x.sin().t()), x))[0].args[0].target is torch.ops.aten.sin.default
    (pin,) = pins(module)
    before = make_fx(function, tracing_mode="fake")(x)
    assert pin.args[0].target is pins(before)[0].args[0].target
    found, expected = module(x.clone()), function(x.clone())
    for one, other in zip(*([y] if isinstance(y, torch.Tensor) else y for y in (found, expected)), strict=True):
        assert torch.equal(one, other)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def losses(model, x):
    return model(x).float().square().mean((1, 2))


def test_inductor_writes_a_layers_input_once():
    """On a GPU what the kernels read is what loops have rounded: nothing is copied. On a CPU loops' tensors are, and
    what products have written is not."""
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block()).bfloat16()
    eager_net, x = copy.deepcopy(net), torch.randn(4, 6, 24).bfloat16()
    step = dpfast.compile_step(net, losses, max_grad_norm=1e-3, batch_size=4)
    _, (code, *_) = run_and_get_code(step, x)
    eager = dpfast.GradSampleModuleFastGradientClipping(eager_net, max_grad_norm=1e-3, loss_reduction="sum")
    losses(eager, x).sum().backward()
    torch.testing.assert_close(step.norms, eager.get_norm_sample().float(), rtol=1e-2, atol=0)
    for p, q in zip(net.parameters(), eager_net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=5e-2, atol=2e-2 * float(q.grad.abs().max()))
    if x.is_cuda:
        assert "dpfast.pinned.default(" not in code
        assert ".to(tl.bfloat16)" in code, "as Inductor rounds nothing by itself that goes on in the loop"
    else:
        assert 0 < code.count("dpfast.pinned.default(") < 2 * 2 * 3, "of two blocks' three layers, input and gradient"
