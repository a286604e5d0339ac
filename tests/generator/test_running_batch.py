"""Rows: what is uploaded, moved and grouped."""

from __future__ import annotations

import pytest
import torch

from lockstep.generator.request import Sequence, SharedPrefix
from lockstep.generator.running_batch import GROUP, STOP_IDS, RunningBatch, max_groups
from lockstep.types import SampleIdentity, SamplingParams

NULL = 99


def make(count: int = 16, width: int = 4) -> RunningBatch:
    return RunningBatch(count, width, steps=3, null_page=NULL, device=torch.device("cpu"))


def sequence(number: int, stop_ids: int = 2, **fields) -> Sequence:
    params = SamplingParams(**({"temperature": 0.5 + number, "top_k": number, "min_p": 0.25} | fields))
    identity = SampleIdentity(0, 0, 0, number)
    return Sequence(0, [7] * (10 + number), params, identity, frozenset(range(1, stop_ids + 1)))


def fill(rows: RunningBatch, count: int) -> list[Sequence]:
    placed = []
    for i in range(count):
        placed.append(sequence(i))
        row = rows.take_row()
        rows.load(row, placed[-1])
        rows.set_pages(row, 0, [2 * i, 2 * i + 1])
    return placed


def state(rows: RunningBatch, row: int) -> list:
    fields = ("position", "remaining", "temperature", "top_k", "top_p", "min_p", "key", "stop", "table")
    tensors = rows.tensors(rows.count)
    return [tensors[name][row].tolist() for name in fields]


def test_a_sequence_is_uploaded_as_it_is() -> None:
    rows = make()
    placed = fill(rows, 3)
    rows.set_pages(1, 2, [50])
    rows.flush()
    stops = [1, 2] + [-1] * (STOP_IDS - 2)
    for i, s in enumerate(placed):
        table = [2 * i, 2 * i + 1, 50 if i == 1 else NULL, NULL]
        assert state(rows, i) == [9 + i, 128, 0.5 + i, i, 1.0, 0.25, list(s.key), stops, table]
    idle = [0, 0, 1.0, 0, 1.0, 0.0, [0] * 4, [-1] * STOP_IDS, [NULL] * 4]
    assert state(rows, 3) == state(rows, 15) == idle
    rows.release(1)
    rows.flush()
    assert state(rows, 1)[:-1] == idle[:-1]
    assert (rows.truncated, rows.greedy, rows.used) == (2, 0, 3)
    assert rows.take_row() == 1


@pytest.mark.parametrize("count", [STOP_IDS, STOP_IDS + 1])
def test_more_stop_ids_than_there_is_room_for_are_left_to_the_host(count: int) -> None:
    rows = make()
    rows.load(rows.take_row(), sequence(0, stop_ids=count))
    rows.flush()
    found = sorted(rows.tensors(1)["stop"][0].tolist())
    assert found == (list(range(1, count + 1)) if count <= STOP_IDS else [-1] * STOP_IDS)


def test_compacting_moves_what_the_device_has_into_free_rows() -> None:
    rows = make()
    placed = fill(rows, 12)
    rows.flush()
    rows.tensors(16)["position"][9] = 1234  # only the device knows
    for i in (2, 3, 5, 10):
        rows.release(i)
    kept = [s for i, s in enumerate(placed) if i not in (2, 3, 5, 10)]
    rows.compact(8)
    assert rows.used == 8 and sorted(s.row for s in kept) == list(range(8))
    assert all(rows.sequences[s.row] is s for s in kept)
    for s in kept:
        number = len(s.prompt_ids) - 10
        position, remaining, _, top_k, *_, key, _, table = state(rows, s.row)
        assert (position, remaining, top_k, key) == (1234 if number == 9 else 9 + number, 128, number, list(s.key))
        assert table[:2] == [2 * number, 2 * number + 1]
    assert all(state(rows, row)[:2] == [0, 0] for row in range(8, 16))


def test_wider_tables_hold_the_pages_of_before() -> None:
    rows = make(width=2)
    fill(rows, 2)
    rows.flush()
    views = rows.tensors(4)
    rows.set_pages(1, 2, [60])
    rows.widen(4)
    rows.flush()
    assert rows.tensors(4)["table"].tolist() == [[0, 1, NULL, NULL], [2, 3, 60, NULL], [NULL] * 4, [NULL] * 4]
    assert rows.tensors(4)["token"] is not views["token"]


def test_samples_of_a_prompt_are_grouped_until_they_leave() -> None:
    rows = make(32)
    long, short = SharedPrefix(128, []), SharedPrefix(32, [])
    placed = fill(rows, 20)
    for i, s in enumerate(placed):
        s.shared = long if i < 10 else short if i < 18 else None
    rows.update_groups(32)
    tensors = rows.tensors(32)
    listed = [[r for r in group if r >= 0] for group in tensors["groups"].tolist()]
    assert listed == [list(range(GROUP)), [8, 9], *[[]] * (max_groups(32) - 2)]
    assert tensors["shared_len"].tolist() == [128] * 10 + [0] * 22
    assert rows.saved == (7 + 1) * 128
    for i in (0, 8):
        rows.release(i)
    rows.update_groups(32)
    listed = [[r for r in group if r >= 0] for group in tensors["groups"].tolist()]
    assert listed[:2] == [[1, 2, 3, 4, 5, 6, 7, 9], []]
    assert tensors["shared_len"].tolist() == [0, *[128] * 7, 0, 128, *[0] * 22]
    rows.update_groups(8)  # a smaller graph has room for two groups, and row 9 is not in it
    assert rows.tensors(8)["groups"].tolist() == [[1, 2, 3, 4, 5, 6, 7, -1], [-1] * GROUP]


def test_groups_beyond_the_room_for_them_read_for_themselves() -> None:
    rows = make(8)
    for i, s in enumerate(fill(rows, 6)):
        s.shared = s.shared or SharedPrefix(64, []) if i % 2 == 0 else rows.sequences[i - 1].shared
    rows.update_groups(8)
    assert rows.tensors(8)["shared_len"].tolist() == [64] * 4 + [0] * 4
