"""The policy step: `forward_backward` on each micro-batch, then `optim_step`.

Between two updates everything stays on the device: gradients, statistics, the parity comparison and the flag that
decides whether the optimizer writes. The host looks once, at the end of `optim_step`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from .. import ops
from ..config import LossConfig, LossType, OptimizerConfig
from ..models import Decoder, PackedAttention
from ..types import PackedBatch
from .losses import LOSSES, TokenValues, kl_k3
from .optimizer import AdamW, FlatParameters

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


# What grows on the device over the micro-batches of one update: sums, and for `diff_max` a maximum. `scored` counts
# the trained and the checked tokens, `checked` those that were compared with the generator's.
STATISTICS = ("loss", "tokens", "clipped", "kl", "entropy", "scored", "checked", "different", "diff_max")


class Trainer:
    """Trains `model` in place with gradients accumulated over micro-batches.

    Args:
        reference: frozen model for the KL term; required when `loss.beta` is above 0.
        enforce_parity: do not update when a log-probability differs from the generator's in any bit.

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
    ) -> None:
        if loss.beta > 0 and reference is None:
            raise ValueError(f"loss.beta is {loss.beta}: the KL term needs a reference model")
        self.model, self.reference, self.loss, self.enforce_parity = model, reference, loss, enforce_parity
        self.flat = FlatParameters(model)
        self.optimizer = AdamW(self.flat, optimizer)
        self.weights_version = 0
        device = self.flat.data.device
        self._lr = torch.zeros((), device=device)
        self._values = torch.zeros(len(STATISTICS), dtype=torch.float64, device=device)
        self._statistics = {name: self._values[i] for i, name in enumerate(STATISTICS)}
        self._scored: list[tuple[PackedBatch, Tensor, Tensor]] = []  # checked batches and both their log-probs

    def forward_backward(
        self, batch: PackedBatch, loss_type: LossType | None = None, keep_support: bool = False
    ) -> None:
        """Add the gradients of `sum(weight * loss)` over the batch's completion tokens to those accumulated.

        Args:
            loss_type: overrides the configured one (supervised steps).
            keep_support: store the sampled support in `batch.support_C`, for later updates on the same batch; those
                run with `batch.check_parity` off, as the weights are no longer the generator's.
        """
        loss_type = loss_type or self.loss.loss_type
        rows_CD, scores = self._score(self.model, batch)
        loss = self._loss(batch, scores, loss_type)
        self.flat.accumulate(torch.autograd.grad(loss, self.flat.parameters))
        self._record(batch, scores)
        if keep_support and batch.truncated and batch.support_C is None:
            batch.support_C = ops.support_mask(
                rows_CD.detach(), self.model.lm_head, batch.temperature_C, scores.threshold_C
            )

    @torch.no_grad()
    def check(self, batch: PackedBatch) -> None:
        """Compare the batch's log-probs with the generator's and train on nothing."""
        self._record(batch, self._score(self.model, batch)[1])

    @torch.no_grad()
    def reference_logprobs(self, batch: PackedBatch) -> None:
        """Fill `batch.ref_logprob_C` with the reference's log-probs (temperature 1, untruncated)."""
        assert self.reference is not None
        batch.ref_logprob_C = self._score(self.reference, batch)[1].model_logprob_C

    def optim_step(self, lr: float) -> StepResult:
        """Update the weights with the accumulated gradients and clear them; the host waits here, once.

        Nothing is written when the loss or the gradient norm is not finite or, under `enforce_parity`, when any
        log-probability differed since the last call.
        """
        s = self._statistics
        self._lr.fill_(lr)
        ok = torch.isfinite(s["loss"])
        if self.enforce_parity:
            ok = ok & (s["different"] == 0)
        grad_norm, applied = self.optimizer.step(self._lr, ok)
        return self._finish(lr, grad_norm, applied)

    def finish_check(self) -> StepResult:
        """The result of a step in which batches were only checked; no update, and gradients are cleared."""
        self.flat.grad.zero_()
        zero = torch.zeros((), device=self.flat.grad.device)
        return self._finish(0.0, zero, zero.bool())

    @torch.no_grad()
    def score(self, batch: PackedBatch) -> ops.TokenLogprobs:
        """The batch's log-probabilities and entropies, as `forward_backward` computes them."""
        return self._score(self.model, batch)[1]

    def reset_optimizer(self) -> None:
        """Start the moments anew (between supervised and reinforcement steps)."""
        self.optimizer.reset()

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What a checkpoint keeps: tensors (live, not copies) and numbers."""
        return self.optimizer.state(), {"weights_version": self.weights_version}

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        """Take over what `state` returned; `ValueError` when it belongs to another model."""
        self.optimizer.load_state(tensors)
        self.weights_version = numbers["weights_version"]

    def _score(self, model: Decoder, batch: PackedBatch) -> tuple[Tensor, ops.TokenLogprobs]:
        """Hidden rows that predict the completion tokens, [C, D], and the tokens' log-probs."""
        attend = PackedAttention(batch.cu_seqlens, batch.prefix_start_S, batch.prefix_len_S, batch.max_len)
        hidden_TD = model(batch.tokens_T, batch.positions_T, attend)
        rows_CD = ops.gather_rows(hidden_TD, batch.logit_rows_C)
        return rows_CD, ops.token_logprobs(
            rows_CD,
            model.lm_head,
            batch.targets_C,
            batch.temperature_C,
            batch.top_k_C,
            batch.top_p_C,
            batch.min_p_C,
            batch.support_C,
            batch.truncated,
        )

    def _loss(self, batch: PackedBatch, scores: ops.TokenLogprobs, loss_type: LossType) -> Tensor:
        """The weighted sum to differentiate; its statistics are added up on the way."""
        values = TokenValues(scores.logprob_C, scores.model_logprob_C, batch.old_logprob_C, batch.advantage_C)
        loss_C, clipped_C = LOSSES[loss_type](values, self.loss)
        s = self._statistics
        if self.reference is not None and loss_type != "sft":
            kl_C = kl_k3(scores.model_logprob_C, batch.ref_logprob_C)
            s["kl"].add_(_total(kl_C, batch.valid_C))
            loss_C = loss_C + self.loss.beta * kl_C
        loss = (batch.weight_C * loss_C).sum()
        s["loss"].add_(loss.detach())
        s["tokens"].add_(batch.valid_C.sum())
        s["clipped"].add_(clipped_C.sum())  # never padding: its advantage is 0
        return loss

    def _record(self, batch: PackedBatch, scores: ops.TokenLogprobs) -> None:
        """Add up the entropy and, where the batch asks for it, compare both log-probs bit by bit."""
        s = self._statistics
        s["entropy"].add_(_total(scores.entropy_C, batch.valid_C))
        s["scored"].add_(batch.valid_C.sum())
        if not batch.check_parity:
            return
        logprob_C, model_logprob_C = scores.logprob_C.detach(), scores.model_logprob_C.detach()
        different_C = _differs(logprob_C, batch.old_logprob_C) | _differs(model_logprob_C, batch.old_model_logprob_C)
        difference_C = torch.maximum(
            (logprob_C - batch.old_logprob_C).abs(), (model_logprob_C - batch.old_model_logprob_C).abs()
        )
        s["checked"].add_(batch.valid_C.sum())
        s["different"].add_((different_C & batch.valid_C).sum())
        s["diff_max"].copy_(torch.maximum(s["diff_max"], torch.where(batch.valid_C, difference_C, 0.0).max()))
        self._scored.append((batch, logprob_C, model_logprob_C))

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


def _total(values_C: Tensor, valid_C: Tensor) -> Tensor:
    """Sum over the valid rows, float64, detached."""
    return torch.where(valid_C, values_C.detach(), 0.0).sum(dtype=torch.float64)


def _differs(a_C: Tensor, b_C: Tensor) -> Tensor:
    """Where two float32 vectors have different bits."""
    return a_C.view(torch.int32) != b_C.view(torch.int32)


def _mismatches(scored: list[tuple[PackedBatch, Tensor, Tensor]]) -> list[Mismatch]:
    """Name the first differing tokens, in packed order. Reads from the device, but only after a difference."""
    found: list[Mismatch] = []
    for batch, *log_probs in scored:
        starts = [0, *accumulate(len(s.token_ids) for s in batch.sequences)]
        for kind, trainer_C, generator_C in zip(
            ("sampled", "model"), log_probs, (batch.old_logprob_C, batch.old_model_logprob_C), strict=True
        ):
            rows = (_differs(trainer_C, generator_C) & batch.valid_C).nonzero().flatten().tolist()
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
