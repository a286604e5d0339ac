"""From problems to scored groups: play problems in their environment, and score the trajectories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from ..distributed import ONE_PROCESS, World
from ..errors import InputError, LockstepError
from ..timings import Timings
from ..types import TRAIN_DOMAIN, RolloutGroup, SampleIdentity, SamplingParams
from .base import Problem, draw
from .environment import PLAIN, Environment, SingleTurn
from .episodes import Asked, Episode, Failures, Limits, Play, Round, Sampler
from .ranks.led import follow, leading
from .ranks.rollouts import outline
from .rewards.calls import Logged
from .rewards.reward_set import Completions, RewardSet, Scoring
from .tokens import Tokens

LOGGED = "logged/"  # prefix of metrics that reward functions logged

Problems = Sequence[tuple[int, Problem]]  # each with its group's number


class Collected(NamedTuple):
    """What was sampled and scored.

    Attributes:
        groups: groups whose completions all have a reward.
        without_reward: the other groups.
        counts: metrics: `groups_without_reward`, `reward_errors/<fn>`, `environment/errors` if there are any, and what
            reward functions logged.
    """

    groups: list[RolloutGroup]
    without_reward: list[RolloutGroup]
    counts: dict[str, float]

    def outline(self) -> Collected:
        """What other ranks need of it."""
        return Collected(list(map(outline, self.groups)), list(map(outline, self.without_reward)), self.counts)


def added(parts: Sequence[Collected]) -> dict[str, float]:
    """The sums of the parts' counts; for what reward functions logged, the mean over trajectories."""
    sizes = [sum(len(group.rollouts) for group in part.groups + part.without_reward) for part in parts]
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part.counts):
        told = [(part.counts[name], size) for part, size in zip(parts, sizes, strict=True) if name in part.counts]
        found[name] = sum(value for value, _ in told)
        if len(told) > 1 and name.startswith(LOGGED):
            found[name] = sum(value * size for value, size in told) / sum(size for _, size in told)
    return found


@dataclass(frozen=True)
class Collector:
    """Plays problems in their environment and scores the trajectories, on all ranks of `world` together. `seed` is part
    of the random key (`SampleIdentity`). With `needs_rewards`, an `End` without a reward is refused if there are no
    reward functions."""

    tokens: Tokens
    sampler: Callable[[list[list[int]], list[SamplingParams]], Sampler]
    rewards: RewardSet
    seed: int
    environment: type[Environment] = SingleTurn
    limits: Limits = Limits()
    failures: Failures = field(default_factory=Failures)
    timings: Timings = field(default_factory=Timings)
    world: World = ONE_PROCESS
    needs_rewards: bool = False

    def collect(
        self, problems: Problems, sampling: SamplingParams, domain: int, step: int, required: bool = True
    ) -> Collected:
        """Sample `sampling.n` completions of each (group, problem) and score them. Each set of ranks that generate
        together takes a share of the problems, which the first of them plays; at the end, every rank has all groups, of
        other ranks' an `outline`. Groups with a completion that no reward applies to, and samples whose environment
        failed, are returned as `without_reward`. `InputError`: a prompt is empty or too long, no group has a reward
        although one is `required`, or scoring fails."""
        where = f"step {step + 1}" if domain == TRAIN_DOMAIN else "validation"
        own = self.world.generator_mesh.fsdp.local_items(problems)
        shared = self.world.gather_results(
            lambda: (self._of(own, sampling, domain, step, where), self.failures.told),
            lambda of_rank: (of_rank[0].outline(), of_rank[1]),
        )
        found = [of_rank for of_rank, _ in shared]
        self.failures.told = [told for _, of_rank in shared for told in of_rank] if self.world.rank == 0 else []
        for rank, of_rank in enumerate(found):
            for group in of_rank.groups + of_rank.without_reward:
                group.sampled_by = rank
        groups = sorted((group for of_rank in found for group in of_rank.groups), key=attrgetter("group"))
        without = sorted((group for of_rank in found for group in of_rank.without_reward), key=attrgetter("group"))
        counts = added(found)
        if self.environment is not SingleTurn:
            _name_alike(groups, self.rewards.names)
        if problems and not groups and required:
            raise self.world.report_on_first(InputError(self._nothing_scored(where, counts)))
        return Collected(groups, without, counts)

    def _of(self, problems: Problems, sampling: SamplingParams, domain: int, step: int, where: str) -> Collected:
        """`collect` for this rank's problems; of ranks that generate together, only the first returns groups."""
        nothing = Collected([], [], {})
        if not problems:
            return nothing
        if not self.world.leads_group:
            follow(self.world, self.sampler([], []))
            return nothing
        asked = [self._asked(*item, domain, step, where) for item in problems]
        known = self.limits.turns == 1 and self.environment.plays is None
        samples = len(problems) * sampling.n if known else None
        about = Scoring(
            f"{where}, groups {asked[0].group} to {asked[-1].group}",
            step=step if domain == TRAIN_DOMAIN else 0,
            tell=self.timings.report_progress,
        )
        with ExitStack() as stack:
            with leading(self.world, self.sampler, samples) as sampler:
                by = Round(self.environment, self.tokens, sampler, self.limits, self.failures, self.timings)
                if self.rewards.in_workers:
                    problems_of = {a.group: a.problem for a in asked}
                    by = by._replace(ended=partial(self._begin_scoring, problems_of, sampling.n, about))
                stack.callback(self.rewards.abandon)
                play = stack.enter_context(closing((self.environment.plays or Play)(by)))
                played = play.run(asked, sampling, SampleIdentity(self.seed, domain, step, 0))
            return self._played(played, play.sampled_tokens, asked, sampling, about, where)

    def _played(
        self,
        played: list[list[Episode]],
        sampled_tokens: int,
        asked: list[Asked],
        sampling: SamplingParams,
        about: Scoring,
        where: str,
    ) -> Collected:
        groups: list[RolloutGroup] = []
        failed: list[RolloutGroup] = []
        for a, episodes in zip(asked, played, strict=True):
            well = _well(episodes, sampling.n)
            for into, some in (groups, well), (failed, [episode for episode in episodes if episode not in well]):
                if rollouts := [e.trajectory for e in some if e.trajectory is not None]:
                    into.append(RolloutGroup(rollouts, sampling, a.group, some[0].prompt, a.problem.columns))
        kept = sum(r.length for group in groups + failed for r in group.rollouts)
        if kept != sampled_tokens:  # some would not be compared
            raise LockstepError(f"{where}: {sampled_tokens} tokens were sampled, and trajectories have {kept}")
        if self.needs_rewards and not self.rewards.rewards and any(not r.rewards for g in groups for r in g.rollouts):
            raise InputError(
                f"{where}: the environment ended with End(), which leaves the reward to reward functions, and there "
                "are none; give End(REWARD), or name one: --reward MODULE:FUNCTION"
            )
        with self.timings.measure("rewards"):
            scored = _score(groups, self.rewards, [e for episodes in played for e in episodes], asked, about)
        failed_in = [e.environment.variant for episodes in played for e in episodes if e.failure is not None]
        counts = scored.counts | ({"environment/errors": len(failed_in)} if failed_in else {})
        counts |= {f"environment/{name}/errors": failed_in.count(name) for name in failed_in if name}
        without = [replace(group, without_reward=True) for group in scored.without_reward + failed]
        return Collected(scored.groups, without, counts)

    def _begin_scoring(
        self, problems: Mapping[int, Problem], samples: int, about: Scoring, episodes: list[Episode]
    ) -> None:
        """Begin to score a prompt's episodes in worker processes, while other prompts are still being played."""
        group, others = episodes[0].group, problems.values()
        own = problems[group].columns.items()
        columns = {name: value for name, value in own if all(name in other.columns for other in others)}
        rows = [(columns, episode) for episode in _well(episodes, samples) if _for_functions(episode)]
        self.rewards.begin(_completions(rows), about._replace(groups=[group]))

    def _asked(self, group: int, problem: Problem, domain: int, step: int, where: str) -> Asked:
        where = f"{where} group {group}" + (f" ({problem.origin})" if problem.origin else "")
        return Asked(group, problem, draw("environment", self.seed, domain, step, group), where)

    def _nothing_scored(self, where: str, counts: Mapping[str, float]) -> str:
        if errors := counts.get("environment/errors"):
            return f"{where}: the environment failed for {errors:g} trajectories, and no group is left; see the log"
        names = ", ".join(reward.name for reward in self.rewards.rewards)
        return (
            f"{where}: every group has a completion that no reward applies to: {names} returned None or failed; "
            "at least one must return a number"
        )


def _name_alike(groups: Sequence[RolloutGroup], functions: Sequence[str]) -> None:
    """Give trajectories that their environment rewarded the same reward names: a name that only some have counts 0 for
    the others, as rewards are summed. Functions' rewards come first, and a number without a name last."""
    rewarded = [r for group in groups for r in group.rollouts if r.rewards.keys() - {*functions}]
    of_environment = dict[str, dict[str, None]]()
    for r in sorted(rewarded, key=lambda r: -len(r.rewards)):  # in the order of those with the most names
        own = (name for name in r.rewards if name not in functions)
        of_environment.setdefault(r.environment, {}).update(dict.fromkeys(own))
    for r in rewarded:
        named = sorted(of_environment[r.environment], key=PLAIN.__eq__)
        of_functions = {name: r.rewards[name] for name in functions if name in r.rewards}
        r.rewards = of_functions | {name: r.rewards.get(name, 0.0) for name in named}


def _well(episodes: Sequence[Episode], samples: int) -> list[Episode]:
    """A prompt's episodes that ended; none if only one of several samples did, as it could not be compared."""
    well = [episode for episode in episodes if episode.end is not None]
    return well if len(well) >= min(2, samples) else []


def _for_functions(episode: Episode) -> bool:
    """Whether the environment left the reward, or some of it, to reward functions."""
    end = episode.end
    return end is not None and (end.functions or end.reward in (None, {}))


def _completions(rows: Sequence[tuple[dict[str, Any], Episode]]) -> Completions:
    """What reward functions score, from episodes with the columns of their data rows."""
    ended = [(columns, e, e.end, e.trajectory) for columns, e in rows if e.end is not None and e.trajectory is not None]
    return Completions(
        [episode.prompt for _, episode, _, _ in ended],
        [end.completion or trajectory.text for _, _, end, trajectory in ended],
        [trajectory.token_ids for *_, trajectory in ended],
        [{**columns, **end.columns} for columns, _, end, _ in ended],
    )


def _score(
    groups: list[RolloutGroup], rewards: RewardSet, played: Sequence[Episode], asked: Sequence[Asked], about: Scoring
) -> Collected:
    """Fill in `rewards` and `reward` of every rollout whose environment left them, or some of them, to functions."""
    of = {id(episode.trajectory): episode for episode in played}
    all_rows = [(group, rollout) for group in groups for rollout in group.rollouts]
    rows = [(group, rollout) for group, rollout in all_rows if _for_functions(of[id(rollout)])]
    numbers, origins = [group.group for group, _ in rows], {a.group: a.problem.origin for a in asked}
    scores = rewards.score(
        _completions([(group.columns, of[id(rollout)]) for group, rollout in rows]),
        about._replace(
            origins=[origins[number] for number in numbers],
            groups=numbers,
            environments=[of[id(rollout)].environment.exposed for _, rollout in rows],
        ),
    )
    logged = rewards.logged if rows else Logged(0)
    for name, column in logged.extra.items():
        for (_, rollout), value in zip(rows, column, strict=True):
            rollout.extra[name] = value
    without = set()
    found = zip(rows, scores.values, scores.totals, scores.unknown, strict=True)
    for (group, rollout), values, total, unknown in found:
        given = rollout.rewards
        if twice := values.keys() & given.keys():
            raise InputError(
                f"{about.where}: the environment and a reward function both name a reward {min(twice)!r}; rename one"
            )
        rollout.rewards = {**values, **given}
        if unknown or (total is None and not given):
            without.add(group.group)
        else:
            rollout.reward += total or 0.0
    split: tuple[list[RolloutGroup], list[RolloutGroup]] = [], []
    for group in groups:
        split[group.group in without].append(group)
    counts: dict[str, float] = {f"reward_errors/{name}": count for name, count in scores.errors.items()}
    counts |= {f"{LOGGED}{name}": value for name, value in logged.metrics.items()}
    counts["groups_without_reward"] = len(without)
    return Collected(*split, counts)
