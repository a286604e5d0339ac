"""The adapter of the `verifiers` package, with that package and without."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import RunConfig, SamplingConfig, TaskConfig, TrainerConfig
from lockstep.environments import make_environment
from lockstep.environments.adapters.verifiers import _parse_spec
from lockstep.environments.data.sources import has_splits, open_source
from lockstep.errors import InputError

INSTALLED = importlib.util.find_spec("verifiers") is not None
TASKSET = """
import verifiers.v1 as vf

class Echo(vf.Task[vf.TaskData]):
    @vf.reward(weight=2.0)
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply) / 10

class EchoTaskset(vf.Taskset[Echo, vf.TasksetConfig]):
    def load(self):
        return [Echo(vf.TaskData(prompt=f"Say {i}.", name=f"n{i}"), self.config.task) for i in range(6)]

__all__ = ["EchoTaskset"]
"""


def test_what_follows_the_name_is_read() -> None:
    spec = _parse_spec('verifiers:echo,game="a",env.agent.harness.id="bash",size=3,renderer="qwen3"', "task.data x")
    assert (spec.taskset, spec.settings, spec.size, spec.renderer) == ("echo", {"game": "a"}, 3, "qwen3")
    assert spec.environment == {"agent": {"harness": {"id": "bash"}}} and not has_splits("verifiers:echo")
    for wrong in ("game", "game=a", "a-b=1"):
        with pytest.raises(InputError, match=f"task.data x has the setting '{wrong}'; each must be KEY=VALUE"):
            _parse_spec(f"verifiers:echo,{wrong}", "task.data x")
    with pytest.raises(InputError, match="has the setting 'a.b.c=2' beside another value of b"):
        _parse_spec("verifiers:echo,a.b=1,a.b.c=2", "task.data x")
    with pytest.raises(InputError, match="size must be a whole number"):
        _parse_spec("verifiers:echo,size=true", "task.data x")


def test_a_setting_named_env_is_the_tasksets() -> None:
    spec = _parse_spec("verifiers:echo,env=1,env.a=2", "task.data x")
    assert (spec.settings, spec.environment) == ({"env": 1}, {"a": 2})


def test_what_cannot_be_played_is_refused() -> None:
    with pytest.raises(InputError, match="name them with --task.data verifiers:NAME"):
        make_environment(TaskConfig("dataset", "rows.jsonl", environment="verifiers"))
    why = "cannot be loaded: ModuleNotFoundError" if INSTALLED else r"pip install 'lockstep-rl\[verifiers\]'"
    with pytest.raises(InputError, match=why):
        open_source("verifiers:none_of_this_name", "train")


@pytest.mark.skipif(not INSTALLED or shutil.which("uv") is None, reason="needs the packages verifiers and uv")
def test_a_taskset_trains_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep import evaluate
    from lockstep.run.replay import replay
    from lockstep.run.train import train

    (tmp_path / "echo_taskset.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    from scripted import scripted_folder

    task: dict[str, Any] = {"environment": "verifiers", "environment_timeout": 120.0, "validation_prompts": 0}
    config = RunConfig(
        steps=1,
        model=str(scripted_folder(tmp_path / "scripted")),
        task=TaskConfig("dataset", 'verifiers:echo_taskset,renderer="default"', max_turns=2, **task),
        sampling=SamplingConfig(num_generations=2, max_completion_length=12),
        trainer=TrainerConfig(prompts_per_step=2, skip_zero_variance=False),
    )
    train(config, tmp_path / "run", resume=False)
    certificate = json.loads((tmp_path / "run" / "parity.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    samples = [sample for line in lines for sample in line["samples"]]
    assert certificate["identical"] and certificate["tokens_checked"] == sum(len(s["token_ids"]) for s in samples) > 0
    assert len(samples) == 4 and all(set(s["rewards"]) == {"length"} for s in samples)
    found = replay(tmp_path / "run", "0/1/1", call_tools=True)
    assert found.tokens == len(lines[1]["samples"][1]["token_ids"]) and not found.difference
    held_out = replace(config.task, validation_data=config.task.data, validation_prompts=2)
    result = evaluate(replace(config, task=held_out), n=2, temperature=1.0)
    assert result["environment/turns"] == 1 and result["rewards/length/mean"] == result["reward/mean"] > 0
