"""How the kernels of decode attention run: what is on its way has room, for any number of programs."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

from lockstep.ops.attention import triton_decode as kernels

SHARED = 227 << 10  # bytes of an H100's and an H200's multiprocessor
OTHERS = 12 << 10  # of queries, of probabilities and of layouts
PROGRAMS = [1, 16, 64, 132, 133, 264, 265, 4096]


@pytest.mark.parametrize("key_bytes", [16 << 10, 32 << 10, 64 << 10])
def test_tiles_on_their_way_fit(key_bytes: int) -> None:
    for rows, programs in itertools.product((1, 5, 17), PROGRAMS):
        tile = kernels._choose_tile(rows, programs, key_bytes)
        together = min(-(-programs // kernels.MULTIPROCESSORS), 2)
        assert tile.query_rows >= rows and tile.stages >= 3
        assert (tile.stages - 1) * key_bytes + OTHERS <= SHARED
        if key_bytes <= 32 << 10:
            assert together * ((tile.stages - 1) * key_bytes + OTHERS) <= SHARED, "programs that run at once"
    for rows, groups in itertools.product((8, 32, 128), PROGRAMS):
        tile = kernels._choose_group_tile(rows, groups, key_bytes)
        assert (tile.stages - 1) * key_bytes + OTHERS <= SHARED and tile.query_rows <= kernels.MAX_GROUP_ROWS
