"""Sharing rollouts between ranks: every rank has the lengths and rewards of all, ranks that train on a rollout have its
values per token, and the first rank, which records them, has everything.

Values per token have 32 bits each. They are sent without conversion, in one message between each pair of ranks.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from ...distributed import World
from ...types import RolloutGroup, SampleIdentity, Segment

Code = Literal["i", "f"]
# A segment's values per token, with the type code of an array of them.
COLUMNS: dict[str, Code] = {
    "token_ids": "i",
    "logprobs": "f",
    "model_logprobs": "f",
    "weight_versions": "i",
    "route_digests": "i",
}
_BYTES = 4  # per value


class RemoteValues(Sequence[Any]):
    """A placeholder for `count` values that only another rank has; here, only their number can be read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError(f"one of {self._count} values of tokens is read, which another rank has")


def outline(group: RolloutGroup) -> RolloutGroup:
    """What every rank needs of a group: everything but its values per token, texts and columns. Equal prompts are
    merged into one list, in `group` and in the outline, so that it is sent once."""
    for name in COLUMNS:
        distinct: list[Any] = []
        for prompt in (rollout.prompt for rollout in group.rollouts):
            values = getattr(prompt, name)
            equal = next((other for other in distinct if other == values), None)
            if equal is None:
                distinct.append(values)
            else:
                setattr(prompt, name, equal)
    placeholders: dict[int, RemoteValues] = {}  # by the id of the list in whose place they are

    def without_values(segment: Segment) -> Segment:
        replaced: dict[str, Any] = {"text": ""}
        for name in COLUMNS:
            values = getattr(segment, name)
            if values is not None:
                replaced[name] = placeholders.setdefault(id(values), RemoteValues(len(values)))
        return replace(segment, **replaced)

    rollouts = [replace(r, segments=list(map(without_values, r.segments)), extra={}) for r in group.rollouts]
    return replace(group, rollouts=rollouts, prompt=None, columns={})


class RolloutHolders:
    """Tracks which ranks have the values per token of a step's groups; at first, those that sampled them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._holders: dict[SampleIdentity, set[int]] = {}  # by a group's first sample

    def send_missing(self, wanted: Iterable[tuple[RolloutGroup, Collection[int]]]) -> None:
        """Send the values of each of these groups to its ranks. All ranks must call this, with the same groups.
        `PeerLost`: a rank is gone, or late by more than the timeout."""
        if self._world.size == 1:
            return
        own_rank = self._world.rank
        to_send: dict[int, list[RolloutGroup]] = {}
        to_receive: dict[int, list[RolloutGroup]] = {}
        for group, ranks in wanted:
            for rank in self._add_holders(group, ranks):
                if own_rank == group.sampled_by:
                    to_send.setdefault(rank, []).append(group)
                elif own_rank == rank and group.sampled_by is not None:
                    to_receive.setdefault(group.sampled_by, []).append(group)
        sizes = {rank: _BYTES * sum(len(v) for v, _ in _values(groups)) for rank, groups in to_receive.items()}
        received = self._world.transfer({rank: _to_bytes(groups) for rank, groups in to_send.items()}, sizes)()
        for rank, groups in to_receive.items():
            _fill_values(groups, received[rank])

    def send_to_first(self, groups: Sequence[RolloutGroup]) -> Callable[[], None]:
        """Begin to send all of these groups to the first rank, with texts and columns. Returns a function that waits
        for them. All ranks must call both."""
        if self._world.size == 1:
            return lambda: None
        by_rank: dict[int, list[RolloutGroup]] = {}  # of ranks other than the first
        for group in groups:
            if group.sampled_by:
                by_rank.setdefault(group.sampled_by, []).append(group)
        without_values = {rank: [g for g in of_rank if self._add_holders(g, [0])] for rank, of_rank in by_rank.items()}
        data = bytearray()
        if own := by_rank.get(self._world.rank):
            data = _to_bytes(without_values[self._world.rank])
            data += pickle.dumps(list(map(_texts, own)))
        sizes = self._world.gather(len(data))
        expected = {rank: sizes[rank] for rank in by_rank} if self._world.is_first else {}
        receive = self._world.transfer({0: data}, expected, tag=1)

        def wait() -> None:
            for rank, data in receive().items():
                rest = _fill_values(without_values[rank], data)
                for group, texts in zip(by_rank[rank], pickle.loads(rest), strict=True):
                    _set_texts(group, texts)

        return wait

    def _add_holders(self, group: RolloutGroup, ranks: Collection[int]) -> list[int]:
        """Record that these ranks have a group's values from now on. Returns those that did not have them yet."""
        if group.sampled_by is None:  # every rank has them
            return []
        holders = self._holders.setdefault(group.rollouts[0].identity, {group.sampled_by})
        missing = [rank for rank in ranks if rank not in holders]
        holders |= {*missing}
        return missing


def _values(groups: Iterable[RolloutGroup]) -> Iterator[tuple[Any, Code]]:
    """Every distinct list of values, once, with its type code."""
    for group in groups:
        seen = set[int]()
        for segment in (segment for rollout in group.rollouts for segment in rollout.segments):
            for name, code in COLUMNS.items():
                values = getattr(segment, name)
                if values is not None and id(values) not in seen:
                    seen.add(id(values))
                    yield values, code


def _to_bytes(groups: Iterable[RolloutGroup]) -> bytearray:
    return bytearray().join(array(code, values) for values, code in _values(groups))


def _fill_values(groups: Sequence[RolloutGroup], data: memoryview) -> memoryview:
    """Replace placeholders by the received values, in order; returns the rest of the data."""
    received: dict[int, list[Any]] = {}  # by the placeholder's id
    for placeholder, code in _values(groups):
        size = _BYTES * len(placeholder)
        received[id(placeholder)], data = data[:size].cast(code).tolist(), data[size:]
    for segment in (segment for group in groups for rollout in group.rollouts for segment in rollout.segments):
        for name in COLUMNS:
            placeholder = getattr(segment, name)
            if placeholder is not None:
                setattr(segment, name, received[id(placeholder)])
    return data


def _texts(group: RolloutGroup) -> tuple[Any, ...]:
    return group.prompt, group.columns, [(r.extra, [s.text for s in r.segments]) for r in group.rollouts]


def _set_texts(group: RolloutGroup, texts: tuple[Any, ...]) -> None:
    group.prompt, group.columns, of_rollouts = texts
    for rollout, (extra, of_segments) in zip(group.rollouts, of_rollouts, strict=True):
        rollout.extra = extra
        for segment, text in zip(rollout.segments, of_segments, strict=True):
            segment.text = text
