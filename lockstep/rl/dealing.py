"""Assigning a step's groups to mini-batches and shards, as a function only of the groups' lengths and numbers and of
the number of mini-batches and shards."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ..types import RolloutGroup


def mini_batches(groups: list[RolloutGroup], number: int) -> list[list[RolloutGroup]]:
    """The groups, in order, in `number` parts as equal as possible, or in as many parts as there are groups."""
    parts = min(number, len(groups))
    return [groups[i * len(groups) // parts : (i + 1) * len(groups) // parts] for i in range(parts)]


def dealt(groups: Sequence[RolloutGroup], shards: int, balanced: bool) -> list[list[RolloutGroup]]:
    """The groups of each shard, in order. `balanced`: shards have about equally many tokens, counting a group's prompt
    once; otherwise groups are assigned round-robin by their numbers."""
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
    """The shard of each item: items are assigned longest first, each to the shard with the fewest tokens, on ties the
    first (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).

    Unlike there, no shard gets more than an equal share of the items, rounded up, as graphs are made for no more.
    """
    found = [0] * len(lengths)
    filling = [(0, shard, -(-len(lengths) // shards)) for shard in range(shards)]  # tokens, shard, free places
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, shard, left = heapq.heappop(filling)
        found[i] = shard
        if left > 1:
            heapq.heappush(filling, (tokens + lengths[i], shard, left - 1))
    return found
