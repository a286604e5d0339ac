"""An environment from outside the package, with tools that take their time: this file, named by one flag."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.config import (
    CheckpointConfig,
    CompileConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
)
from lockstep.environments import Branch, End, Environment, Next, Turn, make_environment
from lockstep.errors import InputError
from lockstep.run.replay import replay
from lockstep.run.train import train


class Toy(Environment):
    """Asks for three words, one a turn, the last of them now and then in a branch; the reward is how many of them have
    an `e`."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def start(self, row: dict[str, Any], seed: int) -> Any:
        self.draw = random.Random(seed)
        return f"{row['prompt'][:12]} word {self.draw.randrange(10)}: "

    async def step(self, turn: Turn) -> Any:
        await asyncio.sleep(random.random() / 200)
        self.said.append(turn.text)
        if len(self.said) == 3:
            return self.cut()
        asked = f"\nword {self.draw.randrange(10)}: "
        anew = len(self.said) == 2 and len(turn.text) % 2 == 0
        return Next(Branch(f"After 2 words,{asked}") if anew else asked, {"said": 0.125})

    def cut(self) -> End:
        return End({"e": float(sum("e" in text for text in self.said)), "turns": 0.01 * len(self.said)})


class Broken(Toy):
    async def step(self, turn: Turn) -> Any:
        raise KeyError(f"nothing for {len(turn.token_ids)} tokens")


class Odd(Toy):
    """Breaks in its second turn after what has an odd number of letters."""

    async def step(self, turn: Turn) -> Any:
        if self.said and len(turn.text) % 2:
            raise KeyError("odd")
        return await super().step(turn)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Two steps of a tiny random model, by a copy of this file."""
    shutil.copy(__file__, tmp_path / "toy.py")
    return RunConfig(
        steps=2,
        task=TaskConfig(easy=True, validation_prompts=2, environment=f"{tmp_path / 'toy.py'}:Toy", max_turns=3),
        sampling=SamplingConfig(
            num_generations=4, max_completion_length=24, stop=(" ", "a", "i", "5", "q", "\x00", "\n")
        ),
        trainer=TrainerConfig(prompts_per_step=2, skip_zero_variance=False),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        checkpoint=CheckpointConfig(interval=1),
    )


def lines(folder: Path, name: str) -> list[Any]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_it_is_played_trained_and_resumed_with_the_same_bits(config: RunConfig, tmp_path: Path) -> None:
    train(config, tmp_path / "whole", resume=False)
    graphs = replace(config, compile=CompileConfig("step", verify="off"))
    train(replace(graphs, steps=1), tmp_path / "parts", resume=False)
    train(graphs, tmp_path / "parts", resume=True)
    rollouts = lines(tmp_path / "whole", "rollouts.jsonl")
    assert lines(tmp_path / "parts", "rollouts.jsonl") == rollouts
    weights = [(tmp_path / run / "model/model.safetensors").read_bytes() for run in ("whole", "parts")]
    assert weights[0] == weights[1]
    assert all(m["recompiles"] == 0 for m in lines(tmp_path / "parts", "metrics.jsonl"))
    samples = [sample for line in rollouts for sample in line["samples"]]
    sampled = sum(s["tokens"] for sample in samples for s in sample["segments"] if s["kind"] == "sampled")
    certificate = json.loads((tmp_path / "whole" / "parity.json").read_text())
    assert sampled == sum(len(sample["token_ids"]) for sample in samples)
    assert (certificate["identical"], certificate["tokens_checked"]) == (True, sampled)
    assert all(re.fullmatch(r"(?s).{1,12} word \d: ", line["prompt"]) for line in rollouts), "as it was given"
    anew = [s for sample in samples for s in sample["segments"] if s.get("anew")]
    assert anew and all(segment["text"].startswith("After 2 words,") for segment in anew)
    several = [sample for sample in samples if len(sample["segments"]) > 2]
    assert several and all(sample["segments"][2]["text"].startswith("\nword") for sample in several)
    assert_reported(tmp_path / "whole", samples)
    assert_replayed(tmp_path, samples)
    metrics = lines(tmp_path / "whole", "metrics.jsonl")
    assert all(1 < m["environment/turns"] <= 3 and m["environment/given_tokens"] > 0 for m in metrics)
    assert "validation/rewards/e/mean" in json.dumps(json.loads((tmp_path / "whole/summary.json").read_text()))


def assert_reported(folder: Path, samples: list[Any]) -> None:
    """Rewards a turn stand with the turns, and times in a file of their own, which nothing compares."""
    for sample in samples:
        turns = [segment for segment in sample["segments"] if segment["kind"] == "sampled"]
        if len(turns) > 1:
            assert all(turn["rewards"] == {"said": 0.125} for turn in turns[:-1]) and "e" in turns[-1]["rewards"]
            assert sample["rewards"]["said"] == 0.125 * sum("said" in turn["rewards"] for turn in turns)
    waited = [s for line in lines(folder, "waits.jsonl") for s in line["samples"]]
    assert [len(w["wait_s"]) for w in waited] == [sum(s["kind"] == "sampled" for s in x["segments"]) for x in samples]
    assert all(seconds > 0 for w in waited for seconds in w["wait_s"])
    page = (folder / "report.html").read_text()
    assert ", reward: said 0.125, answered in " in page
    assert '<pre class="said">' in page and "held-out reward, before to after" in page  # of several names none decides


def assert_replayed(folder: Path, samples: list[Any]) -> None:
    """Trajectories sampled again alone: from a checkpoint, from the beginning, with new answers; not after an edit."""
    found = replay(folder / "whole", "1/1/2", call_tools=True)
    assert (found.difference, found.steps_redone, found.logprobs_compared) == ("", 0, True)
    assert found.tokens == len(samples[14]["token_ids"]) and "bitwise identical" in found.render()
    (folder / "parts" / "checkpoints" / "step_1").rename(folder / "aside")
    path = folder / "parts" / "rollouts.jsonl"
    first, second, third, *rest = path.read_text().splitlines()
    record, token = json.loads(third), samples[9]["token_ids"][0]
    record["samples"][1]["token_ids"][0] = 7
    path.write_text("\n".join([first, second, json.dumps(record), *rest, ""]))
    again = replay(folder / "parts", "1/0/1")
    assert (again.difference, again.steps_redone) == (f"turn 1, token 1: 7 is recorded, {token} came now", 1)
    for trajectory, message in (("9/0/0", "has no trajectory 9/0/0"), ("1", "must be STEP/GROUP/SAMPLE")):
        with pytest.raises(InputError, match=message):
            replay(folder / "whole", trajectory)


def test_tracebacks_are_kept_in_the_run_folder(config: RunConfig, tmp_path: Path) -> None:
    broken = replace(config, task=replace(config.task, environment=f"{tmp_path / 'toy.py'}:Broken"))
    with pytest.raises(InputError, match=r"failed for 2 trajectories, .*; tracebacks are in .*environment_errors.txt$"):
        train(broken, tmp_path / "broken", resume=False)
    kept = (tmp_path / "broken" / "environment_errors.txt").read_text()
    assert kept.count("raise KeyError(") == kept.count("environment failed: KeyError: 'nothing for ") == 2


def test_a_trajectory_that_failed_is_recorded_without_a_reward_and_sampled_again(
    config: RunConfig, tmp_path: Path
) -> None:
    odd = replace(config, task=replace(config.task, environment=f"{tmp_path / 'toy.py'}:Odd"))
    train(replace(odd, steps=1), tmp_path / "odd", resume=False)
    groups = lines(tmp_path / "odd", "rollouts.jsonl")
    failed = [(g["group"], sample) for g in groups if g.get("without_reward") for sample in g["samples"]]
    ended = [sample for g in groups if "without_reward" not in g for sample in g["samples"]]
    assert failed and ended and len(failed) + len(ended) == 8
    assert all(s["reward"] is None and s["advantage"] is None and len(s["segments"]) == 4 for _, s in failed)
    assert all(isinstance(s["reward"], float) for s in ended)
    (metrics,) = lines(tmp_path / "odd", "metrics.jsonl")
    assert metrics["environment/errors"] == len(failed)
    assert metrics["parity/tokens_checked"] == sum(s["tokens"] for s in [*ended, *(s for _, s in failed)])
    group, sample = failed[0]
    assert replay(tmp_path / "odd", f"0/{group}/{sample['sample']}").difference == ""


def test_what_is_no_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("class Other: pass\n")
    with pytest.raises(InputError, match=r"Other' must be a class, a subclass of lockstep.environments.Environment"):
        make_environment(TaskConfig(environment=f"{tmp_path / 'other.py'}:Other"))
    with pytest.raises(InputError, match=r"must be module:Class, path.py:Class, or one of calculator"):
        make_environment(TaskConfig(environment="calculatr"))
    with pytest.raises(InputError, match=r"task.max_turns has no effect without task.environment"):
        TaskConfig(max_turns=3).validate()


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    page = (Path(lockstep.__file__).parents[1] / "docs" / "environments.md").read_text()
    (tmp_path / "my_environment.py").write_text(page.split("```python\n")[1].split("```")[0])
    guess: Any = make_environment(TaskConfig(environment=f"{tmp_path / 'my_environment.py'}:Guess"))()
    assert guess.start({}, 342).startswith("Guess")
    answers = [guess.step(Turn(text, [1], "stop")) for text in ("12", "77", " 42 ")]
    assert answers == [" higher\n", " lower\n", End({"found": 1.0, "fast": 1 / 3})]
    assert guess.step(Turn("no idea", [1], "stop")) == End(0.0)
