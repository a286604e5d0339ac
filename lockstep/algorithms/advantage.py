"""Advantages: of samples, by their group, and of tokens, by a critic's values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from statistics import mean, stdev

# Keeps the quotient finite; the value GRPO's implementation in TRL uses.
_STD_EPSILON = 1e-4
_VARIANCE_EPSILON = 1e-8  # so with tokens', as PPO's has it

Rewards = Sequence[Sequence[float]]


def whitened(values: Rewards) -> list[list[float]]:
    flat = list(chain.from_iterable(values))
    center, scale = mean(flat), _std(flat) + _STD_EPSILON
    return [[(value - center) / scale for value in group] for group in values]


def whiten(advantages: Rewards) -> list[list[float]]:
    """Tokens' advantages less the mean of all, over the deviation of all, as TRL's `PPOTrainer` has it."""
    flat = list(chain.from_iterable(advantages))
    center = math.fsum(flat) / max(len(flat), 1)
    variance = math.fsum((a - center) ** 2 for a in flat) / max(len(flat) - 1, 1)
    return [[(a - center) / math.sqrt(variance + _VARIANCE_EPSILON) for a in sample] for sample in advantages]


def scaled(rewards: Rewards) -> list[list[float]]:
    """Centered by group, over the deviation of all that this gives; exactly 0 where a group's rewards are equal."""
    found = group_advantages(rewards, "none")
    scale = _std(list(chain.from_iterable(found))) + _STD_EPSILON
    return [[value / scale for value in group] for group in found]


def _std(values: Sequence[float]) -> float:
    """The sample standard deviation (n - 1), 0 for a single value."""
    return stdev(values) if len(values) > 1 else 0.0


def group_advantages(rewards: Rewards, scale_rewards: str) -> list[list[float]]:
    """Each sample's advantage, given the rewards of each group's samples: less the group's mean (Dr. GRPO, Liu et al.
    2025), and over the deviation of the group (GRPO, Shao et al. 2024) or the step where `scale_rewards` says so.

    Means and deviations are exactly rounded, so the order of samples does not matter and a group whose rewards are
    all equal has advantages of exactly zero.
    """
    scales = [1.0] * len(rewards)
    if scale_rewards == "group":
        scales = [_std(group) + _STD_EPSILON for group in rewards]
    elif scale_rewards == "batch":
        scales = [_std(list(chain.from_iterable(rewards))) + _STD_EPSILON] * len(rewards)
    centers = [mean(group) for group in rewards]
    return [
        [(reward - center) / scale for reward in group]
        for group, center, scale in zip(rewards, centers, scales, strict=True)
    ]


def leave_one_out(reward: float, group: Sequence[float]) -> float:
    """A reward less the mean of the group's others: exactly 0 where all are equal."""
    n = len(group)
    return (reward - mean(group)) * n / (n - 1) if n > 1 else 0.0


def generalized_advantages(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Of a completion's tokens, given the reward of each and the value before it."""
    found, advantage, following = [0.0] * len(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        advantage = rewards[t] + gamma * following - values[t] + gamma * lam * advantage
        found[t], following = advantage, values[t]
    return found
