"""What an attack on two passes, clip factors and normalization rules found."""

import torch
from released import MARGIN, gradients, norm_over
from torch import nn

from dpfast import GradSampleModuleFastGradientClipping, NormClipper


class InPlace(NormClipper):
    """Computes its factors in the tensor of norms that it is given."""

    thresholds = torch.tensor([1.0])

    def calc_clipping_factors(self, norms):
        return [norms[0].mul_(1e-3).reciprocal().clamp_(max=1.0)]


def test_a_clipper_that_writes_to_its_norms():
    """1000·C was released: the factors were lowered to what the clipper had left in its norms."""
    model = GradSampleModuleFastGradientClipping(nn.Linear(4, 1, bias=False), norm_clipper=InPlace())
    model(torch.full((1, 4), 30.0)).sum().backward()
    assert norm_over(gradients(model), 1.0) <= 1.0 + MARGIN
