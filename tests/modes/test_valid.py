"""Padded batches: a sample that is not valid adds exactly nothing, has no norm and is in no count."""

import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning, InputError, StateError

VALID = torch.tensor([True, False, True, True, False])


class Sequence(nn.Module):
    """Every kind of factor: a lookup, outer products, a norm's rows, a layer used twice."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.twice = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, tokens, scale):
        x = self.twice(self.norm(self.table(tokens)) * scale[:, None, None])
        return self.last(self.twice(x).tanh()).mean(1)


def batch(padding):
    torch.manual_seed(1)
    tokens, scale = torch.randint(11, (5, 4)), torch.rand(5)
    return tokens, torch.where(VALID, scale, padding), torch.randint(3, (5,))


def grads(model):
    return {name: p.grad for name, p in model._module.named_parameters()}


def step(model, *inputs, valid=None, reduction="mean"):
    *inputs, targets = inputs
    if valid is None:
        output = model(*inputs)
    else:
        with model.valid(valid):
            output = model(*inputs)
    F.cross_entropy(output, targets, reduction=reduction).backward()


CLIPPERS = {
    "flat": lambda: None,
    "per layer": lambda: dpfast.ConstantPerLayerClipper(0.1),
    "automatic": lambda: dpfast.AutomaticClipper(0.5),
}


@pytest.mark.parametrize("padding", [0.0, 3.0, float("nan"), float("inf")])
@pytest.mark.parametrize("clipper", CLIPPERS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_padding_adds_exactly_nothing(padding, clipper, reduction):
    torch.manual_seed(0)
    net = Sequence()
    options = {"max_grad_norm": 0.5, "loss_reduction": reduction}
    model, other = (
        dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(net), norm_clipper=CLIPPERS[clipper](), **options)
        for _ in range(2)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpfastWarning)
        step(model, *batch(padding), valid=VALID, reduction=reduction)
    step(other, *(x[VALID] for x in batch(padding)), reduction=reduction)
    for name, grad in grads(other).items():
        torch.testing.assert_close(grads(model)[name], grad, rtol=1e-5, atol=1e-6)
    assert model.nonfinite_samples == 0
    torch.testing.assert_close(model.get_norm_sample()[VALID], other.get_norm_sample())
    assert (model.get_norm_sample()[~VALID] == 0).all() and (model.get_clipping_coef()[..., ~VALID] == 0).all()
    before = {name: grad.clone() for name, grad in grads(model).items()}
    model.zero_grad()
    step(model, *batch(7.0), valid=VALID, reduction=reduction)
    assert all(torch.equal(grad, before[name]) for name, grad in grads(model).items()), "padding moved the sum"


@pytest.mark.parametrize("padding", [3.0, float("nan")])
def test_two_passes(padding):
    torch.manual_seed(0)
    net = Sequence()
    padded, other = (
        dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(net), max_grad_norm=0.5, passes=2) for _ in range(2)
    )
    for model, valid in ((padded, VALID), (other, None)):
        *inputs, targets = batch(padding) if valid is not None else (x[VALID] for x in batch(padding))
        with model.valid(torch.ones(len(targets), dtype=torch.bool) if valid is None else valid):
            losses = F.cross_entropy(model(*inputs), targets, reduction="none")
        losses.mean().backward(retain_graph=True)
        model.zero_grad()
        model.disable_hooks()
        (model.get_clipping_coef() * losses).sum().backward()
    assert (padded.get_clipping_coef()[~VALID] == 0).all()
    for name, grad in grads(other).items():
        torch.testing.assert_close(grads(padded)[name], grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_grad_sample(reduction):
    torch.manual_seed(0)
    model = dpfast.GradSampleModule(Sequence(), loss_reduction=reduction)
    step(model, *batch(float("nan")), valid=VALID, reduction=reduction)
    other = dpfast.GradSampleModule(copy.deepcopy(model).to_standard_module(), loss_reduction="sum")
    step(other, *(x[VALID] for x in batch(float("nan"))), reduction="sum")
    share = 1.0 if reduction == "sum" else 1.0 / len(VALID)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p.grad_sample[~VALID] == 0).all()
        torch.testing.assert_close(p.grad_sample[VALID], q.grad_sample)
        torch.testing.assert_close(p.grad, q.grad * share, rtol=1e-4, atol=1e-6)


def test_nothing_but_padding():
    model = dpfast.GradSampleModuleFastGradientClipping(Sequence())
    step(model, *batch(1.0), valid=torch.zeros(5, dtype=torch.bool))
    assert all((grad == 0).all() for grad in grads(model).values())


@pytest.mark.parametrize("mask", [torch.ones(4, dtype=torch.bool), torch.ones(5), torch.ones(5, 1, dtype=torch.bool)])
def test_a_mask_that_does_not_fit(mask):
    model = dpfast.GradSampleModuleFastGradientClipping(Sequence())
    with pytest.raises(InputError, match=r"valid .* must be bool and have one entry a sample, \(5,\)"):
        step(model, *batch(1.0), valid=mask)
    step(model, *batch(1.0))  # and is forgotten


@pytest.mark.parametrize(
    "mask", [[True] * 5, torch.ones(5, dtype=torch.bool, device="cpu").numpy()], ids=["list", "array"]
)
def test_a_mask_that_is_no_tensor(mask):
    model = dpfast.GradSampleModuleFastGradientClipping(Sequence())
    with pytest.raises(InputError, match=f"valid is a {type(mask).__name__}; it must be a tensor, bool"):
        step(model, *batch(1.0), valid=mask)
    step(model, *batch(1.0))
    compiled = dpfast.compile_step(
        nn.Linear(2, 1), lambda m, x: m(x).sum(1), max_grad_norm=1.0, batch_size=5, backend="eager"
    )
    with pytest.raises(InputError, match=f"valid is a {type(mask).__name__}; it must be a tensor, bool"):
        compiled(torch.randn(5, 2), valid=mask)


def in_another_thread(run):
    """Its result, or its error."""
    found = []

    def noted():
        try:
            found.append(run())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=noted)
    thread.start()
    thread.join()
    return found[0]


def test_blocks_that_end_in_another_order_are_an_error():
    """Two tasks take turns in one thread: the second one's mask held in both, and the first one's for good."""

    def task(model, mask):
        with model.valid(mask):
            yield
        yield

    model = dpfast.GradSampleModuleFastGradientClipping(Sequence())
    first, second = task(model, VALID), task(model, ~VALID)
    next(first), next(second)
    with pytest.raises(StateError, match=r"valid\(...\) ended while another one of this model"):
        next(first)
    step(model, *batch(1.0))
    assert ((model.get_norm_sample() > 0) == ~VALID).all()
    next(second)
    model.zero_grad()
    step(model, *batch(1.0))
    assert (model.get_norm_sample() > 0).all()


def test_another_thread_may_evaluate_meanwhile():
    model = dpfast.GradSampleModuleFastGradientClipping(Sequence())

    def evaluate():
        with torch.no_grad():
            return model(*batch(1.0)[:2])

    with model.valid(VALID):
        assert torch.equal(in_another_thread(evaluate), evaluate())


def test_a_mask_is_of_its_thread():
    """A forward pass of another thread took it for its own: samples that were there got norm 0."""
    model, other = (dpfast.GradSampleModuleFastGradientClipping(Sequence()) for _ in range(2))
    with model.valid(VALID):
        refused = in_another_thread(lambda: step(model, *batch(1.0)))
        assert isinstance(refused, StateError) and r"another thread is within valid(...)" in str(refused)
        assert in_another_thread(lambda: step(model, *batch(1.0), valid=~VALID)) is None
        assert ((model.get_norm_sample() > 0) == ~VALID).all()
        assert in_another_thread(lambda: step(other, *batch(1.0))) is None
        assert (other.get_norm_sample() > 0).all()
        model.zero_grad()
        step(model, *batch(1.0))
        assert ((model.get_norm_sample() > 0) == VALID).all()
    model.zero_grad()
    assert in_another_thread(lambda: step(model, *batch(1.0))) is None
    assert (model.get_norm_sample() > 0).all()


def test_masks_within_masks_and_copies_made_within():
    model = dpfast.GradSampleModuleFastGradientClipping(Sequence())
    with model.valid(VALID):
        with model.valid(~VALID):
            step(model, *batch(1.0))
            assert ((model.get_norm_sample() > 0) == ~VALID).all()
            model.zero_grad()
        step(model, *batch(1.0))
        assert ((model.get_norm_sample() > 0) == VALID).all()
        copied = copy.deepcopy(model)
        model.zero_grad()
        model.remove_hooks()
        with (
            pytest.raises(StateError, match=r"valid\(\.\.\.\) needs hooks: call add_hooks\(\) first"),
            model.valid(VALID),
        ):
            pass
        model.add_hooks()
        step(model, *batch(1.0))
        assert ((model.get_norm_sample() > 0) == VALID).all()
    copied.zero_grad()
    step(copied, *batch(1.0))
    assert (copied.get_norm_sample() > 0).all()


@pytest.mark.parametrize("mode", [dpfast.GradSampleModule, dpfast.GradSampleModuleFastGradientClipping])
def test_a_backward_pass_within_of_a_forward_pass_outside_is_an_error(mode):
    model = mode(nn.Linear(3, 2))
    loss = model(torch.randn(4, 3)).square().sum(1).mean()
    with pytest.raises(StateError, match="forward pass that was outside"), model.valid(torch.ones(4, dtype=torch.bool)):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
