"""Runs with terms of whole sequences, with a teacher, and with mini-batches of a critic's: graphs, a resumption in the
middle and two updates a rollout change no bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lockstep import ops
from lockstep.algorithms.dapo import DAPO
from lockstep.config import (
    CheckpointConfig,
    CompileConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
)
from lockstep.errors import InputError
from lockstep.models import Decoder, PackedAttention
from lockstep.models.families import FAMILIES
from lockstep.models.init import ARCHITECTURES
from lockstep.rl.loop import Loop
from lockstep.run.report.metric_titles import catalogued_name
from lockstep.run.train import train
from lockstep.session.build import build, load_policy, load_teacher, save_policy

pytestmark = pytest.mark.usefixtures("shallow_models")
REWARD = """
def letters(completion_ids, **_):
    "The share of lower-case letters."
    return [sum(97 <= t < 123 for t in ids) / len(ids) for ids in completion_ids]

def some(prompts, completion_ids, **_):
    "The same, of every second prompt; all samples of the others are alike."
    return [bool(len(p) % 4) * x for p, x in zip(prompts, letters(completion_ids))]

def equal(completion_ids, **_):
    return [1.0] * len(completion_ids)
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A tiny model on prompts of unequal length, rewarded for lower-case letters; two updates a rollout."""
    (tmp_path / "rewards.py").write_text(REWARD)
    lines = [json.dumps({"prompt": "hello " * (1 + i % 4)}) for i in range(64)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    data, reward = str(tmp_path / "data.jsonl"), f"{tmp_path / 'rewards.py'}:letters"
    return RunConfig(
        recipe="dataset",
        steps=3,
        task=TaskConfig("dataset", data=data, reward=(reward,), validation_prompts=0),
        sampling=SamplingConfig(num_generations=4, max_completion_length=12, top_k=40),
        trainer=TrainerConfig(prompts_per_step=3, num_iterations=2, max_tokens_per_micro_batch=80),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        checkpoint=CheckpointConfig(interval=1),
    )


def metrics(run: Path) -> list[dict[str, float]]:
    """Of each step, without what is measured."""
    measured = ("time/", "perf/", "memory/", "graphs/", "compile/", "cudagraph/")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(measured)} for line in lines]


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    """The folder of another random model than a run begins with, whose distributions are not flat."""
    policy = load_policy(RunConfig(seed=7, device="cpu"))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(4 if parameter.dim() == 2 else 1)
    save_policy(policy, folder := tmp_path / "teacher")
    return str(folder)


def distilled(config: RunConfig, teacher: str) -> RunConfig:
    """To be like a teacher; nothing is rewarded, and one sample a prompt will do."""
    sampling = replace(config.sampling, num_generations=1, temperature=0.9)
    loss = LossConfig("distillation", teacher=teacher)
    return replace(config, task=replace(config.task, reward=()), sampling=sampling, loss=loss)


@pytest.mark.parametrize("name", ["gspo", "distillation", "ppo"])
def test_graphs_and_a_resumption_change_no_bit(
    config: RunConfig, shallow: Path, tmp_path: Path, teacher: str, name: str
) -> None:
    config = replace(config, model=str(shallow), loss=LossConfig("gspo", epsilon=3e-3, epsilon_high=4e-3))
    if name == "distillation":
        config = distilled(config, teacher)
    if name == "ppo":
        config = replace(config, loss=LossConfig("ppo"), parallel=replace(config.parallel, batch_shards=3))
        config = replace(config, trainer=replace(config.trainer, num_mini_batches=2))  # of one prompt and of two
    eager = replace(config, compile=CompileConfig("none"))
    train(eager, tmp_path / "eager", resume=False)
    graphs = replace(eager, compile=CompileConfig("step", verify="off"))
    train(replace(graphs, steps=1), tmp_path / "graphs", resume=False)
    train(graphs, tmp_path / "graphs", resume=True)
    assert weights(tmp_path / "eager") == weights(tmp_path / "graphs")
    found, expected = metrics(tmp_path / "graphs"), metrics(tmp_path / "eager")
    assert [m["loss"] for m in found] == [m["loss"] for m in expected] and len(found) == 3
    assert all(m["parity/tokens_different"] == 0 < m["parity/tokens_checked"] for m in found)
    assert [m["recompiles"] for m in found] == [0] * 3
    assert all(m["updates"] == config.trainer.updates and m["parity/tokens_not_covered"] == 0 for m in found)


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_kl_in_the_reward(config: RunConfig, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In the first step the reference is the policy; after it what is learned from is less by beta times the
    estimates, of a whole completion or from each token on. The reward that is reported is what was given."""
    loss = LossConfig(name, beta=0.5, use_kl_in_reward=True, kl_estimator="k1")
    made = replace(config, loss=loss, parallel=replace(config.parallel, batch_shards=3))
    loop, found = Loop(made, build(made)), dict[str, list[float]]()
    of_groups = loop._estimate_kl
    monkeypatch.setattr(loop, "_estimate_kl", lambda groups: found.update(kl := of_groups(groups)) or kl)
    first, groups = loop.step(0)
    assert first["kl"] == 0 and not any(x for kl in found.values() for x in kl)
    assert "time/critic" not in first  # of no critic
    found.clear()
    second, groups = loop.step(1)
    rollouts = [r for g in groups for r in g.rollouts]
    assert all(r.reward == r.rewards["letters"] and len(found[r.name]) == len(r.token_ids) for r in rollouts)
    kl = [torch.tensor(found[r.name], dtype=torch.float64) for r in rollouts]
    assert second["kl"] == pytest.approx(torch.cat(kl).mean().item(), rel=1e-6) and second["kl"] != 0
    if name == "grpo":
        net = torch.stack([r.reward - 0.5 * x.sum() for r, x in zip(rollouts, kl, strict=True)]).view(3, 4)
        expected = (net - net.mean(1, keepdim=True)).flatten()
    else:  # what is still to come, of each token
        tails = [r.reward - 0.5 * x.flip(0).cumsum(0).flip(0) for r, x in zip(rollouts, kl, strict=True)]
        flat = torch.cat(tails)
        expected = torch.stack([((x - flat.mean()) / (flat.var() + 1e-8).sqrt()).mean() for x in tails])
    torch.testing.assert_close(torch.tensor([r.advantage for r in rollouts], dtype=torch.float64), expected)
    assert second["reward/mean"] == pytest.approx(sum(r.reward for r in rollouts) / len(rollouts))
    assert second["parity/tokens_different"] == 0 == second["parity/tokens_not_covered"]


BRANCHES = """
from lockstep.environments import Branch, End, Environment

class Thrice(Environment):
    instant = True
    turns = 0

    def step(self, turn):
        self.turns += 1
        return End(float(sum(turn.token_ids) % 5)) if self.turns == 3 else Branch(f"again {self.turns}: " * 2)
"""


@pytest.mark.parametrize("loss", [LossConfig("ppo", beta=0.5, use_kl_in_reward=True), LossConfig("gspo")])
def test_branches_in_several_batches_are_trained_as_in_one(config: RunConfig, tmp_path: Path, loss: LossConfig) -> None:
    """Each token once, with the same advantage; where terms are of whole sequences, a trajectory ends before that."""
    (tmp_path / "branches.py").write_text(BRANCHES)
    place = f"{tmp_path / 'branches.py'}:Thrice"
    task = replace(config.task, environment=place, reward=(), max_turns=3, max_response_length=44)
    sampling = replace(config.sampling, top_k=0, max_completion_length=16, stop=tuple(map(chr, range(32, 127))))
    steps = []
    for tokens in (400, 70):
        trainer = replace(config.trainer, max_tokens_per_micro_batch=tokens, num_iterations=1)
        made = replace(config, task=task, loss=loss, trainer=trainer, sampling=sampling)
        loop = Loop(made, build(made))
        steps.append([loop.step(0), loop.step(1)])
    (_, (whole, first)), (_, (cut, second)) = steps
    assert cut["parity/tokens_different"] == 0 == cut["parity/tokens_not_covered"] and cut["updates"] == 1
    if loss.loss_type == "gspo":
        assert whole["environment/truncated"] == 0 < cut["environment/truncated"]
        return
    assert cut["environment/branches"] > 1.5 and cut["parity/tokens_checked"] == whole["parity/tokens_checked"]
    for name in ("loss", "grad_norm", "kl", "critic/value/mean", "critic/return/mean"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-6), name
    for one, other in zip((r for g in first for r in g.rollouts), (r for g in second for r in g.rollouts), strict=True):
        assert one.token_ids == other.token_ids and one.advantage == pytest.approx(other.advantage, abs=1e-5)


def test_weights_that_are_cut_are_counted(config: RunConfig) -> None:
    loss = LossConfig(importance_sampling_mode="sequence_mask", importance_sampling_clip_max=1.01)
    found = Loop(made := replace(config, loss=loss), build(made)).step(0)[0]
    assert found["clip_ratio"] == 0 < found["importance_sampling/clip_ratio"] < 1


def rewarded_by(config: RunConfig, function: str, **loss: Any) -> RunConfig:
    path = config.task.reward[0].rsplit(":", 1)[0]
    task = replace(config.task, reward=(f"{path}:{function}",))
    return replace(config, task=task, loss=LossConfig("dapo", dynamic_sampling=True, **loss), steps=2)


def test_steps_are_full_and_no_prompt_is_used_twice_or_left_out(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second prompt has no signal: those of further ones take their place, in order, over the steps."""
    made = rewarded_by(config, "some")
    loop = Loop(made, run := build(made))
    asked: list[tuple[int, int]] = []
    of_task = run.task.train_problem
    monkeypatch.setattr(run.task, "train_problem", lambda *place: (asked.append(place), of_task(*place))[1])
    for step in range(2):
        before = len(asked)
        found, groups = loop.step(step)
        assert len(groups) == 3 and all(len({r.reward for r in g.rollouts}) > 1 for g in groups)
        assert sorted(g.group % 3 for g in groups) == [0, 1, 2] and any(g.group >= 3 for g in groups)
        assert found["dynamic_sampling/prompts"] == len(asked) - before > 3
        assert found["frac_reward_zero_std"] == 0 == found["parity/tokens_not_covered"]
        assert found["parity/tokens_checked"] > sum(len(r.token_ids) for g in groups for r in g.rollouts)
    assert asked == [divmod(i, 3) for i in range(len(asked))] and loop.prompts_used == len(asked)


def test_a_resumption_goes_on_with_the_next_prompt(config: RunConfig, tmp_path: Path) -> None:
    made = replace(rewarded_by(config, "some"), compile=CompileConfig("none"))
    train(made, tmp_path / "whole", resume=False)
    train(replace(made, steps=1), tmp_path / "parts", resume=False)
    train(made, tmp_path / "parts", resume=True)
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")
    text = (tmp_path / "whole/rollouts.jsonl").read_text()
    assert text == (tmp_path / "parts/rollouts.jsonl").read_text()
    groups = [json.loads(line) for line in text.splitlines()]
    used = sum(m["dynamic_sampling/prompts"] for m in metrics(tmp_path / "whole"))
    assert sum("replaced" not in g for g in groups) == 6 < len(groups) == used
    for group in groups:  # what was not trained on says so
        alike = len({sample["reward"] for sample in group["samples"]}) == 1
        assert group.get("replaced", False) == alike == (not any(s["advantage"] for s in group["samples"]))


def test_a_step_without_signals_ends_at_the_bound(config: RunConfig) -> None:
    made = rewarded_by(config, "equal", max_num_gen_batches=2)
    found, groups = (loop := Loop(made, build(made))).step(0)
    assert (found["dynamic_sampling/prompts"], found["dynamic_sampling/rounds"], loop.prompts_used) == (6, 2, 6)
    assert [g.group for g in groups] == [3, 4, 5] and found["updates"] == 0 == found["parity/tokens_not_covered"]


def test_a_group_that_is_masked_whole_has_no_signal(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm is not asked about it: `keep` has at least one reward."""
    monkeypatch.setattr(DAPO, "keep", lambda _, rewards: max(rewards) > min(rewards))
    made = rewarded_by(config, "letters", max_num_gen_batches=2, mask_truncated_completions=True)
    found, groups = Loop(made, build(made)).step(0)
    assert all(r.cut_off for g in groups for r in g.rollouts) and found["updates"] == 0
    assert found["dynamic_sampling/prompts"] == 6 and found["parity/tokens_not_covered"] == 0


@pytest.fixture
def four_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the models that are made here have all."""
    monkeypatch.setitem(ARCHITECTURES, "tiny", FAMILIES["qwen3"].architectures["tiny"])


def test_a_model_becomes_like_its_teacher(four_layers: None, config: RunConfig, teacher: str) -> None:
    """The loss is the divergence in nats a token: it falls, and so does what the vocabulary's sum says."""
    made = distilled(config, teacher)
    sampling = replace(made.sampling, num_generations=16, top_k=0)
    trainer = replace(made.trainer, num_iterations=1, max_tokens_per_micro_batch=600)
    made = replace(made, sampling=sampling, trainer=trainer)
    loop = Loop(made, run := build(made))

    def exact() -> float:
        with torch.no_grad():
            both = [log_distributions(model) for model in (run.policy.model, run.teacher.model)]
        return (both[0].exp() * (both[0] - both[1])).sum(1).mean().item()

    before, found = exact(), [loop.step(i)[0] for i in range(12)]
    losses = [m["loss"] for m in found]
    assert found[0]["reward/mean"] == 0 and found[0]["kl"] is None and found[0]["clip_ratio"] == 0
    assert losses[0] > 1.3 * losses[-1] > 0 and exact() < 0.8 * before
    assert all(m["parity/tokens_different"] == 0 < m["parity/tokens_checked"] for m in found) and not loop.validate()


def test_the_critic_comes_to_know_the_rewards(config: RunConfig, tmp_path: Path) -> None:
    """It is exported beside the model, which `transformers` loads, and read again from there."""
    sampling = replace(config.sampling, num_generations=8)
    trainer = replace(config.trainer, prompts_per_step=4, max_tokens_per_micro_batch=600)
    optimizer = replace(config.optimizer, lr_scales=("value_head=2",))
    made = replace(config, sampling=sampling, trainer=trainer, optimizer=optimizer, loss=LossConfig("ppo", vf_coef=1.0))
    loop = Loop(made, run := build(made))
    found = [loop.step(i) for i in range(8)]
    metrics = [m for m, _ in found]
    assert metrics[0]["critic/value/mean"] == 0 == metrics[0]["critic/explained_variance"]
    assert abs(metrics[-1]["critic/value/mean"] - metrics[-1]["critic/return/mean"]) < 0.15
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.2 and all(
        catalogued_name(name) for name in metrics[0]
    )
    advantages = [(r.advantage, len(r.token_ids)) for g in found[0][1] for r in g.rollouts]
    assert sum(a * n for a, n in advantages) == pytest.approx(0, abs=1e-6) and any(a > 0 for a, _ in advantages)
    save_policy(run.policy, folder := tmp_path / "model")
    head = run.policy.model.value_head
    assert head is not None and head.any()
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 512
    again = build(replace(made, model=str(folder))).policy.model.value_head
    assert again is not None and torch.equal(again, head)
    save_file({"value_head": torch.zeros(1, 3)}, folder / "value_head.safetensors")
    with pytest.raises(InputError, match=r"value_head\.safetensors: value_head has shape \[1, 3\]; config"):
        build(replace(made, model=str(folder)))


def log_distributions(model: Decoder | None) -> torch.Tensor:
    """A model's log-probs of what follows each letter of a prompt, [T, V]."""
    assert model is not None
    ids = torch.tensor(list(b"hello hello"))
    cu = torch.tensor([0, len(ids)], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    hidden = model(ids, torch.arange(len(ids)), PackedAttention(ops.Packed(cu, zero, zero, len(ids)), None))
    return torch.log_softmax(hidden @ model.lm_head.T, -1)


def test_a_teacher_of_other_tokens_is_refused(config: RunConfig, teacher: str) -> None:
    made = distilled(config, teacher)
    file = Path(teacher) / "tokenizer.json"
    changed = file.read_text().replace('"<|im_start|>"', '"<|begin|>"')
    file.write_text(changed)
    with pytest.raises(InputError, match=r"loss\.teacher .*: its tokenizer has another vocabulary than the model's: 2"):
        build(made)
    with pytest.raises(InputError, match=r"loss\.teacher: model '.*nowhere': there is no such folder"):
        build(distilled(config, f"{teacher}/nowhere"))


def test_a_teacher_with_fewer_rows_is_refused(config: RunConfig, teacher: str) -> None:
    policy = load_policy(config)
    policy.model.config = replace(policy.model.config, vocab_size=policy.model.config.vocab_size + 1)
    with pytest.raises(InputError, match="its vocabulary has 512 entries and the model's 513, so the model may"):
        load_teacher(distilled(config, teacher), policy)


def test_a_run_goes_on_with_the_teacher_that_it_had(config: RunConfig, teacher: str, tmp_path: Path) -> None:
    made = replace(distilled(config, teacher), compile=CompileConfig("none"), steps=1)
    summary = train(made, tmp_path / "run", resume=False)
    assert summary["learned"] == "nothing is rewarded; the loss is in the report"
    with (Path(teacher) / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(InputError, match=r"loss\.teacher .*teacher: model\.safetensors was .* bytes with SHA-256"):
        train(replace(made, steps=2), tmp_path / "run", resume=True)
