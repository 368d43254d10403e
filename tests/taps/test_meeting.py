"""What has no samples meets rows of which each sample has several: right in either order, and refused in another."""

import pytest
import torch
import torch.nn.functional as F
from in_both_modes import C, check
from torch import nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import EscapedGradientError, InputError, UnsupportedModuleError

T, D = 4, 4


def quantized(m, rows):
    """As VQ-VAEs do, with the codes trained by the rows that are nearest."""
    codes = m.table.weight
    far = rows.square().sum(1, keepdim=True) + codes.square().sum(1) - 2 * rows @ codes.t()
    return (F.one_hot(far.argmin(1), 7).to(rows.dtype) @ codes - rows).square()


WHAT = {
    "F.linear": lambda m, rows: F.linear(rows, m.body.weight, m.body.bias),
    "@ transposed": lambda m, rows: rows @ m.table.weight.t(),
    "@ a vector": lambda m, rows: (rows @ m.body.bias).unsqueeze(-1),
    "of matrices": lambda m, rows: (rows.unsqueeze(1) @ m.body.weight.unsqueeze(0)).squeeze(1),
    "einsum": lambda m, rows: torch.einsum("rd,pd->rp", rows, m.table.weight),
    "added": lambda m, rows: rows + m.body.bias,
    "in place": lambda m, rows: rows.clone().mul_(m.body.bias),
    "where": lambda m, rows: torch.where(rows > 0, rows, m.body.weight[:1]),
    "looked up": lambda m, rows: m.table.weight[(3 * rows[:, 0]).long().abs() % 7] * rows,
    "F.layer_norm": lambda m, rows: F.layer_norm(rows, (D,), m.norm.weight, m.norm.bias),
    "convolution": lambda m, rows: F.conv1d(rows.view(-1, 2, 2), m.conv.weight, m.conv.bias).flatten(1),
    "F.group_norm": lambda m, rows: F.group_norm(rows.view(-1, 2, 2), 1, m.conv.weight[0, :, 0]).flatten(1),
    "codes": quantized,
    "an own vector": lambda m, rows: rows * m.own,
    "own copies": lambda m, rows: rows * m.own.expand(len(rows), -1),
}


class Folds(nn.Module):
    """Positions are folded into rows, and back."""

    def __init__(self, what, fold):
        super().__init__()
        self.first, self.body, self.table = nn.Linear(D, D), nn.Linear(D, D), nn.Embedding(7, D)
        self.norm, self.conv, self.own = nn.LayerNorm(D), nn.Conv1d(2, 3, 2), nn.Parameter(torch.randn(D))
        self.what, self.fold = what, fold

    def forward(self, x):
        fold, back = FOLD[self.fold]
        rows = WHAT[self.what](self, fold(torch.tanh(self.first(x))))
        return torch.sin(3.0 * back(rows, len(x))).flatten(1)


def _odd(rows, n):
    return torch.cat([rows[:n].unsqueeze(1), rows[n:].unflatten(0, (n, -1))], 1)


FOLD = {
    "N*k": (lambda x: x.flatten(0, 1), lambda rows, n: rows.unflatten(0, (n, len(rows) // max(n, 1)))),
    "k*N": (
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda rows, n: rows.unflatten(0, (len(rows) // max(n, 1), n)).transpose(0, 1),
    ),
    # The first positions of all, then each sample's others.
    "neither": (lambda x: torch.cat([x[:, 0], x[:, 1:].flatten(0, 1)]), _odd),
    "samples turned": (
        lambda x: x.flip(0).flatten(0, 1),
        lambda rows, n: rows.unflatten(0, (n, len(rows) // n)).flip(0),
    ),
    "of all": (lambda x: (x - x.mean(0)).flatten(0, 1), lambda rows, n: rows.unflatten(0, (n, len(rows) // n))),
}


@pytest.mark.parametrize("n", [0, 1, 3, T])
@pytest.mark.parametrize("fold", ["N*k", "k*N"])
@pytest.mark.parametrize("what", WHAT)
def test_rows_of_samples(what, fold, n):
    torch.manual_seed(0)
    check(Folds(what, fold), torch.randn(n, T, D), torch.randn(3, T, D))


@pytest.mark.parametrize("fold", ["N*k", "k*N"])
def test_another_number_of_rows(fold):
    torch.manual_seed(0)
    x = torch.randn(3, T, D)
    check(Folds("F.linear", fold), x, torch.randn(5, 2, D), torch.randn(2, 1, D))
    check(Folds("F.linear", fold), x[:, :1], x, torch.randn(5, 2, D))


@pytest.mark.parametrize("fold", ["neither", "samples turned", "of all"])
@pytest.mark.parametrize("what", [what for what in WHAT if not what.startswith(("an own", "own"))])
@pytest.mark.parametrize("mode", [GradSampleModule, lambda m: GradSampleModuleFastGradientClipping(m, max_grad_norm=C)])
def test_rows_in_another_order_are_refused(what, fold, mode):
    torch.manual_seed(0)
    model = mode(Folds(what, fold))
    said = "neither sample by sample|another order|not its own|depends on several samples"
    with pytest.raises((InputError, UnsupportedModuleError), match=said):
        model(torch.randn(3, T, D)).sum().backward()


def test_copies_for_rows_are_refused():
    """Whose they are nothing tells."""

    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x):
            return (self.first(x).flatten(0, 1) * self.body.bias.expand(len(x) * T, -1)).view_as(x)

    with pytest.raises(EscapedGradientError, match=r"body\.bias"):
        GradSampleModule(Copies())(torch.randn(3, T, D)).sum().backward()
