"""Clipped sums of parameters of 16 bits are rounded as a whole, which moves them by more than a sample may: dpfast's
optimizer takes them as they were before, else a warning says so once. Nothing of it is there with parameters in fp32.
"""

import itertools
import warnings

import opacus
import pytest
import torch
from torch import nn

import dpfast
import dpfast.opacus
from dpfast.errors import DpfastWarning
from dpfast.opacus import DPOptimizerFast, PrivacyEngine

C = 1.0


def clipping(model, **options):
    return dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum", **options)


def summed(model, n):
    model.zero_grad()
    model(torch.ones(n, 1, dtype=next(model.parameters()).dtype)).sum().backward()
    return next(model.parameters()).grad.double().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_one_sample_more_moves(dtype):
    """As docs/bounds.md has it: C and an eps of the sum; with fp32 no more than C."""
    model, eps = clipping(nn.Linear(1, 1, bias=False).to(dtype)), torch.finfo(dtype).eps
    with pytest.warns(DpfastWarning, match=rf"trains parameters in {dtype}.* train parameters in fp32"):
        summed(model, 2)
    moves = [abs(summed(model, n) - summed(model, n - 1)) for n in range(250, 300)]
    moves += [abs(summed(model, n) - summed(model, n - 1)) for n in range(4190, 4200)]
    assert max(moves) > 2.0 * C
    assert max(moves) <= C + eps * 4200 * C
    model = clipping(nn.Linear(1, 1, bias=False))
    assert max(abs(summed(model, n) - summed(model, n - 1)) for n in (300, 4200)) <= C


def step(model, x):
    model(x).float().square().sum(1).mean().backward()


def test_it_is_said_once_where_it_is_so():
    x = torch.randn(5, 4)
    with pytest.warns(DpfastWarning, match=r"Linear trains parameters in torch.bfloat16") as said:
        model = clipping(nn.Linear(4, 3).bfloat16())
        for _ in range(3):
            step(model, x.bfloat16())
    assert len([w for w in said if "trains parameters in" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = clipping(nn.Linear(4, 3))
        with torch.autocast("cpu", torch.bfloat16):
            step(model, x)
        frozen = nn.Sequential(nn.Linear(4, 4).bfloat16().requires_grad_(False), nn.Linear(4, 3))
        frozen[0].register_forward_hook(lambda module, args, output: output.float())
        step(clipping(frozen), x.bfloat16())


def test_other_ways_say_it_too():
    x = torch.randn(5, 4).bfloat16()
    compiled = dpfast.compile_step(
        nn.Linear(4, 3).bfloat16(), lambda m, x: m(x).float().sum(1), max_grad_norm=C, batch_size=5, backend="eager"
    )
    with pytest.warns(DpfastWarning, match=r"Linear trains parameters in torch.bfloat16"):
        compiled(x)
    net = nn.Linear(4, 3).bfloat16()
    clipper = dpfast.PerSampleGradientClipper(net, dpfast.ConstantFlatClipper(C))
    step(net, x)
    clipper.clip_and_accumulate()
    with pytest.warns(DpfastWarning, match=r"Linear trains parameters in torch.bfloat16"):
        clipper.pre_step()


def optimizer_of(model, sigma=0.0, lr=0.0, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    options = {"loss_reduction": "sum", "expected_batch_size": 1, **options}
    return DPOptimizerFast(sgd, noise_multiplier=sigma, max_grad_norm=C, **options)


def sums_of_step(optimizer):
    """What it adds noise to."""
    found, add_noise = [], optimizer.add_noise

    def seen():
        found.extend(p.summed_grad.clone() for p in optimizer.params)
        add_noise()

    optimizer.add_noise = seen
    try:
        optimizer.step()
    finally:
        del optimizer.add_noise
    return found


def rows(n, dtype):
    """Whose gradients point one way, so that their sum is as long as can be."""
    torch.manual_seed(0)
    return (torch.tensor([3.0, 1.0, 2.0]) + 0.1 * torch.randn(n, 3)).to(dtype)


def one_pass(model, x):
    model(x).sum().backward()


def two_passes(model, x):
    losses = model(x).sum(1)
    losses.sum().backward(retain_graph=True)
    model.disable_hooks()
    (model.get_clipping_coef() * losses).sum().backward()
    model.enable_hooks()


def of_two_batches(model, x):
    for part in x.split([len(x) // 2, len(x) - len(x) // 2]):
        one_pass(model, part)


def of_units(model, x):
    ids = torch.arange(len(x))
    with model.units(ids, num_units=len(x)):
        one_pass(model, x)


WAYS = {"one": one_pass, "two": two_passes, "of two batches": of_two_batches, "units": of_units}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", [*WAYS, "compiled", "virtual steps", "set to zero"])
def test_an_optimizer_takes_sums_as_they_were(way, dtype):
    """No sample moves them by more than C, and what is taken is no number of 16 bits."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    if way == "compiled":
        optimizer = optimizer_of(net)
        step = dpfast.compile_step(
            net, lambda m, x: m(x).float().sum(1), max_grad_norm=C, batch_size=500, backend="eager"
        )
    else:
        model = clipping(net, passes=2 if way == "two" else 1)
        optimizer = optimizer_of(model)

    def taken(x):
        optimizer.zero_grad(set_to_none=way != "set to zero")
        if way == "compiled":
            step(x)
        elif way == "virtual steps":
            one_pass(model, x[:200])
            optimizer.signal_skip_step(True)
            optimizer.step()
            optimizer.zero_grad()
            one_pass(model, x[200:])
            optimizer.signal_skip_step(False)
        else:
            WAYS.get(way, one_pass)(model, x)
        assert all(p.grad.dtype is dtype for p in net.parameters())
        rounded = [p.grad.clone() for p in net.parameters()]
        sums = sums_of_step(optimizer)
        assert all(p.grad.dtype is dtype for p in net.parameters())
        if way != "virtual steps":
            assert all(((a - b).norm() <= 0.01 * a.norm()) for a, b in zip(sums, rounded, strict=True))
        return torch.cat([x.flatten() for x in sums]).double()

    x = rows(410, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpfastWarning)
        found = [taken(x[:n]) for n in range(400, 411)]
    assert found[0].norm() > 300.0
    moves = [(b - a).norm() for a, b in itertools.pairwise(found)]
    assert max(moves) <= C * (1.0 + 1e-3) and min(moves) > 0.9 * C
    assert not torch.equal(found[0].to(dtype).double(), found[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_is_added_before_anything_is_rounded(dtype):
    """Around a sum whose neighbours in bf16 are 512 apart, and which fp16 has no number for: noise of 64 is what was
    asked for, where rounding alone would make it 0 nearly always, and what is released has its mean."""
    n = 70_000
    model = clipping(nn.Linear(1, 1, bias=False).to(dtype))
    (p,) = model.parameters()
    optimizer = optimizer_of(model, 64.0, loss_reduction="mean", expected_batch_size=n)
    one_pass(model, torch.ones(n, 1, dtype=dtype))
    optimizer.step()
    assert p.grad.dtype is dtype and abs(p.grad.item() - 1.0) < 0.01
    assert torch.equal(p.grad, p.summed_grad)
    generator = torch.Generator().manual_seed(3)
    optimizer = optimizer_of(model, 64.0, loss_reduction="sum", generator=generator)
    optimizer.zero_grad()
    one_pass(model, torch.ones(1000, 1, dtype=dtype))
    (total,) = sums_of_step(optimizer)
    noise = torch.empty(1, 1).normal_(0.0, 64.0, generator=torch.Generator().manual_seed(3))
    assert total.dtype is torch.float32 and torch.equal(p.grad, (total + noise).to(dtype))


def test_sum_that_is_written_to_is_taken_as_it_is():
    """Somebody's clip_grad_norm_ is to have its way, and a warning says what that costs."""
    model = clipping(nn.Linear(3, 2).bfloat16())
    optimizer = optimizer_of(model)
    one_pass(model, rows(300, torch.bfloat16))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 7.0)
    clipped = [p.grad.clone() for p in model.parameters()]
    with pytest.warns(DpfastWarning, match=r"torch.bfloat16 \(2, 3\) was written to.*Leave p.grad alone"):
        assert all(map(torch.equal, sums_of_step(optimizer), clipped))
    optimizer.zero_grad()
    one_pass(model, rows(300, torch.bfloat16))
    for p in model.parameters():
        p.grad.mul_(0.5)
    with pytest.warns(DpfastWarning, match="was written to"):
        one_pass(model, rows(2, torch.bfloat16))


def test_engines_optimizers_take_them_so():
    x, net = rows(300, torch.bfloat16), nn.Linear(3, 2).bfloat16()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=300)
    for mode in ("dpfast", "dpfast_two_pass"):
        engine = PrivacyEngine()
        sgd = torch.optim.SGD(net.parameters(), lr=0.0)
        options = {"noise_multiplier": 0.0, "max_grad_norm": C, "poisson_sampling": False, "grad_sample_mode": mode}
        criterion = nn.CrossEntropyLoss()
        made = engine.make_private(module=net, optimizer=sgd, data_loader=data, criterion=criterion, **options)
        model, optimizer, *loss, _ = made
        (loss[0] if loss else criterion)(model(x), torch.zeros(300, dtype=torch.int64)).backward()
        assert all(total.dtype is torch.float32 for total in sums_of_step(optimizer))
        net = nn.Linear(3, 2).bfloat16()


def test_an_optimizer_that_is_gone_takes_nothing():
    """The module goes on rounding, and says so."""
    model = clipping(nn.Linear(3, 2).bfloat16())
    optimizer_of(model)
    with pytest.warns(DpfastWarning, match="trains parameters in"):
        one_pass(model, rows(300, torch.bfloat16))


def by_data(p):
    p.grad.data.copy_(2.0 * p.grad)


def by_numpy(p):
    p.grad.numpy()[...] *= 2.0


def one_entry(p):
    p.grad.data.view(-1)[0] = 7.0


@pytest.mark.on_cpu
@pytest.mark.parametrize("write", [by_data, by_numpy, one_entry])
def test_a_write_that_leaves_the_version_as_it_was_counts(write):
    """As a collective by hand (all_reduce of ``p.grad``) does: it was dropped, and ranks released sums of their own."""
    dtype = torch.float16 if write is by_numpy else torch.bfloat16
    model = clipping(nn.Linear(3, 2).to(dtype))
    optimizer = optimizer_of(model)
    one_pass(model, rows(300, dtype))
    exact = [x.clone() for x in sums_of_step(optimizer)]
    optimizer.zero_grad()
    one_pass(model, rows(300, dtype))
    for p in model.parameters():
        write(p)
    there = [p.grad.clone() for p in model.parameters()]
    for total, written, before in zip(sums_of_step(optimizer), there, exact, strict=True):
        is_as_before = written == before.to(dtype)
        assert not is_as_before.all() and (write is not one_entry or written.numel() - is_as_before.sum() == 1)
        assert torch.equal(total, torch.where(is_as_before, before, written.to(total.dtype)))


def test_a_write_that_changes_nothing_costs_nothing():
    """clip_grad_norm_ to more than there is multiplies by 1."""
    model = clipping(nn.Linear(3, 2).bfloat16())
    optimizer = optimizer_of(model)
    one_pass(model, rows(300, torch.bfloat16))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums = sums_of_step(optimizer)
    assert all(x.dtype is torch.float32 and not torch.equal(x, x.bfloat16().float()) for x in sums)


def unfrozen(net, optimizer):
    net[0].requires_grad_(True)


def in_a_group_more(net, optimizer):
    optimizer.add_param_group({"params": list(net[0].parameters())})
    net[0].requires_grad_(True)


def to_16_bits(net, optimizer):
    net.bfloat16()


@pytest.mark.parametrize("change", [unfrozen, in_a_group_more, to_16_bits])
def test_what_changes_between_steps_is_taken_as_it_was(change):
    """One sample moved the first sum after it by 1.8 to 4.3 C, and nothing was said."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).bfloat16()
    if change is to_16_bits:
        net.float()
    else:
        net[0].requires_grad_(False)
    model = clipping(net)
    optimizer = optimizer_of(net[1] if change is in_a_group_more else net)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpfastWarning)
        one_pass(model, rows(300, net[1].weight.dtype))
        optimizer.step()
        optimizer.zero_grad()
        change(net, optimizer)
        one_pass(model, rows(300, torch.bfloat16))
        sums = sums_of_step(optimizer)
    assert len(sums) == 4 and all(x.dtype is torch.float32 for x in sums)


def test_it_is_said_when_it_begins():
    """Ours is gone, and Opacus's optimizer takes what is rounded."""
    net = nn.Linear(3, 2).bfloat16()
    model, optimizer = clipping(net), optimizer_of(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpfastWarning)
        one_pass(model, rows(300, torch.bfloat16))
        optimizer.step()
        optimizer.zero_grad()
    del optimizer
    with pytest.warns(DpfastWarning, match="trains parameters in"):
        one_pass(model, rows(300, torch.bfloat16))


def test_a_clipper_takes_none_whoever_is_there():
    net = nn.Linear(3, 2).bfloat16()
    optimizer, clipper = optimizer_of(net), dpfast.PerSampleGradientClipper(net, dpfast.ConstantFlatClipper(C))
    one_pass(net, rows(5, torch.bfloat16))
    clipper.clip_and_accumulate()
    with pytest.warns(DpfastWarning, match="Linear trains parameters in"):
        clipper.pre_step()
    assert optimizer.params


def test_opacus_s_optimizers_are_said_to_round():
    x, y = rows(300, torch.bfloat16), torch.zeros(300, dtype=torch.int64)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=300)
    options = {"noise_multiplier": 0.0, "max_grad_norm": C, "poisson_sampling": False}

    def made(engine, mode, net):
        sgd = torch.optim.SGD(net.parameters(), lr=0.0)
        criterion = nn.CrossEntropyLoss()
        return engine.make_private(
            module=net, optimizer=sgd, data_loader=data, criterion=criterion, grad_sample_mode=mode, **options
        )

    with pytest.warns(DpfastWarning, match="Linear trains parameters in torch.bfloat16"):
        made(PrivacyEngine(), "dpfast_materialize", nn.Linear(3, 2).bfloat16())
    dpfast.opacus.install()
    try:
        model, _, criterion, _ = made(opacus.PrivacyEngine(), "ghost", nn.Linear(3, 2).bfloat16())
        with pytest.warns(DpfastWarning, match="Linear trains parameters in torch.bfloat16"):
            criterion(model(x), y).backward()
    finally:
        dpfast.opacus.uninstall()
