"""Rows of a table, which have no samples, in equations with dots."""

import pytest
import torch
from in_both_modes import check
from torch import nn


class Columns(nn.Module):
    """A column's embedding times its value, as in transformers for tables."""

    def __init__(self, equation):
        super().__init__()
        self.table, self.head, self.equation = nn.Embedding(4, 3), nn.Linear(3, 2), equation

    def forward(self, x):
        h = torch.einsum(self.equation, self.table(torch.arange(4)), x)
        return torch.sin(self.head(h)).flatten(1)


@pytest.mark.parametrize("equation", ["fd,nf->nfd", "fd,...f->...fd", "fd, ...f -> ...fd", "...d,n...->n...d"])
@pytest.mark.parametrize("n", [4, 5])
def test_as_a_loop_over_samples(equation, n):
    torch.manual_seed(0)
    check(Columns(equation), torch.randn(n, 4), torch.randn(n + 1, 4))
