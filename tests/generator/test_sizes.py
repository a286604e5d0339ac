"""Sizes of steps: which of them read shared prefixes once a group."""

from __future__ import annotations

import pytest

from lockstep.generator import pays_to_group


@pytest.mark.parametrize(
    ("rows", "prompt_tokens", "samples", "kv_heads", "expected"),
    [
        (64, 1136, 8, 8, True),
        (64, 1136, 8, 4, True),
        (64, 400, 8, 4, False),  # twice as many as a GPU attends for at once
        (64, 1136, 8, 2, False),  # all of them at once
        (64, 8192, 8, 2, True),  # in more than one chain each
        (64, 1136, 1, 8, False),
        (64, 128, 8, 8, False),
        (512, 128, 8, 8, True),
    ],
)
def test_prefixes_are_read_by_group_where_rows_wait_for_one_another_or_for_long_ones(
    rows: int, prompt_tokens: int, samples: int, kv_heads: int, expected: bool
) -> None:
    assert pays_to_group(rows, prompt_tokens, samples, kv_heads) == expected
