"""What an update found, and how it comes to the host: when it is asked for, not when the update is launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .mismatches import Mismatch
from .routing import RoutingResult


@dataclass(frozen=True)
class StepResult:
    """What one update (or one check without an update) found. Averages are a token, over the tokens trained on;
    `entropy` (nats) is over the checked ones too. `kl` is None without a reference, `routing` without experts. Of the
    tokens checked, those are different that have another log-probability or other experts than in the generator."""

    loss: float
    grad_norm: float
    lr: float
    applied: bool
    finite: bool
    clip_ratio: float
    kl: float | None
    entropy: float
    tokens: int
    tokens_checked: int
    tokens_different: int
    logprob_diff_max: float
    mismatches: list[Mismatch] = field(default_factory=list)
    routing: RoutingResult | None = None


class PendingResult:
    """The result of an update that the device has been given and may not have come to yet.

    Args:
        numbers: what the host is to know of it, on the device; copied, in order with what was launched before.
        finish: makes the result of them, once.
    """

    def __init__(self, numbers: Tensor, finish: Callable[[Sequence[float]], StepResult]) -> None:
        self._finish: Callable[[Sequence[float]], StepResult] | None = finish
        self._result: StepResult | None = None
        self._arrived: torch.cuda.Event | None = None
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        self._numbers.copy_(numbers, non_blocking=True)
        if numbers.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def get(self) -> StepResult:
        """The result, once the device has come to it; take those of several updates in their order."""
        if self._finish is not None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._result, self._finish = self._finish(self._numbers.tolist()), None
        assert self._result is not None
        return self._result
