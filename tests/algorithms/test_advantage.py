"""Advantages against hand-computed values and torch's formula; the overlong penalty's corners."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.algorithms.advantage import group_advantages
from lockstep.algorithms.dapo import DAPO
from lockstep.config import LossConfig

GROUPS = [[1.3, 0.3, 0.0, 0.3], [0.0, 1.0, 1.0, 1.0]]


def test_none_subtracts_the_groups_mean() -> None:
    assert group_advantages([[1.0, 0.0, 0.0, 1.0], [2.0, 6.0]], "none") == [[0.5, -0.5, -0.5, 0.5], [-2.0, 2.0]]


@pytest.mark.parametrize("scale_rewards", ["group", "batch"])
def test_scaled_matches_torchs_sample_deviation(scale_rewards: str) -> None:
    rewards = torch.tensor(GROUPS, dtype=torch.float64)
    std = rewards.std(dim=1, keepdim=True) if scale_rewards == "group" else rewards.std()
    expected = (rewards - rewards.mean(dim=1, keepdim=True)) / (std + 1e-4)
    actual = torch.tensor(group_advantages(GROUPS, scale_rewards), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_two_samples_have_a_deviation() -> None:
    (advantages,) = group_advantages([[2.0, 6.0]], "group")
    assert advantages == pytest.approx([-2 / (8**0.5 + 1e-4), 2 / (8**0.5 + 1e-4)], rel=1e-12)


@given(st.floats(-1e6, 1e6), st.integers(1, 33), st.sampled_from(["none", "group", "batch"]))
def test_equal_rewards_have_exactly_zero_advantage(reward: float, size: int, scale_rewards: str) -> None:
    rewards = [[reward] * size, [0.1, 0.7]]
    assert group_advantages(rewards, scale_rewards)[0] == [0.0] * size


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=9), st.randoms())
def test_the_order_of_samples_does_not_matter(rewards: list[float], random) -> None:
    order = random.sample(range(len(rewards)), len(rewards))
    (straight,) = group_advantages([rewards], "group")
    (shuffled,) = group_advantages([[rewards[i] for i in order]], "group")
    assert shuffled == [straight[i] for i in order]


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (95, -1.5), (100, -2.0), (120, -2.0)]
)
def test_overlong_penalty_falls_linearly_over_the_buffer(length: int, expected: float) -> None:
    config = LossConfig(overlong_buffer=20, overlong_penalty=2.0)
    assert DAPO().penalty(config, length, 100) == pytest.approx(expected, abs=1e-15)


def test_no_buffer_is_no_penalty() -> None:
    assert DAPO().penalty(LossConfig(overlong_buffer=0, overlong_penalty=1.0), 100, 100) == 0.0
