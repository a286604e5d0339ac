"""Words pushed between two GPUs: those that NCCL moves, and no wait without an end."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import Launch

pytestmark = pytest.mark.gpus(2)

RANKS = Path(__file__).with_name("push_ranks.py")
assert RANKS.is_file()


def test_pushed_words_are_those_of_collectives_and_a_rank_that_stays_away_ends_the_wait(launch: Launch) -> None:
    found = launch(2, RANKS, *(["shared"] if launch.shared else []))
    for rank in found["ranks"]:
        assert [part["different"] for part in rank.values()] == [0] * len(rank), rank
    late_rank, group, launch_number = found["late"]["late"]
    assert (late_rank, group) == (1, "@generator_tp") and launch_number > 0 and 19 < found["late"]["seconds"] < 30
    assert (
        "rank 0 of 2: words that rank 1 pushes did not come within 20 s (parallel.timeout)" in found["late"]["message"]
    )
    if not launch.shared:
        small = found["ranks"][0]["8 x 512 torch.bfloat16"]
        assert small["push_us"] < small["nccl_us"], small
