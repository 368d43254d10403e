"""Frozen weights that others have quantised, with adapters beside: tensors of a class of their own, which know no more
than what their layer does with them (torchao's, for one)."""

import copy

import pytest
import torch
from cases import clipped_as_told
from in_both_modes import check
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping, compile_step
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, relative_error

C, N, D = 0.3, 5, 6


class Int8(torch.Tensor):
    """(P, D) as 8 bits and a scale for each row."""

    @staticmethod
    def __new__(cls, values, scales):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scales.dtype, device=scales.device)

    def __init__(self, values, scales):
        self.values_of_8_bits, self.scales = values, scales

    @classmethod
    def of(cls, weight):
        scales = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scales).round().to(torch.int8), scales)

    def __tensor_flatten__(self):
        return ["values_of_8_bits", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, *_):
        return cls(inner["values_of_8_bits"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return cls(func(args[0].values_of_8_bits), func(args[0].scales))
        if func is aten._to_copy.default:  # the loop over samples is in fp64
            return cls(args[0].values_of_8_bits, func(args[0].scales, **kwargs))
        if func is aten.t.default:
            return (args[0].values_of_8_bits * args[0].scales).t()
        if func in (aten.mm.default, aten.addmm.default, aten.linear.default):
            numbers = (x.values_of_8_bits * x.scales if isinstance(x, cls) else x for x in args)
            return func(*numbers)
        raise NotImplementedError(f"{cls.__name__}: {func}")


class Copied(Int8):
    """Copies itself in a way of its own, as bitsandbytes' do."""

    def __deepcopy__(self, memo):
        return type(self)(copy.deepcopy(self.values_of_8_bits), copy.deepcopy(self.scales))


class Adapted(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.base = nn.Linear(D, D)
        self.base.weight = nn.Parameter(kind.of(self.base.weight), requires_grad=False)
        self.base.bias.requires_grad_(False)
        self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def model_of(kind=Int8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, D), nn.Tanh(), Adapted(kind), nn.Tanh(), Adapted(kind), nn.Tanh())


def losses(model, x):
    return torch.sin(3.0 * model(x)).flatten(1).sum(1)


def test_they_refuse_what_they_do_not_know():
    with pytest.raises(NotImplementedError):
        model_of()[2].base.weight.abs()


@pytest.mark.parametrize("t", [N, 3])
def test_as_a_loop_over_samples(t):
    check(model_of(), torch.randn(N, t, 3), torch.randn(N + 1, t, 3))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_as_a_graph(backend):
    """Which computes with the tensors that they are made of: with others, without numbers, the process ended."""
    model, x = model_of(), torch.randn(N, 3, 3)
    exact = loop_over_samples(model, lambda m, x: losses(m, x).sum(), x)
    step = compile_step(model, losses, max_grad_norm=C, batch_size=N + 1, backend=backend)
    step(x)
    for name, expected in clipped_as_told(step.clip_factors, exact, C).items():
        assert relative_error(model.get_parameter(name).grad, expected) <= 1e-5, name


def test_a_graph_of_what_copies_itself_is_refused_by_name():
    step = compile_step(model_of(Copied), losses, max_grad_norm=C, batch_size=N, backend="eager")
    with pytest.raises(UnsupportedModuleError, match=r"holds tensors of class Copied\) cannot be copied .*without a"):
        step(torch.randn(N, 3, 3))


class OfTheBatch(torch.autograd.Function):
    """Inputs rounded by the largest of all, as float8 training "tensorwise"; or but for columns of outliers that the
    whole batch decides on, as LLM.int8 with a threshold."""

    @staticmethod
    def forward(ctx, x, weight, by_columns):
        rows = x.reshape(-1, x.shape[-1])
        outliers = (rows.abs() > 1.0).any(0) if by_columns else torch.zeros(rows.shape[1], dtype=torch.bool)
        scale = (rows.abs().amax(1, keepdim=True) if by_columns else rows.abs().max()) / 7
        rounded = torch.where(outliers, rows, (rows / scale).round() * scale)
        ctx.save_for_backward(weight)
        return (rounded @ weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0], None, None


class RoundsTheBatch(nn.Linear):
    by_columns = False

    def forward(self, x):
        return OfTheBatch.apply(x, self.weight, self.by_columns)


class Outliers(RoundsTheBatch):
    by_columns = True


@pytest.mark.parametrize("t", [N, 3])
@pytest.mark.parametrize("kind", [RoundsTheBatch, Outliers])
def test_scales_of_the_whole_batch_are_refused(kind, t):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, D), kind(D, D).requires_grad_(False), nn.Tanh(), nn.Linear(D, 2))
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=C)
    with pytest.raises(UnsupportedModuleError, match=rf"samples meet in 1 \({kind.__name__}\)"):
        losses(wrapped, 2 * torch.randn(N, t, 3)).mean().backward()
