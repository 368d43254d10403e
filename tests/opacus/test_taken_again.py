"""A run goes on from a checkpoint: steps that are taken again have the same batches and the same noise, or neither; the
same noise on another batch would give samples away."""

import pytest
import torch
from cases import assert_gradients, sum_loss
from opacus.accountants import RDPAccountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpfast
from dpfast.distributed import PoissonBatches, SharedSecret, UnitPoissonSampler
from dpfast.errors import InputError
from dpfast.opacus import DPOptimizerFast, PrivateState
from dpfast.testing import clipped_sum, loop_over_samples

N, C = 48, 0.5


class Run:
    """A private loop whose learning rate is 0, so that of every step the samples and the noise are known."""

    def __init__(self, kind=PoissonBatches, workers=0, sigma=1.0, **options):
        torch.manual_seed(0)
        self.net = nn.Linear(5, 3)
        self.x, self.y = torch.randn(N, 5), torch.randint(0, 3, (N,))
        self.samples = loop_over_samples(self.net, sum_loss, self.x, self.y)
        secret = SharedSecret(bytes(range(32)))
        whose = N if kind is PoissonBatches else torch.arange(N) // 2
        self.batches = kind(whose, 0.25, secret=secret, rank=0, ranks=1, steps=9)
        self.module = dpfast.GradSampleModuleFastGradientClipping(self.net, max_grad_norm=C, loss_reduction="sum")
        self.optimizer = DPOptimizerFast(
            torch.optim.SGD(self.net.parameters(), lr=0.0),
            noise_multiplier=sigma,
            max_grad_norm=C,
            expected_batch_size=N // 4,
            loss_reduction="sum",
            secret=secret,
        )
        self.state = PrivateState(self.optimizer, RDPAccountant(), self.batches)
        numbers = TensorDataset(torch.arange(N, device="cpu"))  # forked workers have no GPU
        self.loader = DataLoader(numbers, batch_sampler=self.batches, num_workers=workers, **options)

    def step(self, taken):
        """(samples, their clipped sum, what was released, the noise in it); None where it was skipped."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(self.x[taken]), self.y[taken], reduction="sum").backward()
        self.optimizer.step()
        if self.optimizer._is_last_step_skipped:
            return None
        exact = clipped_sum({name: g[taken] for name, g in self.samples.items()}, C)
        exact = torch.cat([g.flatten() for g in exact.values()])
        released = torch.cat([p.grad.double().flatten() for p in self.net.parameters()])
        return taken.tolist(), exact, released, released - exact

    def steps(self, batches, most=9):
        return [self.step(taken) for _, (taken,) in zip(range(most), batches, strict=False)]


def saved_and_killed(run, when):
    """(a checkpoint's state, the steps that were taken since). ``when``: where in the loop."""
    loop, state = iter(run.loader), None
    run.steps(loop, 2)
    if when == "behind step()":
        state = run.state.state_dict()
        return state, run.steps(loop, 3)
    (taken,) = next(loop)
    if when == "before step()":
        state = run.state.state_dict()
        return state, [run.step(taken), *run.steps(loop, 2)]
    run.module(run.x[taken]).sum().backward()
    state = run.state.state_dict()  # an unfinished step
    return state, [run.step(taken), *run.steps(loop, 2)]


def resumed(state, **options):
    run = Run(**options)
    run.state.load_state_dict(state)
    return run


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [PoissonBatches, UnitPoissonSampler])
@pytest.mark.parametrize("when", ["behind step()", "before step()", "within a step"])
def test_steps_that_are_taken_again_are_the_same(kind, when, workers):
    state, killed = saved_and_killed(Run(kind, workers), when)
    assert state["noised_steps"] == state["batch"] == 2
    again = resumed(state, kind=kind, workers=2 - workers)
    for before, after in zip(killed, again.steps(again.loader), strict=False):
        assert before[0] == after[0] and torch.equal(before[2], after[2])
        assert before[3].norm() > 0.1


def assert_no_noise_twice(killed, again):
    """Steps of one number have the same samples, and all before them had, or noises that say nothing of one another:
    with another step before them their weights are others."""
    assert killed and again
    alike = True
    for before, after in zip(killed, again, strict=False):
        same = (before[3] - after[3]).norm() < 1e-4 * before[3].norm()
        alike = alike and before[0] == after[0]
        assert alike or not same


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["a loop that is left early", "a batch that is skipped", "a look at some batches"])
def test_another_batch_has_other_noise(how, workers):
    run = Run(workers=workers)
    loop = iter(run.loader)
    run.steps(loop, 2)
    state = run.state.state_dict()
    if how == "a loop that is left early":
        del loop
        loop = iter(run.loader)
    elif how == "a batch that is skipped":
        next(loop)
    else:
        list(zip(range(2), run.loader, strict=False))
    killed = run.steps(loop)
    again = resumed(state)
    assert_no_noise_twice(killed, again.steps(again.loader))


LOOKS = {
    "one batch": lambda loader: next(iter(loader)),
    "all": list,
    "held": lambda loader: (it := iter(loader), next(it)),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_the_loader_within_a_step(look, workers):
    """Of an evaluation, between a batch and its step(): whose batch the step is of the sampler cannot know. In the
    second step of both lives the last draw has one number, and it is the step's own in one of them."""

    def steps(run, loop, looks):
        found, held = [], []
        for number, (taken,) in zip(range(4), loop, strict=False):
            if number == looks:
                held.append(LOOKS[look](run.loader))
            found.append(run.step(taken))
        return found

    run = Run(workers=workers)
    loop = iter(run.loader)
    run.steps(loop, 2)
    state = run.state.state_dict()
    killed = steps(run, loop, 1)
    again = resumed(state, workers=workers)
    assert_no_noise_twice(killed, steps(again, again.loader, 0))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_knows_what_was_looked_at(workers):
    run = Run(workers=workers)
    loop = iter(run.loader)
    run.steps(loop, 2)
    next(iter(run.loader))
    state = run.state.state_dict()
    killed, again = run.steps(loop, 2), resumed(state, workers=workers)
    first, *_ = again.steps(again.loader, 2)
    assert killed[0][0] == first[0] and torch.equal(killed[0][2], first[2])


def test_where_no_step_is_taken_the_sampler_does_not_grow():
    batches = PoissonBatches(4, 0.5, SharedSecret(bytes(32)), steps=10, rank=0, ranks=1)
    for _ in range(5):
        list(batches)
    assert batches.given == ((0, 49),) and batches.untaken == 50


def test_left_early_between_its_checkpoints_it_goes_on_where_the_run_does():
    run = Run(workers=2)
    run.steps(run.loader, 2)
    state = run.state.state_dict()
    again = resumed(state)
    for before, after in zip(run.steps(run.loader, 3), again.steps(again.loader), strict=False):
        assert before[0] == after[0] and torch.equal(before[2], after[2])


def test_persistent_workers_count_anew():
    """A loop that was left early and the next one have the same iterator of the loader."""
    run = Run(workers=2, persistent_workers=True)
    run.steps(run.loader, 2)
    loop = iter(run.loader)
    run.steps(loop, 2)
    state = run.state.state_dict()
    killed, again = run.steps(loop, 3), resumed(state)
    for before, after in zip(killed, again.steps(again.loader, 3), strict=True):
        assert before[0] == after[0] and torch.equal(before[2], after[2])


def test_noise_of_another_size_is_other_noise():
    """Or the two would be solved for the sum."""
    state, killed = saved_and_killed(Run(), "behind step()")
    again = resumed(state, sigma=2.0)
    first, second = killed[0], again.steps(again.loader, 1)[0]
    assert first[0] == second[0] and (2.0 * first[3] - second[3]).norm() > 0.1


def test_parts_of_draws_count_as_draws():
    """BatchMemoryManager asks for a draw when it needs its first part, workers long before."""
    found = []
    for workers in (0, 2):
        run, whole = Run(workers=workers), []
        with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer) as parts:
            for (taken,) in parts:
                if run.step(taken) is not None:
                    whole.append((run.batches.draw, run.batches.untaken))
        found.append(whole)
    assert found[0] == found[1] == [(draw, draw + 1) for draw in range(9)]


def test_what_waits_for_a_step_to_end_is_not_added_to_what_is_taken_again():
    run = Run()
    state = run.state.state_dict()
    run.optimizer.signal_skip_step(True)
    run.step(torch.arange(4))
    run.module(run.x).sum().backward()
    run.state.load_state_dict(state)
    nn.functional.cross_entropy(run.module(run.x[:3]), run.y[:3], reduction="sum").backward()
    run.optimizer.noise_multiplier = 0.0
    run.optimizer.step()
    exact = clipped_sum({name: g[:3] for name, g in run.samples.items()}, C)
    assert_gradients({name: p.grad for name, p in run.net.named_parameters()}, exact)


def test_loaders_that_give_draws_in_another_order_are_refused():
    with pytest.raises(InputError, match="in_order=False"):
        next(iter(Run(workers=1, in_order=False).loader))
