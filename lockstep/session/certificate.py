"""The run's certificate: what its parity checks covered."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ..trainer import StepResult

_EXPERT_COUNTS = (
    *("expert_choices_checked", "tokens_routed_differently"),
    *("prompt_tokens_checked", "prompt_tokens_routed_differently"),
)


@dataclass
class Certificate:
    """What a run's parity check covered, written to `parity.json` after every step.

    The step's first update compares every completion token of every rollout, including groups without a reward: the two
    log-probabilities that the generator recorded against those of the computation that trains, as 32-bit words. For a
    mixture of experts it also compares a digest of the experts chosen before the token was drawn, of every layer and
    slot in order, and does so for the prompts' tokens too, since they receive gradients; these counts are None for
    other models. `logprob_diff_max` is NaN if any of the log-probabilities was.
    """

    mode: str
    steps_checked: int = 0
    tokens_checked: int = 0
    tokens_different: int = 0
    tokens_not_covered: int = 0
    logprob_diff_max: float = 0.0
    expert_choices_checked: int | None = None
    tokens_routed_differently: int | None = None
    prompt_tokens_checked: int | None = None
    prompt_tokens_routed_differently: int | None = None
    first_difference: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def add(self, step: int, result: StepResult, completion_tokens: int) -> None:
        self.steps_checked += 1
        self.tokens_checked += result.tokens_checked
        self.tokens_different += result.tokens_different
        self.tokens_not_covered += completion_tokens - result.tokens_checked
        largest = result.logprob_diff_max
        if largest > self.logprob_diff_max or math.isnan(largest):  # nothing is larger than NaN
            self.logprob_diff_max = largest
        for name, count in zip(_EXPERT_COUNTS, result.routing.compared if result.routing else (), strict=False):
            setattr(self, name, (getattr(self, name) or 0) + count)
        if self.first_difference is None and result.mismatches:
            self.first_difference = {"step": step, **asdict(result.mismatches[0])}

    def to_dict(self) -> dict[str, Any]:
        """The contents of `parity.json`; `identical` is None when there was nothing to check."""
        different = self.tokens_different, self.tokens_not_covered, self.prompt_tokens_routed_differently
        identical: bool | None = not any(different)
        if identical and self.tokens_checked == 0:
            identical = None
        return {"identical": identical, **omit_absent_expert_counts(asdict(self))}


def omit_absent_expert_counts(record: dict[str, Any]) -> dict[str, Any]:
    """The record without the counts of a mixture of experts where they are None."""
    return {name: value for name, value in record.items() if name not in _EXPERT_COUNTS or value is not None}
