"""Which shard of a step a group is assigned to."""

from __future__ import annotations

import math
import random

import pytest

from lockstep.config import LEGACY_CONFIG, RunConfig
from lockstep.rl.batching import assign_to_shards, balance_by_length
from lockstep.types import RolloutGroup, SamplingParams, Segment, Trajectory


def group(number: int, prompt: int, *completions: int) -> RolloutGroup:
    rollouts = [Trajectory([Segment([1] * prompt), Segment([2] * tokens, True)]) for tokens in completions]
    return RolloutGroup(rollouts, SamplingParams(), number)


def long_tailed(groups: int, samples: int = 8) -> list[int]:
    """Tokens of groups whose completions are lognormal, of 2,048 tokens in the mean and at most 8,192."""
    draw = random.Random(0)
    logs = [[math.log(2048) - 0.32 + 0.8 * draw.gauss(0, 1) for _ in range(samples)] for _ in range(groups)]
    return [256 + sum(min(8192, int(math.exp(x))) for x in of_group) for of_group in logs]


def sums(lengths: list[int], shard_of: list[int], shards: int) -> list[int]:
    return [sum(n for n, s in zip(lengths, shard_of, strict=True) if s == shard) for shard in range(shards)]


@pytest.mark.parametrize("shards", [8, 64])
def test_shards_have_about_as_many_tokens(shards: int) -> None:
    lengths = long_tailed(512)
    mean = sum(lengths) / shards
    assert max(sums(lengths, balance_by_length(lengths, shards), shards)) < 1.03 * mean
    assert max(sums(lengths, [i % shards for i in range(512)], shards)) > 1.03 * mean  # as they come


def test_the_longest_goes_to_the_shard_that_has_least_and_room() -> None:
    assert balance_by_length([5, 9, 9, 1, 3, 4], 2) == [0, 0, 1, 0, 1, 1]  # 9, 9, then 5, 4, 3, 1
    assert balance_by_length([100, 1, 1, 1, 1, 1], 2) == [0, 1, 1, 1, 0, 0]  # three each
    assert balance_by_length([7] * 5, 3) == [0, 1, 2, 0, 1]
    assert balance_by_length([], 3) == []


def test_groups_keep_their_order_and_one_shard_has_them_as_they_are() -> None:
    groups = [group(n, 3, *tokens) for n, tokens in ((0, (1, 1)), (2, (9, 1)), (5, (2, 2)), (6, (8, 1)))]
    assert assign_to_shards(groups, 1, balanced=True) == [groups] == assign_to_shards(groups, 1, balanced=False)
    assert assign_to_shards(groups, 2, balanced=True) == [[groups[0], groups[1]], [groups[2], groups[3]]]
    assert assign_to_shards(groups, 2, balanced=False) == [[groups[0], groups[1], groups[3]], [groups[2]]]


def test_a_run_that_began_before_goes_on_in_turn() -> None:
    assert RunConfig().parallel.balance_batch and not LEGACY_CONFIG.parallel.balance_batch
