"""From problems to scored groups: encode the prompts, generate, score. Advantages come later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from ..distributed import ONE, World
from ..errors import InputError
from ..timings import Timings
from ..types import TRAIN_DOMAIN, RolloutGroup, SampleIdentity, SamplingParams, Trajectory
from .base import Encode, Problem
from .rewards.reward_set import RewardSet, Scoring

LOGGED = "logged/"  # of metrics that reward functions logged

Problems = Sequence[tuple[int, Problem]]  # each with its group


class Collected(NamedTuple):
    """What was sampled and scored.

    Attributes:
        groups: those whose completions all have a reward.
        without_reward: the others.
        counts: metrics: `groups_without_reward`, `reward_errors/<fn>`.
    """

    groups: list[RolloutGroup]
    without_reward: list[RolloutGroup]
    counts: dict[str, float]


# generate(prompt_ids, sampling, identities): for each prompt its `sampling.n` completions, whose identities are the
# prompt's with sample 0 to n - 1.
Generate = Callable[[list[list[int]], list[SamplingParams], list[SampleIdentity]], list[list[Trajectory]]]


@dataclass(frozen=True)
class SingleTurn:
    """Prompts that are completed once and scored, on all ranks of `world` together.

    `seed` is a part of what keys the random numbers (`SampleIdentity`). `max_prompt_length` is in tokens; None is no
    limit, and `limited_by` says where it comes from. `timings` measures `encode` and `rewards`.
    """

    encode: Encode
    generate: Generate
    rewards: RewardSet
    seed: int
    max_prompt_length: int | None = None
    timings: Timings = field(default_factory=Timings)
    world: World = ONE
    limited_by: str = ""

    def collect(
        self, problems: Problems, sampling: SamplingParams, domain: int, step: int, required: bool = True
    ) -> Collected:
        """Sample `sampling.n` completions of each (group, problem) and score them. Each rank takes its share of the
        problems, and has all groups in the end; one with a completion that no reward applies to is kept apart.

        Raises `InputError` naming the group, and its data row, for a prompt that is empty or too long, when no group
        has a reward and one is `required`, and whatever scoring refuses.
        """
        where = f"step {step + 1}" if domain == TRAIN_DOMAIN else "validation"
        own = self.world.mesh.fsdp.own(problems)
        found = self.world.share(lambda: self._of(own, sampling, domain, step, where))
        groups = sorted((group for of_rank in found for group in of_rank.groups), key=attrgetter("group"))
        without = sorted((group for of_rank in found for group in of_rank.without_reward), key=attrgetter("group"))
        counts: Counter[str] = Counter()
        for of_rank in found:
            counts.update(of_rank.counts)
        for name in [name for name in counts if name.startswith(LOGGED)]:
            counts[name] /= sum(name in of_rank.counts for of_rank in found)  # type: ignore[assignment]  # means
        if problems and not groups and required:
            names = ", ".join(reward.name for reward in self.rewards.rewards)
            raise InputError(
                f"{where}: every group has a completion that no reward applies to: {names} returned None or failed; "
                "at least one must return a number"
            )
        return Collected(groups, without, dict(counts))

    def _of(self, problems: Problems, sampling: SamplingParams, domain: int, step: int, where: str) -> Collected:
        """`collect` of this rank's problems."""
        if not problems:
            return Collected([], [], {})
        with self.timings.measured("encode"):
            prompt_ids = [self._encode(*item, where) for item in problems]
        identities = [SampleIdentity(self.seed, domain, step, group) for group, _ in problems]
        completions = self.generate(prompt_ids, [sampling] * len(problems), identities)
        assert [len(samples) for samples in completions] == [sampling.n] * len(problems)
        groups = [
            RolloutGroup(
                group=group,
                prompt=problem.prompt,
                rollouts=samples,
                sampling=sampling,
                columns=problem.columns,
            )
            for (group, problem), samples in zip(problems, completions, strict=True)
        ]
        origins = [problem.origin for _, problem in problems for _ in range(sampling.n)]
        where = f"{where}, groups {groups[0].group} to {groups[-1].group}"
        numbers = [group.group for group in groups for _ in group.rollouts]
        about = Scoring(where, origins, numbers, step if domain == TRAIN_DOMAIN else 0, self.timings.tell)
        with self.timings.measured("rewards"):
            return _score(groups, self.rewards, about)

    def _encode(self, group: int, problem: Problem, where: str) -> list[int]:
        where = f"{where} group {group}" + (f" ({problem.origin})" if problem.origin else "")
        try:
            ids = self.encode(problem.prompt)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        if not ids:
            raise InputError(f"{where}: the prompt has no tokens")
        if self.max_prompt_length is not None and len(ids) > self.max_prompt_length:
            why = f" ({self.limited_by})" if self.limited_by else ""
            most = f"at most {self.max_prompt_length} are allowed{why}"
            raise InputError(f"{where}: the prompt has {len(ids)} tokens; {most}")
        return ids


def _score(groups: list[RolloutGroup], rewards: RewardSet, about: Scoring) -> Collected:
    """Fill in every rollout's `rewards` and `reward`."""
    rows = [(group, rollout) for group in groups for rollout in group.rollouts]
    scores = rewards.score(
        [group.prompt for group, _ in rows],
        [rollout.text for _, rollout in rows],
        [rollout.token_ids for _, rollout in rows],
        [group.columns for group, _ in rows],
        about,
    )
    for name, column in rewards.logged.extra.items():
        for (_, rollout), value in zip(rows, column, strict=True):
            rollout.extra[name] = value
    without = set()
    for (group, rollout), values, total in zip(rows, scores.values, scores.totals, strict=True):
        rollout.rewards = values
        if total is None:
            without.add(group.group)
        else:
            rollout.reward = total
    split: tuple[list[RolloutGroup], list[RolloutGroup]] = [], []
    for group in groups:
        split[group.group in without].append(group)
    counts: dict[str, float] = {f"reward_errors/{name}": count for name, count in scores.errors.items()}
    counts |= {f"{LOGGED}{name}": value for name, value in rewards.logged.metrics.items()}
    counts["groups_without_reward"] = len(without)
    return Collected(*split, counts)
