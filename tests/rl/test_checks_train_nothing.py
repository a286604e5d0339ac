"""What is only compared, and whether it is, moves no weight and no bias by which experts are chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import OptimizerConfig, ParallelConfig, RunConfig, SamplingConfig, TaskConfig, TrainerConfig
from lockstep.rl.loop import Loop
from lockstep.session.build import build

REWARD = """
def some(prompts, completion_ids, **_):
    return [len(p) % 4 and sum(t % 2 for t in ids) / len(ids) for p, ids in zip(prompts, completion_ids)]
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Six prompts of four samples, of which every third prompt's are rewarded alike, on a model with experts that are
    balanced."""
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"prompt": "a" * n}) for n in (4, 13, 22)))
    data, reward = str(tmp_path / "data.jsonl"), f"{tmp_path / 'rewards.py'}:some"
    return RunConfig(
        recipe="dataset",
        arch="tiny-glm4-moe",
        task=TaskConfig("dataset", data=data, reward=(reward,), validation_prompts=0),
        sampling=SamplingConfig(num_generations=4, max_completion_length=8, ignore_eos=True),
        trainer=TrainerConfig(prompts_per_step=6),
        optimizer=OptimizerConfig(learning_rate=1e-3, router_bias_rate=0.01),
        parallel=ParallelConfig(batch_shards=2),
    )


def trained(config: RunConfig) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What two steps found of what they trained on, and then the trainer's state, biases and all."""
    loop, metrics = Loop(config, build(config)), []
    for step in range(2):
        found, _ = loop.step(step)
        metrics.append({k: v for k, v in found.items() if k.startswith(("moe/", "loss", "grad_norm", "updates"))})
        checked = found["parity/tokens_checked"]
        assert (checked == 0) if config.parity == "off" else (checked == 6 * 4 * 8)
        assert found["frac_reward_zero_std"] >= 1 / 3  # groups that are skipped
    return metrics, loop.run.trainer.state()[0]


@pytest.mark.parametrize(("top_k", "mini_batches"), [(0, 1), (0, 2), (20, 2)])
def test_experts_are_balanced_alike_whether_parity_is_checked(config: RunConfig, top_k: int, mini_batches: int) -> None:
    """Also where later mini-batches are scored early for the support that was sampled."""
    sampling, trainer = replace(config.sampling, top_k=top_k), replace(config.trainer, num_mini_batches=mini_batches)
    made = replace(config, sampling=sampling, trainer=trainer)
    (found, state), (others, other) = (trained(replace(made, parity=parity)) for parity in ("strict", "off"))
    assert any(bias.any() for name, bias in state.items() if name.endswith("router_bias"))
    assert state.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in state.items())
    assert found == others and all(step["updates"] == mini_batches for step in found)
