"""Picked rows stay where they are in functions that go entry by entry or along the last dimension, and in no others."""

import copy

import pytest
import torch
import torch.nn.functional as F
from picked_rows import assert_right, loss
from torch import Tensor, nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastError
from dpfast.taps.followed import Following
from dpfast.taps.row_by_row import is_pointwise
from dpfast.testing import loop_over_samples, relative_error

D, T = 6, 5
VECTOR = torch.linspace(0.5, 1.5, D, dtype=torch.float64)

ENTRY_BY_ENTRY = {
    "sin": torch.sin,
    "exp": Tensor.exp,
    "log": lambda x: (x.abs() + 1.0).log(),
    "square": torch.square,
    "a power": lambda x: x**2,
    "powers of two": lambda x: 2**x,
    "abs": abs,
    "neg": lambda x: -x,
    "clamp": lambda x: x.clamp(-1, 1),
    "bounds by name": lambda x: torch.clamp(x, min=-1, max=1),
    "sqrt": lambda x: x.square().add(1.0).sqrt(),
    "rsqrt": lambda x: (x * x + 1.0).rsqrt(),
    "reciprocal": lambda x: 1.0 / (x.abs() + 1.0),
    "erf": torch.erf,
    "special": lambda x: torch.special.expit(x) + torch.special.erf(x),
    "sigmoids": lambda x: F.logsigmoid(x) + F.hardsigmoid(x) - x.sigmoid(),
    "activations": lambda x: F.mish(F.hardswish(x)) + F.softsign(F.tanhshrink(x)) + F.selu(F.relu6(x)),
    "less a vector": lambda x: x - VECTOR.to(x),
    "by a vector": lambda x: x / VECTOR.to(x),
    "of a vector": lambda x: VECTOR.to(x) - x,
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "masked": lambda x: x.masked_fill(x < -0.5, 0.0),
    "in place": lambda x: x.clone().mul_(2.0).sin_().clamp_(-0.9, 0.9),
}
ALONG_THE_LAST = {
    "softmax": lambda x: x.softmax(-1),
    "softmax by name": lambda x: F.softmax(x, dim=1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "norms": lambda x: F.rms_norm(F.layer_norm(x, (D,)), (D,), VECTOR.to(x)),
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "sum": lambda x: x.sin().sum(-1, keepdim=True) + 0.0 * x,
}
WIDER = {
    "twice": lambda x: torch.cat([x, 2 * x], -1),
    "with sines": lambda x: torch.cat((x.sin(), x.cos()), dim=1),
    "by name": lambda x: torch.concat(tensors=[x, x], dim=-1),
}

MIXING = {
    "where, of other rows": lambda x: torch.where(x > 0, x, x.flip(0)),
    "lerp, to other rows": lambda x: torch.lerp(x, x.flip(0), 0.5),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: F.log_softmax(x, dim=0),
    "normalize": lambda x: F.normalize(x, dim=0),
    "normalize as it is": lambda x: F.normalize(x.T).T,
    "norm over all": lambda x: F.layer_norm(x, x.shape),
    "cumsum": lambda x: x.cumsum(0),
    "sum": lambda x: x.sum(0, keepdim=True).expand_as(x),
    "sorted": lambda x: x.sort(0)[0],
    "flipped": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "products": lambda x: (x @ x.T) @ x,
    "beside others": lambda x: torch.cat([x, x.flip(0)], -1)[:, : x.shape[1]],
    "under others": lambda x: torch.cat([x, x])[: len(x)],
    "written over": lambda x: x.clone().copy_(x.flip(0)),
    "one written over": lambda x: _written(x.clone()),
    "a row written over": lambda x: _row_written(x.clone()),
}


def _written(x):
    x[:1] = x[-1:]
    return x


def _row_written(x):
    x[0].copy_(x[-1])
    return x


class Head(nn.Module):
    """A head on the rows of a mask."""

    def __init__(self, between, width=D):
        super().__init__()
        self.first, self.head = nn.Linear(3, D), nn.Linear(width, 2)
        self.between = between

    def forward(self, x):
        picked = x[:, :, 0] > 0
        found = self.head(self.between(self.first(x)[picked]))
        return found.new_zeros(*x.shape[:2], 2).masked_scatter(picked[..., None], found)


class Radiance(nn.Module):
    """Points within a ball, their sines beside them, go through layers with a skip connection (NeRF)."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = nn.Linear(9, 7), nn.Linear(16, 7), nn.Linear(7, 1)

    def forward(self, points):
        inside = points.square().sum(-1) < 2.0
        x = points[inside]
        x = torch.cat([x, x.sin(), x.cos()], -1)
        h = torch.cat([torch.relu(self.one(x)), x], -1)
        out = points.new_zeros(points.shape[:-1])
        out[inside] = self.last(F.softplus(self.two(h)))[:, 0]
        return out


def some(n):
    """Of which each sample has rows that are picked."""
    torch.manual_seed(n)
    x = torch.randn(n, T, 3)
    x[:, 0] = x[:, 0].abs() * 0.5
    return x


@pytest.mark.parametrize("how", ENTRY_BY_ENTRY | ALONG_THE_LAST)
def test_rows_stay_where_they_are(how):
    assert_right(Head((ENTRY_BY_ENTRY | ALONG_THE_LAST)[how]), some(3), some(T), some(1))


@pytest.mark.parametrize("n", [1, 3, T])
@pytest.mark.parametrize("how", WIDER)
def test_rows_side_by_side(how, n):
    assert_right(Head(WIDER[how], 2 * D), some(n))


@pytest.mark.parametrize("n", [1, 3, T])
def test_a_skip_connection(n):
    assert_right(Radiance(), some(n), some(n + 1))


@pytest.mark.parametrize("n", [1, 3, T])
@pytest.mark.parametrize("how", MIXING)
def test_what_mixes_rows_is_refused(how, n):
    wrapped = GradSampleModuleFastGradientClipping(Head(MIXING[how]), loss_reduction="sum")
    with pytest.raises(DpfastError):
        loss(wrapped, some(n)).backward()


@pytest.mark.parametrize("between", [lambda x: x - x.sum(0), lambda x: x.addcmul(x.mean(0), x)])
@pytest.mark.parametrize("n", [3, T])
def test_what_all_rows_give_is_not_broadcast_back_over_them(between, n):
    """Those rows stand where they stood, and are seen to change with other samples."""
    wrapped = GradSampleModuleFastGradientClipping(Head(between), loss_reduction="sum")
    with pytest.raises(DpfastError, match=r"depends on several samples|changes with a sample that is not its own"):
        loss(wrapped, some(n)).backward()


@pytest.mark.parametrize("how", MIXING)
def test_what_mixes_rows_is_not_followed(how):
    x = torch.randn(4, D)
    with Following("it", (x,)) as rows:
        assert torch.equal(rows.picked(x.sin()).numbers, torch.arange(4))
        assert rows.picked(MIXING[how](x)) is None


def test_rows_beside_others_are_not_followed():
    x = torch.randn(4, D)
    with Following("it", (x,)) as rows:
        one, two = x[torch.tensor([0, 1])], x[torch.tensor([2, 3])]
        assert rows.picked(torch.cat([one, one.cos()], -1)) is not None
        for mixed in ([one, two], [one, torch.randn(2, 3)], [torch.randn(2, 3), one], [one, one.flip(0)]):
            assert rows.picked(torch.cat(mixed, -1)) is None
        assert rows.picked(torch.cat([one, one])) is None
        assert rows.picked(torch.cat([one, one], 0)) is None


def test_rows_that_are_written_over_by_name_are_not_followed():
    x, others = torch.randn(4, D), torch.randn(4, D)
    with Following("it", (x,)) as rows:
        torch.add(others, others, out=x)
        assert rows.picked(x) is None
        torch.cat([others[:, :2], others[:, 2:]], -1, out=x)
        assert rows.picked(x) is None


class OfSamples(nn.Module):
    """A layer on whole samples that are picked."""

    def __init__(self):
        super().__init__()
        self.first, self.more, self.last = nn.Linear(3, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x):
        h = self.first(x)
        some = x[:, 0, 0] > 0.3
        return self.last(h.index_put((some,), self.more(F.silu(h[some].softmax(2)) ** 2)))


@pytest.mark.parametrize("n", [1, 3, T])
def test_rows_of_whole_samples(n):
    model, x = OfSamples(), some(n)
    x[0, 0, 0] = 1.0
    samples = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    exact = loop_over_samples(model, loss, x)
    loss(samples, x).backward()
    for name, p in samples._module.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name


@pytest.mark.parametrize("how", ENTRY_BY_ENTRY | ALONG_THE_LAST)
def test_in_trials_no_bit_depends_on_how_many_rows_are_picked(how):
    """Kernels take the last entries of all another way, and samples would look as if they met."""
    function, x = (ENTRY_BY_ENTRY | ALONG_THE_LAST)[how], torch.randn(40, D)
    whole = function(x)
    with Following("it", (x,), trial=True) as rows:
        for few in range(40):
            found = function(x[torch.arange(40) >= few])
            assert torch.equal(found, whole[few:]) or how == "in place"
            assert torch.equal(rows.picked(found).numbers, torch.arange(few, 40))


def test_a_reduction_of_one_row_has_no_rows():
    x = torch.randn(4, D)
    with Following("it", (x,)) as rows:
        assert rows.picked(x[1]) is not None
        assert rows.picked(x[1].max()) is None
        assert rows.picked(x.max()) is None
        assert rows.picked(torch.maximum(x, -x)) is not None


def test_somebody_elses_function_of_the_same_name_is_not_followed():
    library = torch.library.Library("dpfast_test_row_by_row", "DEF")
    library.define("sin(Tensor x) -> Tensor")
    library.impl("sin", lambda x: x.flip(0), "CompositeImplicitAutograd")
    x = torch.randn(4, D)
    with Following("it", (x,)) as rows:
        assert rows.picked(torch.ops.dpfast_test_row_by_row.sin(x)) is None


def test_what_torch_calls_pointwise_is_so():
    """Whichever of its functions of one tensor that is: another row changes nothing in a row."""
    checked = 0
    for space in (Tensor, torch, F, torch.special):
        for name in dir(space):
            function = getattr(space, name)
            if not callable(function) or not is_pointwise(getattr(function, "__name__", "")):
                continue
            x = torch.rand(4, D) * 0.5 + 0.25
            other = x.clone()
            other[1] = torch.rand(D)
            torch.manual_seed(0)
            try:
                one = function(x.clone())
                torch.manual_seed(0)
                two = function(other)
            except (TypeError, RuntimeError):  # it takes more
                continue
            if isinstance(one, Tensor) and one.dim():
                checked += 1
                assert one.shape == x.shape, name
                rows = [0, 2, 3]
                assert torch.equal(one[rows], two[rows]) or bool(one[rows].isnan().any()), name
    assert checked > 100
