"""Section `loss`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ...errors import meant, refuse
from ..algorithms import LOSS_TYPES, OF_THE_RATIO, READ_BY, SHIPPED
from .section import Section, at_least, between

ImportanceSampling = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class LossConfig(Section):
    """The policy loss and the advantage estimate."""

    loss_type: str = "grpo"
    """The algorithm: grpo, dr_grpo, dapo, gspo, cispo, sapo, dppo, rloo, reinforce_pp, reinforce_pp_baseline, ppo,
    distillation; or one of your own, as module:Class or path.py:Class."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """sequence makes gspo of grpo: one ratio of probabilities a sequence."""
    epsilon: float | None = at_least(0, default=None)
    """Clip range below (and above unless epsilon_high is given), 0.2 by default; dppo: the divergence that is too far,
    0.15 by default. gspo's ratios are close to 1: its paper has 3e-4, and 4e-4 above."""
    epsilon_high: float | None = at_least(0, default=None)
    """Clip range above; 0.28 by default for dapo. cispo: the largest weight, 5 by default."""
    sapo_temperature_pos: float = between(1e-3, 1e3, default=1.0)
    """sapo: how fast the gate closes where the advantage is positive."""
    sapo_temperature_neg: float = between(1e-3, 1e3, default=1.05)
    """sapo: the same where it is not."""
    divergence_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """dppo: total variation, or KL divergence (the paper's epsilon for that is 0.05)."""
    clip_ratio_c: float = at_least(1, default=20.0)
    """dppo: the largest ratio of probabilities that counts."""
    gamma: float = between(0, 1, default=1.0)
    """ppo: the discount a token."""
    lam: float = between(0, 1, default=0.95)
    """ppo: how far an advantage looks ahead of what the critic says (the lambda of GAE)."""
    vf_coef: float = at_least(0, default=0.1)
    """ppo: weight of the critic's loss."""
    cliprange_value: float = at_least(0, default=0.2)
    """ppo: how far from its old value the critic's new one counts."""
    teacher: str | None = None
    """distillation: the frozen model to learn from, a Hugging Face folder or hub id; its tokenizer has the
    vocabulary of the model's."""
    beta: float = at_least(0, default=0.0)
    """Weight of the KL divergence from the frozen initial model, of both at temperature 1 and without filters."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The estimate of that divergence from a token's log-probs: their difference d (k1), d^2 / 2 (k2), or e^-d - 1 + d
    (k3)."""
    use_kl_in_reward: bool = False
    """Take beta times the estimates off the reward, instead of adding them to the loss: their sum over a completion;
    ppo and reinforce_pp, which have an advantage a token, take each off where it is."""
    importance_sampling_mode: ImportanceSampling | None = None
    """For the updates after a step's first: weigh the loss by the ratio of the weights of now to those that sampled,
    of tokens or of whole sequences, cut at importance_sampling_clip_max or left out above it, in place of the loss's
    own ratio and clip. In the first update the weight is exactly 1."""
    importance_sampling_clip_max: float = at_least(1, default=3.0)
    """The largest such weight."""
    use_bias_correction_kl: bool = True
    """Weigh each token's KL estimate by its probability in the model over that in the distribution it was sampled from:
    unbiased at every temperature, its gradient too; what filters (top_k, top_p, min_p) left out is missing. Off: the
    estimate is biased at a temperature other than 1 and under filters, and its gradient always."""
    scale_rewards: Literal["none", "group", "batch"] = "none"
    """Divide advantages by the standard deviation of the group's or the batch's rewards. TRL's default is group; none,
    as in Dr. GRPO, weighs easy, middling and hard prompts alike."""
    normalize_advantages: bool = False
    """rloo: less the mean of all the step's advantages, over their standard deviation."""
    overlong_buffer: int = at_least(0, default=0)
    """dapo: the last this many tokens before max_completion_length cost a linear penalty; 0 is off. Of several
    turns the tokens sampled in all, before max_turns times that, or max_response_length where it is less."""
    overlong_penalty: float = between(0, 1e6, default=1.0)
    """dapo: the penalty at that limit."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal, before penalties, by those of further prompts until the step is full;
    DAPO's paper does. They are checked and not trained on."""
    max_num_gen_batches: int = between(2, 1000, default=10)
    """dynamic_sampling: a step uses at most this many times prompts_per_step prompts; then it is trained as it is."""
    router_aux_loss_coef: float = at_least(0, default=0.0)
    """Weight of the load-balancing loss of a mixture of experts, of the tokens that an update trains on; 0 is off."""
    mask_truncated_completions: bool = False
    """Leave completions that did not finish out of the loss. As in TRL the means of grpo and dr_grpo still count them
    among the sequences, and that of dapo leaves out their tokens."""

    @property
    def algorithm(self) -> str:
        """`loss_type`, the alias resolved."""
        return "gspo" if self.importance_sampling_level == "sequence" else self.loss_type

    @property
    def of_groups(self) -> bool:
        """Whether advantages compare a prompt's samples with each other; of your own algorithm it is taken so."""
        return self.algorithm not in SHIPPED or SHIPPED[self.algorithm].of_groups

    @property
    def needs_rewards(self) -> bool:
        """Whether there is nothing to learn from without reward functions; of your own algorithm it is taken so."""
        return self.algorithm not in SHIPPED or SHIPPED[self.algorithm].rewarded

    @property
    def kl_in_loss(self) -> bool:
        return self.beta > 0 and not self.use_kl_in_reward

    def check(self) -> None:
        known = ", ".join(LOSS_TYPES)
        refuse(
            self.loss_type not in LOSS_TYPES and ":" not in self.loss_type,
            f"loss.loss_type is {self.loss_type!r}{meant(self.loss_type, LOSS_TYPES)}; it must be one of {known}, or "
            "an algorithm of your own, as module:Class or path.py:Class",
        )
        refuse(
            self.importance_sampling_level == "sequence" and self.loss_type not in ("grpo", "gspo"),
            f"loss.importance_sampling_level is sequence, which makes gspo of grpo, and loss.loss_type is "
            f"{self.loss_type}; use loss_type gspo, or remove it",
        )
        high, clips = self.epsilon_high, self.algorithm in READ_BY["epsilon"]
        low = SHIPPED[self.algorithm].epsilon if clips and self.epsilon is None else self.epsilon
        refuse(
            clips and high is not None and low is not None and high < low,
            f"loss.epsilon_high is below loss.epsilon, which is {low}; it must be at least as large",
        )

    def without_effect(self) -> Iterator[tuple[str, str]]:
        if self.overlong_buffer == 0:
            yield "overlong_penalty", "without loss.overlong_buffer; set that above 0, or remove the penalty"
        for name, readers in READ_BY.items():
            if self.algorithm in SHIPPED and self.algorithm not in readers:
                yield name, f"on loss_type {self.algorithm}; use {' or '.join(readers)}, or remove it"
        if self.algorithm in SHIPPED and self.importance_sampling_mode is not None:
            mode = "loss.importance_sampling_mode"
            for name in OF_THE_RATIO:
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

    def unread(self) -> Iterator[tuple[str, str]]:
        yield from super().unread()
        if self.beta == 0:  # a run of before there was this setting has it off, with any beta
            yield "use_bias_correction_kl", "without loss.beta; set that above 0, or remove it"
