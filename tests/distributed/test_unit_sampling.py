"""Poisson batches of units."""

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant

from dpfast import UnitPoissonSampler
from dpfast.distributed import SharedSecret
from dpfast.errors import InputError

SECRET = SharedSecret(bytes(range(32)))
USERS = ["ann", "bob", "ann", "eve", "bob", "ann", "dan", "ann"]


def test_units_come_with_all_their_records():
    sampler = UnitPoissonSampler(USERS, 0.5, secret=SECRET, steps=300)
    assert sampler.num_units == 4 and sampler.unit_of_record.tolist() == [0, 1, 0, 2, 1, 0, 3, 0]
    taken = torch.zeros(300, 4, dtype=torch.float64)
    for step, batch in enumerate(sampler):
        users = {USERS[i] for i in batch}
        assert sorted(batch) == [i for i, user in enumerate(USERS) if user in users]
        taken[step, [sampler.unit_of_record[i].item() for i in batch]] = 1.0
    assert (taken.mean(0) - 0.5).abs().max() < 5 * (0.25 / 300) ** 0.5
    assert (torch.corrcoef(taken.T) - torch.eye(4)).abs().max() < 0.25
    assert any(not batch for batch in UnitPoissonSampler(USERS, 0.2, secret=SECRET, steps=50))


def test_no_more_records_of_a_unit_than_were_asked_for():
    sampler = UnitPoissonSampler(torch.tensor([7, 3, 7, 7, 3, 7]), 1.0, records_a_unit=2, secret=SECRET, steps=60)
    batches = [tuple(batch) for batch in sampler]
    for batch in batches:
        assert set(batch) >= {1, 4} and len(batch) == 4 and len(set(batch)) == 4
    assert {pair for batch in batches for pair in [tuple(i for i in batch if i in (0, 2, 3, 5))]} == {
        (0, 2),
        (0, 3),
        (0, 5),
        (2, 3),
        (2, 5),
        (3, 5),
    }


def test_units_of_one_size_draw_each_for_itself():
    sampler = UnitPoissonSampler([0, 1] * 4, 1.0, records_a_unit=1, secret=SECRET, steps=60)
    places = torch.tensor([[i // 2 for i in batch] for batch in sampler], dtype=torch.float64)
    assert places.shape == (60, 2) and torch.corrcoef(places.T)[0, 1].abs() < 0.4


@pytest.mark.parametrize("records_a_unit", [None, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_unit_goes_to_one_rank_whole(ranks, records_a_unit):
    """Also where some of its records are drawn: ranks drew them from one stream, each from its beginning."""
    options = {"records_a_unit": records_a_unit, "secret": SECRET, "steps": 50}
    one = UnitPoissonSampler(USERS, 0.6, **options)
    parts = [UnitPoissonSampler(USERS, 0.6, **options, rank=r, ranks=ranks) for r in range(ranks)]
    assert len({part.must_agree() for part in parts}) == 1
    for whole, *of_step in zip(one, *parts, strict=True):
        assert sorted(i for part in of_step for i in part) == sorted(whole)
        users = [{USERS[i] for i in part} for part in of_step]
        assert sum(map(len, users)) == len(set().union(*users))


def test_goes_on_from_a_step_and_is_another_draw_without_a_secret():
    sampler = UnitPoissonSampler(USERS, 0.5, secret=SECRET, steps=4)
    first, second = list(sampler), list(sampler)
    sampler.step = 4
    assert first != second and list(sampler) == second and len(sampler) == 4
    assert len(UnitPoissonSampler(USERS, 0.1)) == 10
    draws = [tuple(map(tuple, UnitPoissonSampler(range(50), 0.5, steps=3))) for _ in range(2)]
    assert draws[0] != draws[1]


def test_the_accountant_counts_units():
    sampler = UnitPoissonSampler(USERS, 0.25)
    accountant = RDPAccountant()
    for _ in sampler:
        accountant.step(noise_multiplier=1.1, sample_rate=sampler.sample_rate)
    assert accountant.get_epsilon(1e-5) > 0


class Hashed:
    """Has a hash, and equals itself alone."""

    def __hash__(self):
        return 1


def by(numbers):
    """As data sets give them, each record's by itself."""
    return [
        list(torch.tensor(numbers)),
        list(np.array(numbers)),
        [np.array(number) for number in numbers],
        [(0, number) for number in torch.tensor(numbers)],
    ]


@pytest.mark.parametrize("users", by([5, 3, 5, 9, 3]))
def test_users_are_told_apart_by_value(users):
    """Tensors hash by identity, and every record would be a user of its own."""
    assert UnitPoissonSampler(users, 0.5, secret=SECRET).unit_of_record.tolist() == [0, 1, 0, 2, 1]


@pytest.mark.parametrize(
    "user",
    [
        torch.tensor([1, 2]),
        np.array([1, 2]),
        float("nan"),
        torch.tensor(float("nan")),
        object(),
        Hashed(),
        [1],
        (1, object()),
        frozenset([float("nan")]),
    ],
    ids=[
        "vector",
        "array",
        "NaN",
        "NaN in a tensor",
        "object",
        "object with a hash",
        "list",
        "object in a tuple",
        "NaN in a set",
    ],
)
def test_what_names_no_user_is_refused(user):
    with pytest.raises(InputError, match="give numbers or strings"):
        UnitPoissonSampler(["ann", user], 0.5, secret=SECRET)


@pytest.mark.parametrize(
    ("users", "rate", "more", "message"),
    [
        ([], 0.5, {}, "user_of_record is empty"),
        (torch.zeros(3, 2, dtype=torch.int64), 0.5, {}, r"user_of_record \(3, 2\)"),
        (torch.zeros(3), 0.5, {}, "torch.float32 must be"),
        (USERS, 0.0, {}, "sample_rate=0.0"),
        (USERS, 1.5, {}, "sample_rate=1.5"),
        (USERS, 0.5, {"records_a_unit": 0}, "records_a_unit=0"),
    ],
)
def test_bad_input(users, rate, more, message):
    with pytest.raises(InputError, match=message):
        UnitPoissonSampler(users, rate, **more)
