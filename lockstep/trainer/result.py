"""The results of updates, which the host reads when asked for them, not when an update is launched."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from .mismatches import Mismatch
from .routing import RoutingResult

MAX_PENDING = 8  # results that may be pending at a time


@dataclass(frozen=True)
class StepResult:
    """The result of one update (or one check without an update). Averages are over the tokens trained on; that of
    `entropy` (nats) is over checked tokens, too. `kl` is None without a reference, `routing` without experts. A checked
    token is different if a log-probability or its experts are not the generator's, or a log-probability is NaN."""

    loss: float
    grad_norm: float
    lr: float
    applied: bool
    finite: bool
    clip_ratio: float
    kl: float | None
    entropy: float
    tokens: int
    tokens_sampled: int
    tokens_checked: int
    tokens_different: int
    logprob_diff_max: float
    mismatches: list[Mismatch] = field(default_factory=list)
    routing: RoutingResult | None = None

    @property
    def tokens_not_covered(self) -> int:
        """Sampled tokens that were not compared; negative if more were compared than sampled."""
        return self.tokens_sampled - self.tokens_checked

    @property
    def identical(self) -> bool:
        """Whether every sampled token was compared and none differs, nor the experts of any prompt token."""
        elsewhere = self.routing.prompt_tokens_different if self.routing else 0
        return self.tokens_different == self.tokens_not_covered == elsewhere == 0


def average_results(updates: Sequence[StepResult], of_all: Sequence[StepResult]) -> StepResult:
    """The first of several updates of a step (the one that compared all sampled tokens), with the means over all of
    them of loss, gradient norm, KL divergence and load-balancing loss. The clip ratio is the mean over the updates of
    all iterations (`of_all`), as the first update of a step clips nothing."""
    first = updates[0]
    means: dict[str, Any] = {"clip_ratio": _mean([update.clip_ratio for update in of_all])}
    for name in ("loss", "grad_norm", "kl"):
        means[name] = _mean([getattr(update, name) for update in updates])
    routing = first.routing
    if routing is not None:
        aux_loss = _mean([update.routing.aux_loss for update in updates if update.routing])
        routing = replace(routing, aux_loss=aux_loss)
    return replace(first, **means, routing=routing)


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of values that are None in all updates or in none."""
    given = [value for value in values if value is not None]
    return fmean(given) if given else None


class Results:
    """The results of the latest updates, written by the device after each and read by the host on demand. `rows`:
    float64 [MAX_PENDING, size + 1], the latest update first; each row ends with the update's number
    (`step.push_results`)."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.rows = torch.zeros(MAX_PENDING, size + 1, dtype=torch.float64, device=device)
        self._launched = 0
        self._latest: deque[weakref.ref[PendingResult]] = deque(maxlen=MAX_PENDING)  # one for each row, in launch order

    def make_room(self) -> None:
        """Call before launching an update: reads the result whose row it will push out, if that is still referenced."""
        if len(self._latest) == MAX_PENDING and (oldest := self._latest[0]()) is not None:
            oldest.get()

    def add(self, finish: Callable[[Sequence[float]], StepResult]) -> PendingResult:
        """The pending result of the update just launched; `finish` makes it from the row, once."""
        self._launched += 1
        pending = PendingResult(self, self._launched, finish)
        self._latest.append(weakref.ref(pending))
        return pending

    def read(self, number: int) -> list[float]:
        """The row of an update. Waits for the device. Raises `RuntimeError` if too many updates were launched since."""
        rows = self.rows.tolist()
        for *found, last in rows:
            if last == number:
                return found
        raise RuntimeError(f"the result of update {number} is gone: the device has those of {[r[-1] for r in rows]}")

    def reset(self) -> None:
        """Restart the count after a launch that was not an update; first reads results that are still referenced."""
        for pending in [reference() for reference in self._latest]:
            if pending is not None:
                pending.get()
        self._latest.clear()
        self._launched = 0
        self.rows.zero_()


@dataclass(eq=False)
class PendingResult:
    """The result of an update that was launched and may not have run yet."""

    _results: Results
    _number: int
    _finish: Callable[[Sequence[float]], StepResult] | None
    _result: StepResult | None = None

    def get(self) -> StepResult:
        if self._finish is not None:
            self._result, self._finish = self._finish(self._results.read(self._number)), None
        assert self._result is not None
        return self._result
