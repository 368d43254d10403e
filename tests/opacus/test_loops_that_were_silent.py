"""Training loops that would release more than they are accounted for."""

import threading
import time
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpfast import GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastWarning, InputError, StateError
from dpfast.opacus import DPOptimizerFast, PrivacyEngine
from dpfast.opacus.noise import new_secret
from dpfast.trials import same_random_numbers

N, D = 8, 5


def private(sizes=2, wrap=PrivacyEngine, **options):
    """(model, optimizer, criterion or None, loader, engine), of a linear layer and N samples."""
    torch.manual_seed(0)
    net, engine = nn.Linear(D, 3), wrap()
    data = DataLoader(TensorDataset(torch.randn(N, D), torch.randn(N, 3)), batch_size=N // sizes, shuffle=True)
    given = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, **options}
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    model, optimizer, *criterion, loader = engine.make_private(module=net, optimizer=sgd, data_loader=data, **given)
    return model, optimizer, criterion[0] if criterion else None, loader, engine


def backward(model, x, y):
    (model(x) - y).square().sum(1).mean().backward()


# --- random numbers that another thread's look sets back ---


def while_looked_at(draw, times=200):
    """What ``draw()`` gave in a thread while another one looks again and again."""
    found, stop = [], threading.Event()

    def look():
        while not stop.is_set():
            with same_random_numbers() as again:
                for _ in range(20):
                    again()
                    torch.randn(1000)
            time.sleep(1e-4)  # a lock is not fair

    thread = threading.Thread(target=look)
    thread.start()
    try:
        found = [draw() for _ in range(times)]
    finally:
        stop.set()
        thread.join()
    return found


def test_no_secret_of_blocks_is_drawn_twice():
    secrets = Counter(while_looked_at(lambda: new_secret().fingerprint(), 2000))
    assert max(secrets.values()) == 1


def test_no_noise_is_drawn_twice():
    net = nn.Linear(1, 10, bias=False)
    model = GradSampleModuleFastGradientClipping(net, max_grad_norm=1.0)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer = DPOptimizerFast(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1)
    (model(torch.ones(2, 1)) * 0).sum(1).mean().backward()  # looked at before

    def step():
        (model(torch.ones(2, 1)) * 0).sum(1).mean().backward()
        before = net.weight.detach()[:4].clone()
        optimizer.step()
        optimizer.zero_grad()
        return tuple((net.weight.detach()[:4] - before).flatten().round(decimals=3).tolist())

    optimizer.zero_grad()
    noises = Counter(while_looked_at(step))
    assert max(noises.values()) == 1


def test_no_batch_is_drawn_twice():
    data = DataLoader(TensorDataset(torch.randn(400, D), torch.randn(400, 3)), batch_size=100)
    net = nn.Linear(D, 3)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    given = {"noise_multiplier": 0.0, "max_grad_norm": 1.0}
    _, _, loader = PrivacyEngine().make_private(module=net, optimizer=sgd, data_loader=data, **given)

    def draws():
        for _ in range(1000):
            yield from loader.batch_sampler

    each = draws()
    drawn = Counter(while_looked_at(lambda: tuple(next(each))))
    assert max(drawn.values()) == 1


# --- steps that take several draws ---


@pytest.mark.parametrize("says_when_not", [True, False])
@pytest.mark.parametrize("every", [2, 3])
def test_a_step_of_several_poisson_draws_is_refused(every, says_when_not):
    model, optimizer, _, loader, engine = private()
    with pytest.raises(StateError, match="2 Poisson draws"):
        for i in range(4):
            for x, y in loader:
                skips = (i + 1) % every != 0
                if skips or says_when_not:
                    optimizer.signal_skip_step(do_skip=skips)
                backward(model, x, y)
                optimizer.step()
                optimizer.zero_grad()
                i += 1
    assert not engine.accountant.history
    assert all(p.summed_grad is None and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("says_when_not", [True, False])
def test_parts_of_one_draw_are_one_step(says_when_not):
    model, optimizer, _, loader, engine = private(sizes=1)
    for _ in range(3):
        for x, y in loader:
            parts = list(zip(x.split(3), y.split(3), strict=True))
            for i, (some, of_them) in enumerate(parts):
                if says_when_not or i + 1 < len(parts):
                    optimizer.signal_skip_step(do_skip=i + 1 < len(parts))
                backward(model, some, of_them)
                optimizer.step()
                optimizer.zero_grad()
    assert [steps for *_, steps in engine.accountant.history] == [3]


@pytest.mark.parametrize("every", [2, 3])
def test_steps_within_epochs_are_not_warned_of(every, recwarn):
    model, optimizer, _, loader, _ = private(sizes=4, poisson_sampling=False)
    for _ in range(3):
        for i, (x, y) in enumerate(loader):
            backward(model, x, y)
            if (i + 1) % every == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    assert not [w for w in recwarn if "end of an epoch" in str(w.message)]


def test_a_step_over_the_end_of_an_epoch_is_warned_of():
    torch.manual_seed(0)
    net = nn.Linear(D, 3)
    data = DataLoader(TensorDataset(torch.randn(9, D), torch.randn(9, 3)), batch_size=3, shuffle=True)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    given = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    model, optimizer, loader = PrivacyEngine().make_private(module=net, optimizer=sgd, data_loader=data, **given)
    with pytest.warns(DpfastWarning, match="the end of an epoch of 3 batches"):
        for i, (x, y) in enumerate([*loader, *loader]):
            backward(model, x, y)
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()


# --- others ---


def test_ghost_clipping_with_a_loss_that_is_not_its_own_is_refused():
    model, optimizer, criterion, loader, _ = private(grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss(), sizes=1)
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y.argmax(1)).backward()
    with pytest.raises(StateError, match="criterion"):
        optimizer.step()
    optimizer.zero_grad()
    criterion(model(x), y.argmax(1)).backward()
    optimizer.step()


@pytest.mark.parametrize("secure", [False, True])
def test_ghost_clipping_has_the_engines_noise(secure):
    if secure:
        pytest.importorskip("torchcsprng")
    noise = None if secure else torch.Generator().manual_seed(3)
    options = {"noise_generator": noise, "noise_multiplier": 1.0}
    model, optimizer, criterion, loader, _ = private(
        grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss(), sizes=1, **options
    )
    assert optimizer.generator is noise and optimizer.noise_multiplier == 1.0
    x, y = next(iter(loader))
    criterion(model(x), y.argmax(1)).backward()
    optimizer.step()


def test_an_optimizer_that_takes_several_gradients_a_step_is_refused():
    net = nn.Linear(D, 3)
    with pytest.raises(InputError, match="LBFGS"):
        DPOptimizerFast(
            torch.optim.LBFGS(net.parameters()), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1
        )
