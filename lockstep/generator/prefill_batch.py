"""The prompt tokens of a mixed step, laid out in one block of memory for the device.

Shape suffixes: R rows, P prompt tokens, S segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .forward import SEGMENT
from .scheduler import MAX_PROMPTS, Chunk


class MixedSizes(NamedTuple):
    """The rows, prompt tokens and segments that a mixed step has room for."""

    rows: int
    tokens: int
    segments: int

    @property
    def fields(self) -> list[int]:
        r, p, s = self
        return [p, p, p, s, s, s + 1, r]

    @staticmethod
    def for_tokens(rows: int, tokens: int) -> MixedSizes:
        """Sizes for `tokens` tokens, however they are distributed over prompts."""
        return MixedSizes(rows, tokens, tokens // SEGMENT + min(tokens, MAX_PROMPTS))

    @staticmethod
    def exact(rows: int, chunks: list[Chunk]) -> MixedSizes:
        counts = [chunk.count for chunk in chunks]
        return MixedSizes(rows, sum(counts), sum(-(-n // SEGMENT) for n in counts))


class MixedBatch(NamedTuple):
    """Views of one int64 tensor. Unused tokens and segments have the null row; unused segments come last.

    Attributes:
        token, position, row: [P]; `row` is the row whose pages receive the token's keys and values.
        segment_row, segment_context: [S]; the segment's row, and its context length at its end.
        segment_start: [S + 1]; the index of its first token in the batch, which begins with a token for every row.
        source: [R]; the index in the batch of the token whose hidden state a row samples from.
    """

    token: Tensor
    position: Tensor
    row: Tensor
    segment_row: Tensor
    segment_context: Tensor
    segment_start: Tensor
    source: Tensor

    @staticmethod
    def view(flat: Tensor, sizes: MixedSizes) -> MixedBatch:
        """The fields in `flat`, int64 [sum of `sizes.fields`]."""
        return MixedBatch(*flat.split(sizes.fields))


def lay_out(chunks: list[Chunk], sizes: MixedSizes, null_row: int, pinned: bool) -> Tensor:
    """The batch of these chunks, as a host tensor, int64 [sum of `sizes.fields`]."""
    fields = sizes.fields
    flat = torch.zeros(sum(fields), dtype=torch.int64, pin_memory=pinned)
    batch = MixedBatch(*flat.split(fields))
    batch.row.fill_(null_row)
    torch.arange(sizes.rows, out=batch.source)
    segments: list[tuple[int, int, int]] = []
    place = 0
    for chunk in chunks:
        end = chunk.start + chunk.count
        tokens = slice(place, place + chunk.count)
        batch.token[tokens] = torch.tensor(chunk.prefill.token_ids[chunk.start : end])
        torch.arange(chunk.start, end, out=batch.position[tokens])
        batch.row[tokens] = chunk.prefill.row
        for start in range(chunk.start, end, SEGMENT):
            context = min(start + SEGMENT, end)
            segments.append((chunk.prefill.row, context, sizes.rows + place + start - chunk.start))
        place += chunk.count
        for sample in chunk.started:
            batch.source[sample.row] = sizes.rows + place - 1
    rest = sizes.segments - len(segments)
    segments += [(null_row, 0, sizes.rows + place)] * (rest + 1)
    row_S, context_S, start_S = torch.tensor(segments).t()
    batch.segment_row.copy_(row_S[:-1])
    batch.segment_context.copy_(context_S[:-1])
    batch.segment_start.copy_(start_S)
    return flat
