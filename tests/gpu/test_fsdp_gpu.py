"""Two GPUs over NCCL, collectives within CUDA graphs: the bits of one process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launch import Launch
from processes import finished

pytestmark = pytest.mark.gpus(2)

ROOT = Path(__file__).parents[2]
RANKS, BENCHMARK = ROOT / "tests" / "distributed" / "ranks.py", ROOT / "benchmarks" / "run.py"
assert RANKS.is_file() and BENCHMARK.is_file()
WAYS = {  # of the benchmark's, those together that are likely to fail together
    "sharded": ("sharded", "unbucketed", "in the order of the trace"),
    "gathered": ("weights gathered", "gathered weights kept"),
    "products": ("products shared, words pushed", "products shared", "products shared in both roles"),
}


@pytest.fixture(scope="module", params=["", "expandable_segments:True"], ids=["plain memory", "expandable segments"])
def found(request: pytest.FixtureRequest, launch: Launch) -> dict[str, Any]:
    """What `tests/distributed/ranks.py` finds on two GPUs."""
    return launch(2, RANKS, "cuda", PYTORCH_CUDA_ALLOC_CONF=request.param)


@pytest.mark.parametrize("kind", ["bfloat16", "experts", "state_in_one_process", "offloaded", "a_critic"])
def test_two_gpus_have_the_bits_of_one(found: dict[str, Any], kind: str) -> None:
    assert found[kind] == [[], []]


def test_frozen_parameters_groups_and_a_teacher_have_the_bits_of_one(found: dict[str, Any]) -> None:
    assert [unlike for unlike, *_ in found["parameter_groups"]] == [[], []]
    assert found["a_teacher"][:2] == [[], []]


def test_adding_in_another_order_would_be_noticed(found: dict[str, Any]) -> None:
    first, second = found["another_order_of_addition"]
    assert 0 in first and first == second


@pytest.mark.parametrize("way", ["stage 2", "stage 3"])
def test_graphs_with_collectives_compute_what_eager_does(found: dict[str, Any], way: str) -> None:
    graphs = found["graphs"][way]
    assert graphs["different"] == [[], []] and graphs["digests"][0] == graphs["digests"][1]
    assert graphs["captures"][1] == 0


def test_a_fault_on_one_gpu_stops_the_update_on_both(found: dict[str, Any]) -> None:
    assert found["a_flipped_bit_on_one_rank"] == [[False, 1, True, [["group 1 sample 0", 2, "sampled"]], True]] * 2
    assert found["a_loss_that_is_not_finite_on_one_rank"] == [[False, False, True]] * 2


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_steps_of_reinforcement_learning(ways: Sequence[str], launch: Launch, tmp_path: Path) -> None:
    """`benchmarks/run.py fsdp` at a small size: recorded graphs, one process and two."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, str(BENCHMARK), "fsdp", "--arch", "qwen3-100m", "--json", str(tmp_path / "figures.json")]
    steps, only = (3, ways[:2]) if launch.shared else (10, ways)  # each takes many times as long where ranks share one
    command += ["--steps", str(steps), *["--ranks-share-gpu"] * launch.shared, "--only", "one process", *only]
    run = finished(command, env=os.environ | {"PYTHONPATH": path})
    assert run.returncode == 0, run.stdout + run.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [*figures["ways"]] == ["one process", *only]
    for name, way in figures["ways"].items():
        assert way["tokens_different"] == 0 < way["tokens_checked"] and way["steps"] == steps, name
        assert way["same_rollouts"] and way["same_weights"] and way["same_first_rollouts"], name
        assert way["recompiles"] == 0 < way["replays"], name
