"""Where each token has an advantage of its own: between packing and the first update what it is, and with a critic its
values and what it is to learn."""

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
    """Fill in the batches' advantages, values and returns, of the samples that are trained on; a rollout's advantage
    becomes its tokens' mean. Returns the metrics of a critic, where there is one.

    Args:
        rollouts: those of all ranks that are trained on.
        kl: by a rollout's name what `config.beta` times is taken off each token's reward; empty for nothing.
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
                rows_C[: len(values)].copy_(torch.tensor(values))  # in place: a batch's tensors lie side by side
    for rollout, of_tokens in zip(rollouts, advantages, strict=True):
        rollout.advantage = math.fsum(of_tokens) / len(of_tokens)
    return {} if found is None else _metrics(list(chain.from_iterable(said)), list(chain.from_iterable(returns)))


def _values(trainer: Trainer, batches: Sequence[PackedBatch]) -> dict[str, list[float]]:
    """What the critic says before each sampled token, by a rollout's name, of all ranks."""
    values: dict[str, list[float]] = {}
    for batch in batches:
        trainer.values(batch)
        assert batch.old_value_C is not None
        add_values(values, batch.old_value_C[batch.valid_C].tolist(), batch)
    for of_rank in trainer.world.gather(values):
        values |= of_rank
    return values


def token_rewards(rollout: Trajectory, beta: float, kl: Sequence[float] | None) -> list[float]:
    """The reward of each sampled token: that of a turn with its last, what else the rollout has with the last of all,
    less `beta` times each one's KL estimate."""
    found = [-beta * estimate for estimate in kl] if kl else [0.0] * rollout.length
    *earlier, _ = rollout.turns
    given = [math.fsum((turn.rewards or {}).values()) for turn in earlier]
    for end, reward in zip(accumulate(len(turn.token_ids) for turn in earlier), given, strict=True):
        found[end - 1] += reward
    found[-1] += rollout.reward - math.fsum(given)
    return found


def _metrics(values: list[float], returns: list[float]) -> dict[str, Any]:
    """How much of the returns' variance the critic knew before the step; None where they have none."""
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
    """Of the values of each trajectory's sampled tokens, those of what a micro-batch has of one; zeros of another."""
    count, begin = sequence.length, sequence.part_from or 0
    return by_name[sequence.name][begin : begin + count] if sequence.name in by_name else [0.0] * count


def add_values(found: dict[str, list[float]], values: list[float], batch: PackedBatch) -> None:
    """Add a batch's values a completion token to those of each sequence by its name: of several parts in order."""
    rest = iter(values)
    for sequence in batch.sequences:
        found.setdefault(sequence.name, []).extend(islice(rest, sequence.length))
