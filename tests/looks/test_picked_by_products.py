"""Rows that are picked by a product with a matrix of zeros and ones (the dispatch of GShard and Switch): in an order
that the data makes, and where the first batches go one way nothing else shows it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

D, E = 6, 2
MODES = pytest.mark.parametrize("mode", [GradSampleModule, GradSampleModuleFastGradientClipping])


def whole_numbers(index, n):
    return F.one_hot(index, n).float()


def rows_of_a_table(index, n):
    return torch.eye(n)[index]


def scattered(index, n):
    return torch.zeros(*index.shape, n).scatter(-1, index.unsqueeze(-1), 1.0)


def compared(index, n):
    return (index.unsqueeze(-1) == torch.arange(n)).to(torch.float32)


def where(index, n):
    return torch.where(index.unsqueeze(-1) == torch.arange(n), torch.tensor(1.0), torch.tensor(0.0))


def by_product(hot, x):
    return [hot[:, e].t() @ x for e in range(E)]


def by_equation(hot, x):
    return list(torch.einsum("n e c, n ... -> e c ...", hot, x))


def by_lists(hot, x):
    return [torch.einsum(hot[:, e], [0, 1], x, [0, 2], [1, 2]) for e in range(E)]


def by_sum(hot, x):
    return list((hot.unsqueeze(-1) * x[:, None, None]).sum(dim=0))


def by_batches_of_experts(hot, x):
    return list(torch.bmm(hot.permute(1, 2, 0), x.expand(E, *x.shape)))


def by_tensordot(hot, x):
    return list(torch.tensordot(hot, x, dims=([0], [0])))


def by_linear(hot, x):
    return [F.linear(hot[:, e].t(), x.t()) for e in range(E)]


def added(hot, x):
    return [torch.addmm(x.new_zeros(1), hot[:, e].t(), x) for e in range(E)]


class Dispatched(nn.Module):
    """(N, D) -> (N, 3), by the best expert; nearly every sample goes to the first. capacity: of an expert, N times."""

    def __init__(self, hot=whole_numbers, dispatch=by_product, capacity=1, name="experts", weighted=False):
        super().__init__()
        self.gate = nn.Linear(D, E)
        nn.init.constant_(self.gate.bias[:1], 40.0)
        self.add_module(name, nn.ModuleList(nn.Linear(D, 3) for _ in range(E)))
        self.hot, self.dispatch, self.capacity, self.name, self.weighted = hot, dispatch, capacity, name, weighted

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        to_expert = self.hot(p.argmax(-1), E)  # (N, E)
        place = ((to_expert.cumsum(0) - 1) * to_expert).sum(-1).long()
        to_place = self.hot(place, self.capacity * len(x))  # (N, C)
        hot = to_expert.unsqueeze(-1) * to_place.unsqueeze(1)
        combine = hot * p.unsqueeze(-1)
        if self.weighted:
            hot = combine.bool().to(x)
        rows = self.dispatch(hot, x)
        y = torch.stack([expert(some) for expert, some in zip(getattr(self, self.name), rows, strict=True)])
        return torch.einsum("nec,ecd->nd", combine, y)


def losses(model, x):
    return model(x).square().sum(1)


def refused(mode, model, x):
    with pytest.raises(UnsupportedModuleError):
        losses(mode(model, loss_reduction="sum", **clipping(mode)), x).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def clipping(mode):
    return {} if mode is GradSampleModule else {"max_grad_norm": 1.0}


@MODES
@pytest.mark.parametrize(
    "dispatch",
    [by_product, by_equation, by_lists, by_sum, by_batches_of_experts, by_tensordot, by_linear, added],
)
def test_every_product_is_seen(mode, dispatch):
    torch.manual_seed(0)
    refused(mode, Dispatched(dispatch=dispatch), torch.randn(5, D))


@pytest.mark.parametrize("hot", [rows_of_a_table, scattered, compared, where])
@pytest.mark.parametrize("weighted", [False, True])
def test_however_the_matrix_is_made(hot, weighted):
    torch.manual_seed(0)
    refused(GradSampleModule, Dispatched(hot, weighted=weighted), torch.randn(5, D))


@pytest.mark.parametrize("name", ["experts", "layers"])
@pytest.mark.parametrize("capacity", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_whatever_the_experts_are_called_and_hold(name, capacity, n):
    torch.manual_seed(0)
    refused(GradSampleModule, Dispatched(capacity=capacity, name=name), torch.randn(n, D))


# --- what sums over other things is right, as it was ---


class Right(nn.Module):
    """(N, T, D) -> (N, 3)."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))
        self.gate = nn.Linear(D, E)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(getattr(self, self.how)(h, (x[..., 0] > 0).to(x)))

    def masked_mean(self, h, mask):
        return (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)

    def masked_product(self, h, mask):
        return torch.einsum("nt,ntd->nd", mask, h)

    def masked_attention(self, h, mask):
        score = (h @ h.transpose(1, 2)).masked_fill(mask.unsqueeze(1) == 0, -1e4)
        return (score.softmax(-1) @ h)[:, 0]

    def dispatch_within_samples(self, h, mask):
        """As lucidrains' mixture of experts: each sample has slots of its own."""
        p = self.gate(h).softmax(-1)
        hot = whole_numbers(p.argmax(-1), E).to(h)
        place = ((hot.cumsum(1) - 1) * hot).sum(-1).long()
        hot = hot.unsqueeze(-1) * whole_numbers(place, h.shape[1]).to(h).unsqueeze(2)  # (N, T, E, C)
        slots = torch.einsum("bnd,bnec->ebcd", h, hot)
        y = torch.stack([expert(some) for expert, some in zip(self.experts, slots, strict=True)])
        return torch.einsum("ebcd,bnec->bnd", y, hot * p.unsqueeze(-1)).mean(1)

    def dense_and_folded(self, h, mask):
        """Every expert on each feature's course, folded with the samples."""
        x = h[:, :D].transpose(1, 2) if h.shape[1] >= D else F.pad(h, (0, 0, 0, D - h.shape[1])).transpose(1, 2)
        x = x.reshape(-1, D)
        y = torch.stack([expert(x) for expert in self.experts], -1)
        return (y * self.gate(x).softmax(-1).unsqueeze(1)).sum(-1).view(len(h), -1, D).mean(1)


@MODES
@pytest.mark.parametrize("how", [name for name in vars(Right) if name[0] != "_" and name != "forward"])
@pytest.mark.parametrize("t", [2, 3, 6])
def test_sums_within_samples_are_right(mode, how, t):
    torch.manual_seed(0)
    model = Right(how)
    module = mode(copy.deepcopy(model), loss_reduction="sum", **clipping(mode))
    for n in (4, 3, 6, 1):
        x = torch.randn(n, t, D)
        exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x)
        module.zero_grad()
        losses(module, x).sum().backward()
        if mode is GradSampleModule:
            for name, p in module._module.named_parameters():
                if name in exact and p.grad_sample is not None:
                    assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name
        else:
            assert relative_error(module.get_norm_sample(), norms_of(exact)) <= 1e-5


class Folded(nn.Module):
    """A dense mixture behind a transposed input, (N, L, C) -> (N, C, 4), as neuralforecast's RMoK."""

    def __init__(self, folded=True):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
        self.gate, self.folded = nn.Linear(8, 2), folded

    def forward(self, x):
        n, length, channels = x.shape
        x = x.transpose(1, 2)
        x = x.reshape(n * channels, length) if self.folded else x
        y = torch.stack([expert(x) for expert in self.experts], -1)
        return (y * self.gate(x).softmax(-1).unsqueeze(-2)).sum(-1).reshape(n, channels, 4)


@MODES
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_a_dense_mixture_on_the_transposed_input(mode, folded, channels):
    torch.manual_seed(0)
    model = Folded(folded)
    module = mode(copy.deepcopy(model), loss_reduction="sum", **clipping(mode))
    for n in (4, channels, 2 * channels, 1):
        x = torch.randn(n, 8, channels)
        exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x)
        module.zero_grad()
        module(x).square().sum().backward()
        if mode is GradSampleModule:
            assert all(
                relative_error(p.grad_sample, exact[name]) <= 1e-5 for name, p in module._module.named_parameters()
            )
        else:
            assert relative_error(module.get_norm_sample(), norms_of(exact)) <= 1e-5
