"""Section `loss`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ...errors import did_you_mean_note, refuse
from ..algorithms import ALGORITHM_TABLE, LOSS_TYPES, RATIO_SETTINGS, READ_BY
from .section import Section, at_least, between

ImportanceSampling = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class LossConfig(Section):
    """The policy loss and the advantage estimate."""

    loss_type: str = "grpo"
    """The algorithm: grpo, dr_grpo, dapo, gspo, cispo, sapo, dppo, rloo, reinforce_pp, reinforce_pp_baseline, ppo,
    distillation; or your own, as module:Class or path.py:Class."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """sequence turns grpo into gspo: one probability ratio per sequence."""
    epsilon: float | None = at_least(0, default=None)
    """Clip range below (and above unless epsilon_high is given), 0.2 by default; dppo: the divergence beyond which a
    token is masked, 0.15 by default. gspo's ratios are close to 1: its paper uses 3e-4 below and 4e-4 above."""
    epsilon_high: float | None = at_least(0, default=None)
    """Clip range above; 0.28 by default for dapo. cispo: the largest weight, 5 by default."""
    sapo_temperature_pos: float = between(1e-3, 1e3, default=1.0)
    """sapo: temperature of the gate for positive advantages; higher closes it faster."""
    sapo_temperature_neg: float = between(1e-3, 1e3, default=1.05)
    """sapo: the same for other advantages."""
    divergence_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """dppo: total variation, or KL divergence (for which the paper's epsilon is 0.05)."""
    clip_ratio_c: float = at_least(1, default=20.0)
    """dppo: upper bound on the probability ratio."""
    gamma: float = between(0, 1, default=1.0)
    """ppo: the discount per token."""
    lam: float = between(0, 1, default=0.95)
    """ppo: the lambda of GAE; higher relies more on later rewards and less on the critic."""
    vf_coef: float = at_least(0, default=0.1)
    """ppo: weight of the critic's loss."""
    cliprange_value: float = at_least(0, default=0.2)
    """ppo: clip range of the critic's new value around its old one."""
    teacher: str | None = None
    """distillation: the frozen model to learn from, a Hugging Face folder or hub id; its tokenizer must have the
    model's vocabulary."""
    beta: float = at_least(0, default=0.0)
    """Weight of the KL divergence from the frozen initial model, both at temperature 1 and without filters."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The estimate of that divergence from a token's log-probs: their difference d (k1), d^2 / 2 (k2), or e^-d - 1 + d
    (k3)."""
    use_kl_in_reward: bool = False
    """Subtract beta times the estimates from the reward instead of adding them to the loss: their sum over a
    completion; ppo and reinforce_pp, which have an advantage per token, subtract each at its token."""
    importance_sampling_mode: ImportanceSampling | None = None
    """For updates after a step's first: weight the loss by the ratio of probabilities under the current and the
    sampling weights, per token or sequence, truncated at importance_sampling_clip_max or masked above it. Replaces the
    loss's own ratio and clip. In the first update the weight is exactly 1."""
    importance_sampling_clip_max: float = at_least(1, default=3.0)
    """The largest such weight."""
    use_bias_correction_kl: bool = True
    """Weight each token's KL estimate by its probability under the model over that under the sampling distribution, so
    that estimate and gradient are unbiased at every temperature, except for what filters (top_k, top_p, min_p) removed.
    Off: the estimate is biased at temperatures other than 1 and with filters, its gradient always."""
    scale_rewards: Literal["none", "group", "batch"] = "none"
    """Divide advantages by the standard deviation of the group's or the batch's rewards. TRL's default is group; none,
    as in Dr. GRPO, gives easy, medium and hard prompts equal weight."""
    normalize_advantages: bool = False
    """rloo: subtract the mean of all the step's advantages and divide by their standard deviation."""
    overlong_buffer: int = at_least(0, default=0)
    """dapo: a linear penalty on the last this many tokens before max_completion_length; 0 is off. With several turns
    all sampled tokens count, and the limit is max_turns times that, or max_response_length if that is less."""
    overlong_penalty: float = between(0, 1e6, default=1.0)
    """dapo: the penalty at that limit."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards, before penalties, are all equal by groups of further prompts until the step is
    full, as in DAPO's paper. Replaced groups are checked for parity but not trained on."""
    max_num_gen_batches: int = between(2, 1000, default=10)
    """dynamic_sampling: a step uses at most this many times prompts_per_step prompts, then trains on what it has."""
    router_aux_loss_coef: float = at_least(0, default=0.0)
    """Weight of a mixture of experts' load-balancing loss, over the tokens that an update trains on; 0 is off."""
    mask_truncated_completions: bool = False
    """Leave unfinished completions out of the loss. As in TRL, the means of grpo and dr_grpo still count them as
    sequences, and that of dapo leaves out their tokens."""

    @property
    def algorithm(self) -> str:
        """`loss_type`, with `importance_sampling_level` applied."""
        return "gspo" if self.importance_sampling_level == "sequence" else self.loss_type

    @property
    def group_relative(self) -> bool:
        """Whether advantages compare a prompt's samples with each other; not assumed of a user's algorithm."""
        return self.algorithm in ALGORITHM_TABLE and ALGORITHM_TABLE[self.algorithm].group_relative

    @property
    def needs_rewards(self) -> bool:
        """Whether there is nothing to learn from without reward functions; of a user's algorithm assumed unless it has
        a teacher."""
        return ALGORITHM_TABLE[self.algorithm].uses_rewards if self.algorithm in ALGORITHM_TABLE else not self.teacher

    @property
    def kl_in_loss(self) -> bool:
        return self.beta > 0 and not self.use_kl_in_reward

    def check(self) -> None:
        known, note = ", ".join(LOSS_TYPES), did_you_mean_note(self.loss_type, LOSS_TYPES)
        refuse(
            self.loss_type not in LOSS_TYPES and ":" not in self.loss_type,
            f"loss.loss_type is {self.loss_type!r}{note}; it must be one of {known}, or "
            "an algorithm of your own, as module:Class or path.py:Class",
        )
        refuse(
            self.importance_sampling_level == "sequence" and self.loss_type not in ("grpo", "gspo"),
            f"loss.importance_sampling_level is sequence, which makes gspo of grpo, and loss.loss_type is "
            f"{self.loss_type}; use loss_type gspo, or remove it",
        )
        if self.epsilon_high is not None and self.algorithm in READ_BY["epsilon"]:
            low = ALGORITHM_TABLE[self.algorithm].epsilon if self.epsilon is None else self.epsilon
            refuse(
                self.epsilon_high < low,
                f"loss.epsilon_high is below loss.epsilon, which is {low}; it must be at least as large",
            )

    def ineffective_fields(self) -> Iterator[tuple[str, str]]:
        if self.overlong_buffer == 0:
            yield "overlong_penalty", "without loss.overlong_buffer; set that above 0, or remove the penalty"
        for name, readers in READ_BY.items():
            if self.algorithm in ALGORITHM_TABLE and self.algorithm not in readers:
                yield name, f"on loss_type {self.algorithm}; use {' or '.join(readers)}, or remove it"
        if self.algorithm in ALGORITHM_TABLE and self.importance_sampling_mode is not None:
            mode = "loss.importance_sampling_mode"
            for name in RATIO_SETTINGS:
                yield name, f"beside {mode}, which is in place of the loss's own ratio; remove one"
        if self.beta == 0:
            yield "kl_estimator", "without loss.beta; set that above 0, or remove it"
            yield "use_kl_in_reward", "without loss.beta; set that above 0, or remove it"
        if self.use_kl_in_reward:
            yield "use_bias_correction_kl", "beside loss.use_kl_in_reward: it is of the loss's estimate; remove one"
        if not self.dynamic_sampling:
            yield "max_num_gen_batches", "without loss.dynamic_sampling; turn that on, or remove it"
        if self.importance_sampling_mode is None:
            yield "importance_sampling_clip_max", "without loss.importance_sampling_mode; give one, or remove it"

    def ineffective_if_given(self) -> Iterator[tuple[str, str]]:
        yield from super().ineffective_if_given()
        if self.beta == 0:  # not in `ineffective_fields`: runs from before this setting have it off with any beta
            yield "use_bias_correction_kl", "without loss.beta; set that above 0, or remove it"
