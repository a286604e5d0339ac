"""From problems to scored groups: play problems in their environment, and score the trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from ..distributed import ONE_PROCESS, World
from ..errors import InputError, LockstepError
from ..timings import Timings
from ..types import TRAIN_DOMAIN, RolloutGroup, SampleIdentity, SamplingParams, Trajectory
from .base import Problem, draw
from .codec import ChatCodec
from .environment import UNNAMED_REWARD, Environment, SingleTurn
from .episodes import Episode, EpisodeContext, EpisodeRunner, Failures, GroupRequest, Limits, MakeSampler
from .ranks.leader import broadcast_calls, repeat_calls
from .ranks.rollouts import outline
from .rewards.calls import Logged
from .rewards.reward_set import Completions, RewardSet, Scoring

LOGGED_PREFIX = "logged/"  # of metrics that reward functions logged

NumberedProblems = Sequence[tuple[int, Problem]]  # each with its group's number


class Collected(NamedTuple):
    """What was sampled and scored.

    Attributes:
        groups: groups whose completions all have a reward.
        without_reward: the other groups.
        counts: metrics: `groups_without_reward`, `reward_errors/<fn>`, `environment/errors` if there are any, and what
            reward functions logged.
        scored: the completions that reward functions were called for.
    """

    groups: list[RolloutGroup]
    without_reward: list[RolloutGroup]
    counts: dict[str, float]
    scored: int = 0

    def outline(self) -> Collected:
        """What other ranks need of it."""
        return self._replace(groups=[*map(outline, self.groups)], without_reward=[*map(outline, self.without_reward)])


def merge_counts(parts: Sequence[Collected]) -> dict[str, float]:
    """The sums of the parts' counts; for what reward functions logged, the mean over the completions they scored."""
    counts: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part.counts):
        values = [(part.counts[name], part.scored) for part in parts if name in part.counts]
        if len(values) > 1 and name.startswith(LOGGED_PREFIX):
            counts[name] = sum(value * scored for value, scored in values) / sum(scored for _, scored in values)
        else:
            counts[name] = sum(value for value, _ in values)
    return counts


@dataclass(frozen=True)
class Collector:
    """Plays problems in their environment and scores the trajectories, on all ranks of `world` together. `seed` is part
    of the random key (`SampleIdentity`). With `needs_rewards`, an `End` without a reward is refused if there are no
    reward functions."""

    codec: ChatCodec
    make_sampler: MakeSampler
    rewards: RewardSet
    seed: int
    environment: type[Environment] = SingleTurn
    limits: Limits = Limits()
    failures: Failures = field(default_factory=Failures)
    timings: Timings = field(default_factory=Timings)
    world: World = ONE_PROCESS
    needs_rewards: bool = False

    def collect(
        self, problems: NumberedProblems, sampling: SamplingParams, domain: int, step: int, required: bool = True
    ) -> Collected:
        """Sample `sampling.n` completions of each (group, problem) and score them. Each set of ranks that generate
        together takes a share of the problems, which the first of them plays; at the end, every rank has all groups, of
        other ranks' an `outline`. Groups with a completion that no reward applies to, and samples whose environment
        failed, are returned as `without_reward`. `InputError`: a prompt is empty or too long, no group has a reward
        although one is `required`, or scoring fails."""
        where = f"step {step + 1}" if domain == TRAIN_DOMAIN else "validation"
        own = self.world.generator_mesh.fsdp.local_items(problems)
        shared = self.world.gather_results(
            lambda: (self._collect_own(own, sampling, domain, step, where), self.failures.messages),
            lambda of_rank: (of_rank[0].outline(), of_rank[1]),
        )
        collected = [of_rank for of_rank, _ in shared]
        is_first = self.world.rank == 0
        self.failures.messages = [message for _, messages in shared for message in messages] if is_first else []
        for rank, of_rank in enumerate(collected):
            for group in of_rank.groups + of_rank.without_reward:
                group.sampled_by = rank
        groups = sorted((g for of_rank in collected for g in of_rank.groups), key=attrgetter("group"))
        without_reward = sorted((g for of_rank in collected for g in of_rank.without_reward), key=attrgetter("group"))
        counts = merge_counts(collected)
        if self.environment is not SingleTurn:
            _unify_reward_names(groups, self.rewards.names)
        if problems and not groups and required:
            raise self.world.report_on_first(InputError(self._no_reward_message(where, counts)))
        return Collected(groups, without_reward, counts, sum(part.scored for part in collected))

    def _collect_own(
        self, problems: NumberedProblems, sampling: SamplingParams, domain: int, step: int, where: str
    ) -> Collected:
        """`collect` for this rank's problems; of ranks that generate together, only the first returns groups."""
        nothing = Collected([], [], {})
        if not problems:
            return nothing
        if not self.world.leads_group:
            repeat_calls(self.world, self.make_sampler([], []))
            return nothing
        requests = [self._request(*item, domain, step, where) for item in problems]
        is_single_turn = self.limits.turns == 1 and self.environment.plays is None
        total_samples = len(problems) * sampling.n if is_single_turn else None
        scored_step = step if domain == TRAIN_DOMAIN else 0
        scoring = Scoring(where, step=scored_step, tell=self.timings.report_progress)
        on_group_end = None
        if self.rewards.in_workers:
            problems_by_group = {request.group: request.problem for request in requests}
            on_group_end = partial(self._begin_scoring, problems_by_group, sampling.n, scoring)
        with ExitStack() as stack:
            with broadcast_calls(self.world, self.make_sampler, total_samples) as make_sampler:
                shared = self.limits, self.failures, self.timings, on_group_end
                context = EpisodeContext(self.environment, self.codec, make_sampler, *shared)
                stack.callback(self.rewards.abandon)
                runner = stack.enter_context(closing((self.environment.plays or EpisodeRunner)(context)))
                played = runner.run(requests, sampling, SampleIdentity(self.seed, domain, step, 0))
            return self._score_played(played, runner.sampled_tokens, requests, sampling, scoring, where)

    def _score_played(
        self,
        played: list[list[Episode]],
        sampled_tokens: int,
        requests: list[GroupRequest],
        sampling: SamplingParams,
        scoring: Scoring,
        where: str,
    ) -> Collected:
        groups: list[RolloutGroup] = []
        failed: list[RolloutGroup] = []
        for request, episodes in zip(requests, played, strict=True):
            usable = _usable(episodes, sampling.n)
            others = [episode for episode in episodes if episode not in usable]
            for into, some in (groups, usable), (failed, others):
                prompts = [e.prompt for e in some if e.trajectory is not None]
                if rollouts := [e.trajectory for e in some if e.trajectory is not None]:
                    if self.environment is not SingleTurn:
                        self._describe_other_prompts(rollouts)
                    into.append(RolloutGroup(rollouts, sampling, request.group, prompts[0], request.problem.columns))
        kept = sum(r.length for group in groups + failed for r in group.rollouts)
        if kept != sampled_tokens:  # some would not be compared
            raise LockstepError(f"{where}: {sampled_tokens} tokens were sampled, and trajectories have {kept}")
        if self.needs_rewards and not self.rewards.rewards and any(not r.rewards for g in groups for r in g.rollouts):
            raise InputError(
                f"{where}: the environment ended with End(), which leaves the reward to reward functions, and there "
                "are none; give End(REWARD), or name one: --reward MODULE:FUNCTION"
            )
        all_episodes = [episode for episodes in played for episode in episodes]
        with self.timings.measure("rewards"):
            scored = _score(groups, self.rewards, all_episodes, requests, scoring)
        counts, failed_in = scored.counts, [e.environment.variant for e in all_episodes if e.failure is not None]
        if failed_in:
            counts["environment/errors"] = len(failed_in)
        counts |= {f"environment/{name}/errors": failed_in.count(name) for name in failed_in if name}
        without_reward = [replace(group, without_reward=True) for group in scored.without_reward + failed]
        return Collected(scored.groups, without_reward, counts, scored.scored)

    def _describe_other_prompts(self, rollouts: list[Trajectory]) -> None:
        """Set the text of prompts that are not the first rollout's, which is recorded for the group."""
        for prompt in (rollout.prompt for rollout in rollouts):
            if prompt.token_ids != rollouts[0].prompt.token_ids:
                prompt.text = self.codec.decode(prompt.token_ids)

    def _begin_scoring(
        self, problems: Mapping[int, Problem], samples: int, scoring: Scoring, episodes: list[Episode]
    ) -> None:
        """Begin to score a prompt's episodes in worker processes, while other prompts are still being played."""
        group, others = episodes[0].group, problems.values()
        own = problems[group].columns.items()
        columns = {name: value for name, value in own if all(name in other.columns for other in others)}
        rows = [(columns, episode) for episode in _usable(episodes, samples) if _needs_functions(episode)]
        self.rewards.begin(_completions(rows), scoring._replace(groups=[group]))

    def _request(self, group: int, problem: Problem, domain: int, step: int, where: str) -> GroupRequest:
        where = f"{where} group {group}" + (f" ({problem.origin})" if problem.origin else "")
        return GroupRequest(group, problem, draw("environment", self.seed, domain, step, group), where)

    def _no_reward_message(self, where: str, counts: Mapping[str, float]) -> str:
        if errors := counts.get("environment/errors"):
            return f"{where}: the environment failed for {errors:g} trajectories, and no group is left; see the log"
        names = ", ".join(reward.name for reward in self.rewards.rewards)
        return (
            f"{where}: every group has a completion that no reward applies to: {names} returned None or failed; "
            "at least one must return a number"
        )


def _unify_reward_names(groups: Sequence[RolloutGroup], functions: Sequence[str]) -> None:
    """Give trajectories that their environment rewarded the same reward names: a name that only some have counts 0 for
    the others, as rewards are summed. Functions' rewards come first, and a number without a name last."""
    rewarded = [r for group in groups for r in group.rollouts if r.rewards.keys() - {*functions}]
    names_of: dict[str, dict[str, None]] = {}  # by environment; dicts, for their order
    for r in sorted(rewarded, key=lambda r: -len(r.rewards)):  # in the order of those with the most names
        own = (name for name in r.rewards if name not in functions)
        names_of.setdefault(r.environment, {}).update(dict.fromkeys(own))
    for r in rewarded:
        names = sorted(names_of[r.environment], key=lambda name: name == UNNAMED_REWARD)
        of_functions = {name: r.rewards[name] for name in functions if name in r.rewards}
        r.rewards = of_functions | {name: r.rewards.get(name, 0.0) for name in names}


def _usable(episodes: Sequence[Episode], samples: int) -> list[Episode]:
    """A prompt's episodes that ended; none if only one of several samples did, as it could not be compared."""
    usable = [episode for episode in episodes if episode.end is not None]
    return usable if len(usable) >= min(2, samples) else []


def _needs_functions(episode: Episode) -> bool:
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
    groups: list[RolloutGroup],
    rewards: RewardSet,
    episodes: Sequence[Episode],
    requests: Sequence[GroupRequest],
    scoring: Scoring,
) -> Collected:
    """Fill in `rewards` and `reward` of every rollout whose environment left them, or some of them, to functions."""
    episode_of = {id(episode.trajectory): episode for episode in episodes}
    all_rows = [(group, rollout, episode_of[id(rollout)]) for group in groups for rollout in group.rollouts]
    rows = [row for row in all_rows if _needs_functions(row[2])]
    numbers = [group.group for group, _, _ in rows]
    origins = {request.group: request.problem.origin for request in requests}
    scores = rewards.score(
        _completions([(group.columns, episode) for group, _, episode in rows]),
        scoring._replace(
            origins=[origins[number] for number in numbers],
            groups=numbers,
            environments=[episode.environment.exposed for _, _, episode in rows],
        ),
    )
    logged = rewards.logged if rows else Logged(0)
    for name, column in logged.extra.items():
        for (_, rollout, _), value in zip(rows, column, strict=True):
            rollout.extra[name] = value
    unscored: set[int] = set()
    for (group, rollout, _), values, total, unknown in zip(
        rows, scores.values, scores.totals, scores.unknown, strict=True
    ):
        given = rollout.rewards
        if twice := values.keys() & given.keys():
            raise InputError(
                f"{scoring.where}: the environment and a reward function both name a reward {min(twice)!r}; rename one"
            )
        rollout.rewards = {**values, **given}
        if unknown or (total is None and not given):
            unscored.add(group.group)
        else:
            rollout.reward += total or 0.0
    counts: dict[str, float] = {f"reward_errors/{name}": count for name, count in scores.errors.items()}
    counts |= {f"{LOGGED_PREFIX}{name}": value for name, value in logged.metrics.items()}
    counts["groups_without_reward"] = len(unscored)
    with_reward = [group for group in groups if group.group not in unscored]
    without_reward = [group for group in groups if group.group in unscored]
    return Collected(with_reward, without_reward, counts, len(rows))
