"""Which mini-batch of a step each group is in, and which shard of it: functions of the groups' lengths and number and
of the numbers of mini-batches and shards, alone."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ..types import RolloutGroup


def mini_batches(groups: list[RolloutGroup], number: int) -> list[list[RolloutGroup]]:
    """The groups cut in order, as evenly as can be, into `number` parts, or into as many as there are groups."""
    parts = min(number, len(groups))
    return [groups[i * len(groups) // parts : (i + 1) * len(groups) // parts] for i in range(parts)]


def dealt(groups: Sequence[RolloutGroup], shards: int, balanced: bool) -> list[list[RolloutGroup]]:
    """The groups of each shard, in their order: by their tokens, of which a prompt's count once, or in turn by their
    numbers."""
    numbers = [group.group for group in groups]
    after = [[s for rollout in group.rollouts for s in rollout.segments[1:]] for group in groups]
    prompts = [group.rollouts[0].segments[0] for group in groups]
    lengths = [sum(len(s.token_ids) for s in (prompt, *of)) for prompt, of in zip(prompts, after, strict=True)]
    shard_of = by_length(lengths, shards) if balanced else [number % shards for number in numbers]
    found: list[list[RolloutGroup]] = [[] for _ in range(shards)]
    for shard, group in zip(shard_of, groups, strict=True):
        found[shard].append(group)
    return found


def by_length(lengths: Sequence[int], shards: int) -> list[int]:
    """The shard of each item: longest first, to the shard that has the least; of equal ones the first.

    No shard has more items than an equal share of them, rounded up: graphs are made for no more (R. L. Graham, Bounds
    on multiprocessing timing anomalies, 1969, without that limit).
    """
    found = [0] * len(lengths)
    filling = [(0, shard, -(-len(lengths) // shards)) for shard in range(shards)]  # tokens, shard, items to come
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, shard, left = heapq.heappop(filling)
        found[i] = shard
        if left > 1:
            heapq.heappush(filling, (tokens + lengths[i], shard, left - 1))
    return found
