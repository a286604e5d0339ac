"""The running sequences on the device: rows of a few tensors at fixed addresses.

A graph for r sequences works on the first r rows. The host's changes (sequences that start, leave or get pages) are
collected and uploaded together before the next launch; all other state stays on the device from step to step.

Shape suffixes: R rows, K stop ids, W pages of a sequence, M rows or entries that changed.
"""

from __future__ import annotations

import heapq
import struct

import torch
from torch import Tensor

from ..ops import KEY_TILE
from ..types import SamplingParams
from .kv_cache import upload
from .request import Sequence, SharedPrefix

STOP_IDS = 4  # checked on the device; sequences with more stop ids stop on the host
RESULTS = 3  # 32-bit words: token, log-probability, the model's own; with experts a fourth, their digest
GROUP = 8  # the most sequences that read a prefix together
ALIGNMENT = 16  # elements: every 32-bit field starts on a 64-byte boundary

_FIELDS = [2, STOP_IDS, 4, 5]  # widths in an uploaded row: token and position, stop ids, key, remaining and the filters


class RunningBatch:
    """The rows, their sequences, and changes not uploaded yet. `routed`: results have a fourth word, for experts.

    A row is idle if it has no sequence or its sequence has stopped: it takes part in steps at position 0 of the null
    page. An additional row, `null_row`, is always idle and has only the null page.

    Attributes:
        width: the most pages of a sequence.
        sequences: by row; None for an empty row.
        truncated, greedy: the number of sequences with a filter, and with temperature 0.
        saved: positions that a decode step reads less thanks to shared prefixes, for the rows of the last
            `update_groups` call.
    """

    def __init__(
        self, count: int, width: int, steps: int, null_page: int, device: torch.device, routed: bool = False
    ) -> None:
        self.count, self.null_row, self._null_page, self.device = count, count, null_page, device
        self.width = width
        self.sequences: list[Sequence | None] = [None] * count
        self.truncated = self.greedy = self.saved = 0
        self._free = list(range(count))
        self._taken: set[int] = set()
        self._changed: dict[int, list[int]] = {}
        self._pages: dict[int, list[tuple[int, list[int]]]] = {}  # by row: first column and pages
        stride = -(-(count + 1) // ALIGNMENT) * ALIGNMENT
        with torch.inference_mode(False):
            self._long = torch.zeros(2, stride, dtype=torch.int64, device=device)
            self._int = torch.zeros(5, stride, dtype=torch.int32, device=device)  # remaining, and the filters
            self._float = self._int.view(torch.float32)
            self._float[2:4] = 1  # temperature and top-p: harmless values for idle rows
            self._stop = torch.full((count + 1, STOP_IDS), -1, dtype=torch.int64, device=device)
            self._key = torch.zeros(count + 1, 4, dtype=torch.int64, device=device)
            self._ordinal = torch.arange(count, device=device)
            self._cu_seqlens = torch.arange(count + 1, dtype=torch.int32, device=device)
            self._shared_len = torch.zeros(count, dtype=torch.int32, device=device)
            self._groups = torch.full((max_groups(count), GROUP), -1, dtype=torch.int32, device=device)
            self._next_result = torch.zeros(1, dtype=torch.int64, device=device)
            self.results = torch.zeros(count, RESULTS + routed, steps, dtype=torch.int32, device=device)
            self.table = torch.full((count + 1, width), null_page, dtype=torch.int32, device=device)
        self._views: dict[int, dict[str, Tensor]] = {}
        self._grouped = count  # the number of rows that the groups on the device are for; 0: out of date

    def widen(self, width: int) -> None:
        """Make the block table `width` pages wide. Tensors from earlier `tensors` calls must not be used any more."""
        with torch.inference_mode(False):
            table = torch.full((self.count + 1, width), self._null_page, dtype=torch.int32, device=self.device)
            table[:, : self.width] = self.table
        self.table, self.width = table, width
        self._views.clear()

    def tensors(self, rows: int) -> dict[str, Tensor]:
        """Views of the first `rows` rows, which a step reads and writes."""
        if rows in self._views:
            return self._views[rows]
        with torch.inference_mode(False):
            self._views[rows] = {
                "token": self._long[0, :rows],
                "position": self._long[1, :rows],  # of `token`
                "stop": self._stop[:rows],  # -1: none
                "remaining": self._int[0, :rows],  # tokens still to be sampled; 0: idle
                "top_k": self._int[1, :rows],
                "temperature": self._float[2, :rows],
                "top_p": self._float[3, :rows],
                "min_p": self._float[4, :rows],
                "key": self._key[:rows],
                "table": self.table[:rows],
                "ordinal": self._ordinal[:rows],
                "cu_seqlens": self._cu_seqlens[: rows + 1],
                "groups": self._groups[: max_groups(rows)],  # rows that read the same prefix pages, padded with -1
                "shared_len": self._shared_len[:rows],  # positions in these pages
                "results": self.results[:rows],
                "next_result": self._next_result,  # the next step's column of `results`
            }
        return self._views[rows]

    @property
    def used(self) -> int:
        """The number of rows up to the last one that is taken."""
        return max(self._taken) + 1 if self._taken else 0

    def take_row(self) -> int:
        row = heapq.heappop(self._free)
        self._taken.add(row)
        return row

    def load(self, row: int, sequence: Sequence) -> None:
        """Put a sequence into its row. The next step samples its next token, from the hidden state of its last one."""
        assert self.sequences[row] is None
        sequence.row, self.sequences[row], self._grouped = row, sequence, 0
        self.truncated += sequence.sampling.truncated
        self.greedy += sequence.sampling.temperature == 0
        stops = list(sequence.stop_ids) if len(sequence.stop_ids) <= STOP_IDS else []
        stops += [-1] * (STOP_IDS - len(stops))
        filters = _filter_words(sequence.sampling)
        self._changed[row] = [0, sequence.length - 1, *stops, *sequence.key, sequence.remaining, *filters]

    def set_pages(self, row: int, first: int, pages: list[int]) -> None:
        self._pages.setdefault(row, []).append((first, pages))

    def release(self, row: int) -> None:
        sequence = self.sequences[row]
        if sequence is not None:
            self.truncated -= sequence.sampling.truncated
            self.greedy -= sequence.sampling.temperature == 0
            self.sequences[row], sequence.row, self._grouped = None, -1, 0
        self._changed[row] = _IDLE
        self._pages.pop(row, None)
        self._taken.discard(row)
        heapq.heappush(self._free, row)

    def compact(self, rows: int) -> None:
        """Move sequences from rows beyond the first `rows` into free rows among these, on the device."""
        if not any(self.sequences[rows:]):
            return
        self.flush()
        self._grouped = 0
        moves = []
        for source, sequence in enumerate(self.sequences[rows:], rows):
            if sequence is not None:
                target = self.take_row()
                assert target < rows, "more sequences than rows"
                moves.append((source, target))
                self.sequences[target], self.sequences[source], sequence.row = sequence, None, target
                self._taken.discard(source)
                heapq.heappush(self._free, source)
        source_M, target_M = upload(moves, self.device).t()
        for tensor, dim in ((self._long, 1), (self._stop, 0), (self._key, 0), (self._int, 1), (self.table, 0)):
            tensor.index_copy_(dim, target_M, tensor.index_select(dim, source_M))
        self._int[0].index_fill_(0, source_M, 0)
        self._long[1].index_fill_(0, source_M, 0)

    def flush(self) -> None:
        """Upload pending changes before a launch, and restart its results at the first column."""
        self._next_result.zero_()
        if self._changed:
            changed = upload([[row, *fields] for row, fields in self._changed.items()], self.device)
            row_M, long_M, stop_M, key_M, int_M = changed.split([1, *_FIELDS], dim=1)
            row_M = row_M.squeeze(1)
            self._long.index_copy_(1, row_M, long_M.t())
            self._stop.index_copy_(0, row_M, stop_M)
            self._key.index_copy_(0, row_M, key_M)
            self._int.index_copy_(1, row_M, int_M.t().int())
            self._changed.clear()
        if self._pages:
            index: list[int] = []
            entered: list[int] = []
            for row, runs in self._pages.items():
                for first, pages in runs:
                    index += range(row * self.width + first, row * self.width + first + len(pages))
                    entered += pages
            index_M, page_M = upload([index, entered], self.device)
            self.table.view(-1).index_copy_(0, index_M, page_M.int())
            self._pages.clear()

    def update_groups(self, rows: int) -> None:
        """Update which of the first `rows` rows read a shared prefix together."""
        if self._grouped == rows:
            return
        rows_by_prefix: dict[SharedPrefix, list[int]] = {}
        for row, sequence in enumerate(self.sequences[:rows]):
            if sequence is not None and sequence.shared and sequence.shared.positions >= KEY_TILE:
                rows_by_prefix.setdefault(sequence.shared, []).append(row)
        shared_len, self.saved = [0] * rows, 0
        grouped: list[list[int]] = []
        for prefix, members in rows_by_prefix.items():
            for first in range(0, len(members), GROUP):
                group = members[first : first + GROUP]
                if len(group) > 1 and len(grouped) < max_groups(rows):
                    grouped.append(group + [-1] * (GROUP - len(group)))
                    self.saved += (len(group) - 1) * prefix.positions
                    for row in group:
                        shared_len[row] = prefix.positions
        grouped += [[-1] * GROUP] * (max_groups(rows) - len(grouped))
        flat = upload(shared_len + [row for group in grouped for row in group], self.device).int()
        self._shared_len[:rows].copy_(flat[:rows])
        self._groups[: max_groups(rows)].copy_(flat[rows:].view(-1, GROUP))
        self._grouped = rows


def max_groups(rows: int) -> int:
    """The most groups among `rows` rows. The rows of any further groups read their prefixes individually."""
    return max(2, rows // 4)


def _filter_words(p: SamplingParams) -> tuple[int, ...]:
    """The filters as int32 words, with the bit patterns of the float32 ones."""
    return struct.unpack("<4i", struct.pack("<i3f", p.top_k, p.temperature, p.top_p, p.min_p))


_IDLE = [0, 0, *[-1] * STOP_IDS, 0, 0, 0, 0, 0, *_filter_words(SamplingParams())]  # with harmless filters
