"""Advantages: per sample, from its group's rewards, and per token, from a critic's values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from statistics import mean, stdev

# Added to divisors, which may be 0.
_STD_EPSILON = 1e-4  # as in TRL's GRPO
_VARIANCE_EPSILON = 1e-8  # for per-token advantages, as in TRL's PPO

Rewards = Sequence[Sequence[float]]


def normalize_over_step(values: Rewards) -> list[list[float]]:
    """Values less their mean over all groups of the step, divided by their standard deviation."""
    flat = list(chain.from_iterable(values))
    center, scale = mean(flat), _std(flat) + _STD_EPSILON
    return [[(value - center) / scale for value in group] for group in values]


def whiten_tokens(advantages: Rewards) -> list[list[float]]:
    """Per-token advantages of all samples, normalized to mean 0 and deviation 1, as in TRL's `PPOTrainer`."""
    flat = list(chain.from_iterable(advantages))
    center = math.fsum(flat) / max(len(flat), 1)
    variance = math.fsum((a - center) ** 2 for a in flat) / max(len(flat) - 1, 1)
    return [[(a - center) / math.sqrt(variance + _VARIANCE_EPSILON) for a in sample] for sample in advantages]


def group_centered_advantages(rewards: Rewards) -> list[list[float]]:
    """Rewards less their group's mean, divided by the standard deviation of all these differences; exactly 0 in a group
    whose rewards are all equal."""
    found = group_advantages(rewards, "none")
    scale = _std(list(chain.from_iterable(found))) + _STD_EPSILON
    return [[value / scale for value in group] for group in found]


def _std(values: Sequence[float]) -> float:
    """The sample standard deviation (n - 1); 0 for a single value."""
    return stdev(values) if len(values) > 1 else 0.0


def group_advantages(rewards: Rewards, scale_rewards: str) -> list[list[float]]:
    """Each sample's advantage: its reward less the group's mean (Dr. GRPO, Liu et al. 2025), divided by the standard
    deviation of the group (GRPO, Shao et al. 2024) or of the step if `scale_rewards` is "group" or "batch".

    Means and deviations are correctly rounded, so the order of samples does not matter, and a group whose rewards are
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
    """A reward less the mean of the others in its group; exactly 0 if all are equal."""
    n = len(group)
    return (reward - mean(group)) * n / (n - 1) if n > 1 else 0.0


def generalized_advantages(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Generalized advantage estimates for a completion's tokens, from the reward of each and the value before it."""
    found, advantage, following = [0.0] * len(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        advantage = rewards[t] + gamma * following - values[t] + gamma * lam * advantage
        found[t], following = advantage, values[t]
    return found
