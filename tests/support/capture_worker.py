"""A step captured in a CUDA graph and replayed with another batch, in a process of its own: a capture that fails leaves
torch's random numbers unusable in its process."""

import copy
import sys

import torch
from nodes_kept import check_none_is_kept, noted
from whole_steps import MODELS, WRAPPERS, step

from dpfast.testing import relative_error


def main(name):
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    original = make().cuda()
    x, y = inputs().cuda(), torch.zeros(6, dtype=torch.long, device="cuda")
    plain = WRAPPERS["one pass"](copy.deepcopy(original))
    captured = WRAPPERS["one pass"](original)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(7):  # the eighth would be looked at
            captured.zero_grad(set_to_none=True)
            with noted(captured):
                step(captured, x, y)
    torch.cuda.current_stream().wait_stream(side)
    check_none_is_kept(captured)
    graph = torch.cuda.CUDAGraph()
    captured.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step(captured, x, y)
    x.copy_(inputs())
    graph.replay()
    step(plain, x, y)
    for (parameter, p), q in zip(captured.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(p.grad, q.grad) <= 1e-5, parameter


if __name__ == "__main__":
    main(sys.argv[1])
