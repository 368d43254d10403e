"""``passes=2``: what the second backward pass releases of a sample is at most C, whatever the first one has seen.

Bounded: the exact norm of ``p.grad`` after Opacus's protocol (``released.in_two_passes``), to which one sample adds:
the losses of the others are zero. Where dpfast cannot keep the promise, an error of its own passes too.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from released import MARGIN, gradients, in_two_passes, keeps_or_refuses, norm_over, nothing_released
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.modes import sketches


def wrapped(module: nn.Module, max_grad_norm: float = 1.0) -> GradSampleModuleFastGradientClipping:
    return GradSampleModuleFastGradientClipping(module, passes=2, max_grad_norm=max_grad_norm)


def first_alone(n: int) -> torch.Tensor:
    return F.one_hot(torch.tensor(0), n).float()


class Checkpointed(nn.Module):
    """A dropout and a weight in a checkpointed region, which draws anew whenever it is run again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        def region(x):
            return self.linear(F.dropout(x, 0.5))

        return checkpoint(region, x, use_reentrant=True, preserve_rng_state=False)


def test_a_recomputation_that_draws_other_numbers():
    """Dropout under a checkpoint with ``preserve_rng_state=False``: dropped in the first pass, kept in the second."""
    most = 0.0
    for seed in range(8):
        torch.manual_seed(seed)
        model = wrapped(Checkpointed())
        x = torch.full((1, 1), 30.0, requires_grad=True)
        most = max(most, keeps_or_refuses(lambda m=model, x=x: in_two_passes(m, m(x)[:, 0]), model, 1.0))
    assert most <= 1.0 + MARGIN


@pytest.mark.parametrize("autocast", [False, True])
def test_fp16_gradients_that_underflow_at_the_scale_of_a_mean(autocast):
    """fp16 weights, or fp32 ones under autocast: 1.5e-5 is a number of fp16, 1.5e-5/512 is none."""
    n, width = 512, 4096
    model = wrapped(nn.Linear(width, 1, bias=False).to(torch.float32 if autocast else torch.float16))
    inputs = torch.zeros(n, width, dtype=model.weight.dtype)
    inputs[0] = 60_000.0

    def step():
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            outputs = model(inputs)
        in_two_passes(model, outputs[:, 0].float() * 1.5e-5 * first_alone(n))

    assert keeps_or_refuses(step, model, 1.0) <= 1.0 + MARGIN


def test_fp32_backprops_that_cancel_at_a_third_and_not_at_one():
    """Two neighbours among the numbers of fp32, times fl(1/3), round to one: the first pass sees a gradient of 0."""
    one, next_one = float.fromhex("0x1.800004p+0"), float.fromhex("0x1.800006p+0")
    model = wrapped(nn.Linear(1, 1, bias=False))
    inputs = torch.zeros(3, 1)
    inputs[0] = 60.0 * 2.0**23
    outputs = model(inputs)[:, 0]
    in_two_passes(model, (outputs * next_one - outputs * one) * first_alone(3))
    assert norm_over(gradients(model), 1.0) <= 1.0 + MARGIN


def mlp(width: int = 16) -> nn.Module:
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


@pytest.mark.parametrize("autocast", [False, True])
def test_ordinary_bf16_networks(autocast):
    """A multilayer perceptron, cross-entropy, N = 4: the backprops of the two passes round differently; so does p.grad
    in bf16, which counts."""
    most = 0.0
    for seed in range(30):
        torch.manual_seed(seed)
        model = wrapped(mlp().to(torch.float32 if autocast else torch.bfloat16), max_grad_norm=0.1)
        inputs, targets = torch.randn(4, 16, dtype=next(model.parameters()).dtype), torch.randint(0, 10, (4,))

        def step(model=model, inputs=inputs, targets=targets):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                outputs = model(inputs)
            in_two_passes(model, F.cross_entropy(outputs.float(), targets, reduction="none") * first_alone(4))

        most = max(most, keeps_or_refuses(step, model, 0.1))
    assert most <= 1.0 + MARGIN


@pytest.mark.parametrize("mean", [1e4, 1e5])
def test_group_norm_of_values_far_from_zero(mean):
    """|mean|/std >= 1e4: weight gradients are what is left where large terms cancel, otherwise at every scale."""
    most = 0.0
    for seed in range(40):
        torch.manual_seed(seed)
        head = nn.Linear(4 * 64, 3).requires_grad_(False)
        model = wrapped(nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), head), max_grad_norm=0.1)
        inputs, targets = torch.randn(3, 4, 8, 8) + mean, torch.randint(0, 3, (3,))
        in_two_passes(model, F.cross_entropy(model(inputs), targets, reduction="none") * first_alone(3))
        most = max(most, norm_over(gradients(model), 0.1))
    assert most <= 1.0 + MARGIN


class Normalizing(nn.Module):
    """Its backward hook gives every gradient the norm 1, also that of a loss that is weighted by a factor."""

    def __init__(self):
        super().__init__()
        self.linear, self.after = nn.Linear(1, 1, bias=False), nn.Identity()
        self.after.register_full_backward_hook(lambda module, grads, _: (grads[0] / grads[0].norm(),))

    def forward(self, x):
        return self.after(self.linear(x))


def test_backward_hooks_that_are_not_linear_in_the_loss():
    """The gradient of ``c·loss`` is not ``c`` times that of the loss."""
    model = wrapped(Normalizing())
    inputs = torch.zeros(4, 1)
    inputs[0] = 4.0
    step = lambda: in_two_passes(model, model(inputs)[:, 0] * first_alone(4))  # noqa: E731
    assert keeps_or_refuses(step, model, 1.0) <= 1.0 + MARGIN


@pytest.mark.filterwarnings("ignore:1 of 3 samples")
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_dropped_sample_adds_exactly_nothing(bad):
    """Factor 0: ``0·inf`` reaches no parameter, and the others' sum has the bits that it has without the sample."""
    torch.manual_seed(0)
    layer = nn.Linear(2, 1)
    sums = []
    for value in (bad, 0.0):
        model = wrapped(nn.Linear(2, 1))
        model.load_state_dict({f"_module.{k}": v for k, v in layer.state_dict().items()})
        inputs = torch.tensor([[1.0, 2.0], [value, 1.0], [3.0, -1.0]])
        losses = model(inputs)[:, 0]
        in_two_passes(model, losses if value else losses * torch.tensor([1.0, 0.0, 1.0]))
        sums.append(torch.cat([g.flatten() for g in gradients(model)]))
    assert torch.equal(*sums)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 2e4), (torch.float32, 1e30), (torch.float32, 1e-30)])
def test_differences_are_seen_where_norms_overflow_or_underflow(dtype, size):
    """An infinite norm had nothing farther than it, and a norm of 0 hid a difference of 0."""
    before = torch.full((1, 3, 256), size, dtype=dtype)
    now = before.clone()
    now[0, 1, ::2] *= 0.5
    weights = torch.ones(3, dtype=torch.float64)
    assert sketches._differ(before, now, sketches._ALIKE, weights).tolist() == [True]
    assert sketches._differ(before, before, sketches._ALIKE, weights).tolist() == [False]


@pytest.mark.parametrize("kept", ["small, held", "large, held", "entries"])
@pytest.mark.parametrize("fault", [None, "numbers", "one sample", "written"])
def test_another_gradient_in_the_second_pass_is_refused(kept, fault, monkeypatch):
    """Whether what taps see is small and held itself, or large and looked at in places; what comes twice is none."""
    if kept == "entries":
        monkeypatch.setattr(sketches, "_HELD", 0)
    positions = 4 if kept == "small, held" else 300
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)))
    seen = []

    def changed(grad):
        seen.append(grad)
        if fault == "written" and len(seen) == 2:
            seen[0].mul_(2.0)
        if fault == "numbers" and len(seen) == 2:
            return grad + 0.01 * torch.randn_like(grad)
        if fault == "one sample" and len(seen) == 2:
            seen_from = sketches._SAME if grad.is_cpu else sketches._ALIKE  # docs/bounds.md
            return grad * (1 + 2 * seen_from * F.one_hot(torch.tensor(1), 3).view(3, 1, 1))
        return grad.clone() if fault is None else None

    outputs = []
    model._module[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    losses = model(torch.randn(3, positions, 16)).square().sum((1, 2))
    outputs[0].register_hook(changed)
    if fault is None or (fault == "written" and kept == "entries"):  # a copy is not written to
        in_two_passes(model, losses)
    else:
        message = "was written to" if fault == "written" else "saw other activations or gradients"
        with nothing_released(model, message):
            in_two_passes(model, losses)
