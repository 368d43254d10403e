"""Loops over Opacus's BatchMemoryManager that end within a draw, and what the next loop steps on."""

import itertools
import warnings

import pytest
import torch
from cases import assert_gradients, sum_loss
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpfast.errors import DpfastWarning, StateError
from dpfast.opacus import PrivacyEngine
from dpfast.testing import clipped_sum, loop_over_samples

MODES = ["dpfast", "dpfast_two_pass", "dpfast_materialize"]
C, N = 0.5, 24

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook", "ignore:Optimal order")


class Training:
    """A private loop without noise that has the samples of every draw, of the sampler's own record."""

    def __init__(self, mode, workers=0):
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)
        self.x, self.y = torch.randn(N, 4) * 3, torch.randint(0, 3, (N,))
        self.samples = loop_over_samples(self.net, sum_loss, self.x, self.y)
        # On the CPU, as usual: forked workers have no GPU, and loaders draw there.
        data = TensorDataset(self.x.cpu(), self.y.cpu(), torch.arange(N, device="cpu"))
        loader = DataLoader(data, batch_size=12, num_workers=workers, generator=torch.Generator("cpu").manual_seed(3))
        engine = PrivacyEngine(accountant="rdp")
        self.accountant = engine.accountant
        self.module, self.optimizer, *criterion, self.loader = engine.make_private(
            module=self.net,
            optimizer=torch.optim.SGD(self.net.parameters(), lr=0.0),
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=C,
            loss_reduction="sum",
            grad_sample_mode=mode,
        )
        self.criterion = criterion[0] if criterion else nn.CrossEntropyLoss(reduction="sum")
        self.draws, sampler = [], self.loader.batch_sampler
        self.loader.__dict__["batch_sampler"] = self.Recorded(sampler, self.draws)

    class Recorded:
        def __init__(self, sampler, draws):
            self.sampler, self.draws = sampler, draws

        def __iter__(self):
            for draw in self.sampler:
                self.draws.append(sorted(draw))
                yield draw

        def __len__(self):
            return len(self.sampler)

    def parts(self):
        return BatchMemoryManager(data_loader=self.loader, max_physical_batch_size=4, optimizer=self.optimizer)

    def backward(self, x, y, *_):
        self.optimizer.zero_grad()
        x, y = x.to(self.x.device), y.to(self.x.device)
        self.criterion(self.module(x), y).backward()

    def step(self, *part):
        """Whether it was a whole one."""
        self.backward(*part)
        self.optimizer.step()
        return not self.optimizer._is_last_step_skipped

    def epoch(self):
        """All whole steps are those of one draw, to the last bit of fp32."""
        first, taken, steps = len(self.draws), [], 0
        with self.parts() as parts:
            for x, y, which in parts:
                taken += which.tolist()
                if self.step(x, y):
                    assert sorted(taken) == self.draws[first + steps]
                    exact = clipped_sum({name: g[taken] for name, g in self.samples.items()}, C)
                    assert_gradients({name: p.grad for name, p in self.net.named_parameters()}, exact)
                    taken, steps = [], steps + 1
        assert steps == len(self.loader) and not taken


def give_up(training, how):
    with training.parts() as parts:
        for number, part in enumerate(parts):
            if how == "before step()" and number == 1:
                training.backward(*part)
                raise KeyboardInterrupt
            whole = training.step(*part)
            if (how == "after a part" and not whole) or (how == "after a whole step" and whole):
                break


@pytest.mark.parametrize(
    ("how", "workers"), [("before step()", 0), ("after a part", 0), ("after a whole step", 1), ("before step()", 1)]
)
@pytest.mark.parametrize("mode", MODES)
def test_the_next_loop_begins_with_a_draw_of_its_own(mode, how, workers):
    training = Training(mode, workers)
    try:
        give_up(training, how)
    except KeyboardInterrupt as interrupt:
        kept = interrupt  # as a notebook keeps the last traceback, and the generator in it
        assert kept.__traceback__
    with pytest.warns(DpfastWarning, match="ended within a draw"):
        training.epoch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpfastWarning)
        training.epoch()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_was_interrupted_before_its_noise_is_dropped(mode):
    """The draw is one part, so neither the queue nor the last step tells of it."""

    def interrupted():
        raise KeyboardInterrupt

    training = Training(mode)
    training.optimizer.add_noise = interrupted
    part = training.x[:4], training.y[:4]
    with pytest.raises(KeyboardInterrupt):
        training.step(*part)
    del training.optimizer.add_noise
    with training.parts() as parts:
        next(iter(parts))  # and no zero_grad(), as in a loop that calls it behind step()
        assert all(p.summed_grad is None for p in training.optimizer.params)


@pytest.mark.parametrize("mode", MODES)
def test_loops_that_end_as_they_should_are_not_touched(mode):
    """Epochs within one BatchMemoryManager, a break behind a whole step, and signals of one's own."""
    training = Training(mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpfastWarning)
        with training.parts() as parts:
            whole = sum(training.step(*part) for _ in range(2) for part in parts)
            assert whole == 2 * len(training.loader)
            for part in parts:
                if training.step(*part):
                    break
        give_up(training, "after a whole step")
        for last in (False, True):
            training.optimizer.signal_skip_step(not last)
            assert training.step(training.x[4 * last : 4 * last + 4], training.y[4 * last : 4 * last + 4]) == last
        exact = clipped_sum({name: g[:8] for name, g in training.samples.items()}, C)
        assert_gradients({name: p.grad for name, p in training.net.named_parameters()}, exact)
        training.epoch()


def ahead(batches):
    """One batch is always there before it is asked for."""
    following = next(batches)
    for batch in batches:
        yield following
        following = batch


@pytest.mark.parametrize("workers", [0, 2])
def test_fetching_ahead_is_refused(workers):
    """As nobody can tell it from a loop that has left out its first part."""
    training = Training("dpfast", workers)
    with training.parts() as parts:
        with pytest.raises(StateError, match=r"given part 1 .* that of part 0"):
            for part in ahead(iter(parts)):
                training.step(*part)
        with warnings.catch_warnings():
            warnings.simplefilter("error", DpfastWarning)
            training.epoch()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("left_out", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_part_that_is_left_out(mode, left_out, workers):
    """Each step from there on would have been that of the part before: draws would end where others do."""
    training = Training(mode, workers)
    with training.parts() as parts:
        loop = iter(parts)
        with pytest.raises(StateError, match=rf"given part {left_out + 1} .* that of part {left_out}:"):
            for number, part in enumerate(loop):
                if number != left_out:
                    training.step(*part)
        assert all(p.summed_grad is None for p in training.optimizer.params)
        with pytest.raises(StateError, match="goes on after"):  # who catches errors and goes on
            for _ in loop:
                pass
    training.epoch()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_of_no_samples_in_the_place_of_a_part(mode):
    """The remedy that the error names."""
    training = Training(mode)
    taken, first = [], True
    with training.parts() as parts:
        for x, y, which in parts:
            n = 0 if first else len(x)
            taken, first = taken + which[:n].tolist(), False
            if training.step(x[:n], y[:n]):
                exact = clipped_sum({name: g[taken] for name, g in training.samples.items()}, C)
                assert_gradients({name: p.grad for name, p in training.net.named_parameters()}, exact)
                taken = []
    assert not first


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_draws_of_no_samples_may_be_left_out(mode, workers):
    training = Training(mode, workers)
    sampler = training.loader.batch_sampler

    class WithEmpty(Training.Recorded):
        def __iter__(self):
            for number, draw in enumerate(self.sampler):
                yield from [[]] * (number == 0 and len(training.draws) > 1)  # another iteration begins with one
                yield draw
                yield from [[]] * number  # none, then one, then two: the last draw of all is empty

    training.loader.__dict__["batch_sampler"] = WithEmpty(sampler, None)
    taken, steps = [], 0
    with warnings.catch_warnings(), training.parts() as parts:
        warnings.simplefilter("error", DpfastWarning)
        for x, y, which in itertools.chain.from_iterable(parts for _ in range(2)):
            if len(x) == 0:
                continue
            taken += which.tolist()
            if training.step(x, y):
                assert sorted(taken) == training.draws[steps]
                taken, steps = [], steps + 1
    assert steps == len(training.draws) == 2 * len(sampler) and not taken


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_in_the_accountant_loses_no_steps(mode, monkeypatch):
    """It takes the entry of all steps so far out of its history, and puts it back with one more."""
    training = Training(mode)
    for some in (slice(0, 3), slice(3, 7)):
        training.step(training.x[some], training.y[some])
    history, accountant = list(training.accountant.history), training.accountant

    def interrupted(self, **_):
        self.history.pop()
        raise KeyboardInterrupt

    monkeypatch.setattr(type(accountant), "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.step(training.x[:4], training.y[:4])
    assert accountant.history == history == [(0.0, 0.5, 2)]
    monkeypatch.undo()
    training.step(training.x[:4], training.y[:4])
    assert accountant.history == [(0.0, 0.5, 3)]


@pytest.mark.parametrize("mode", ["dpfast", "dpfast_two_pass"])
def test_an_interrupted_step_adds_nothing_to_the_next_one(mode):
    """A loop that calls zero_grad() behind step(), which an interrupted one does not come to."""

    def interrupted():
        raise KeyboardInterrupt

    training = Training(mode)
    parts, parameters = [slice(0, 3), slice(3, 7), slice(7, 11)], dict(training.net.named_parameters())

    def part_of(some, *, skipped=False):
        training.optimizer.signal_skip_step(skipped)
        training.criterion(training.module(training.x[some]), training.y[some]).backward()
        training.optimizer.step()

    part_of(parts[0], skipped=True)
    training.optimizer.add_noise = interrupted
    with pytest.raises(KeyboardInterrupt):
        part_of(parts[1])
    del training.optimizer.add_noise
    part_of(parts[2])
    exact = clipped_sum({name: g[parts[2]] for name, g in training.samples.items()}, C)
    assert_gradients({name: p.grad for name, p in parameters.items()}, exact)


def test_another_loop_within_one_is_refused():
    training = Training("dpfast", workers=1)
    with training.parts() as parts:
        loop = iter(parts)
        training.step(*next(loop))
        with training.parts() as others, pytest.warns(DpfastWarning, match="ended within a draw"):
            list(others)
        with pytest.raises(StateError, match="goes on after another one"):
            next(loop)
    training.epoch()
