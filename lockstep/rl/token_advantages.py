"""Per-token advantages and, with a critic, values and returns, computed between packing and the first update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, islice
from typing import Any

import torch

from ..config import LossConfig
from ..trainer import Trainer
from ..types import PackedBatch, Trajectory


def estimate(
    trainer: Trainer,
    config: LossConfig,
    batches: Sequence[PackedBatch],
    rollouts: Sequence[Trajectory],
    kl: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Fill in the batches' advantages, values and returns, and set each rollout's advantage to the mean over its
    tokens. Returns the critic's metrics, or nothing without a critic.

    Args:
        rollouts: those of all ranks that the loss does not mask.
        kl: by rollout name, per-token KL estimates; `config.beta` times these are subtracted from the rewards.
    """
    found = _values(trainer, batches) if trainer.algorithm.has_critic else None
    if found is not None:
        rollouts = [rollout for rollout in rollouts if rollout.name in found]
    said = [found[r.name] if found is not None else [0.0] * r.length for r in rollouts]
    rewards = [token_rewards(r, config.beta, kl.get(r.name)) for r in rollouts]
    advantages, returns = trainer.algorithm.estimate(config, rewards, said)
    by_name = {r.name: pair for r, *pair in zip(rollouts, advantages, returns, strict=True)}
    for batch in batches:
        for i, rows_C in enumerate((batch.advantage_C, batch.return_C)):
            if rows_C is not None:
                of_names = {name: pair[i] for name, pair in by_name.items()}
                values = list(chain.from_iterable(_of_part(s, of_names) for s in batch.sequences))
                rows_C[: len(values)].copy_(torch.tensor(values))  # in place: a batch's tensors share one buffer
    for rollout, of_tokens in zip(rollouts, advantages, strict=True):
        rollout.advantage = math.fsum(of_tokens) / len(of_tokens)
    return {} if found is None else _metrics(list(chain.from_iterable(said)), list(chain.from_iterable(returns)))


def _values(trainer: Trainer, batches: Sequence[PackedBatch]) -> dict[str, list[float]]:
    """By rollout name, the critic's value before each sampled token; for all ranks."""
    values: dict[str, list[float]] = {}
    for batch in batches:
        trainer.values(batch)
        assert batch.old_value_C is not None
        add_values(values, batch.old_value_C[batch.valid_C].tolist(), batch)
    for of_rank in trainer.world.gather(values):
        values |= of_rank
    return values


def token_rewards(rollout: Trajectory, beta: float, kl: Sequence[float] | None) -> list[float]:
    """The reward of each sampled token: a turn's reward is at its last token, the rest of the rollout's at the very
    last token; `beta` times each token's KL estimate is subtracted."""
    found = [-beta * estimate for estimate in kl] if kl else [0.0] * rollout.length
    *earlier, _ = rollout.turns
    given = [math.fsum((turn.rewards or {}).values()) for turn in earlier]
    for end, reward in zip(accumulate(len(turn.token_ids) for turn in earlier), given, strict=True):
        found[end - 1] += reward
    found[-1] += rollout.reward - math.fsum(given)
    return found


def _metrics(values: list[float], returns: list[float]) -> dict[str, Any]:
    """The critic's metrics before the step. Its explained variance is None if the returns have no variance."""
    spread = _variance(returns)
    left = _variance([r - v for r, v in zip(returns, values, strict=True)])
    return {
        "critic/value/mean": math.fsum(values) / max(len(values), 1),
        "critic/return/mean": math.fsum(returns) / max(len(returns), 1),
        "critic/explained_variance": 1 - left / spread if spread else None,
    }


def _variance(values: list[float]) -> float:
    mean = math.fsum(values) / max(len(values), 1)
    return math.fsum((v - mean) ** 2 for v in values)


def _of_part(sequence: Trajectory, by_name: Mapping[str, Sequence[float]]) -> Sequence[float]:
    """The entries of `by_name` for a sequence, which may be part of a trajectory; zeros if there are none."""
    count, begin = sequence.length, sequence.part_offset or 0
    return by_name[sequence.name][begin : begin + count] if sequence.name in by_name else [0.0] * count


def add_values(found: dict[str, list[float]], values: list[float], batch: PackedBatch) -> None:
    """Append a batch's values per completion token to `found`, by sequence name; parts of a sequence come in order."""
    rest = iter(values)
    for sequence in batch.sequences:
        found.setdefault(sequence.name, []).extend(islice(rest, sequence.length))
