"""Words pushed between two GPUs, or eight: those that NCCL moves, and no wait without an end."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import Launch

RANKS = Path(__file__).with_name("push_ranks.py")
assert RANKS.is_file()

GPUS = [pytest.param(ranks, marks=pytest.mark.gpus(ranks), id=f"{ranks}_gpus") for ranks in (2, 8)]


@pytest.mark.parametrize("ranks", GPUS)
def test_pushed_words_are_those_of_collectives_and_a_rank_that_stays_away_ends_the_wait(
    launch: Launch, ranks: int
) -> None:
    found = launch(ranks, RANKS, *(["shared"] if launch.shared else []))
    for rank in found["ranks"]:
        assert [part["different"] for part in rank.values()] == [0] * len(rank), rank
    late_rank, group, launch_number = found["late"]["late"]
    assert late_rank in range(1, ranks) and group == "@generator_tp" and launch_number > 0
    assert 19 < found["late"]["seconds"] < 30
    late = f"rank 0 of {ranks}: words that rank {late_rank} pushes did not come within 20 s (parallel.timeout)"
    assert late in found["late"]["message"]
    if not launch.shared:
        small = found["ranks"][0]["8 x 512 torch.bfloat16"]
        print(f"8 x 512 between {ranks} GPUs: {small['push_us']:.1f} us pushed, {small['nccl_us']:.1f} by NCCL")
        assert ranks > 2 or small["push_us"] < small["nccl_us"], small  # of more nothing is known yet
