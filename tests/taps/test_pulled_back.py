"""Weights by functions whose own backward knows no rule for many gradients at once: samples go through one by one."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

N, D, K, C = 5, 6, 3, 0.3


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, s, back):
        ctx.save_for_backward(w, s)
        ctx.back = back
        return w * s

    @staticmethod
    def backward(ctx, grad):
        return *ctx.back(grad, *ctx.saved_tensors), None


def by_einsum(grad, w, s):
    return torch.einsum("ij,j->ij", grad, s), torch.einsum("ij,ij->j", grad, w)


def by_writing(grad, w, s):
    of_w, of_s = torch.zeros(K, D, dtype=w.dtype), torch.zeros(D, dtype=w.dtype)
    return of_w.addcmul_(grad, s), of_s.add_((grad * w).sum(0))


def by_a_look(grad, w, s):
    """At numbers, by which some samples have no gradient at one of the two."""
    return grad * s, (grad * w).sum(0) if float(grad.sum()) > 0 else None


def to_one_alone(grad, w, s):
    return torch.einsum("ij,j->ij", grad, s), None


def failing(grad, w, s):
    torch.einsum("ij,j->ij", grad, s)
    raise RuntimeError("somebody's own")


class Net(nn.Module):
    def __init__(self, back):
        super().__init__()
        self.w, self.s, self.back = nn.Parameter(torch.randn(K, D)), nn.Parameter(torch.rand(D)), back

    def forward(self, x):
        return F.linear(x, Scaled.apply(self.w, self.s, self.back))


def loss(model, x):
    return model(x).sin().sum()


def wrapped(model):
    return dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=C)


@pytest.mark.parametrize("back", [by_einsum, by_writing, by_a_look, to_one_alone], ids=lambda f: f.__name__)
def test_one_by_one(back):
    torch.manual_seed(0)
    model, x = Net(back), torch.randn(N, D)
    plain, module = copy.deepcopy(model), wrapped(model)
    exact = loop_over_samples(plain, loss, x)
    loss(module, x).backward()
    assert relative_error(module.get_norm_sample(), norms_of(exact)) < 1e-5
    for name, total in clipped_sum(exact, C).items():
        assert relative_error(model.get_parameter(name).grad, total) < 1e-5, name


def test_an_error_of_its_own_comes_as_it_is():
    with pytest.raises(RuntimeError, match="somebody's own"):
        loss(wrapped(Net(failing)), torch.randn(N, D)).backward()
