"""Sparse tensors: an operator of the model's own is right; an input is refused before anything has changed."""

import pytest
import torch
from two_linears import C, D, N, Net, clipping, step

from dpfast.errors import InputError, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

LAYOUTS = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr}
A = (torch.arange(D * D) % 3 == 0).float().view(D, D)


class Given(Net):
    """Its second input is for all samples."""

    def forward(self, x, operator=None):
        x = x if operator is None else torch.sparse.mm(operator.to(x.dtype), x.t()).t()
        return self.last(torch.tanh(self.first(x)))


class Owns(Given):
    def __init__(self):
        super().__init__()
        self.register_buffer("operator", A.to_sparse())

    def forward(self, x):
        return super().forward(x, self.operator)


class OwnsAndMixes(Owns):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def assert_as_the_loop(wrapped, plain, *inputs):
    plain.load_state_dict(wrapped._module.state_dict())
    step(wrapped, *inputs)
    x, *others = inputs
    exact = clipped_sum(loop_over_samples(plain, lambda m, x: m(x, *others).square().sum(), x), C)
    for name, p in wrapped._module.named_parameters():
        assert relative_error(p.grad, exact[name]) < 1e-4, name


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
def test_a_buffer():
    assert_as_the_loop(clipping(Owns()), Owns(), torch.randn(N, D))


def test_a_buffer_of_a_model_that_mixes():
    with pytest.raises(UnsupportedModuleError, match="samples"):
        step(clipping(OwnsAndMixes()), torch.randn(N, D))


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", [0, 1])
def test_an_input_is_refused(number, layout):
    wrapped, inputs = clipping(Given()), [torch.randn(N, D), A]
    sparse = [*inputs[:number], LAYOUTS[layout](inputs[number])]
    with pytest.raises(InputError, match=rf"sparse_{layout}, .*input {number}.*to_dense\(\).*a buffer"):
        wrapped(*sparse)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(*sparse), wrapped(*inputs[: number + 1]))
    assert_as_the_loop(wrapped, Given(), inputs[0], *inputs[1 : number + 1])
