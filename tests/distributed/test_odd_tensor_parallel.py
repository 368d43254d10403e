"""Two and three processes on a CPU (gloo) with tensor parallel as few would place it, against one process."""

import re

import pytest
import torch
import tp_odd_worker
import tp_worker
from cases import assert_gradients
from processes import run_ranks
from tp_odd_worker import DISAGREEMENTS, IDS, Columns, case, losses, with_adapters
from tp_worker import HOW, C

from dpfast.testing import clipped_sum, loop_over_samples, norms_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(tp_odd_worker.__file__, tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return run_ranks(tp_odd_worker.__file__, tmp_path_factory.mktemp("odd"), ranks=3)


def assert_step(ranks, what, samples, tolerance=1e-5):
    for rank in ranks:
        assert not isinstance(rank[what], str), rank[what]
        assert_gradients(rank[what][0], clipped_sum(samples, C), tolerance)
        assert torch.allclose(rank[what][1].double(), norms_of(samples), rtol=tolerance)


def exact(model, x, *labels, of=losses):
    return loop_over_samples(model, lambda m, *batch: of(m, *batch).sum(), x, *labels)


@pytest.mark.parametrize("number", ["ranks", "three"])
def test_layers_in_odd_places(request, number):
    """Also columns without rows behind them, where each rank has the loss of its own features."""
    ranks, (model, x) = request.getfixturevalue(number), case()
    assert_step(ranks, "columns and rows", exact(model, x))
    assert_step(ranks, "one position", exact(model, x[:, 0], of=lambda m, x: m(x).square().sum(1)))
    assert_step(ranks, "columns", exact(*case(Columns)))
    assert_step(ranks, "wrapped first", exact(model, x))


def test_one_layer_alone(ranks):
    assert_step(ranks, "columns, gathered", exact(*case(Columns)))
    assert_step(ranks, "rows", exact(*case()))


def test_adapters_of_parted_layers(ranks):
    assert_step(ranks, "adapters", exact(*with_adapters(), of=tp_worker.losses))


def test_a_loss_of_parts_of_the_vocabulary(ranks):
    assert_step(ranks, "loss of parts", tp_worker.exact())


def test_two_passes_of_an_output_of_which_each_rank_has_a_part(ranks):
    assert_step(ranks, "output of parts", exact(*case()))


@pytest.mark.parametrize("how", ["autocast", "bf16"])
def test_16_bit(ranks, how):
    assert_step(ranks, how, exact(*case()), tolerance=0.03)


def test_ranks_with_their_own_random_numbers_release_no_more_than_they_measure(ranks):
    """Where no rank has a whole parameter by which it would be seen, each part's norm is that of what is released."""
    for rank in ranks:
        released, norm = rank["own random numbers"]
        assert norm > C
        assert C * (1 - 1e-4) < released <= C * (1 + 1e-6)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_all_raise(ranks, what):
    """Also where one of them would send a message of another length."""
    for rank in ranks:
        error, untouched = rank[what]
        assert re.search("StateError: ranks disagree on what is clipped to what", str(error)), error
        assert untouched


@pytest.mark.parametrize("what", ["one freezes", "one unfreezes", "one freezes between"])
def test_a_rank_that_trains_something_else_later(ranks, what):
    """All raise: it would have sent fewer or more numbers than the others wait for, and they waited for ever. In the
    second of two passes a sum of the others' parts alone may be larger than the whole, whose norm was taken."""
    test_ranks_that_disagree_all_raise(ranks, what)


@pytest.mark.parametrize(("what", "frozen"), [("all freeze", ("n1.weight",)), ("all unfreeze", ())])
def test_all_ranks_train_something_else_later(ranks, what, frozen):
    assert_step(ranks, what, tp_worker.exact(frozen=frozen))


def test_all_ranks_freeze_norms_between_two_passes(ranks):
    """The others' sums are those of the norms that were taken."""
    summed = {name: g for name, g in clipped_sum(tp_worker.exact(), C).items() if not name.endswith("n1.weight")}
    for rank in ranks:
        assert not isinstance(rank["all freeze between"][0], str), rank["all freeze between"]
        assert_gradients(rank["all freeze between"][0], summed)


@pytest.mark.parametrize("what", [*HOW, "mean", "per layer"])
def test_units_of_samples(ranks, what):
    samples, members = tp_worker.exact(), [(unit == IDS).nonzero().flatten() for unit in range(4)]
    of_units = {name: torch.stack([g[some].sum(0) for some in members]) for name, g in samples.items()}
    if what == "mean":
        counts = torch.tensor([max(1, len(some)) for some in members])
        of_units = {name: g / counts.view(-1, *[1] * (g.dim() - 1)) for name, g in of_units.items()}
    summed = clipped_sum(of_units, C)
    if what == "per layer":
        summed = {name: clipped_sum({name: g}, C)[name] for name, g in of_units.items()}
    for rank in ranks:
        assert not isinstance(rank["units", what], str), rank["units", what]
        gradients, norms, factors = rank["units", what]
        assert_gradients(gradients, summed)
        assert torch.allclose(norms.double(), norms_of(of_units), rtol=1e-5)
        assert torch.equal(factors, ranks[0]["units", what][2])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("units differ", "StateError: ranks of one tensor parallel mesh were called with different inputs"),
        ("tokens", r"UnsupportedModuleError: down \(Linear\) has parts .* units of tokens"),
    ],
)
def test_units_that_are_refused(ranks, what, message):
    for rank in ranks:
        assert re.search(message, str(rank[what])), rank[what]
