"""Opacus's loss of ghost clipping with dpfast: the same result, from one backward pass where that is enough."""

import copy
from contextlib import nullcontext

import opacus
import pytest
import torch
import torch.nn.functional as F
from cases import assert_gradients
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.grad_sample.utils import register_norm_sampler
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from opacus_cases import opacus_example, private, train, weights
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import dpfast.opacus
from dpfast.errors import InputError, StateError
from dpfast.opacus import backward

C = 0.5
ORIGINAL = DPTensorFastGradientClipping.backward

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook")


@pytest.fixture(autouse=True)
def _uninstalled():
    yield
    dpfast.opacus.uninstall()
    assert DPTensorFastGradientClipping.backward is ORIGINAL


def ghost_step(model, losses, *batch, install, reduction="mean", batch_first=True, during=None, factors=None):
    """(clipped sums by name, how often the backward pass ran, the private module) of one step."""
    private = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=C, batch_first=batch_first, loss_reduction=reduction, strict=False
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(parameters, lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=C,
        expected_batch_size=1,
        loss_reduction=reduction,
    )
    if install:
        dpfast.opacus.install()
    if factors is not None:
        private.get_clipping_coef = lambda: factors
    per_sample = losses(private, *batch)
    passes = []
    per_sample.register_hook(lambda grad: passes.append(grad))
    with during or nullcontext():
        DPTensorFastGradientClipping(private, optimizer, per_sample, reduction).backward()
    assert private.hooks_enabled
    return {name: p.grad for name, p in model.named_parameters()}, len(passes), private


def compare(model, losses, *batch, passes, tolerance=1e-5, **options):
    """A step with dpfast against Opacus's own with the same clip factors, and these against Opacus's own."""
    other, others = copy.deepcopy(model), copy.deepcopy(batch)
    found, count, ours = ghost_step(model, losses, *batch, install=True, **options)
    assert count == passes
    dpfast.opacus.uninstall()
    factors = ours.get_clipping_coef()
    exact, count, theirs = ghost_step(other, losses, *others, install=False, factors=factors, **options)
    assert count == 2
    exact_factors = type(theirs).get_clipping_coef(theirs)
    assert (factors <= exact_factors * (1 + tolerance)).all() and (factors >= exact_factors * (1 - 1e-3)).all()
    assert (factors < 1).any()
    assert {name for name, g in found.items() if g is None} == {name for name, g in exact.items() if g is None}
    found, exact = ({k: g for k, g in all_.items() if g is not None} for all_ in (found, exact))
    assert_gradients(found, exact, tolerance)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.grad is None or p.grad.dtype == q.grad.dtype
        if p.requires_grad:
            assert p._forward_counter == q._forward_counter


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("name", ["block", "mlp"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_pass_is_enough_where_every_layer_has_a_rule(name, reduction):
    model, x, y = opacus_example(name)
    compare(model, cross_entropy, x, y, passes=1, reduction=reduction)


def test_convolutions_and_frozen_layers():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.Flatten(),
        nn.Linear(64, 5),
    )
    model[3].requires_grad_(False)
    model[5].bias.requires_grad_(False)
    compare(model, cross_entropy, torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,)), passes=1)


def test_samples_in_the_second_dimension():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(7, 6, 4)
    compare(model, lambda m, x: m(x).square().sum((0, 2)), x, passes=1, batch_first=False)


@pytest.mark.skipif(opacus.__version__ < "1.6", reason="Opacus 1.5.4's own norms fail in autocast")
def test_autocast():
    model, x, y = opacus_example("block")

    def losses(m, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            out = m(x)
        return F.cross_entropy(out.float(), y, reduction="none")

    compare(model, losses, x, y, passes=1, tolerance=3e-2)


class Scale(nn.Module):
    """A layer of the user's."""

    def __init__(self, width=5):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, width))

    def forward(self, x):
        return x * self.weight


@pytest.fixture
def sampler_of_a_user():
    register_norm_sampler(Scale)(lambda m, a, b: {m.weight: (a[0] * b).norm(dim=1)})
    yield
    del GradSampleModuleFastGradientClipping.NORM_SAMPLERS[Scale]


def with_scale():
    model, x, y = opacus_example("mlp")
    return model.append(Scale()), x, y


@pytest.mark.parametrize("own_sampler", [True, False])
def test_layers_without_a_rule_need_the_second_pass(own_sampler, request):
    if own_sampler:
        request.getfixturevalue("sampler_of_a_user")
    model, x, y = with_scale()
    compare(model, cross_entropy, x, y, passes=2)


@pytest.mark.parametrize(("install", "own_sampler"), [(False, False), (True, False), (True, True)])
def test_matrix_products_of_the_backward_pass(install, own_sampler, request, reference_runs):
    """Opacus needs an input gradient and both weight gradients, twice, and products for its norms. (torch counts no
    kernels' products.)"""
    n, input_gradient, weight_gradients = 6, 2 * 20 * 5, 2 * (12 * 20 + 20 * 5)
    if own_sampler:
        request.getfixturevalue("sampler_of_a_user")
    model, x, y = with_scale() if own_sampler else opacus_example("mlp")
    counter = FlopCounterMode(display=False)
    ghost_step(model, cross_entropy, x, y, install=install, during=counter)
    if install:
        passes = 2 if own_sampler else 1
        assert counter.get_total_flops() == n * (passes * input_gradient + weight_gradients)
    else:
        assert counter.get_total_flops() > n * 2 * (input_gradient + weight_gradients)


def test_gradients_of_inputs():
    """Opacus's, the sum of both passes."""
    grads = []
    for install in (False, True):
        model, x, y = opacus_example("mlp")
        x.requires_grad_()
        ghost_step(model, cross_entropy, x, y, install=install)
        grads.append(x.grad)
    assert_gradients({"x": grads[1]}, {"x": grads[0]})


def test_parameters_of_the_loss():
    """They are outside the private module: Opacus weights their gradients by the factors, and so it stays."""
    grads = []
    for install in (False, True):
        model, x, y = opacus_example("mlp")
        temperature = nn.Parameter(torch.tensor(2.0))
        losses = lambda m, x, y, t=temperature: F.cross_entropy(m(x) / t, y, reduction="none")  # noqa: E731
        found, passes, _ = ghost_step(model, losses, x, y, install=install)
        assert passes == 2
        grads.append({**found, "temperature": temperature.grad})
    assert_gradients(grads[1], grads[0])


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Inside(nn.Module):
    """``way`` says what happens between two layers."""

    def __init__(self, way):
        super().__init__()
        self.first, self.middle, self.last, self.way = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 5), way

    def forward(self, x):
        x = self.first(x)
        if self.way == "custom function":
            return self.last(Double.apply(torch.tanh(self.middle(x))))
        return self.last(checkpoint(lambda x: torch.tanh(self.middle(x)), x, use_reentrant=True))


@pytest.mark.parametrize("way", ["custom function", "checkpoint"])
def test_what_dpfast_does_not_know_is_left_to_opacus(way):
    _, x, y = opacus_example("mlp")
    torch.manual_seed(0)
    compare(Inside(way), cross_entropy, x, y, passes=2)


def test_hooks_on_parameters_see_both_passes():
    for install in (False, True):
        model, x, y = opacus_example("mlp")
        seen = []
        model[0].weight.register_hook(seen.append)
        model[3].weight.register_post_accumulate_grad_hook(seen.append)
        ghost_step(model, cross_entropy, x, y, install=install)
        assert len(seen) == 4


def test_a_weight_whose_own_module_is_not_what_uses_it():
    """Opacus fails, or takes the last step's norm for this one's; with dpfast the step fails and says why."""

    class Borrowed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 5)

        def forward(self, x):
            x = torch.tanh(self.first(x))
            self.unused = self.middle(x)
            return self.last(F.linear(x, self.middle.weight))

    _, x, y = opacus_example("mlp")
    with pytest.raises(AttributeError, match="_norm_sample"):
        ghost_step(Borrowed(), cross_entropy, x, y, install=False)
    with pytest.raises(StateError, match=r"middle\.weight: used by another module"):
        ghost_step(Borrowed(), cross_entropy, x, y, install=True)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (lambda m, x: m(x), r"shape \(6, 3\) is not one loss a sample"),
        (lambda m, x: m(x).sum(1, keepdim=True), r"shape \(6, 1\) is not one loss a sample"),
        (lambda m, x: m(x).sum(), r"shape \(\) is not one loss a sample"),
        (lambda m, x: m(x).flatten(), "6 samples went through the model and there are 18 losses"),
        (lambda m, x: m(x).sum().view(1), "6 samples went through the model and there are 1 losses"),
    ],
)
def test_losses_that_are_not_one_a_sample_are_errors(losses, message):
    with pytest.raises(InputError, match=message):
        ghost_step(nn.Linear(4, 3), losses, torch.randn(6, 4), install=True)


def test_gradients_are_added_to_what_other_parameters_hold():
    """The optimizer's parameters are cleared between the passes, as in Opacus; a frozen optimizer's are not."""
    model, x, y = opacus_example("mlp")
    exact, _, _ = ghost_step(copy.deepcopy(model), cross_entropy, x, y, install=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    found, passes, _ = ghost_step(model, cross_entropy, x, y, install=True)
    assert passes == 1
    assert_gradients(found, exact)


@pytest.mark.parametrize("place", backward._PLACES, ids=lambda place: place.name)
def test_what_others_put_there_stays(place):
    def others(self):
        raise AssertionError

    setattr(place.cls, place.name, others)
    try:
        dpfast.opacus.install()
        assert vars(place.cls)[place.name] is others
        dpfast.opacus.uninstall()
        assert vars(place.cls)[place.name] is others
    finally:
        setattr(place.cls, place.name, place.theirs)


def test_uninstall_puts_everything_back():
    before = [vars(place.cls)[place.name] for place in backward._PLACES]
    dpfast.opacus.install()
    dpfast.opacus.install()
    assert not any(
        vars(place.cls)[place.name] is theirs for place, theirs in zip(backward._PLACES, before, strict=True)
    )
    dpfast.opacus.uninstall()
    assert [vars(place.cls)[place.name] for place in backward._PLACES] == before


def test_a_failing_pass_leaves_nothing_behind():
    model, x, y = opacus_example("mlp")

    def losses(m, x, y):
        out = m(x)
        out.register_hook(lambda grad: 1 / 0)
        return F.cross_entropy(out, y, reduction="none")

    with pytest.raises(ZeroDivisionError):
        ghost_step(model, losses, x, y, install=True)
    assert not backward._KEPT


@pytest.mark.parametrize("name", ["mlp", "block"])
def test_a_script_of_opacus_s(name):
    """Its engine in ghost mode, Poisson batches, noise: the same weights and the same ε with one line more."""
    runs = []
    for install in (False, True):
        if install:
            dpfast.opacus.install()
        engine, module, optimizer, criterion, batches = private(
            None, name, sigma=1.0, criterion=nn.CrossEntropyLoss(), grad_sample_mode="ghost"
        )
        sizes = train(module, optimizer, criterion, batches)
        runs.append((weights(module), sizes, engine.get_epsilon(1e-5)))
    (exact, sizes, epsilon), (found, our_sizes, our_epsilon) = runs
    assert sizes == our_sizes and epsilon == our_epsilon
    assert_gradients(found, exact)


class Positions(nn.Module):
    """A table looked up once for all samples, (T,)."""

    def __init__(self):
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(40, 8), nn.Embedding(16, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head((self.words(x) + self.positions(torch.arange(x.shape[1]))).tanh().mean(1))


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.norm(self.first(x.transpose(0, 1))).tanh().mean(0))


@pytest.mark.parametrize(
    ("make", "x"), [(Positions, torch.randint(0, 40, (5, 5))), (TimeFirst, torch.randn(5, 5, 6))], ids=["table", "time"]
)
def test_as_many_positions_as_samples(make, x):
    """Opacus takes one for the other in its norms; its sums at least are the samples', and so are ours."""
    torch.manual_seed(0)
    net, weights = make(), torch.tensor([2000.0, 0.0, 0.0, 0.0, 0.0])
    losses = lambda m, x: m(x).square().sum(1) * weights  # noqa: E731
    expected, _, _ = ghost_step(copy.deepcopy(net), losses, x, install=False)
    found, passes, _ = ghost_step(net, losses, x, install=True)
    assert passes == 2
    for name, p in found.items():
        assert torch.allclose(p, expected[name], atol=1e-5), name
