"""The layout of a mixed step's prompt tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.generator.forward import SEGMENT
from lockstep.generator.prefill_batch import MixedBatch, MixedSizes, lay_out
from lockstep.generator.request import Prefill, Sequence
from lockstep.generator.scheduler import MAX_PROMPTS, Chunk
from lockstep.types import SampleIdentity, SamplingParams

NULL_ROW = 77


def chunk(row: int, start: int, count: int, started: tuple[int, ...] = ()) -> Chunk:
    tokens = [1000 * row + i for i in range(start + count)]
    samples = [Sequence(0, tokens, SamplingParams(), SampleIdentity(0, 0, 0, 0), frozenset(), row=r) for r in started]
    return Chunk(Prefill(tokens, samples, row=row), start, count, samples)


def test_chunks_become_segments_with_their_rows_pages() -> None:
    chunks = [chunk(3, 100, SEGMENT + 6), chunk(1, 0, 5, started=(1, 4))]
    sizes = MixedSizes(rows=6, tokens=128, segments=5)
    batch = MixedBatch.view(lay_out(chunks, sizes, NULL_ROW, pinned=False), sizes)
    used = SEGMENT + 11
    expected = [3000 + i for i in range(100, 106 + SEGMENT)] + [1000 + i for i in range(5)]
    assert batch.token[:used].tolist() == expected
    assert batch.position[:used].tolist() == [t % 1000 for t in expected]
    assert batch.row.tolist() == [3] * (SEGMENT + 6) + [1] * 5 + [NULL_ROW] * (128 - used)
    assert batch.segment_row.tolist() == [3, 3, 1, NULL_ROW, NULL_ROW]
    assert batch.segment_context.tolist() == [100 + SEGMENT, 106 + SEGMENT, 5, 0, 0]
    assert batch.segment_start.tolist() == [6, 6 + SEGMENT, 12 + SEGMENT, 6 + used, 6 + used, 6 + used]
    assert batch.source.tolist() == [0, 6 + used - 1, 2, 3, 6 + used - 1, 5]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=MAX_PROMPTS))
def test_there_is_room_for_tokens_however_they_are_spread(counts: list[int]) -> None:
    chunks = [chunk(i, 0, count) for i, count in enumerate(counts)]
    exact = MixedSizes.exact(2, chunks)
    room = MixedSizes.for_tokens(2, exact.tokens)
    assert room.tokens == exact.tokens == sum(counts) and room.segments >= exact.segments
    batch = MixedBatch.view(lay_out(chunks, exact, NULL_ROW, pinned=False), exact)
    lengths = batch.segment_start.diff()
    assert lengths.min() >= 1 and lengths.max() <= SEGMENT and NULL_ROW not in batch.segment_row
