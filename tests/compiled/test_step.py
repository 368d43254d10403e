"""The compiled step against the loop over samples and the eager one-pass mode."""

import copy
import pickle
import warnings

import pytest
import torch
from small_steps import CASES, Mlp, check, exact_step, median_norm, mlp_batch, square_losses

import dpfast
from dpfast.errors import DpfastWarning, InputError, StateError
from dpfast.testing import relative_error


@pytest.mark.parametrize("case", CASES)
def test_step_equals_loop_and_eager_mode_for_every_size_of_batch(case):
    torch.manual_seed(0)
    make, losses, batches = CASES[case]
    net = make()
    step = dpfast.compile_step(
        net, losses, max_grad_norm=median_norm(net, losses, batches(6)), batch_size=6, backend="aot_eager"
    )
    for n in (4, 6, 1, 0, 13):
        check(step, net, losses, batches(n))
    assert len(step._graphs) == 1

    eager = dpfast.GradSampleModuleFastGradientClipping(
        copy.deepcopy(net), max_grad_norm=step.max_grad_norm, loss_reduction="sum"
    )
    batch = batches(6)
    eager.zero_grad()
    losses(eager, *batch).sum().backward()
    net.zero_grad()
    step(*batch)
    torch.testing.assert_close(step.clip_factors, eager.get_clipping_coef(), rtol=1e-6, atol=0)
    for p, q in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    assert not any("forward" in vars(m) for m in net.modules()), "the model itself is not tapped"


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))], ids=["copy", "pickle"]
)
def test_a_copy_captures_anew_and_holds_nothing_of_the_last_batch(copied):
    torch.manual_seed(0)
    net, batch = Mlp(), mlp_batch(4)
    step = dpfast.compile_step(net, square_losses, max_grad_norm=0.3, batch_size=5, backend="aot_eager")
    step.forbid_grad_accumulation()
    step(*batch)
    left = [p.grad.clone() for p in net.parameters()]
    other = copied(step)
    assert other.model is not net and not other._graphs
    with pytest.raises(StateError):
        _ = other.norms
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(1.5)
    other.model.zero_grad()
    check(other, other.model, square_losses, mlp_batch(7)[:2])
    with pytest.raises(StateError, match="accumul"):
        other(*batch)
    assert all(torch.equal(p.grad, x) for p, x in zip(net.parameters(), left, strict=True))
    assert len(step.norms) == 4


def test_padding_adds_exactly_nothing_whatever_it_holds():
    torch.manual_seed(0)
    net = Mlp()
    step = dpfast.compile_step(net, square_losses, max_grad_norm=0.5, batch_size=5, backend="aot_eager")
    batch, valid = mlp_batch(5), torch.tensor([True, False, True, True, False])
    check(step, net, square_losses, batch, valid=valid)
    before = [p.grad.clone() for p in net.parameters()]
    for padding in (0.0, 1e30, float("inf"), float("nan")):
        some = [torch.where(valid[:, None], x, padding) for x in batch]
        net.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error", DpfastWarning)
            step(*some, valid=valid)
        assert all(torch.equal(p.grad, x) for p, x in zip(net.parameters(), before, strict=True)), padding
        assert len(step.norms) == 3 and step.dropped == 0


def test_a_sample_that_is_not_finite_is_dropped_and_counted():
    torch.manual_seed(0)
    net = Mlp()
    step = dpfast.compile_step(net, square_losses, max_grad_norm=0.5, batch_size=4, backend="aot_eager")
    x, y = mlp_batch(4)
    x[2] = float("nan")
    with pytest.warns(DpfastWarning, match="1 of 4 samples"):
        step(x, y)
        assert step.dropped == 1  # of a GPU known when it is asked for
    rest = torch.tensor([True, True, False, True])
    sums, _ = exact_step(net, square_losses, (x[rest], y[rest]), 0.5)
    assert step.clip_factors[2] == 0
    assert all(relative_error(p.grad, sums[name]) < 1e-5 for name, p in net.named_parameters())
    # In passes each is counted once.
    step(torch.cat([x, x]), torch.cat([y, y]))
    assert step.dropped == 2 and len(step.norms) == 8


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        (lambda m, x, y: square_losses(m, x, y).mean(), r"\(\) \(torch.float32\)"),
        (lambda m, x, y: (m(x) - y).square(), r"\(5, 3\)"),
        (lambda m, x, y: x.sum(1), "no parameter's gradient"),
        (lambda m, x, y: 0.0, "a float"),
    ],
)
def test_losses_that_are_not_one_a_sample(losses, found):
    step = dpfast.compile_step(Mlp(), losses, max_grad_norm=1.0, batch_size=5, backend="aot_eager")
    with pytest.raises(InputError, match=rf"gave .*{found}.*one loss a sample, \(5,\)"):
        step(*mlp_batch(5))


def test_sums_in_bf16_have_room_for_their_rounding_as_the_eager_steps():
    """Their factors are made within the graph, from norms that are larger by 2⁻⁸ / 2."""
    torch.manual_seed(0)
    net = Mlp().to(torch.bfloat16)
    batch = [x.to(torch.bfloat16) for x in mlp_batch(5)]
    eager = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(net), max_grad_norm=1e-2, loss_reduction="sum")
    square_losses(eager, *batch).sum().backward()
    step = dpfast.compile_step(net, square_losses, max_grad_norm=1e-2, batch_size=5, backend="aot_eager")
    step(*batch)
    assert all(graph.counts for graph in step._graphs.values())
    torch.testing.assert_close(step.clip_factors, eager.get_clipping_coef(), rtol=1e-4, atol=0)
    room = 1.0 - step.clip_factors.double() * step.norms.double() / 1e-2
    assert (room >= torch.finfo(torch.bfloat16).eps / 2 / (1.0 + torch.finfo(torch.bfloat16).eps) - 1e-6).all()
