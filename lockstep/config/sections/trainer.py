"""Section `trainer`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ...errors import refuse
from .section import Section, at_least, between

# Read only by supervised steps; recipes set them, so they may remain when those steps are turned off.
_WARMUP_FIELDS = ("learning_rate", "loss", "reward", "interval", "batch_size")


@dataclass(frozen=True)
class TrainerConfig(Section):
    """The training step."""

    prompts_per_step: int = between(1, 1 << 20, default=5)
    """Groups per step."""
    num_iterations: int = at_least(1, default=1)
    """Optimizer updates on each rollout."""
    num_mini_batches: int = at_least(1, default=1)
    """Parts that a step's groups are divided into, with one update for each; num_iterations is the number of passes
    over all of them."""
    mode: Literal["packed", "per_sample"] = "packed"
    """packed: each prompt once, many samples per micro-batch. per_sample: one sample's forward, then its backward."""
    max_tokens_per_micro_batch: int = at_least(2, default=16384)
    """Packed tokens per micro-batch; a step with more accumulates gradients over several."""
    skip_zero_variance: bool = True
    """Leave out groups whose advantages are all zero."""
    max_idle_steps: int = at_least(1, default=10)
    """Stop after this many consecutive steps with nothing to train on."""
    warmup_steps: int = at_least(0, default=0)
    """Supervised steps on worked examples before reinforcement learning (tasks that have them)."""
    warmup_learning_rate: float = at_least(0, default=1e-3)
    """Learning rate of the first supervised step; it falls linearly to 0 over these steps."""
    warmup_loss: float = at_least(0, default=0.0)
    """End the supervised steps early, once the mean loss of the last ten is below this (nats per token)."""
    warmup_reward: float = at_least(0, default=0.0)
    """End the supervised steps early, once greedy answers to held-out problems reach this mean reward; 0 is off. There
    are as many problems as in validation, but other ones. The loss alone says little about how many a model solves."""
    warmup_interval: int = at_least(1, default=50)
    """Supervised steps between checks of warmup_reward."""
    warmup_batch_size: int = at_least(1, default=64)
    """Worked examples per supervised step."""

    @property
    def updates(self) -> int:
        """The most weight updates in a step."""
        return self.num_iterations * self.num_mini_batches

    def check(self) -> None:
        prompts = self.prompts_per_step
        refuse(
            self.num_mini_batches > prompts,
            f"trainer.num_mini_batches is {self.num_mini_batches} and trainer.prompts_per_step {prompts}; each has at "
            f"least one prompt, so use at most {prompts}",
        )

    def ineffective_if_given(self) -> Iterator[tuple[str, str]]:
        if self.warmup_steps == 0:
            for name in _WARMUP_FIELDS:
                yield f"warmup_{name}", "with trainer.warmup_steps 0, which turns supervised steps off; remove it"
        elif self.warmup_reward == 0:
            yield "warmup_interval", "without trainer.warmup_reward; set that above 0, or remove it"
