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


class Elsewhere(Sequence[Any]):
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
    known, prompts = dict[int, Elsewhere](), [rollout.prompt for rollout in group.rollouts]
    for name in COLUMNS:
        different: list[Any] = []
        for prompt in prompts:
            values = getattr(prompt, name)
            if (same := next((other for other in different if other == values), None)) is None:
                different.append(same := values)
            setattr(prompt, name, same)

    def without(segment: Segment) -> Segment:
        here = {name: values for name in COLUMNS if (values := getattr(segment, name)) is not None}
        there: dict[str, Any] = {n: known.setdefault(id(v), Elsewhere(len(v))) for n, v in here.items()}
        return replace(segment, text="", **there)

    rollouts = [replace(r, segments=list(map(without, r.segments)), extra={}) for r in group.rollouts]
    return replace(group, rollouts=rollouts, prompt=None, columns={})


class Holders:
    """Tracks which ranks have the values per token of a step's groups; at first, those that sampled them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[SampleIdentity, set[int]] = {}  # by a group's first sample

    def bring(self, wanted: Iterable[tuple[RolloutGroup, Collection[int]]]) -> None:
        """Send the values of each of these groups to its ranks. All ranks must call this, with the same groups.
        `PeerLost`: a rank is gone, or late by more than the timeout."""
        if self._world.size == 1:
            return
        here = self._world.rank
        out: dict[int, list[RolloutGroup]] = {}
        coming: dict[int, list[RolloutGroup]] = {}
        for group, ranks in wanted:
            for rank in self._lacking(group, ranks):
                if here == group.sampled_by:
                    out.setdefault(rank, []).append(group)
                elif here == rank and group.sampled_by is not None:
                    coming.setdefault(group.sampled_by, []).append(group)
        sizes = {rank: _BYTES * sum(len(v) for v, _ in _values(groups)) for rank, groups in coming.items()}
        came = self._world.transfer({rank: _words(groups) for rank, groups in out.items()}, sizes)()
        for rank, groups in coming.items():
            _fill(groups, came[rank])

    def bring_to_first(self, groups: Sequence[RolloutGroup]) -> Callable[[], None]:
        """Begin to send all of these groups to the first rank, with texts and columns. Returns a function that waits
        for them. All ranks must call both."""
        if self._world.size == 1:
            return lambda: None
        by_rank: dict[int, list[RolloutGroup]] = {}
        for group in groups:
            if group.sampled_by:
                by_rank.setdefault(group.sampled_by, []).append(group)
        lacked = {rank: [g for g in of if self._lacking(g, [0])] for rank, of in by_rank.items()}
        data = bytearray()
        if own := by_rank.get(self._world.rank):
            data = _words(lacked[self._world.rank])
            data += pickle.dumps(list(map(_texts, own)))
        sizes = self._world.gather(len(data))
        coming = {rank: sizes[rank] for rank in by_rank} if self._world.is_first else {}
        arriving = self._world.transfer({0: data}, coming, tag=1)

        def arrived() -> None:
            for rank, data in arriving().items():
                rest = _fill(lacked[rank], data)
                for group, texts in zip(by_rank[rank], pickle.loads(rest), strict=True):
                    _take_texts(group, texts)

        return arrived

    def _lacking(self, group: RolloutGroup, ranks: Collection[int]) -> list[int]:
        """Those of the ranks that do not have a group's values yet; they count as having them from now on."""
        if group.sampled_by is None:  # every rank has them
            return []
        known = self._known.setdefault(group.rollouts[0].identity, {group.sampled_by})
        lacking = [rank for rank in ranks if rank not in known]
        known |= {*lacking}
        return lacking


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


def _words(groups: Iterable[RolloutGroup]) -> bytearray:
    return bytearray().join(array(code, values) for values, code in _values(groups))


def _fill(groups: Sequence[RolloutGroup], data: memoryview) -> memoryview:
    """Replace placeholders by the received values, in order; returns the rest of the data."""
    found: dict[int, list[Any]] = {}
    for values, code in list(_values(groups)):
        size = _BYTES * len(values)
        found[id(values)], data = data[:size].cast(code).tolist(), data[size:]
    for segment in (segment for group in groups for rollout in group.rollouts for segment in rollout.segments):
        for name in COLUMNS:
            if (values := getattr(segment, name)) is not None:
                setattr(segment, name, found[id(values)])
    return data


def _texts(group: RolloutGroup) -> tuple[Any, ...]:
    return group.prompt, group.columns, [(r.extra, [s.text for s in r.segments]) for r in group.rollouts]


def _take_texts(group: RolloutGroup, texts: tuple[Any, ...]) -> None:
    group.prompt, group.columns, of_rollouts = texts
    for rollout, (extra, of_segments) in zip(group.rollouts, of_rollouts, strict=True):
        rollout.extra = extra
        for segment, text in zip(rollout.segments, of_segments, strict=True):
            segment.text = text
