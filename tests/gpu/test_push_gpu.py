"""Words pushed between two GPUs: those that NCCL moves, and no wait without an end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from test_fsdp_gpu import json_of

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

RANKS = Path(__file__).with_name("push_ranks.py")
assert RANKS.is_file()


def test_pushed_words_are_those_of_collectives_and_a_rank_that_stays_away_ends_the_wait() -> None:
    found = json_of([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(RANKS), "2"])
    for rank in found["ranks"]:
        assert [part["different"] for part in rank.values()] == [0] * len(rank), rank
    assert found["late"]["group"] == "@generator_tp" and 19 < found["late"]["seconds"] < 30
    assert "did not come within 20 s (parallel.timeout)" in found["late"]["message"]
    small = found["ranks"][0]["8 x 512 torch.bfloat16"]
    assert small["push_us"] < small["nccl_us"], small
