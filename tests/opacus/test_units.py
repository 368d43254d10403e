"""PrivacyEngine where persons, not records, are to be protected."""

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from dpfast import UnitPoissonSampler
from dpfast.errors import InputError, StateError
from dpfast.opacus import PrivacyEngine

USERS = [0, 0, 0, 1, 1, 2, 3, 3, 4, 5, 6, 7]


def private(users=USERS, **more):
    torch.manual_seed(0)
    x, y = torch.randn(12, 3), torch.randint(0, 2, (12,))
    net = nn.Linear(3, 2)
    return PrivacyEngine(accountant="rdp"), {
        "module": net,
        "optimizer": optim.SGD(net.parameters(), lr=0.1),
        "data_loader": DataLoader(TensorDataset(x, y, torch.arange(12)), batch_size=3),
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.5,
        "user_of_record": users,
        **more,
    }


def test_units_are_drawn_clipped_and_counted():
    engine, arguments = private()
    model, optimizer, loader = engine.make_private(**arguments)
    sampler = loader.batch_sampler
    assert isinstance(sampler, UnitPoissonSampler) and sampler.sample_rate == 0.25
    assert optimizer.expected_batch_size == 2
    steps, device = 0, next(model.parameters()).device
    for _ in range(3):
        for x, y, records in loader:
            users, ids = sampler.unit_of_record[records.long().cpu()].unique(return_inverse=True)
            optimizer.zero_grad()
            x, y = x.to(device), y.to(device)  # Opacus makes empty draws on the CPU
            with model.units(ids, len(users)):
                nn.functional.cross_entropy(model(x), y).backward()
            assert model.get_norm_sample().shape == (len(users),)
            clipped = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            assert clipped <= 0.5 * len(users) * (1 + 1e-6)
            optimizer.step()
            steps += 1
    assert engine.accountant.history == [(1.0, 0.25, steps)] and steps == 12
    assert engine.get_epsilon(1e-5) > 0


def test_a_step_that_was_not_told_whose_samples_are_whose():
    engine, arguments = private()
    model, _, _ = engine.make_private(**arguments)
    with pytest.raises(StateError, match=r"within model.units\(ids, num_units\)"):
        model(torch.randn(4, 3)).sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("skipped", [False, True])
def test_a_draw_that_is_taken_in_parts(skipped):
    """As BatchMemoryManager does, or accumulation: a unit may have been clipped in each part."""
    engine, arguments = private()
    model, optimizer, _ = engine.make_private(**arguments)
    model.allow_grad_accumulation()
    before = [p.detach().clone() for p in model.parameters()]
    for part in range(2):
        with model.units(torch.tensor([0, 1, 1]), 2):
            model(torch.randn(3, 3)).sum().backward()
        if skipped and part == 0:
            optimizer.signal_skip_step(True)
            optimizer.step()
            optimizer.zero_grad()
    optimizer.signal_skip_step(False)
    with pytest.raises(StateError, match="sums several backward passes"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_made_private_again():
    """Without user_of_record records would be drawn, and users clipped."""
    engine, arguments = private()
    model, optimizer, loader = engine.make_private(**arguments)
    again = {**arguments, "module": model, "optimizer": optimizer, "data_loader": loader}
    _, _, loader = engine.make_private(**again)
    assert isinstance(loader.batch_sampler, UnitPoissonSampler)
    with pytest.raises(StateError, match="give it user_of_record= again"):
        engine.make_private(**{**again, "user_of_record": None})
    again |= {"module": model.to_standard_module(), "user_of_record": None}
    model, _, loader = engine.make_private(**again)
    assert not isinstance(loader.batch_sampler, UnitPoissonSampler)
    model(torch.randn(4, 3)).sum().backward()


def test_with_epsilon_and_capped():
    engine, arguments = private(records_a_unit=1)
    del arguments["noise_multiplier"]
    _, optimizer, loader = engine.make_private_with_epsilon(
        **arguments, target_epsilon=5.0, target_delta=1e-5, epochs=2
    )
    assert optimizer.noise_multiplier > 0 and loader.batch_sampler.records_a_unit == 1
    engine, arguments = private(None)
    _, _, loader = engine.make_private(**arguments)
    assert not isinstance(loader.batch_sampler, UnitPoissonSampler)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"user_of_record": USERS[:-1]}, "user_of_record has 11 entries for a data set of 12"),
        ({"grad_sample_mode": "dpfast_two_pass"}, "goes with grad_sample_mode='dpfast'"),
        ({"grad_sample_mode": "dpfast_compiled"}, "goes with grad_sample_mode='dpfast'"),
        ({"grad_sample_mode": "hooks"}, "goes with grad_sample_mode='dpfast'"),
        ({"poisson_sampling": False}, "Poisson sampling"),
    ],
)
def test_bad_input(more, message):
    engine, arguments = private()
    with pytest.raises(InputError, match=message):
        engine.make_private(**{**arguments, **more})
