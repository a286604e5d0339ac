"""The policy step: `forward_backward` on each micro-batch, then `optim_step`.

Between two updates everything stays on the device: gradients, statistics, the parity comparison and the flag that
decides whether the optimizer writes. The host looks once, at the end of `optim_step`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..config import LossConfig, LossType, OptimizerConfig
from ..graph import Compiler
from ..models import Decoder
from ..types import PackedBatch
from .optimizer import AdamW, FlatParameters
from .runs import EagerRuns, GraphRuns
from .step import STATISTICS, Scored, differs, score

MAX_MISMATCHES = 8


@dataclass(frozen=True)
class Mismatch:
    """A completion token whose log-probability has other bits in the trainer; `position` counts from 0."""

    request: str
    position: int
    kind: str  # "sampled" or "model"
    generator: float
    trainer: float


@dataclass(frozen=True)
class StepResult:
    """What one update (or one check without an update) found. Averages are a token, over the tokens trained on;
    `entropy` (nats) is over the checked ones too. `kl` is None without a reference."""

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


class Trainer:
    """Trains `model` in place with gradients accumulated over micro-batches.

    Args:
        reference: frozen model for the KL term; required when `loss.beta` is above 0.
        enforce_parity: do not update when a log-probability differs from the generator's in any bit.
        compiler: run as captured graphs; None calls the model.

    Attributes:
        weights_version: updates applied so far.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: OptimizerConfig,
        loss: LossConfig,
        *,
        reference: Decoder | None = None,
        enforce_parity: bool = True,
        compiler: Compiler | None = None,
    ) -> None:
        if loss.beta > 0 and reference is None:
            raise ValueError(f"loss.beta is {loss.beta}: the KL term needs a reference model")
        self.model, self.reference, self.loss = model, reference, loss
        self.flat = FlatParameters(model)
        self.optimizer = AdamW(self.flat, optimizer)
        self.weights_version = 0
        device = self.flat.data.device
        self._lr = torch.zeros((), device=device)
        self._values = torch.zeros(len(STATISTICS), dtype=torch.float64, device=device)
        runs = EagerRuns(model, reference, self.flat, self.optimizer, loss, self._values, self._lr, enforce_parity)
        self._runs = runs if compiler is None else GraphRuns(runs, compiler)
        self._scored: list[tuple[PackedBatch, Scored]] = []  # checked batches and their log-probs

    def forward_backward(
        self, batch: PackedBatch, loss_type: LossType | None = None, keep_support: bool = False
    ) -> None:
        """Add the gradients of `sum(weight * loss)` over the batch's completion tokens to those accumulated.

        Args:
            loss_type: overrides the configured one (supervised steps).
            keep_support: store the sampled support in `batch.support_C`, for later updates on the same batch; those
                run with `batch.check_parity` off, as the weights are no longer the generator's.
        """
        with_support = keep_support and batch.truncated and batch.support_C is None
        scored = self._runs.forward_backward(batch, loss_type or self.loss.loss_type, with_support)
        self._remember(batch, scored)
        if scored.rows_CD is not None and scored.threshold_C is not None:
            batch.support_C = ops.support_mask(
                scored.rows_CD, self.model.lm_head, batch.temperature_C, scored.threshold_C
            )

    def check(self, batch: PackedBatch) -> None:
        """Compare the batch's log-probs with the generator's and train on nothing."""
        self._remember(batch, self._runs.check(batch))

    def _remember(self, batch: PackedBatch, scored: Scored) -> None:
        """Keep what names a mismatch."""
        if batch.check_parity:
            self._scored.append((batch, Scored(scored.logprob_C, scored.model_logprob_C)))

    def reference_logprobs(self, batch: PackedBatch) -> None:
        """Fill `batch.ref_logprob_C` with the reference's log-probs (temperature 1, untruncated)."""
        batch.ref_logprob_C = self._runs.reference_logprobs(batch)

    def optim_step(self, lr: float) -> StepResult:
        """Update the weights with the accumulated gradients and clear them; the host waits here, once.

        Nothing is written when the loss or the gradient norm is not finite or, under `enforce_parity`, when any
        log-probability differed since the last call.
        """
        self._lr.fill_(lr)
        return self._finish(lr, *self._runs.optim_step())

    def finish_check(self) -> StepResult:
        """The result of a step in which batches were only checked; no update, and gradients are cleared."""
        self.flat.grad.zero_()
        zero = torch.zeros((), device=self.flat.grad.device)
        return self._finish(0.0, zero, zero.bool())

    @torch.no_grad()
    def score(self, batch: PackedBatch) -> ops.TokenLogprobs:
        """The batch's log-probabilities and entropies, as `forward_backward` computes them."""
        return score(self.model, batch)[1]

    def reset_optimizer(self) -> None:
        """Start the moments anew (between supervised and reinforcement steps)."""
        self.optimizer.reset()

    def numerics(self) -> dict[str, Any]:
        """What the bits of a run depend on besides its configuration."""
        on_cpu = self.flat.data.device.type == "cpu"
        return {
            "torch": torch.__version__,
            "dtype": str(self.flat.data.dtype),
            "device": torch.backends.cpu.get_cpu_capability() if on_cpu else torch.cuda.get_device_name(),
            "operators": ops.cpu_backend() if on_cpu else "cuda",
            "threads": torch.get_num_threads() if on_cpu else 0,
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What a checkpoint keeps: tensors (live, not copies) and numbers."""
        return self.optimizer.state(), {"weights_version": self.weights_version}

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        """Take over what `state` returned; `ValueError` when it belongs to another model."""
        self.optimizer.load_state(tensors)
        self.weights_version = numbers["weights_version"]

    def _finish(self, lr: float, grad_norm: Tensor, applied: Tensor) -> StepResult:
        """Bring the statistics to the host, in one transfer, and start them anew."""
        values = torch.cat((self._values, torch.stack((grad_norm, applied)).double())).tolist()
        s = dict(zip((*STATISTICS, "grad_norm", "applied"), values, strict=True))
        mismatches = _mismatches(self._scored) if s["different"] else []
        self._values.zero_()
        self._scored.clear()
        self.weights_version += int(s["applied"])
        tokens = max(s["tokens"], 1.0)
        return StepResult(
            loss=s["loss"],
            grad_norm=s["grad_norm"],
            lr=lr,
            applied=bool(s["applied"]),
            finite=math.isfinite(s["loss"]) and math.isfinite(s["grad_norm"]),
            clip_ratio=s["clipped"] / tokens,
            kl=None if self.reference is None else s["kl"] / tokens,
            entropy=s["entropy"] / max(s["scored"], 1.0),
            tokens=int(s["tokens"]),
            tokens_checked=int(s["checked"]),
            tokens_different=int(s["different"]),
            logprob_diff_max=s["diff_max"],
            mismatches=mismatches,
        )


def _mismatches(checked: list[tuple[PackedBatch, Scored]]) -> list[Mismatch]:
    """Name the first differing tokens, in packed order. Reads from the device, but only after a difference."""
    found: list[Mismatch] = []
    for batch, scored in checked:
        starts = [0, *accumulate(len(s.token_ids) for s in batch.sequences)]
        for kind, trainer_C, generator_C in (
            ("sampled", scored.logprob_C, batch.old_logprob_C),
            ("model", scored.model_logprob_C, batch.old_model_logprob_C),
        ):
            rows = (differs(trainer_C, generator_C) & batch.valid_C).nonzero().flatten().tolist()
            for row in rows[:MAX_MISMATCHES]:
                index = int(batch.sequence_C[row])
                found.append(
                    Mismatch(
                        request=batch.sequences[index].request,
                        position=row - starts[index],
                        kind=kind,
                        generator=float(generator_C[row]),
                        trainer=float(trainer_C[row]),
                    )
                )
        if len(found) >= MAX_MISMATCHES:
            break
    return found[:MAX_MISMATCHES]
