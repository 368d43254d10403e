"""Recurrent layers as cuDNN's, on a CPU: all outputs of one node of autograd's, and states that are contiguous. Without
dropout, which the backward pass would draw again."""

import functools

import torch
from torch import _VF, Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpfast.rules import recurrent

KINDS = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn_tanh"}


class OneNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *tensors):
        ctx.function = function
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return function(*tensors)

    @staticmethod
    def backward(ctx, *grads):
        with torch.enable_grad():
            tensors = [x.detach().requires_grad_(x.is_floating_point()) for x in ctx.saved_tensors]
            came = [(x, g) for x, g in zip(ctx.function(*tensors), grads, strict=True) if g is not None]
            outputs, own = zip(*came, strict=True)
            wanted = [x for x in tensors if x.requires_grad]
            found = iter(torch.autograd.grad(outputs, wanted, own))
        return None, *(next(found) if x.requires_grad else None for x in tensors)


def as_one_node(native, *args):
    states = args[2] if isinstance(args[1], Tensor) and not args[1].is_floating_point() else args[1]
    if not all(s.is_contiguous() for s in ([states] if isinstance(states, Tensor) else states)):
        raise RuntimeError("rnn: hx is not contiguous")
    leaves, structure = tree_flatten(args)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def function(*tensors):
        some = dict(zip(places, tensors, strict=True))
        return native(*tree_unflatten([some.get(i, x) for i, x in enumerate(leaves)], structure))

    return OneNode.apply(function, *(leaves[i] for i in places))


def put_in_place(monkeypatch):
    """Of torch's recurrent layers and of those that dpfast's rule runs."""
    for mode, name in KINDS.items():
        function = functools.partial(as_one_node, getattr(_VF, name))
        monkeypatch.setattr(_VF, name, function)
        monkeypatch.setitem(recurrent._NATIVE, mode, function)
