"""What `lockstep replay` reads of a record, and that it makes a step's weights as the run did."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from runs import DATA, SUM

from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.run.replay import replay
from lockstep.run.replay.record import recorded_sample

GIVEN, SAMPLED = {"kind": "given", "tokens": 2, "token_ids": [1, 2]}, {"kind": "sampled", "tokens": 2}
WHOLE: dict[str, Any] = {"sample": 0, "segments": [GIVEN, SAMPLED], "token_ids": [3, 4]}


class Numbered:
    """Each trajectory has a prompt of its own, as TRL's environments may."""

    numbers = itertools.count()

    def reset(self, **row: Any) -> str:
        self.number = next(Numbered.numbers)
        return f" Game {self.number}."

    def get_reward(self) -> float:
        return self.number


@pytest.mark.parametrize(
    "samples",
    [
        3,
        [3],
        [{"sample": 0}],
        [{**WHOLE, "token_ids": [3]}],
        [{**WHOLE, "token_ids": ["3", 4]}],
        [{**WHOLE, "segments": []}],
        [{**WHOLE, "segments": [SAMPLED]}],
        [{**WHOLE, "segments": [GIVEN]}],
        [{**WHOLE, "segments": [{**GIVEN, "token_ids": 7}, SAMPLED]}],
        [{**WHOLE, "segments": [GIVEN, {"kind": "sampled", "tokens": "x"}]}],
        [{**WHOLE, "segments": [GIVEN, SAMPLED, {"kind": "given", "tokens": 2}]}],
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, samples: Any) -> None:
    (tmp_path / "config.yaml").touch()
    for found in ([WHOLE], samples):
        (tmp_path / "rollouts.jsonl").write_text(json.dumps({"step": 0, "group": 0, "samples": found}) + "\n")
        if found == [WHOLE]:
            assert recorded_sample(tmp_path, 0, 0, 0)[1] == WHOLE
            continue
        with pytest.raises(InputError, match="rollouts.jsonl: what it has of trajectory 0/0/0 is damaged"):
            recorded_sample(tmp_path, 0, 0, 0)


def test_a_run_that_was_made_longer_on_any_layout_is_replayed(tmp_path: Path) -> None:
    decays = "--optimizer.lr-scheduler", "linear", "--optimizer.learning-rate", "1e-2", "--optimizer.warmup-steps", "0"
    given = "--reward", f"{DATA / 'rewards.py'}:spread", "--checkpoint.interval", "0"
    small = "sum-digits", "--steps", "3", *SUM[3:]
    assert main(["train", *small, *decays, *given, "--run-dir", str(tmp_path)]) == 0
    text = (tmp_path / "config.yaml").read_text()
    for before, after in (("steps: 3", "steps: 4"), ("fsdp: 0", "fsdp: 2"), ("generator_tp: 1", "generator_tp: 2")):
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "config.yaml").write_text(text)
    found = replay(tmp_path, "2/0/0")
    assert found.steps_redone == 2 and found.difference == ""  # with the rates of a run of three steps
    (tmp_path / "config.yaml").write_text(text.replace("  tp: 1", "  tp: 2"))
    with pytest.raises(InputError, match="the run has parallel.tp 2"):
        replay(tmp_path, "2/0/0")


def test_samples_with_prompts_of_their_own_are_recorded_with_them_and_replayed(tmp_path: Path) -> None:
    given = "--task.environment", f"{__file__}:Numbered", "--reward", f"{DATA / 'rewards.py'}:spread"
    assert main(["train", "sum-digits", "--steps", "1", *SUM[3:], *given, "--run-dir", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    prompts: list[str] = []
    for line in lines:
        for sample in line["samples"]:
            prompts.append(sample["segments"][0].get("text") or line["prompt"][0]["content"])
            name = f"0/{line['group']}/{sample['sample']}"
            assert replay(tmp_path, name).difference == "", name
    games = sorted(int(re.findall(r" Game (\d+)\.", prompt)[0]) for prompt in prompts)
    assert games == list(range(len(games))) and any(len(line["samples"]) > 1 for line in lines)
    report = (tmp_path / "report.html").read_text()
    assert len({*re.findall(r" Game (\d+)\.", report)}) == min(3, len(games))
