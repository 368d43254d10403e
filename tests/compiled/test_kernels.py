"""Where kernels run, each launch is one operation of the graph."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from small_steps import check, median_norm, token_batch, token_losses
from torch import nn
from torch._dynamo import lookup_backend

import dpfast
from dpfast.arithmetic import ops


class Kernels(nn.Module):
    """A lookup, thin layers that share a launch, a wide one with a norm and a sum of its own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(13, 16)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.wide, self.head = nn.Linear(16, 24), nn.Linear(24, 13)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.head(self.wide(x + self.up(F.gelu(self.down(x)))))


class Seen:
    """A backend that counts the operations of ours in the graph that it is given."""

    def __call__(self, graph, inputs):
        names = (str(node.target) for node in graph.graph.nodes)
        self.nodes = Counter(name.partition(".")[2] for name in names if "dpfast" in name)
        return lookup_backend("aot_eager")(graph, inputs)


def test_a_step(monkeypatch):
    monkeypatch.setenv("DPFAST_BACKEND", "triton")
    torch.manual_seed(0)
    net, seen = Kernels(), Seen()
    limit = median_norm(net, token_losses, token_batch(4))
    monkeypatch.setattr(torch, "compile", None)  # it would take apart a graph that is one already
    step = dpfast.compile_step(net, token_losses, max_grad_norm=limit, batch_size=4, backend=seen)
    for n in (4, 3):
        check(step, net, token_losses, token_batch(n))
    nodes = seen.nodes
    assert nodes["clip.default"] == 0 and nodes["lookup_sq_norm.default"] == 1
    assert nodes["directs.default"] >= 1 and nodes["weighted_sum.default"] == nodes["sq_norm.default"] == 2, nodes


class Kept(nn.Module):
    """Wide layers of few samples with many positions each, whose gradients are kept; their biases, and a norm's."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(72, 80), nn.LayerNorm(80), nn.Linear(80, 72)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


def test_gradients_that_are_kept(monkeypatch):
    """Of each large layer one operation writes them, and one sums them; all small ones are summed by one."""
    monkeypatch.setenv("DPFAST_BACKEND", "triton")
    torch.manual_seed(0)
    net, batch, seen = Kept(), (torch.randn(2, 80, 72),), Seen()

    def losses(model, x):
        return model(x).square().mean((1, 2))

    limit = median_norm(net, losses, batch)
    step = dpfast.compile_step(net, losses, max_grad_norm=limit, batch_size=2, backend=seen)
    check(step, net, losses, batch)
    nodes = seen.nodes
    assert nodes["kept.default"] == nodes["weighted_rows.default"] == 2 and nodes["sq_norm.default"] == 0, nodes
    assert nodes["weighted_side_by_side.default"] == 1, nodes


def test_rows_whose_norms_have_a_launch_of_their_own(monkeypatch):
    """A bias takes norms of rows alone; while a graph is captured there is nothing to launch a kernel on."""
    monkeypatch.setenv("DPFAST_BACKEND", "triton")
    torch.manual_seed(0)
    net, batch = nn.Linear(4, 64), (torch.randn(2, 256, 4), torch.randn(2, 256, 64))
    assert batch[1][0].numel() >= ops._WORTH_A_KERNEL

    def losses(model, x, backprops):
        return (model(x) * backprops).sum((1, 2))

    limit = median_norm(net, losses, batch)
    step = dpfast.compile_step(net, losses, max_grad_norm=limit, batch_size=2, backend="eager")
    check(step, net, losses, batch)


@pytest.mark.parametrize("keep", [False, True])
def test_directs_have_the_bits_that_they_have_outside(keep, monkeypatch):
    from dpfast.arithmetic import kernel_norms

    monkeypatch.setenv("DPFAST_BACKEND", "triton")
    pairs = [(torch.randn(3, 20, d), torch.randn(3, 20, p)) for d, p in ((16, 4), (16, 4), (40, 24))]
    few, wide = pairs[:2], pairs[2]
    found = torch.ops.dpfast.directs([a for a, _ in pairs], [b for _, b in pairs], keep)
    expected = [*kernel_norms.grouped(few, keep=keep), kernel_norms.direct(*wide, keep=keep)]
    flat = [x for of in expected for x in (*of.norm, of.error, of.grad_sample) if x is not None]
    assert len(found) == len(flat) and all(torch.equal(x, y) for x, y in zip(found, flat, strict=True))
