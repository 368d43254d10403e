"""What Opacus's ghost clipping has no norm of is refused while dpfast is installed."""

import pytest
import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.layers import DPLSTM
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import nn

import dpfast.opacus
from dpfast.errors import EscapedGradientError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

C = 0.5

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook")


@pytest.fixture(autouse=True)
def _installed():
    dpfast.opacus.install()
    yield
    dpfast.opacus.uninstall()


def ghost_step(model, losses, x, y):
    private = GradSampleModuleFastGradientClipping(model, max_grad_norm=C, strict=False)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=C,
        expected_batch_size=1,
    )
    DPTensorFastGradientClipping(private, optimizer, losses(private, x, y), "mean").backward()


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


class Keeps(nn.Sequential):
    """Its losses are of what a hook has kept, too."""

    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        self.kept = {}
        self[0].register_forward_hook(lambda module, args, output: self.kept.update(h=output))


def auxiliary(model, x, y):
    losses = cross_entropy(model, x, y)
    return losses + 10.0 * model._module.kept["h"].square().sum(1)


def unfrozen(model, x, y):
    model._module[0].requires_grad_(True)
    return cross_entropy(model, x, y)


def penalised(model, x, y):
    return cross_entropy(model, x, y) + model._module[2].weight.square().sum()


@pytest.mark.parametrize("losses, name", [(auxiliary, "0"), (unfrozen, "0"), (penalised, "2")])
def test_what_opacus_s_norms_are_without_is_refused(losses, name):
    """It was added unclipped: one sample moved the sum by 83 C with a kept feature, by 830 C with an unfrozen layer."""
    model = Keeps()
    if losses is unfrozen:
        model[0].requires_grad_(False)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    with pytest.raises(EscapedGradientError, match=rf"parameter {name}\.weight .* does not measure, and would add"):
        ghost_step(model, losses, x, y)
    assert all(p.grad is None for p in model.parameters())


class Scaled(nn.Module):
    """A residual block with a parameter beside its layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x):
        return x + self.scale * self.layer(x)


class ClassToken(nn.Module):
    """Its own parameter stands in front of each sample's rows."""

    def __init__(self):
        super().__init__()
        self.token, self.embed, self.head = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), 1, 4), self.embed(x).unsqueeze(1).tanh()], 1)
        return self.head(x.mean(1))


def of_weight_norm():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    "build",
    [lambda: nn.Sequential(Scaled(), nn.Linear(4, 3)), ClassToken, of_weight_norm],
    ids=["scale", "token", "norm"],
)
def test_layers_that_functorch_takes_with_their_parent_are_measured(build):
    """Where a module has parameters beside its layers, Opacus hangs one hook on it and none on them."""
    torch.manual_seed(0)
    model, x, y = build(), 3.0 * torch.randn(5, 4), torch.randint(3, (5,))
    samples = loop_over_samples(model, lambda m, x, y: 10.0 * cross_entropy(m, x, y).sum(), x, y)
    ghost_step(model, lambda m, x, y: 10.0 * cross_entropy(m, x, y), x, y)
    for name, exact in clipped_sum(samples, C).items():
        assert relative_error(dict(model.named_parameters())[name].grad, exact) <= 1e-4


class Passing(torch.autograd.Function):
    """Of a user's: Opacus's second backward pass runs, because something may be within it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class TwoLayers(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.a, self.b, self.use = nn.Linear(4, 4), nn.Linear(4, 3), use

    def forward(self, x):
        return self.use(self, x)


BESIDE = {
    "beneath another layer's hook": lambda m, x: m.b(torch.tanh(m.a(x) + F.linear(x, m.a.weight))),
    "twice in a row": lambda m, x: m.b(F.linear(m.a(x).tanh(), m.a.weight)),
    "past the last layer": lambda m, x: m.b(m.a(x)) + F.linear(x, m.a.weight)[:, :3],
    "a bias": lambda m, x: m.b(m.a(x).tanh() * (1.0 + m.a.bias)),
}


@pytest.mark.parametrize("passing", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("how", BESIDE)
def test_what_uses_a_parameter_beside_its_module_is_refused(how, hooked, passing):
    """A swapped sample moved the sum by 2 to 330 C, as in Opacus alone."""
    use = BESIDE[how]
    model = TwoLayers((lambda m, x: Passing.apply(use(m, x))) if passing else use)
    if hooked:
        model.a.weight.register_hook(lambda gradient: gradient)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    with pytest.raises(EscapedGradientError, match=r"parameter a\.(weight|bias) .* does not measure, and would add"):
        ghost_step(model, cross_entropy, x, y)
    assert all(p.grad is None for p in model.parameters())


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x):
        return self.weight * x


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = DPLSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x.unsqueeze(1))[0][:, -1]


OTHERS = {
    "prelu": (nn.PReLU, lambda m: m.weight),
    "a layer of one's own": (Scale, lambda m: m.weight),
    "a block with a parameter of its own": (Scaled, lambda m: m.layer.weight.sum(1)),
    "lstm": (LastState, lambda m: m.lstm.l0.ih.weight.sum(0)),
}


@pytest.mark.parametrize("how", OTHERS)
def test_so_is_what_uses_one_of_a_layer_without_a_rule_of_dpfast_s(how):
    """One sample moved the sum by 1.2 to 76 C."""
    build, parameter = OTHERS[how]
    model = TwoLayers(lambda m, x: m.b(m.other(m.a(x)).tanh() + parameter(m.other) * x))
    model.other = build()
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    with pytest.raises(EscapedGradientError, match=r"parameter other\..* does not measure, .*; something beside "):
        ghost_step(model, cross_entropy, x, y)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("how", OTHERS)
def test_they_are_measured_by_themselves(how):
    torch.manual_seed(0)
    model, alone = (TwoLayers(lambda m, x: m.b(m.other(m.a(x)).tanh() + x)) for _ in range(2))
    model.other, alone.other = (OTHERS[how][0]() for _ in range(2))
    alone.load_state_dict(model.state_dict())
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    ghost_step(model, cross_entropy, x, y)
    samples = loop_over_samples(alone, lambda m, x, y: cross_entropy(m, x, y).sum(), x, y)
    for name, exact in clipped_sum(samples, C).items():
        assert relative_error(dict(model.named_parameters())[name].grad, exact) <= 1e-4


class WithParameters(torch.autograd.Function):
    """A checkpoint that is given the parameters of what runs in it, as diffusion models have it."""

    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run, ctx.x = run, x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.y = run(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, gradient):
        return None, *torch.autograd.grad(ctx.y, [ctx.x, *ctx.run.parameters()], gradient, retain_graph=True)


def checkpointed(m, x):
    """Two layers take what it gives."""
    y = WithParameters.apply(m.a, x.requires_grad_(), *m.a.parameters()).tanh()
    return m.b(y) + m.c(y)


def not_checkpointed(m, x):
    y = m.a(x).tanh()
    return m.b(y) + m.c(y)


@pytest.mark.parametrize(
    ("use", "plainly"),
    [
        (checkpointed, not_checkpointed),
        (lambda m, x: Passing.apply(m.b(Passing.apply(m.a(x)))) + m.c(x), lambda m, x: m.b(m.a(x)) + m.c(x)),
    ],
    ids=["checkpoint", "function"],
)
def test_models_with_functions_of_their_own_are_not_refused(use, plainly):
    torch.manual_seed(0)
    model, plain = TwoLayers(use), TwoLayers(plainly)
    model.c, plain.c = nn.Linear(4, 3), nn.Linear(4, 3)
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    samples = loop_over_samples(plain, lambda m, x, y: cross_entropy(m, x, y).sum(), x, y)
    ghost_step(model, cross_entropy, x, y)
    for name, exact in clipped_sum(samples, C).items():
        assert relative_error(dict(model.named_parameters())[name].grad, exact) <= 1e-4
