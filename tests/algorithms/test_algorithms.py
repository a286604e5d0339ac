"""Each algorithm's loss and gradients on logits of `transformers`: against a few lines of plain torch over a padded
batch, and against TRL's own loss; ragged, with ratios other than 1, and with completions that are masked."""

from __future__ import annotations

import inspect
import math
import re
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep
from lockstep.algorithms import ALGORITHMS, SUPERVISED, Algorithm, TokenValues, make_algorithm, supervised_algorithm
from lockstep.algorithms.advantage import generalized_advantages
from lockstep.algorithms.grpo import GRPO
from lockstep.config import LOSS_TYPES, READ_BY, LossConfig
from lockstep.errors import InputError
from lockstep.rl.token_advantages import token_rewards
from lockstep.types import Segment, Trajectory

LENGTHS = [1, 7, 4, 12, 3, 9]
GROUPS = [[0, 1, 2], [3, 4, 5]]
LIMIT = 12  # what the longest has
SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"epsilon": 0.01, "epsilon_high": 0.02},
    "cispo": {"epsilon_high": 1.2},
    "dppo": {"epsilon": 0.002, "epsilon_high": 0.003},
    "rloo": {"epsilon": 0.02},
    "distillation": {"teacher": "a folder"},
    "ppo": {"gamma": 0.97, "lam": 0.9, "vf_coef": 0.3, "cliprange_value": 0.1},
}


@pytest.fixture(scope="module")
def transformers_logits() -> Tensor:
    """[sequences, LIMIT, vocabulary] of a tiny random model."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        return 8 * model(torch.randint(0, 40, (len(LENGTHS), LIMIT))).logits


class Case:
    """A padded batch, its log-probs and theirs when it was sampled, and rewards."""

    def __init__(self, logits: Tensor, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.logits = logits.clone().requires_grad_()
        self.ids = torch.randint(0, 40, logits.shape[:2], generator=draw)
        self.logp = torch.log_softmax(self.logits, -1).gather(-1, self.ids[..., None])[..., 0]
        self.old = self.logp.detach() + 0.3 * torch.randn(self.logp.shape, generator=draw)
        self.ref = self.logp.detach() + 0.3 * torch.randn(self.logp.shape, generator=draw)
        self.value = (0.2 * logits[..., 0]).detach().requires_grad_()
        self.old_value = self.value.detach() + 0.3 * torch.randn(self.logp.shape, generator=draw)
        self.lengths = torch.tensor(LENGTHS)
        self.real = torch.arange(LIMIT) < self.lengths[:, None]
        self.masked = [3] if seed % 2 else []  # cut off, and left out
        self.mask = self.real.clone()
        self.mask[self.masked] = False
        self.rewards = torch.rand(len(LENGTHS), generator=draw).double()

    def groups(self) -> list[list[float]]:
        return [[self.rewards[i].item() for i in group] for group in GROUPS]

    def ours(self, algorithm: Algorithm, config: LossConfig) -> Tensor:
        """The step's loss as the package has it, from packed rows and a few rows of padding."""
        found = algorithm.advantages(config, self.groups())
        advantages = torch.tensor([a for group in found for a in group], dtype=torch.float32)
        kept = [i for i in range(len(LENGTHS)) if i not in self.masked]
        weights = torch.zeros(len(LENGTHS))
        weights[kept] = torch.tensor(algorithm.weights([LENGTHS[i] for i in kept], len(LENGTHS), LIMIT))
        cu = torch.cat([torch.zeros(1), self.lengths.cumsum(0), torch.full((2,), sum(LENGTHS))]).int()

        def rows(values: Tensor, fill: float = 0.0) -> Tensor:
            return torch.cat((values[self.real], torch.full((5,), fill)))

        per_token = [rows(x[:, None].expand(-1, LIMIT)) for x in (advantages, weights)]
        logp = rows(self.logp, -3.0)
        values = TokenValues(logp, logp, rows(self.old), per_token[0], cu, rows(self.ref))
        self.criticized = algorithm.has_critic
        if algorithm.has_token_advantages:
            values = self.of_tokens(algorithm, config, values, rows)
        loss, clipped = algorithm.corrected_loss(values)
        assert not clipped[-5:].any(), "padding is clipped"
        if algorithm.kl_in_loss:
            loss = loss + config.beta * algorithm.kl(values, rows(self.ref))
        self.clipped = clipped
        return (per_token[1] * loss).sum()

    def of_tokens(self, algorithm: Algorithm, config: LossConfig, values: TokenValues, rows: Any) -> TokenValues:
        """With each token's own advantage, and a critic's return, of the samples that count."""
        kept = [i for i in range(len(LENGTHS)) if i not in self.masked]
        said = [self.old_value[i, : LENGTHS[i]].tolist() for i in kept]
        rewards = [rollout_of(i, self.rewards[i].item()) for i in kept]
        estimates = (self.old - self.ref).tolist()
        kl = [estimates[i][: LENGTHS[i]] if algorithm.kl_in_reward else None for i in kept]
        given = [token_rewards(r, config.beta, k) for r, k in zip(rewards, kl, strict=True)]
        both = algorithm.estimate(config, given, said)
        found = torch.zeros(2, len(LENGTHS), LIMIT)
        for which, of_samples in zip(found, both, strict=True):
            for i, of_tokens in zip(kept, of_samples, strict=True):
                which[i, : LENGTHS[i]] = torch.tensor(of_tokens)
        if not algorithm.has_critic:
            return values._replace(advantage_C=rows(found[0]))
        critic = {"value_C": rows(self.value), "old_value_C": rows(self.old_value), "return_C": rows(found[1])}
        return values._replace(advantage_C=rows(found[0]), **critic)


def plain(name: str, c: Case, config: LossConfig, advantage: Tensor) -> Tensor:
    """The papers' formulas over a padded batch."""
    log_ratio, n = c.logp - c.old, c.real.sum(1, keepdim=True)
    low, high = bounds(name, config)
    if name == "gspo":
        log_ratio = ((log_ratio * c.real).sum(1, keepdim=True) / n).expand_as(c.logp)
    if name == "rloo":
        log_ratio = (log_ratio * c.real).sum(1, keepdim=True).expand_as(c.logp)
    r, a = log_ratio.exp(), advantage[:, None].float()
    if name == "distillation":  # the sampled token's own log-ratio is its advantage
        token = r * (c.logp - c.ref).detach()
    elif name == "cispo":
        token = -r.detach().clamp(max=high) * a * c.logp
    elif name == "sapo":
        tau = torch.where(a > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
        token = -4 / tau * torch.sigmoid(tau * (r - 1)) * a
    elif name == "dppo":
        p, q = c.logp.detach().exp(), c.old.exp()
        far = (p - q).abs()
        if config.divergence_type == "binary_kl":
            far = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        masked = torch.where(a > 0, (r > 1) & (far > high), (r < 1) & (far > low))
        token = (
            -a * r.detach().clamp(max=config.clip_ratio_c) * ~masked * c.logp
        )  # as TRL's experimental trainer has it
    else:
        token = -torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)
    token = token * c.mask
    if name == "reinforce_pp" and config.use_kl_in_reward:
        to_come = plain_rewards(c, config).flip(1).cumsum(1).flip(1)
        advantage = plain_whitened(c, to_come)
        token = -torch.minimum(r * advantage, r.clamp(1 - low, 1 + high) * advantage) * c.mask
    if name == "ppo":
        advantage, returns = plain_gae(c, config)
        near = torch.clamp(c.value, c.old_value - config.cliprange_value, c.old_value + config.cliprange_value)
        worse = torch.maximum((c.value - returns) ** 2, (near - returns) ** 2)
        token = -torch.minimum(r * advantage, r.clamp(1 - low, 1 + high) * advantage)
        token = (token + config.vf_coef * 0.5 * worse) * c.mask
    if name in ("dapo", "cispo", "dppo", "reinforce_pp", "reinforce_pp_baseline", "distillation", "ppo"):
        return token.sum() / c.mask.sum()
    if name == "dr_grpo":
        return token.sum() / (LIMIT * len(LENGTHS))
    return (token.sum(1) / n[:, 0]).mean()


def bounds(name: str, config: LossConfig) -> tuple[float, float]:
    """The clip range below and above, with each algorithm's defaults."""
    low = config.epsilon if config.epsilon is not None else {"dppo": 0.15}.get(name, 0.2)
    high = config.epsilon_high if config.epsilon_high is not None else {"dapo": 0.28}.get(name, low)
    return low, high


def plain_rewards(c: Case, config: LossConfig) -> Tensor:
    """Of each token, in double: the sample's with its last, and in the reward k1 of the divergence with each."""
    rewards = torch.zeros_like(c.old_value, dtype=torch.float64)
    rewards[torch.arange(len(c.lengths)), c.lengths - 1] = c.rewards
    return rewards - config.beta * (c.old - c.ref).double() * c.real


def plain_whitened(c: Case, advantage: Tensor) -> Tensor:
    counted = advantage[c.mask]
    return ((advantage - counted.mean()) * torch.rsqrt(counted.var() + 1e-8)).float()


def plain_gae(c: Case, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Whitened advantages and returns over a padded batch, as TRL's `PPOTrainer` has them, in double."""
    values, rewards = c.old_value.double() * c.real, plain_rewards(c, config)
    last, reversed_ = torch.zeros(len(values), dtype=torch.float64), []
    for t in reversed(range(LIMIT)):
        following = values[:, t + 1] if t < LIMIT - 1 else 0.0
        delta = rewards[:, t] + config.gamma * following - values[:, t]
        last = delta + config.gamma * config.lam * last
        reversed_.append(last)
    advantage = torch.stack(reversed_[::-1], 1)
    return plain_whitened(c, advantage), (advantage + values).float()


def plain_advantages(name: str, rewards: Tensor) -> Tensor:
    grouped = rewards.view(len(GROUPS), -1)
    centered = (grouped - grouped.mean(1, keepdim=True)).flatten()
    if name == "rloo":
        others = (grouped.sum(1, keepdim=True) - grouped) / (grouped.shape[1] - 1)
        return (grouped - others).flatten()
    if name == "reinforce_pp":
        return (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    if name == "reinforce_pp_baseline":
        return centered / (centered.std() + 1e-4)
    return centered


def assert_same(c: Case, ours: Tensor, other: Tensor) -> None:
    assert abs(ours.item() - other.item()) <= 1e-5 * max(abs(other.item()), 1e-2)
    by = [c.logits] if not c.criticized else [c.logits, c.value]
    gradients = (torch.autograd.grad(loss, by, retain_graph=True) for loss in (ours, other))
    for have, want in zip(*gradients, strict=True):
        assert want.norm() > 0 and (have - want).norm() <= 1e-5 * want.norm()


def rollout_of(i: int, reward: float) -> Trajectory:
    return Trajectory([Segment([1]), Segment([2] * LENGTHS[i], True)], reward=reward)


def config_of(name: str, **changes: Any) -> LossConfig:
    config = LossConfig(name, **SETTINGS.get(name, {}))
    return replace(config, **changes)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LOSS_TYPES)
def test_the_loss_is_the_papers(transformers_logits: Tensor, name: str, seed: int) -> None:
    c, config = Case(transformers_logits, seed), config_of(name)
    ours = c.ours(make_algorithm(config), config)
    assert_same(c, ours, plain(name, c, config, plain_advantages(name, c.rewards)))
    assert c.clipped.any() == (name not in ("sapo", "distillation"))


@pytest.mark.parametrize("seed", [0, 1])
def test_supervised_steps_have_the_cross_entropy(transformers_logits: Tensor, seed: int) -> None:
    c = Case(transformers_logits, seed)
    labels = torch.where(c.mask, c.ids, -100)  # what `transformers` leaves out
    plain = torch.nn.functional.cross_entropy(c.logits.flatten(0, 1), labels.flatten())
    assert_same(c, c.ours(supervised_algorithm(LossConfig()), LossConfig()), plain)


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
def test_a_token_is_credited_with_the_divergence_from_there_on(transformers_logits: Tensor, name: str) -> None:
    """In the reward, for what has an advantage a token; the second sample's rewards are not those of the first."""
    c, config = Case(transformers_logits, 1), config_of(name, beta=0.4, use_kl_in_reward=True, kl_estimator="k1")
    ours = c.ours(make_algorithm(config), config)
    assert_same(c, ours, plain(name, c, config, plain_advantages(name, c.rewards)))
    without = plain(name, c, replace(config, beta=0.0), plain_advantages(name, c.rewards))
    assert abs(without - ours) > 1e-3


def test_dppo_by_kl(transformers_logits: Tensor) -> None:
    c, config = Case(transformers_logits, 0), config_of("dppo", divergence_type="binary_kl")
    assert_same(
        c, c.ours(make_algorithm(config), config), plain("dppo", c, config, plain_advantages("dppo", c.rewards))
    )


def trl_loss(c: Case, config: LossConfig, name: str, advantage: Tensor) -> Tensor:
    """What TRL's trainers compute of the same log-probs; `self` has what their method reads."""
    trl = pytest.importorskip("trl")
    low, high = bounds(name, config)
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    model = SimpleNamespace(training=False)
    trainer = SimpleNamespace(
        model=model,
        _get_per_token_logps_and_entropies=lambda *_, **__: (c.logp, torch.zeros_like(c.logp), None),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=config.use_bias_correction_kl,
            sapo_temperature_pos=config.sapo_temperature_pos,
            sapo_temperature_neg=config.sapo_temperature_neg,
        ),
        accelerator=accelerator, beta=config.beta, epsilon_low=low, epsilon_high=high,
        loss_type="grpo" if name == "gspo" else name,
        importance_sampling_level="sequence" if name == "gspo" else "token",
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, max_completion_length=LIMIT,
        aux_loss_enabled=False, _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
        _metrics={"eval": defaultdict(list)},
    )  # fmt: skip
    inputs = {
        "prompt_ids": c.ids, "prompt_mask": c.real, "completion_ids": c.ids, "completion_mask": c.mask.float(),
        "advantages": advantage.float(), "old_per_token_logps": c.old, "ref_per_token_logps": c.ref,
        "old_logps": (c.old * c.mask).sum(1), "num_items_in_batch": c.mask.sum(),
    }  # fmt: skip
    kind = trl.RLOOTrainer if name == "rloo" else trl.GRPOTrainer
    return kind._compute_loss(trainer, model, inputs)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo"])
def test_the_loss_is_trls(transformers_logits: Tensor, name: str, seed: int, beta: float) -> None:
    """TRL weighs the KL estimate by the ratio that the loss has, of whole sequences too; so there it is not weighed."""
    if name == "rloo" and beta:
        pytest.skip("TRL's RLOO has its KL in the reward")
    weighed = name != "gspo"
    c, config = Case(transformers_logits, seed), config_of(name, beta=beta, use_bias_correction_kl=weighed)
    advantage = plain_advantages(name, c.rewards)
    theirs = trl_loss(c, config, name, advantage)
    if name == "rloo":  # in whose value a masked sequence is one with a ratio of 1
        theirs = theirs + advantage[c.masked].sum().float() / len(LENGTHS)
    assert_same(c, c.ours(make_algorithm(config), config), theirs)


def test_names_and_defaults_are_trls() -> None:
    """But for those that the documentation names."""
    trl = pytest.importorskip("trl")
    ours = {f.name: f.default for f in fields(LossConfig)} | {"epsilon": GRPO().epsilon}
    modes = {"importance_sampling_mode"}  # theirs is of the mismatch of two engines, and on by default
    for kind, named in ((trl.GRPOConfig, {"loss_type", "scale_rewards"} | modes), (trl.RLOOConfig, {"beta"})):
        theirs = {f.name.removeprefix("vllm_"): f.default for f in fields(kind) if f.default is not None}
        shared = ours.keys() & theirs.keys()
        assert {name for name in shared if ours[name] != theirs[name]} == named
        assert len(shared) >= 4
    names = {"importance_sampling_level", "importance_sampling_clip_max", "use_bias_correction_kl", "epsilon_high"}
    names |= {"sapo_temperature_pos", "sapo_temperature_neg", "mask_truncated_completions", "router_aux_loss_coef"}
    assert names <= {f.name.removeprefix("vllm_") for f in fields(trl.GRPOConfig)}
    page = " ".join((Path(lockstep.__file__).parents[1] / "docs/algorithms.md").read_text().split())
    assert "`loss_type` is `dapo`, its `scale_rewards` `group`" in page and "`beta` of RLOO 0.05" in page


def test_normalized_advantages_are_trls() -> None:
    config = LossConfig("rloo", normalize_advantages=True)
    found = torch.tensor(make_algorithm(config).advantages(config, [[1.0, 0.0, 0.5], [0.0, 0.0, 1.0]])).flatten()
    plain = plain_advantages("rloo", torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 1.0]))
    torch.testing.assert_close(found, (plain - plain.mean()) / (plain.std() + 1e-4))


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_on_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    """At a ratio of exactly 1 nothing is clipped, and the gradient by a token's log-prob is `-A`."""
    logp = torch.tensor([-2.0, -3.0, -1e-6, -80.0]).requires_grad_()
    advantage = torch.tensor([0.5, 0.5, -3.0, -3.0])
    cu = torch.tensor([0, 2, 4, 4], dtype=torch.int32)
    teacher = logp.detach() + advantage
    values = TokenValues(logp, logp, logp.detach(), advantage, cu, teacher)
    loss, clipped = make_algorithm(config_of(name)).loss(values)
    weight = torch.tensor([0.5, 0.5, 0.5, 0.5]) if name == "rloo" else torch.ones(4)  # the sum, in the mean of two
    (gradient,) = torch.autograd.grad((weight * loss).sum(), logp)
    assert torch.equal(gradient, -advantage) and not clipped.any()


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_a_huge_ratio_never_gives_a_gradient_that_is_no_number(name: str) -> None:
    """Where the objective is flat or cut, the gradient is 0 or finite; where it is not, it is infinite and seen."""
    logp, old = torch.tensor([-1e-3, -200.0]).requires_grad_(), torch.tensor([-200.0, -1e-3])
    cu = torch.tensor([0, 1, 2], dtype=torch.int32)
    advantage = torch.tensor([1.0, -1.0])
    values = TokenValues(logp, logp, old, advantage, cu, logp.detach() + advantage)
    loss, _ = make_algorithm(config_of(name)).loss(values)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    if name == "distillation":  # an estimate that nothing cuts
        assert loss.tolist() == gradient.tolist() == [-math.inf, 0.0]
    else:
        assert loss.isfinite().all() and gradient.isfinite().all()


def test_every_setting_is_read_by_those_who_are_said_to() -> None:
    """The table of settings and the algorithms' fields agree, and so do the names."""
    assert {*LOSS_TYPES, SUPERVISED} == ALGORITHMS.keys()
    shared = {f.name for f in fields(Algorithm)}
    settings = {f.name for f in fields(LossConfig)}
    in_loss = READ_BY.keys() - {"scale_rewards", "overlong_buffer", "overlong_penalty", "normalize_advantages"}
    in_loss -= {"dynamic_sampling", "teacher", "beta", "gamma", "lam"}
    help = inspect.getsource(LossConfig).split('"""')[3]
    page = (Path(lockstep.__file__).parents[1] / "docs/algorithms.md").read_text()
    for name in LOSS_TYPES:
        own = {f.name for f in fields(ALGORITHMS[name])} - shared
        assert own <= settings and own == {setting for setting in in_loss if name in READ_BY[setting]}
        assert re.search(rf"\b{name}\b", help) and f"| `{name}` |" in page


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LossConfig("p3o"), "loss.loss_type is 'p3o'; it must be one of grpo, dr_grpo, "),
        (LossConfig("cispo", epsilon=0.1), "loss.epsilon has no effect on loss_type cispo"),
        (LossConfig("rloo", scale_rewards="group"), "loss.scale_rewards has no effect on loss_type rloo"),
        (LossConfig("dapo", importance_sampling_level="sequence"), "loss.importance_sampling_level is sequence"),
        (
            LossConfig("gspo", sapo_temperature_pos=2.0),
            "loss.sapo_temperature_pos has no effect on",
        ),
        (LossConfig(teacher="m"), "loss.teacher has no effect on loss_type grpo; use distillation, or remove it"),
        (LossConfig("distillation", teacher="m", beta=0.1), "loss.beta has no effect on loss_type distillation"),
        (LossConfig("distillation", teacher="m", epsilon=0.1), "loss.epsilon has no effect on loss_type distillation"),
        (LossConfig(kl_estimator="k1"), "loss.kl_estimator has no effect without loss.beta"),
        (LossConfig(use_kl_in_reward=True), "loss.use_kl_in_reward has no effect without loss.beta"),
        (LossConfig(importance_sampling_clip_max=2.0), "loss.importance_sampling_clip_max has no effect without"),
        (
            LossConfig(importance_sampling_mode="token_mask", epsilon=0.3),
            "loss.epsilon has no effect beside loss.importance_sampling_mode, which is in place of the loss's own",
        ),
        (
            LossConfig("sapo", importance_sampling_mode="token_mask", sapo_temperature_neg=2.0),
            "loss.sapo_temperature_neg has no effect beside loss.importance_sampling_mode",
        ),
        (
            LossConfig(beta=0.1, use_kl_in_reward=True, use_bias_correction_kl=False),
            "loss.use_bias_correction_kl has no effect beside loss.use_kl_in_reward",
        ),
        (LossConfig(clip_ratio_c=5.0), "loss.clip_ratio_c has no effect on loss_type grpo; use dppo, or remove it"),
        (LossConfig("sapo", sapo_temperature_pos=0.0), "loss.sapo_temperature_pos is 0.0; it must be between"),
    ],
)
def test_settings_that_do_not_go_together_are_named(config: LossConfig, message: str) -> None:
    with pytest.raises(InputError) as caught:
        config.validate()
    assert str(caught.value).startswith(message)


def test_trls_sequence_level_is_gspo() -> None:
    config = LossConfig(importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)
    config.validate()
    assert make_algorithm(config) == make_algorithm(LossConfig("gspo", epsilon=3e-4, epsilon_high=4e-4))


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_truncated_importance_sampling(transformers_logits: Tensor, name: str, mode: Any) -> None:
    """A weight in place of the loss's own ratio, cut or left out above 1.2; exactly 1 where nothing has moved."""
    c, config = Case(transformers_logits, 0), LossConfig(name)
    weighed = replace(config, importance_sampling_mode=mode, importance_sampling_clip_max=1.2)
    log_ratio = (c.logp - c.old).detach() * c.real
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(c.logp)
    weight = log_ratio.exp().clamp(max=1.2)
    if mode.endswith("mask"):
        weight = torch.where(log_ratio.exp() > 1.2, 0.0, weight)
    scale = -weight * plain_advantages(name, c.rewards)[:, None].float() * c.mask
    now = c.logp - c.logp.detach()  # 0, with a gradient
    if name == "cispo":
        plain = (scale * c.logp).sum() / c.mask.sum()
    elif name == "grpo":
        plain = ((scale * now.exp()).sum(1) / c.lengths).mean()
    else:  # one ratio a sequence, whose gradient is of all its tokens
        whole = ((now * c.real).sum(1) / c.lengths).exp()
        plain = ((scale * whole[:, None]).sum(1) / c.lengths).mean()
    assert_same(c, c.ours(make_algorithm(weighed), weighed), plain)
    assert c.clipped.any()
    c.old = c.logp.detach()
    one, other = (c.ours(make_algorithm(x), x) for x in (weighed, config))
    assert torch.equal(one, other) and not c.clipped.any()
    assert torch.equal(*(torch.autograd.grad(x, c.logits, retain_graph=True)[0] for x in (one, other)))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_of_the_divergence(estimator: Any) -> None:
    """Of the tokens that a position can have, weighed, k1 and k3 are the divergence, and so is the gradient of all."""
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(9, dtype=torch.float64, generator=draw).requires_grad_()
    model, ref = torch.log_softmax(logits, 0), torch.randn(9, dtype=torch.float64, generator=draw).log_softmax(0)
    drawn = torch.log_softmax(logits.detach() / 0.7, 0)
    exact = (model.exp() * (model - ref)).sum()
    algorithm = make_algorithm(LossConfig(beta=0.1, kl_estimator=estimator))
    found = (drawn.exp() * algorithm.kl(TokenValues(model, model, drawn, torch.zeros(9)), ref)).sum()
    if estimator != "k2":
        torch.testing.assert_close(found, exact)
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (found, exact)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_worked_examples_are_not_weighed_by_how_likely_they_are(mode: Any) -> None:
    """Their log-probs of when they were sampled are 0, as nothing sampled them."""
    model = torch.tensor([-3.0, -0.1], requires_grad=True)
    values = TokenValues(model, model, torch.zeros(2), torch.ones(2))
    loss, _ = supervised_algorithm(LossConfig(importance_sampling_mode=mode)).corrected_loss(values)
    assert torch.equal(loss, -model)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("moved", [0.0, 0.3])
def test_in_the_mean_distillation_is_trls_reverse_kl(temperature: float, moved: float) -> None:
    """Over the tokens that a position can have, by their probability when sampled; `moved`: updates were made since."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    draw = torch.Generator().manual_seed(3)
    sampled, change, teacher = torch.randn(3, 11, dtype=torch.float64, generator=draw)
    logits = (sampled + moved * change).requires_grad_()
    model, drawn = torch.log_softmax(logits, 0), torch.log_softmax(sampled / temperature, 0)
    algorithm = make_algorithm(LossConfig("distillation", teacher="a folder"))
    values = TokenValues(drawn, model, drawn, torch.ones(11), None, torch.log_softmax(teacher, 0))
    found = (drawn.exp() * algorithm.loss(values)[0]).sum()
    exact = gkd.GKDTrainer.generalized_jsd_loss(logits[None, None], teacher[None, None], beta=1, reduction="sum")
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (found, exact)))


def test_the_bound_above_is_not_below_the_one_below() -> None:
    for name, low in (("grpo", 0.2), ("dapo", 0.2), ("dppo", 0.15)):
        with pytest.raises(InputError, match=f"loss.epsilon_high is below loss.epsilon, which is {low}; it must be"):
            LossConfig(name, epsilon_high=low - 0.01).validate()
        LossConfig(name, epsilon_high=low).validate()
        assert getattr(make_algorithm(LossConfig(name)), "epsilon", None) == low
    assert make_algorithm(LossConfig("dppo", epsilon_high=0.15)) == replace(
        make_algorithm(LossConfig("dppo")), epsilon_high=0.15
    )


def test_a_ratio_of_dppo_is_cut_at_its_cap() -> None:
    logp = torch.tensor([-0.1, -0.1]).requires_grad_()
    values = TokenValues(logp, logp, torch.tensor([-0.1 - math.log(8), -9.0]), torch.tensor([-1.0, -1.0]))
    loss, masked = make_algorithm(LossConfig("dppo")).loss(values)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    torch.testing.assert_close(gradient, torch.tensor([8.0, 20.0]))
    assert not masked.any()  # both come back to what sampled them


def test_a_teacher_that_is_not_there_is_missed() -> None:
    with pytest.raises(InputError, match="loss.teacher is missing: loss_type distillation learns from a model; give"):
        make_algorithm(LossConfig("distillation"))


def test_generalized_advantages_by_hand() -> None:
    """The reward comes with the last token; with lambda 1 the return is the discounted reward, with 0 one step's."""
    rewards, values = token_rewards(rollout_of(4, 2.0), 1.0, None), [0.5, 0.25, 1.0]
    assert rewards == [0.0, 0.0, 2.0]
    assert generalized_advantages(rewards, values, 1.0, 1.0) == [1.5, 1.75, 1.0]
    assert generalized_advantages(rewards, values, 0.5, 1.0) == [0.0, 0.75, 1.0]
    assert generalized_advantages(rewards, values, 1.0, 0.0) == [-0.25, 0.75, 1.0]
    assert generalized_advantages(rewards, values, 1.0, 0.5) == [-0.25 + 0.5 * 1.25, 1.25, 1.0]
    rewards = token_rewards(rollout_of(4, 2.0), 0.5, [1.0, -2.0, 4.0])
    assert rewards == [-0.5, 1.0, 0.0]
    assert generalized_advantages(rewards, values, 1.0, 1.0) == [0.0, 0.75, -1.0]
    config = LossConfig("ppo", lam=1.0)
    advantages, returns = make_algorithm(config).estimate(config, [[2.0], [0.0]], [[1.0], [0.5]])
    assert returns == [[2.0], [0.0]] and advantages == [[pytest.approx(0.5**0.5)], [pytest.approx(-(0.5**0.5))]]
