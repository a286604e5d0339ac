"""Assigning a step's groups to mini-batches and shards, as a function only of the groups' lengths and numbers and of
the number of mini-batches and shards."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain

from ..types import RolloutGroup


def split_mini_batches(groups: list[RolloutGroup], number: int) -> list[list[RolloutGroup]]:
    """The groups, in order, in `number` parts as equal as possible, or in as many parts as there are groups."""
    parts = min(number, len(groups))
    return [groups[i * len(groups) // parts : (i + 1) * len(groups) // parts] for i in range(parts)]


def assign_to_shards(groups: Sequence[RolloutGroup], shards: int, balanced: bool) -> list[list[RolloutGroup]]:
    """The groups of each shard, in order. `balanced`: shards have about equally many tokens, counting a group's prompt
    once; otherwise groups are assigned round-robin by their numbers."""
    if balanced:
        lengths: list[int] = []
        for group in groups:
            prompt, responses = group.rollouts[0].segments[0], [r.segments[1:] for r in group.rollouts]
            lengths.append(sum(len(segment.token_ids) for segment in chain([prompt], *responses)))
        shard_of = balance_by_length(lengths, shards)
    else:
        shard_of = [group.group % shards for group in groups]
    groups_of: list[list[RolloutGroup]] = [[] for _ in range(shards)]
    for shard, group in zip(shard_of, groups, strict=True):
        groups_of[shard].append(group)
    return groups_of


def balance_by_length(lengths: Sequence[int], shards: int) -> list[int]:
    """The shard of each item: items are assigned longest first, each to the shard with the fewest tokens, on ties the
    first (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).

    Unlike there, no shard gets more than an equal share of the items, rounded up, as graphs are made for no more.
    """
    shard_of = [0] * len(lengths)
    capacity = -(-len(lengths) // shards)
    heap = [(0, shard, capacity) for shard in range(shards)]  # tokens, shard, free places
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, shard, free = heapq.heappop(heap)
        shard_of[i] = shard
        if free > 1:
            heapq.heappush(heap, (tokens + lengths[i], shard, free - 1))
    return shard_of
