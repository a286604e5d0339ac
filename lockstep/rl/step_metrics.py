"""The metrics of a step, whose names `run.metrics` documents."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from itertools import chain
from statistics import mean, pstdev
from typing import Any

import torch

from ..environments import Environment
from ..environments.environment import environment_metrics
from ..session.build import TrainingSession
from ..session.signals import EndRequest
from ..timings import Span, seconds_by_name
from ..trainer import StepResult, count_slots
from ..types import PackedBatch, RolloutGroup, Trajectory

# Phases whose seconds are reported as `time/<name>`.
_REPORTED_PHASES = ("step", "generate", "environment", "rewards", "critic", "forward_backward", "optim_step", "sync")


def step_metrics(
    run: TrainingSession,
    groups: list[RolloutGroup],
    result: StepResult,
    batches: list[PackedBatch],
    weights_version: int,
    spans: Sequence[Span],
) -> dict[str, Any]:
    """The metrics that every step has, by name, the same on every rank. Padding is that of all ranks' batches; for
    times and memory the largest value of any rank counts. The entry `ending` is not a metric, but all ranks' signals.

    Args:
        groups: those of all ranks, complete on the first rank only.
        batches, spans: those of this rank.
        weights_version: that of the weights that sampled the step.
    """
    seconds = {"sync": 0.0} | seconds_by_name(spans)  # in one process the generator reads the trainer's weights
    own: dict[str, Any] = {f"time/{name}": seconds[name] for name in seconds if name in _REPORTED_PHASES}
    own["memory/peak_gib"] = peak_memory_gib(run.policy.model.embed.device)
    own |= run.runtime.metrics()
    own["ending"] = EndRequest() if run.delay is None else run.delay.poll()
    all_slots, all_used, measured_by_rank = zip(*run.world.gather((*count_slots(batches), own)), strict=True)
    slots, used = sum(all_slots), sum(all_used)
    measured: dict[str, Any] = {"padding_waste": 1.0 - used / slots if slots else 0.0}
    for name in dict.fromkeys(chain.from_iterable(measured_by_rank)):  # not every rank scores rollouts
        measured[name] = max(of_rank[name] for of_rank in measured_by_rank if name in of_rank)
    return run.world.broadcast_from_first(lambda: _complete_metrics(run, groups, result, weights_version, measured))


def _complete_metrics(
    run: TrainingSession, groups: list[RolloutGroup], result: StepResult, weights_version: int, measured: dict[str, Any]
) -> dict[str, Any]:
    rollouts = [r for g in groups for r in g.rollouts]
    turns_of = [r.turns for r in rollouts]
    lengths = [sum(len(turn.token_ids) for turn in turns) for turns in turns_of]
    versions = [v for turns in turns_of for turn in turns for v in turn.weight_versions or ()]
    environments = {r.environment for r in rollouts} - {""}  # empty unless the run has several
    zero_std = [all(r.reward == g.rollouts[0].reward for r in g.rollouts) for g in groups]
    tokens = sum(len(s.token_ids) for r in rollouts for s in r.segments)
    return {
        **environment_metrics(run.environment, rollouts),  # before others, of which they replace none
        **reward_metrics(groups),
        **(_metrics_by_environment(run.environment, rollouts, environments) if environments else {}),
        "frac_reward_zero_std": mean(map(float, zero_std)),
        **{name: getattr(result, name) for name in ("loss", "grad_norm", "kl", "entropy", "clip_ratio")},
        "response_length/mean": mean(lengths),
        "response_length/max": max(lengths),
        "response_length/clip_ratio": mean(float(r.cut_off) for r in rollouts),
        "policy_age": weights_version - min(versions),
        "logprob_diff/max": result.logprob_diff_max,
        **{f"parity/tokens_{how}": getattr(result, f"tokens_{how}") for how in ("checked", "different", "not_covered")},
        **(result.routing.metrics() if result.routing else {}),
        **measured,
        "perf/tokens_per_s_per_gpu": tokens / run.world.size / measured["time/step"],
    }


def _metrics_by_environment(
    kind: type[Environment], rollouts: Sequence[Trajectory], names: Collection[str]
) -> dict[str, float]:
    """For each of a run's several environments: its trajectories, their mean reward, and `Environment.metrics`."""
    metrics: dict[str, float] = {}
    for name in sorted(names):
        own = [r for r in rollouts if r.environment == name]
        prefix = f"environment/{name}"
        metrics |= {f"{prefix}/trajectories": len(own), f"{prefix}/reward/mean": mean(r.reward for r in own)}
        for key, value in environment_metrics(kind, own).items():
            metrics.setdefault(f"{prefix}/{key.removeprefix('environment/')}", value)
    return metrics


def reward_metrics(groups: list[RolloutGroup]) -> dict[str, float]:
    """`reward/mean` and `reward/std`; `rewards/<fn>/mean` and `rewards/<fn>/std`, over rollouts that it applies to."""
    rollouts = [r for g in groups for r in g.rollouts]
    metrics = {
        "reward/mean": mean(r.reward for r in rollouts),
        "reward/std": mean(pstdev([r.reward for r in g.rollouts]) for g in groups),
    }
    for name in dict.fromkeys(name for r in rollouts for name in r.rewards):
        values = [value for r in rollouts if (value := r.rewards.get(name)) is not None]
        if values:
            metrics |= {f"rewards/{name}/mean": mean(values), f"rewards/{name}/std": pstdev(values)}
    return metrics


def pass_metrics(groups: list[RolloutGroup], n: int) -> dict[str, float]:
    """`pass@<n>`: the share of groups of n samples of which one passes by the first reward function, among those whose
    samples all have a value of it; nothing if there are none."""
    name = next((name for g in groups for r in g.rollouts for name in r.rewards), "")
    passed = [count > 0 for g in groups if len(g.rollouts) == n and (count := g.count_passed(name)) is not None]
    return {f"pass@{n}": mean(passed)} if passed else {}


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes of what the system counts
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
