"""Per-token advantages and, with a critic, values and returns, computed between packing and the first update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, islice
from typing import Any

import torch

from ..algorithms.host_calls import call_method
from ..config import LossConfig
from ..trainer import Trainer
from ..types import PackedBatch, Trajectory


def estimate_token_advantages(
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
    has_critic = trainer.algorithm.has_critic
    if has_critic:
        values_by_name = _critic_values(trainer, batches)
        rollouts = [rollout for rollout in rollouts if rollout.name in values_by_name]
        values = [values_by_name[rollout.name] for rollout in rollouts]
    else:
        values = [[0.0] * rollout.length for rollout in rollouts]
    rewards = [token_rewards(r, config.beta, kl.get(r.name)) for r in rollouts]
    about, lengths = (config, rewards, [[*of_tokens] for of_tokens in values]), [len(tokens) for tokens in values]
    advantages, returns = call_method(config, trainer.algorithm.estimate, *about, shape=[lengths, lengths])
    names = [rollout.name for rollout in rollouts]
    advantages_by_name = dict(zip(names, advantages, strict=True))
    returns_by_name = dict(zip(names, returns, strict=True))
    for batch in batches:
        _fill_rows(batch.advantage_C, batch, advantages_by_name)
        if batch.return_C is not None:
            _fill_rows(batch.return_C, batch, returns_by_name)
    for rollout, of_tokens in zip(rollouts, advantages, strict=True):
        rollout.advantage = math.fsum(of_tokens) / len(of_tokens)
    if not has_critic:
        return {}
    return _critic_metrics(list(chain.from_iterable(values)), list(chain.from_iterable(returns)))


def _fill_rows(rows_C: torch.Tensor, batch: PackedBatch, by_name: Mapping[str, Sequence[float]]) -> None:
    """Set the rows of a batch's sequences, which may be parts of trajectories, to the values of their tokens in
    `by_name`; zeros for sequences that are not there."""
    values: list[float] = []
    for sequence in batch.sequences:
        count, begin = sequence.length, sequence.part_offset or 0
        values += by_name[sequence.name][begin : begin + count] if sequence.name in by_name else [0.0] * count
    rows_C[: len(values)].copy_(torch.tensor(values))  # in place: a batch's tensors share one buffer


def _critic_values(trainer: Trainer, batches: Sequence[PackedBatch]) -> dict[str, list[float]]:
    """By rollout name, the critic's value before each sampled token; for all ranks."""
    values: dict[str, list[float]] = {}
    for batch in batches:
        trainer.values(batch)
        assert batch.old_value_C is not None
        append_token_values(values, batch.old_value_C[batch.valid_C].tolist(), batch)
    for values_of_rank in trainer.world.gather(values):
        values |= values_of_rank
    return values


def token_rewards(rollout: Trajectory, beta: float, kl: Sequence[float] | None) -> list[float]:
    """The reward of each sampled token: a turn's reward is at its last token, the rest of the rollout's at the very
    last token; `beta` times each token's KL estimate is subtracted."""
    rewards = [-beta * estimate for estimate in kl] if kl else [0.0] * rollout.length
    *earlier_turns, _ = rollout.turns
    turn_rewards = [math.fsum((turn.rewards or {}).values()) for turn in earlier_turns]
    for end, reward in zip(accumulate(len(turn.token_ids) for turn in earlier_turns), turn_rewards, strict=True):
        rewards[end - 1] += reward
    rewards[-1] += rollout.reward - math.fsum(turn_rewards)
    return rewards


def _critic_metrics(values: list[float], returns: list[float]) -> dict[str, Any]:
    """The critic's metrics before the step. Its explained variance is None if the returns have no variance."""
    total = _sum_of_squares(returns)
    residual = _sum_of_squares([r - v for r, v in zip(returns, values, strict=True)])
    return {
        "critic/value/mean": math.fsum(values) / max(len(values), 1),
        "critic/return/mean": math.fsum(returns) / max(len(returns), 1),
        "critic/explained_variance": 1 - residual / total if total else None,
    }


def _sum_of_squares(values: list[float]) -> float:
    """The sum of squared differences from the mean."""
    mean = math.fsum(values) / max(len(values), 1)
    return math.fsum((v - mean) ** 2 for v in values)


def append_token_values(by_name: dict[str, list[float]], values: list[float], batch: PackedBatch) -> None:
    """Append a batch's values per completion token, by sequence name; parts of a sequence come in order."""
    rest = iter(values)
    for sequence in batch.sequences:
        by_name.setdefault(sequence.name, []).extend(islice(rest, sequence.length))
