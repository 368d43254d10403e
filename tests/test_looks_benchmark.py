"""What watching and looking take is measured on any model."""

import looks
import pytest
import torch
import watch
import workloads


def test_watching_and_looks_are_timed():
    tiny = workloads.gpt("tiny", n=4, t=8, d=16, blocks=1, vocabulary=20, check=4, dtype=torch.float32)
    assert 0 < watch.measure(tiny, 1, rounds=3)["share"] < 1
    row = looks.measure(tiny, 1)
    assert row["first"] > row["later"] > 0  # two of them
    assert row["share"] == pytest.approx((row["first"] + 3 * row["later"]) / 1000)  # at the 8th, 64th and 512th


def test_sequences_of_several_lengths_are_packed():
    row = looks.measure(looks.packed(n=5, t=8, d=8), 1)
    assert row["first"] > row["later"] > 0
