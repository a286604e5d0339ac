"""An algorithm from outside the package, with a term of whole sequences: this file, named by one flag."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import lockstep
from lockstep.algorithms import Algorithm, TokenValues, make_algorithm
from lockstep.config import (
    CheckpointConfig,
    CompileConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    validate,
)
from lockstep.config.recipes import RECIPES
from lockstep.errors import InputError
from lockstep.run.train import train
from lockstep.session.build import resolve


@dataclass(frozen=True)
class Toy(Algorithm):
    """`-r A`, less the more of it a whole sequence has moved: `r / (1 + |mean log r|)`."""

    epsilon: float = 0.5  # from the configuration
    strength: float = 1.0  # of its own

    whole_sequences: ClassVar[bool] = True

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        log_ratio_C = values.logprob_C - values.old_logprob_C
        moved_C = values.sequence_mean(log_ratio_C).abs()
        loss_C = -values.advantage_C * torch.exp(log_ratio_C) / (1 + self.strength * moved_C)
        return loss_C, moved_C > self.epsilon


@dataclass(frozen=True)
class Penalized(Toy):
    """What it computes on the host are torch's numbers."""

    def penalty(self, config: LossConfig, length: int, max_completion_length: int) -> Any:
        return torch.tensor(-0.5 * length)

    def advantages(self, config: LossConfig, rewards: Any) -> Any:
        return torch.tensor(rewards) - torch.tensor(rewards).mean(dim=1, keepdim=True)


@pytest.fixture
def config(tmp_path: Path, shallow: Path) -> RunConfig:
    """Two steps of two updates of a tiny random model, by a copy of this file."""
    shutil.copy(__file__, tmp_path / "toy.py")
    return RunConfig(
        model=str(shallow),
        steps=2,
        task=TaskConfig(easy=True, validation_prompts=0),
        sampling=SamplingConfig(num_generations=4, max_completion_length=8),
        trainer=TrainerConfig(prompts_per_step=2, num_iterations=2, skip_zero_variance=False),
        loss=LossConfig(f"{tmp_path / 'toy.py'}:Toy", epsilon=0.25),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        checkpoint=CheckpointConfig(interval=1),
        compile=CompileConfig("step"),
    )


def test_it_has_its_own_settings_and_those_of_the_run(config: RunConfig) -> None:
    algorithm: Any = make_algorithm(config.loss)
    assert (algorithm.epsilon, algorithm.strength, algorithm.beta) == (0.25, 1.0, 0.0)


def test_numbers_of_torch_are_numbers(config: RunConfig, tmp_path: Path) -> None:
    loss = replace(config.loss, loss_type=f"{tmp_path / 'toy.py'}:Penalized")
    train(replace(config, steps=1, loss=loss, compile=CompileConfig("none")), tmp_path / "run", resume=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    samples = [sample for line in lines for sample in line["samples"]]
    assert len(samples) == 8
    assert all(s["reward"] == -0.5 * s["tokens"] and type(s["advantage"]) is float for s in samples)


def test_it_is_captured_checked_and_traced_at_every_start(config: RunConfig, tmp_path: Path) -> None:
    eager, graphs = replace(config, compile=CompileConfig("none")), tmp_path / "graphs"
    train(eager, tmp_path / "eager", resume=False)
    train(replace(config, steps=1), graphs, resume=False)
    summary = train(config, graphs, resume=True)
    weights = [(run / "model/model.safetensors").read_bytes() for run in (tmp_path / "eager", graphs)]
    assert weights[0] == weights[1]
    lines = [json.loads(line) for line in (graphs / "metrics.jsonl").read_text().splitlines()]
    assert all(m["parity/tokens_different"] == 0 < m["parity/tokens_checked"] for m in lines)
    compiled = summary["compile"]  # of the second start: both kinds of its updates are traced, all else was stored
    assert compiled["traces"] == 2 and compiled["loaded"] > 2
    (tmp_path / "toy.py").write_text((tmp_path / "toy.py").read_text() + "\n# edited\n")
    with pytest.raises(InputError, match=r"loss\.loss_type .*toy\.py:Toy was .* bytes"):
        train(replace(config, steps=3), graphs, resume=True)


WRONG = """
import torch
from lockstep.algorithms import Algorithm

class NoLoss(Algorithm):
    pass

class Total(Algorithm):
    def loss(self, values):
        return values.logprob_C.sum(), values.logprob_C > 0

class Still(Algorithm):
    def loss(self, values):
        return values.advantage_C, values.logprob_C > 0

class Broken(Algorithm):
    def loss(self, values):
        return values.nothing

class Summed(Algorithm):
    def loss(self, values):
        return values.sequence_sum(values.logprob_C), values.logprob_C > 0

class Taught(Algorithm):
    def loss(self, values):
        return values.logprob_C - values.ref_logprob_C, values.logprob_C > 0

class Choosing(Algorithm):
    def loss(self, values):
        if values.advantage_C.sum() > 0:
            return -values.logprob_C, values.logprob_C > 0

class Reading(Algorithm):
    def loss(self, values):
        return -values.logprob_C * values.advantage_C.max().item(), values.logprob_C > 0

def function(values):
    return values

class Sound(Algorithm):
    def loss(self, values):
        return -values.advantage_C * values.logprob_C, values.logprob_C > 0

class Single(Sound):
    def loss(self, values):
        return super().loss(values)[0]

class Unfinite(Sound):
    def advantages(self, config, rewards):
        return [[r / 0.0 if r else float("nan") for r in group] for group in [[0.0, 0.0], [0.0, 0.0]]]

class Penalty(Sound):
    def penalty(self, config, length, max_completion_length):
        return None

class Undecided(Sound):
    def keep(self, rewards):
        return None

class Silent(Sound):
    has_critic = True

class Deaf(Silent):
    def estimate(self, config, rewards, values):
        return rewards, values

class Short(Deaf):
    def loss(self, values):
        return Sound.loss(self, values)[0] + values.value_C, values.logprob_C > 0

    def estimate(self, config, rewards, values):
        return [r[:-1] for r in rewards], values

class Scalar(Short):
    def estimate(self, config, rewards, values):
        return 1.0, values

class Alone(Short):
    def estimate(self, config, rewards, values):
        return rewards

class OutOfRange(Short):
    def estimate(self, config, rewards, values):
        return values[0][5], values

class Centred(Algorithm):
    def loss(self, values):
        return -values.advantage_C * (values.logprob_C - values.logprob_C.mean()), values.logprob_C > 0

class Drifting(Algorithm):
    def loss(self, values):
        drift = (values.logprob_C - values.old_logprob_C).detach().abs().max()
        return -values.advantage_C * values.logprob_C / (1 + drift), values.logprob_C > 0

class Whitened(Sound):
    def loss(self, values):
        centred = values.advantage_C - values.advantage_C.mean()
        return super().loss(values._replace(advantage_C=centred / values.advantage_C.std()))

class Shared(Sound):
    def loss(self, values):
        return super().loss(values._replace(advantage_C=values.advantage_C / values.advantage_C.abs().sum()))

import math
from dataclasses import dataclass

@dataclass(frozen=True)
class Holding(Sound):
    scale: object = math.exp

class InPlace(Sound):
    def loss(self, values):
        values.advantage_C.clamp_(max=0.5)
        return super().loss(values)

class Noisy(Sound):
    def loss(self, values):
        loss, clipped = super().loss(values)
        return loss * torch.rand_like(loss), clipped
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoLoss", "raised NotImplementedError: NoLoss has no loss"),
        ("Total", r"its loss is torch.float32 \[\]; it must be torch.float32, one a token \(\[6\] here\)"),
        ("Still", "its loss has no gradient by the log-probs"),
        ("Single", r"loss returns torch.float32 \[6\]; it must return two, the losses and which were clipped"),
        (
            "Unfinite",
            r"advantages of two groups of two samples are \[\[nan, nan\], \[nan, nan\]\]; they must be",
        ),
        ("Penalty", "penalty of three tokens is None; it must be a number"),
        ("Undecided", "keep returns None; it must be True or False"),
        ("Silent", "raised NotImplementedError: Silent has a critic and does not say what it is to learn"),
        ("Deaf", "it has a critic, and its loss has no gradient by the critic's values"),
        (
            "Short",
            r"estimate of two samples of 3 and 1 tokens returns advantages \[\[0.5, 0.5\], \[\]\]; they must be",
        ),
        (
            "Scalar",
            "estimate of two samples of 3 and 1 tokens returns advantages 1.0; they must be a list",
        ),
        (
            "Alone",
            r"estimate returns \[\[0.5, 0.5, 0.5\], \[0.5\]\]; it must return two",
        ),
        ("OutOfRange", "raised IndexError: list index out of range"),
        ("Centred", "its loss of a token depends on padding or on other sequences, .*; use values.sequence_mean or"),
        ("Drifting", "its loss of a token depends on padding or on other sequences"),
        ("Whitened", "its loss of a token depends on padding or on other sequences"),
        ("Shared", "its loss of a token depends on padding or on other sequences"),
        ("InPlace", "its loss changes values.advantage_C in place; it must make new tensors"),
        ("Holding", "its field scale is <built-in function exp>; it must be a number, text, None, or several"),
        ("Noisy", "its loss is another one when it is called again with the same values"),
        (
            "Broken",
            r"raised AttributeError: 'TokenValues' object has no attribute 'nothing' \(wrong.py, line 18\); "
            "TokenValues has logprob_C, .*, return_C, sequence_sum",
        ),
        ("Summed", r"whole sequences the class says whole_sequences = True \(wrong.py, line 22\)"),
        ("Taught", r"\(wrong.py, line 26\); ref_logprob_C is None unless the class says has_teacher = True"),
        ("Choosing", r"raised TypeError: .*__bool__\): torch.where.* in place of `if`.* \(wrong.py, line 30\)"),
        ("Reading", r"raised TypeError: .*Python's \(item\).* \(wrong.py, line 35\)"),
        ("function", "must be a class, a subclass of lockstep.algorithms.Algorithm"),
        ("Missing", "has no class 'Missing'"),
    ],
)
def test_what_is_wrong_with_one_is_said_at_once(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    config = LossConfig(f"{tmp_path / 'wrong.py'}:{name}")
    config.validate()
    with pytest.raises(InputError, match=rf"loss\.loss_type '.*wrong\.py:{name}'.*{message}"):
        make_algorithm(config)


LATER = """
from lockstep.algorithms import Algorithm
from lockstep.algorithms.ppo import PPO

class Sound(Algorithm):
    def loss(self, values):
        return -values.advantage_C * values.logprob_C, values.logprob_C > 0

class Raises(Sound):
    def advantages(self, config, rewards):
        if len(rewards[0]) > 2:
            raise ValueError("too many")
        return rewards

class TwoEach(Sound):
    def advantages(self, config, rewards):
        return [[1.0, -1.0] for group in rewards]

class Infinite(Sound):
    def advantages(self, config, rewards):
        return [[float("inf") if len(group) > 2 else 1.0 for _ in group] for group in rewards]

class TwoWeights(Sound):
    def weights(self, lengths, num_sequences, max_completion_length):
        return [0.5, 0.5]

class NoPenalty(Sound):
    def penalty(self, config, length, max_completion_length):
        return None if length > 3 else 0.0

class Bootstrapped(PPO):
    def estimate(self, config, rewards, values):
        for of_tokens in values:
            of_tokens.append(0.0)  # a value of 0 after the last token
        return [row[1:] for row in values], rewards
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", r"advantages raised ValueError: too many \(.*later\.py, line \d+\)"),
        (
            "TwoEach",
            r"advantages returned \[\[1.0, -1.0\], .*; it must be finite numbers, so many in each list: \[4, 4\]",
        ),
        ("Infinite", r"advantages returned \[\[inf, .*; it must be finite numbers, so many in each list: \[4, 4\]"),
        ("TwoWeights", r"weights returned \[0.5, 0.5\]; it must be finite numbers, so many in each list: 8"),
        ("NoPenalty", r"penalty returned None; it must be a finite number"),
        ("Bootstrapped", ""),
    ],
)
def test_what_is_wrong_with_a_step_s_results_is_said(
    config: RunConfig, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "later.py").write_text(LATER)
    loss = LossConfig(f"{tmp_path / 'later.py'}:{name}")
    config = replace(config, steps=1, loss=loss, compile=CompileConfig("none"))
    if not message:
        assert train(config, tmp_path / "run", resume=False)["parity"]["identical"]
        return
    with pytest.raises(InputError, match=rf"loss\.loss_type '.*later\.py:{name}': {message}"):
        train(config, tmp_path / "run", resume=False)


BASELINES = """
from statistics import mean, stdev

from lockstep.algorithms.grpo import GRPO
from lockstep.algorithms.ppo import PPO

class OfStep(GRPO):
    def advantages(self, config, rewards):
        center = mean(mean(group) for group in rewards)
        return [[reward - center for reward in group] for group in rewards]

class Critic(PPO):
    pass

class OfGroup(GRPO):
    pass

class OfDeviation(GRPO):
    def advantages(self, config, rewards):
        return [[reward / (stdev(group) + 1) for reward in group] for group in rewards]
"""


@pytest.mark.parametrize(
    "name, learns", [("OfStep", True), ("Critic", True), ("OfGroup", False), ("OfDeviation", False)]
)
def test_one_sample_a_prompt_is_refused_if_its_advantage_is_always_0(tmp_path: Path, name: str, learns: bool) -> None:
    (tmp_path / "own.py").write_text(BASELINES)
    loss, sampling = LossConfig(f"{tmp_path / 'own.py'}:{name}"), SamplingConfig(num_generations=1)
    config = RunConfig(loss=loss, sampling=sampling, device="cpu")
    assert_resolves(config, learns, r"num_generations is 1: every group's advantage would be zero")


def assert_resolves(config: RunConfig, learns: bool, refusal: str) -> None:
    config = validate(config)
    if learns:
        assert resolve(config).loss == config.loss
    else:
        with pytest.raises(InputError, match=refusal):
            resolve(config)


PUPILS = """
from lockstep.algorithms.algorithm import Algorithm
from lockstep.algorithms.distillation import Distillation

class Pupil(Distillation):
    pass

class OfGroup(Distillation):
    advantages = Algorithm.advantages

class Brief(OfGroup):
    def penalty(self, config, length, max_completion_length):
        return -length / max_completion_length
"""


@pytest.mark.parametrize("name, learns", [("Pupil", True), ("OfGroup", False), ("Brief", True)])
def test_a_teacher_without_rewards_is_refused_if_every_advantage_is_0(tmp_path: Path, name: str, learns: bool) -> None:
    (tmp_path / "own.py").write_text(PUPILS)
    loss, task = LossConfig(f"{tmp_path / 'own.py'}:{name}", teacher="a folder"), TaskConfig(name="dataset", data="x")
    refusal = r"task\.reward is missing: without rewards every advantage of .*OfGroup"
    assert_resolves(RunConfig(loss=loss, task=task, device="cpu"), learns, refusal)


OWN = """
from lockstep.algorithms.distillation import Distillation
from lockstep.algorithms.ppo import PPO

class Critic(PPO):
    pass

class Pupil(Distillation):
    pass
"""


def test_one_may_have_a_critic_or_a_teacher(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    assert make_algorithm(LossConfig(f"{tmp_path / 'own.py'}:Critic")).has_critic
    pupil = LossConfig(f"{tmp_path / 'own.py'}:Pupil", teacher="a folder")
    assert make_algorithm(pupil).has_teacher
    with pytest.raises(InputError, match=r"loss\.teacher is missing: loss_type .*own\.py:Pupil learns from a model"):
        make_algorithm(replace(pupil, teacher=None))
    with pytest.raises(InputError, match=r"loss\.teacher has no effect: loss_type .*own\.py:Critic learns from none"):
        make_algorithm(replace(pupil, loss_type=f"{tmp_path / 'own.py'}:Critic"))


UNREAD = """
from lockstep.algorithms import Algorithm
from lockstep.algorithms.dapo import DAPO
from lockstep.algorithms.distillation import Distillation

class Plain(Algorithm):
    def loss(self, values):
        return -values.advantage_C * values.logprob_C, values.logprob_C > 0

class Bare(Plain):
    has_kl = False

class Taught(Plain):
    has_teacher = True

class Clipped(DAPO):
    pass
"""


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "Plain",
            {"epsilon": 0.3},
            "loss.epsilon has no effect: loss_type .*:Plain has no field of that name",
        ),
        ("Plain", {"divergence_type": "binary_kl"}, "loss.divergence_type has no effect: .* has no field of that name"),
        ("Plain", {"lam": 0.5}, "loss.lam has no effect: loss_type .*:Plain has no method estimate of its own; write"),
        (
            "Plain",
            {"overlong_buffer": 3, "overlong_penalty": 2.0},
            "loss.overlong_penalty has no effect: .* has no method penalty of its own",
        ),
        (
            "Bare",
            {"beta": 0.1},
            "loss.beta has no effect: loss_type .*:Bare has no KL term in its loss; turn",
        ),
        (
            "Taught",
            {"beta": 0.1, "teacher": "t"},
            "loss.beta has no effect: .* has a teacher where the",
        ),
        ("Plain", {"teacher": "t"}, "loss.teacher has no effect: loss_type .*:Plain learns from none; remove it"),
        ("Bare", {"beta": 0.1, "use_kl_in_reward": True}, ""),
        ("Plain", {"beta": 0.1, "scale_rewards": "group", "dynamic_sampling": True}, ""),
        ("Clipped", {"epsilon": 0.1, "epsilon_high": 0.2, "overlong_buffer": 3, "overlong_penalty": 2.0}, ""),
        ("Taught", {"teacher": "t"}, ""),
    ],
)
def test_settings_that_one_cannot_read_are_refused(
    tmp_path: Path, name: str, given: dict[str, Any], message: str
) -> None:
    (tmp_path / "unread.py").write_text(UNREAD)
    for recipe in RECIPES.values():  # what one has set for its own algorithm is not in the way
        assert make_algorithm(replace(recipe(None).loss, loss_type=f"{tmp_path / 'unread.py'}:Plain"))
    config = LossConfig(f"{tmp_path / 'unread.py'}:{name}", **given)
    config.validate()
    if message:
        with pytest.raises(InputError, match=message):
            make_algorithm(config)
    else:
        algorithm = make_algorithm(config)
        assert not algorithm.kl_in_loss or given["beta"] > 0
        assert all(getattr(algorithm, key, value) == value for key, value in given.items())


def example(tmp_path: Path, name: str, number: int) -> Any:
    """An algorithm from an example of the documentation, the first or the second."""
    page = (Path(lockstep.__file__).parents[1] / "docs" / "algorithms.md").read_text()
    (tmp_path / "example.py").write_text(page.split("```python\n")[number].split("```")[0])
    return make_algorithm(LossConfig(f"{tmp_path / 'example.py'}:{name}", epsilon=0.3))


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    algorithm = example(tmp_path, "Mine", 1)
    assert (algorithm.epsilon, algorithm.strength, algorithm.indexes_sequences) == (0.3, 0.5, True)


def test_in_the_mean_the_documented_bonus_is_that_of_the_entropy(tmp_path: Path) -> None:
    """At another temperature and after an update; summed over all tokens, by how often each is sampled."""
    algorithm, drawn = example(tmp_path, "EntropyBonus", 2), torch.Generator().manual_seed(0)
    logits, before = torch.randn(2, 7, dtype=torch.float64, generator=drawn)
    logits.requires_grad_()
    logprob_C, old_C = logits.log_softmax(0), (before / 0.7).log_softmax(0)
    values = TokenValues(logprob_C, logprob_C, old_C, torch.zeros_like(old_C))
    bonus = (old_C.exp() * algorithm.loss(values)[0]).sum()
    entropy = -(logprob_C.exp() * logprob_C).sum()
    torch.testing.assert_close(bonus, -0.001 * entropy)
    of_bonus, of_entropy = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (bonus, entropy))
    torch.testing.assert_close(of_bonus, -0.001 * of_entropy)


def test_the_documented_second_bound_is_verls(tmp_path: Path) -> None:
    algorithm = example(tmp_path, "DualClip", 2)
    log_ratio_C = torch.tensor([-2.0, -0.1, 0.0, 0.2, 0.9, 1.2, 5.0, 400.0], dtype=torch.float64).repeat(2)
    log_ratio_C.requires_grad_()
    advantage_C = torch.tensor([-1.5] * 8 + [0.5] * 8, dtype=torch.float64)
    values = TokenValues(log_ratio_C - 1, log_ratio_C - 1, torch.full_like(advantage_C, -1.0), advantage_C)
    loss_C, _ = algorithm.loss(values)
    ratio_C = log_ratio_C.detach().exp().requires_grad_()
    clipped_C = torch.maximum(-advantage_C * ratio_C, -advantage_C * ratio_C.clamp(0.7, 1.3))
    bounded_C = torch.where(advantage_C < 0, torch.minimum(clipped_C, -3 * advantage_C), clipped_C)
    torch.testing.assert_close(loss_C, bounded_C)
    (of_ratio_C,) = torch.autograd.grad(bounded_C.sum(), ratio_C)
    expected_C = torch.where(of_ratio_C == 0, 0.0, of_ratio_C * ratio_C)
    torch.testing.assert_close(torch.autograd.grad(loss_C.sum(), log_ratio_C)[0], expected_C)
