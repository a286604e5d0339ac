"""The metrics of a step, whose names `run.metrics` documents."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import mean, pstdev
from typing import Any

import torch

from ..environments import Environment
from ..environments.environment import metrics_of
from ..session.build import TrainingSession
from ..session.signals import EndRequest
from ..timings import Span, seconds_by_name
from ..trainer import StepResult, count_slots
from ..types import PackedBatch, RolloutGroup, Trajectory

# Phases whose seconds are reported as `time/<name>`.
_TIMED = ("step", "generate", "environment", "rewards", "critic", "forward_backward", "optim_step", "sync")


def step_metrics(
    run: TrainingSession,
    groups: list[RolloutGroup],
    result: StepResult,
    batches: list[PackedBatch],
    version: int,
    spans: Sequence[Span],
) -> dict[str, Any]:
    """The metrics that every step has, by name, the same on every rank. Padding is that of all ranks' batches; for
    times and memory the largest value of any rank counts. The entry `ending` is not a metric, but all ranks' signals.

    Args:
        groups: those of all ranks, complete on the first rank only.
        batches, spans: those of this rank.
        version: the version of the weights that sampled the step.
    """
    spent = {"sync": 0.0} | seconds_by_name(spans)  # in one process the generator reads the trainer's weights
    seconds = {f"time/{name}": value for name, value in spent.items() if name in _TIMED}
    own: dict[str, Any] = {**seconds, "memory/peak_gib": peak_memory_gib(run.policy.model.embed.device)}
    own |= run.runtime.metrics() | {"ending": EndRequest() if run.delay is None else run.delay.poll()}
    ranks = run.world.gather((*count_slots(batches), own))
    slots, used = sum(rank[0] for rank in ranks), sum(rank[1] for rank in ranks)
    names = dict.fromkeys(name for *_, of_rank in ranks for name in of_rank)  # not every rank scores rollouts
    largest = {name: max(of_rank[name] for *_, of_rank in ranks if name in of_rank) for name in names}
    measured = {"padding_waste": 1.0 - used / slots if slots else 0.0, **largest}
    return run.world.broadcast_from_first(lambda: _of_the_step(run, groups, result, version, measured))


def _of_the_step(
    run: TrainingSession, groups: list[RolloutGroup], result: StepResult, version: int, measured: dict[str, Any]
) -> dict[str, Any]:
    rollouts = [r for g in groups for r in g.rollouts]
    turns = [r.turns for r in rollouts]
    lengths = [sum(len(turn.token_ids) for turn in of_one) for of_one in turns]
    several = {r.environment for r in rollouts} - {""}
    zero_std = [all(r.reward == g.rollouts[0].reward for r in g.rollouts) for g in groups]
    tokens = sum(len(s.token_ids) for r in rollouts for s in r.segments)
    return {
        **reward_metrics(groups),
        **metrics_of(run.environment, rollouts),
        **(_by_environment(run.environment, rollouts, several) if several else {}),
        "frac_reward_zero_std": mean(map(float, zero_std)),
        **{name: getattr(result, name) for name in ("loss", "grad_norm", "kl", "entropy", "clip_ratio")},
        "response_length/mean": mean(lengths),
        "response_length/max": max(lengths),
        "response_length/clip_ratio": mean(float(r.cut_off) for r in rollouts),
        "policy_age": version - min(v for of_one in turns for turn in of_one for v in turn.weight_versions or ()),
        "logprob_diff/max": result.logprob_diff_max,
        **{f"parity/tokens_{how}": getattr(result, f"tokens_{how}") for how in ("checked", "different", "not_covered")},
        **(result.routing.metrics() if result.routing else {}),
        **measured,
        "perf/tokens_per_s_per_gpu": tokens / run.world.size / measured["time/step"],
    }


def _by_environment(
    kind: type[Environment], rollouts: Sequence[Trajectory], names: Collection[str]
) -> dict[str, float]:
    """For each of a run's several environments: its trajectories, their mean reward, and `Environment.metrics`."""
    found: dict[str, float] = {}
    for name in sorted(names):
        own = [r for r in rollouts if r.environment == name]
        before = f"environment/{name}"
        found |= {f"{before}/trajectories": len(own), f"{before}/reward/mean": mean(r.reward for r in own)}
        measured = {key.removeprefix("environment/"): value for key, value in metrics_of(kind, own).items()}
        found |= {f"{before}/{key}": value for key, value in measured.items()}
    return found


def reward_metrics(groups: list[RolloutGroup]) -> dict[str, float]:
    """`reward/mean` and `reward/std`; `rewards/<fn>/mean` and `rewards/<fn>/std`, over rollouts that it applies to."""
    rollouts = [r for g in groups for r in g.rollouts]
    metrics = {
        "reward/mean": mean(r.reward for r in rollouts),
        "reward/std": mean(pstdev([r.reward for r in g.rollouts]) for g in groups),
    }
    for name in dict.fromkeys(name for r in rollouts for name in r.rewards):
        values = [v for r in rollouts if (v := r.rewards.get(name)) is not None]
        if values:
            metrics |= {f"rewards/{name}/mean": mean(values), f"rewards/{name}/std": pstdev(values)}
    return metrics


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
