"""What the looks at where samples are leave of the caller's random numbers; torch's and Python's beside the looks' own
tests."""

import random

import numpy
import pytest
import torch
from torch import nn

import dpfast
from dpfast.trials.random_numbers import same_random_numbers


@pytest.mark.parametrize("draw", [lambda: torch.rand([]), random.random, numpy.random.random, numpy.random.randn])
def test_whether_any_are_drawn(draw):
    with same_random_numbers() as again:
        assert not again.are_drawn()
        first = draw()
        assert again.are_drawn()
        again()
        assert not again.are_drawn()
        assert draw() == first


def test_a_look_draws_no_random_numbers_of_numpy():
    """Each look drew what the model's own forward was to draw."""

    class Model(nn.Linear):
        def forward(self, x):
            self.drawn = numpy.random.rand()
            return super().forward(x)

    drawn = []
    for wrap in (nn.Identity(), dpfast.GradSampleModule):
        numpy.random.seed(0)
        model = Model(4, 2)
        called = wrap(model)
        for _ in range(3):
            called(torch.ones(4, 4))
            drawn.append(model.drawn)
    assert drawn[:3] == drawn[3:]
