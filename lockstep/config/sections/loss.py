"""Section `loss`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ...errors import refuse
from .section import Section, at_least, between

LossType = Literal["grpo", "dr_grpo", "dapo", "sft"]


@dataclass(frozen=True)
class LossConfig(Section):
    """The policy loss and the advantage estimate."""

    loss_type: LossType = "grpo"
    """grpo: mean over each sequence, then over sequences. dr_grpo: sum over max_completion_length. dapo: mean over
    all tokens with an asymmetric clip."""
    epsilon: float = at_least(0, default=0.2)
    """Clip range below (and above unless epsilon_high is given)."""
    epsilon_high: float | None = at_least(0, default=None)
    """Clip range above; 0.28 by default for dapo."""
    beta: float = at_least(0, default=0.0)
    """Weight of the KL divergence from the frozen initial model, of both at temperature 1 and without filters."""
    use_bias_correction_kl: bool = True
    """Weigh each token's KL estimate by its probability in the model over that in the distribution it was sampled from:
    unbiased at every temperature, its gradient too; what filters (top_k, top_p, min_p) left out is missing. Off: the
    estimate is biased at a temperature other than 1 and under filters, and its gradient always."""
    scale_rewards: Literal["none", "group", "batch"] = "none"
    """Divide advantages by the standard deviation of the group's or the batch's rewards. TRL's default is group; none,
    as in Dr. GRPO, weighs easy, middling and hard prompts alike."""
    overlong_buffer: int = at_least(0, default=0)
    """dapo: the last this many tokens before max_completion_length cost a linear penalty; 0 is off."""
    overlong_penalty: float = between(0, 1e6, default=1.0)
    """dapo: the penalty at max_completion_length."""
    router_aux_loss_coef: float = at_least(0, default=0.0)
    """Weight of the load-balancing loss of a mixture of experts, of the tokens that an update trains on; 0 is off."""
    mask_truncated_completions: bool = False
    """Leave completions that did not finish out of the loss. As in TRL the means of grpo and dr_grpo still count them
    among the sequences, and that of dapo leaves out their tokens."""

    def check(self) -> None:
        refuse(
            self.loss_type == "sft", "loss.loss_type sft is for the supervised warm-up only; use grpo, dr_grpo or dapo"
        )
        refuse(
            self.epsilon_high is not None and self.epsilon_high < self.epsilon,
            "loss.epsilon_high is below loss.epsilon; it must be at least as large",
        )

    def without_effect(self) -> Iterator[tuple[str, str]]:
        if self.loss_type != "dapo":
            yield "overlong_buffer", f"on loss_type {self.loss_type}; use dapo or remove it"
        if self.overlong_buffer == 0:
            yield "overlong_penalty", "without loss.overlong_buffer; set that above 0, or remove the penalty"
