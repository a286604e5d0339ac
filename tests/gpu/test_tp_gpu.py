"""GPUs that share products: the words of one process, in graphs, whoever moves them. Two that share every product in
both roles, and four or eight of which two share those of the trainer and all those of the generator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import Launch

RANKS = Path(__file__).with_name("tp_ranks.py")
assert RANKS.is_file()

GPUS = [pytest.param(ranks, marks=pytest.mark.gpus(ranks), id=f"{ranks}_gpus") for ranks in (2, 4, 8)]


@pytest.fixture(scope="module", params=GPUS)
def found(request: pytest.FixtureRequest, launch: Launch) -> dict[str, Any]:
    return launch(request.param, RANKS)


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("way", ["collectives", "pushes"])
def test_words_are_those_of_one_process_before_and_after_an_update(found: Any, model: str, way: str) -> None:
    case = found[f"{model}, {way}"]
    assert case["as one process draws"] and case["alike on all ranks"] and case["different tokens"] > 20
    for applied, checked, different, *_ in case["updates"]:
        assert applied and different == 0 and checked == case["tokens"]
    for shared, alone in zip(case["updates"], case["of one process"], strict=True):
        assert shared[:3] == alone[:3] and shared[3:] == pytest.approx(alone[3:], rel=0.05)
    assert {"decode full", "forward_backward full", "mixed full"} <= set(case["levels"])


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_pushed_words_change_nothing(found: Any, model: str) -> None:
    moved, pushed = (found[f"{model}, {way}"] for way in ("collectives", "pushes"))
    assert moved["updates"] == pushed["updates"] and moved["drawn"] == pushed["drawn"]


@pytest.mark.parametrize("model", ["llama", "deepseek_v3"])
def test_gradients_of_a_captured_step_are_those_of_an_eager_one(found: Any, model: str) -> None:
    for of_rank in found[f"gradients, {model}"]["of ranks"]:
        eager, captured = of_rank["eager"], of_rank["captured"]
        assert eager["not zero"] and eager["gradients"] == captured["gradients"]
    print(
        f"{model} {found[f'gradients, {model}']['axes']}: {eager['seconds'] * 1e3:.1f} ms eager, "
        f"{captured['seconds'] * 1e3:.1f} captured"
    )
