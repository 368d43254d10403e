"""Experts in a list that no token came to when the model was looked at, where units are of tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import relative_error

D, E, T, C, UNITS = 4, 3, 8, 1.0, 5
IDS = torch.tensor([[0] * 3 + [1] * 5, [2] * T, [3] * 2 + [4] * 5 + [-1]])

pytestmark = pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")


class Expert(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        self.up, self.down, self.mixes = nn.Linear(D, 8), nn.Linear(8, D), mixes

    def forward(self, x):
        x = self.up(x).relu()
        return self.down(x - x.mean(0) if self.mixes else x)


class Model(nn.Module):
    """Each token goes to one expert; those that get none are left out."""

    def __init__(self, last_mixes=False):
        super().__init__()
        self.table, self.gate, self.head = nn.Embedding(20, D), nn.Linear(D, E), nn.Linear(D, 20)
        self.experts = nn.ModuleList(Expert(last_mixes and e == E - 1) for e in range(E))
        self.all_to_the_first()

    @torch.no_grad()
    def all_to_the_first(self, yes=True):
        self.gate.bias.copy_(torch.tensor([50.0 * yes, 0.0, 0.0]))

    def forward(self, tokens):
        x = self.table(tokens).flatten(0, 1)
        weights, chosen = self.gate(x).softmax(-1).topk(1, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = torch.where(chosen[:, 0] == e)[0]
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]) * weights[rows])
        return self.head((x + out).view(*tokens.shape, D))


def losses(model, tokens):
    """(N, T)"""
    logits = model(tokens).transpose(1, 2)
    return F.cross_entropy(logits, tokens.roll(-1, 1), reduction="none") * (torch.arange(T) < T - 1)


def step(model, tokens):
    model.zero_grad()
    with model.units(IDS, UNITS) as units:
        units.sums(losses(model, tokens)).sum().backward()


def exact(state, tokens):
    """The clipped sum over units, in fp64."""
    plain = Model()
    plain.load_state_dict(state)
    plain.double()
    total = [torch.zeros_like(p) for p in plain.parameters()]
    for unit in range(UNITS):
        found = torch.autograd.grad(
            (losses(plain, tokens) * (unit == IDS)).sum(), list(plain.parameters()), allow_unused=True
        )
        found = [torch.zeros_like(p) if g is None else g for p, g in zip(plain.parameters(), found, strict=True)]
        norm = float(torch.stack([g.norm() for g in found]).norm())
        total = [t + g * min(1.0, C / norm) for t, g in zip(total, found, strict=True)]
    return dict(zip([name for name, _ in plain.named_parameters()], total, strict=True))


def after_looks(last_mixes=False):
    """A model that has been looked at twice while all tokens went to its first expert."""
    torch.manual_seed(0)
    model = GradSampleModuleFastGradientClipping(Model(last_mixes), max_grad_norm=C, loss_reduction="sum")
    for _ in range(3):
        step(model, torch.randint(1, 20, (3, T)))
    model._module.all_to_the_first(False)
    return model


def test_it_is_looked_at_when_it_runs():
    model = after_looks()
    for _ in range(2):
        tokens = torch.randint(1, 20, (3, T))
        step(model, tokens)
        for name, expected in exact(model._module.state_dict(), tokens).items():
            assert relative_error(model._module.get_parameter(name).grad, expected) <= 1e-4, name


def test_one_in_which_units_meet_is_refused_then():
    model = after_looks(last_mixes=True)
    told = (
        r"experts\.2.*(another unit|which tokens stand beside)|a sample that is not its own"  # or by looks at samples
    )
    with pytest.raises(UnsupportedModuleError, match=told):
        step(model, torch.randint(1, 20, (3, T)))
