"""`Play`, one round: the samples of several prompts, from start to end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

from ...errors import HistoryRewritten, InputError, PromptTooLong
from ...machine import fast_thread_switching
from ...types import SampleIdentity, SamplingParams, Segment, Trajectory
from ...user_functions import as_input_error, copy_nested, one_line
from ..calls import Answer, Calls, Failure
from ..environment import Branch, End, Environment, Next, Turn, by_name
from ..tokens import answering, said_by
from .answers import count, is_chat, is_tokens, unlike, wrong_end, wrong_reward, wrong_step
from .episode import Asked, Episode, Round, Sampler

Started = list[tuple[Episode, Any]]  # each with what `start` returned
_log = logging.getLogger("lockstep")

TURNS = 64  # the most finished turns handled between launches, if environments are instant


class Play:
    def __init__(self, by: Round) -> None:
        self._environment, self._tokens, self._sampler_of, self._limits, self._failures, self._timings, self._ended = by
        self._calls = Calls(by.limits.timeout, by.environment.instant)
        self._sampler: Sampler | None = None
        self._sampled: dict[tuple[int, int], Episode] = {}  # by request and sample: those in the generator
        self._done: deque[tuple[Episode, Trajectory]] = deque()  # turns that are sampled but not yet handled
        self.sampled_tokens = 0  # of all turns
        self._warned = False  # that branches do not fit together
        self._episodes: list[Episode] = []
        self._prompts: dict[int, Started] = {}  # by group, until all its samples have started

    def run(self, asked: Sequence[Asked], sampling: SamplingParams, identity: SampleIdentity) -> list[list[Episode]]:
        """Play the problems, and return the episodes of each: `sampling.n` samples, numbered from `identity.sample` on.
        Random numbers are keyed by `identity` with the group's number. `InputError`: a prompt is empty or refused.
        `LockstepError`: too many environments failed in a row."""
        self._asked, self._sampling, self._identity = {a.group: a for a in asked}, sampling, identity
        samples = range(identity.sample, identity.sample + sampling.n)
        with as_input_error(f"task.environment: {self._environment.__name__}() raised"):
            for a, sample in product(asked, samples):
                self._episodes.append(Episode(self._environment(), a.group, sample, self._tokens))
        groups = [self._episodes[i * sampling.n : (i + 1) * sampling.n] for i in range(len(asked))]
        self._of_prompt = {a.group: episodes for a, episodes in zip(asked, groups, strict=True)}
        try:
            for a, episodes in zip(asked, groups, strict=True):
                for episode in episodes:
                    self._calls.call(episode, episode.environment.start, a.row, a.seed)
            with nullcontext() if self._environment.instant else fast_thread_switching():
                self._go(sampling.n * len(asked))
        finally:
            self._calls.abandon()
            for request_id in {request_id for request_id, _ in self._sampled}:
                assert self._sampler is not None
                self._sampler.abort(request_id)
        return groups

    def _go(self, total: int) -> None:
        """Handle answers and sample until all `total` episodes have ended."""
        left = total
        while left:
            busy = bool(self._sampled or self._done)
            with nullcontext() if busy or self._environment.instant else self._timings.measure("environment"):
                answers = self._calls.answers(wait=not busy)
            self._answers(answers)
            if self._sampled:
                self._advance()
            for _ in range(min(len(self._done), TURNS) if self._environment.instant else len(self._done)):
                self._take(*self._done.popleft())
            left = len(self._sampled) + len(self._done) + len(self._calls)
            self._timings.report_progress(f"{total - left} of {total}")

    def close(self) -> None:
        """Close the environments."""
        for episode in self._episodes:
            try:
                episode.environment.close()
            except (Exception, SystemExit) as error:
                _log.warning("%s: close raised %s: %s", self._where(episode), type(error).__name__, one_line(error))

    def _where(self, episode: Episode) -> str:
        return f"{self._asked[episode.group].where} sample {episode.sample}"

    def _answers(self, answers: list[Answer]) -> None:
        ready: list[Started] = []
        for answer in answers:
            episode: Episode = answer.key  # type: ignore[assignment]
            if episode.trajectory is None:
                ready += self._started(episode, answer.value)
                continue
            episode.trajectory.segments[-1].wait_s += answer.seconds
            if isinstance(answer.value, Failure):
                self._fail(episode, answer.value)
            elif episode.cut:
                self._end(episode, answer.value)
            else:
                self._stepped(episode, episode.trajectory, answer.value)
        if ready:
            self._begin(ready)

    def _started(self, episode: Episode, value: Any) -> list[Started]:
        """Record a result of `start`, and return what can begin: the group, once all its samples have started."""
        try:
            value = copy_nested(value, "what start returned") if isinstance(value, list) else value
        except InputError as error:
            value = Failure(str(error))
        if not self._environment.begin_together:
            return [[(episode, value)]]
        prompts = self._prompts.setdefault(episode.group, [])
        prompts.append((episode, value))
        return [self._prompts.pop(episode.group)] if len(prompts) == self._sampling.n else []

    def _begin(self, ready: list[Started]) -> None:
        wanted: list[tuple[list[Episode], Any]] = []  # episodes that begin alike, and their prompt
        for started in ready:
            episodes, given = [one for one, _ in started], [value for _, value in started]
            failure = next((value for value in given if isinstance(value, Failure)), None)
            failure = failure or unlike(given, self._environment.begin_alike)
            if failure is not None:
                for episode in episodes:
                    self._fail(episode, failure)
                continue
            alike = all(other == given[0] for other in given)
            wanted += [(episodes, given[0])] if alike else [([one], value) for one, value in started]
        with self._timings.measure("encode"):
            begun = [(some, self._prompt(some, value)) for some, value in wanted]
        if self._sampler is None and begun:
            kinds = [replace(self._sampling, n=len(episodes)) for episodes, _ in begun]
            self._sampler = self._sampler_of([ids for _, ids in begun], kinds)
        for episodes, prompt_ids in begun:
            self._request(episodes, prompt_ids, replace(self._sampling, n=len(episodes)))

    def _prompt(self, episodes: list[Episode], given: Any) -> list[int]:
        """The tokens of the prompt of these episodes."""
        asked, tokens = self._asked[episodes[0].group], self._tokens
        tokenized, chat = is_tokens(given), is_chat(given)
        try:
            if tokens.with_tools is not None and (tools := self._tools(episodes[0].environment)):
                tokens = tokens.with_tools(tools)
            ids = given if tokenized else tokens.prompt(given)
            text = tokens.text(given) if tokenized else given
        except InputError as error:
            raise InputError(f"{asked.where}: {error}") from error
        except OverflowError as error:
            raise InputError(f"{asked.where}: start returned token ids that no model has: {one_line(given)}") from error
        if not ids:
            raise InputError(f"{asked.where}: the prompt has no tokens")
        most = self._limits.prompt_tokens
        if most is not None and len(ids) > most:
            why = f" ({self._limits.prompt_reason})" if self._limits.prompt_reason else ""
            raise InputError(f"{asked.where}: the prompt has {len(ids)} tokens; at most {most} are allowed{why}")
        for episode in episodes:
            episode.tokens, episode.prompt = tokens, text
            episode.messages = list(given) if chat else None
        return ids

    def _tools(self, environment: Environment) -> Sequence[Mapping[str, Any]]:
        kind = f"task.environment: {self._environment.__name__}.tools"
        with as_input_error(f"{kind} raised"):
            tools = environment.tools
        if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
            raise InputError(f"{kind} is {one_line(tools, repr)}; it must be a property that lists JSON schemas")
        return tools

    def _until(self, environment: Environment, sampling: SamplingParams) -> SamplingParams:
        """How the next turn of an environment is sampled. Raises `InputError` if it changes what it may not."""
        kind = f"task.environment: {self._environment.__name__}.until"
        with as_input_error(f"{kind} raised"):
            found = environment.until(sampling)
        most, stops = sampling.max_completion_length, sampling.stop_token_ids
        if (
            not isinstance(found, SamplingParams)
            or replace(found, max_completion_length=most, stop_token_ids=stops) != sampling
            or not (0 < found.max_completion_length <= most and set(stops) <= set(found.stop_token_ids))
        ):
            given = "it may lower max_completion_length and add stop_token_ids to what it is given"
            raise InputError(f"{kind} returned {one_line(found, repr)}; {given}")
        return found

    def _request(self, episodes: list[Episode], token_ids: list[int], sampling: SamplingParams) -> None:
        assert self._sampler is not None
        first = min(episode.sample for episode in episodes)
        if len(episodes) == 1:
            sampling = self._until(episodes[0].environment, sampling)
        trajectory = episodes[0].trajectory
        branch = sum(segment.begins_branch for segment in trajectory.segments) if trajectory is not None else 0
        domain = self._identity.domain + (branch << 8)  # positions repeat in a branch, but random keys must not
        identity = replace(self._identity, group=episodes[0].group, sample=first, domain=domain)
        request_id = self._sampler.add_request(token_ids, sampling, identity)
        self._sampled |= {(request_id, episode.sample): episode for episode in episodes}

    def _advance(self) -> None:
        assert self._sampler is not None
        for grown in self._sampler.advance():
            episode = self._sampled.get((grown.request_id, grown.identity.sample))  # None: not of this round
            if episode is not None and grown.completion is not None:
                del self._sampled[grown.request_id, grown.identity.sample]
                self._done.append((episode, grown.completion))

    def _take(self, episode: Episode, made: Trajectory) -> None:
        """Add a sampled turn to its trajectory, and ask the environment what follows."""
        turn = made.segments[-1]
        self.sampled_tokens += len(turn.token_ids)
        if episode.trajectory is None:
            episode.trajectory = made
        else:
            segments, routes = episode.trajectory.segments, made.prompt.route_digests
            if routes is not None and segments[-1].begins_branch:
                segments[-1].route_digests = routes
            elif routes is not None:
                known = len(routes) - len(segments[-1].token_ids)
                segments[-1].route_digests, segments[-2].last_route = routes[known:], routes[known - 1]
            segments.append(turn)
            episode.trajectory.finish_reason = made.finish_reason
        if made.finish_reason == "length" and len(turn.token_ids) < self._sampling.max_completion_length:
            episode.trajectory.finish_reason = "truncated"
        episode.turns += 1
        said = episode.tokens.said(turn)
        if episode.messages is not None:
            episode.messages.append(said.in_chat)
        last = episode.trajectory.cut_off or episode.turns >= self._limits.turns
        reason = episode.trajectory.finish_reason
        told = Turn(turn.text, list(turn.token_ids), reason, said.message, said.malformed, last, turn)
        self._calls.call(episode, episode.environment.step, told)

    def _stepped(self, episode: Episode, trajectory: Trajectory, given: Any) -> None:
        if isinstance(given, Next):
            if wrong := wrong_reward(given.reward):
                self._fail(episode, Failure(wrong))
                return
            trajectory.segments[-1].rewards, given = by_name(given.reward), given.given
            episode.rewarded = True
        if isinstance(given, End):
            self._end(episode, given)
        elif wrong := wrong_step(given):
            self._fail(episode, Failure(wrong))
        elif trajectory.cut_off:
            self._cut(episode)
        elif episode.turns >= self._limits.turns:
            self._truncate(episode, trajectory)
        else:
            self._go_on(episode, trajectory, given)

    def _go_on(self, episode: Episode, trajectory: Trajectory, given: Any) -> None:
        try:
            trajectory.segments.append(self._given(episode, given))
        except PromptTooLong:
            self._truncate(episode, trajectory)
            return
        except InputError as error:  # for example, the template refuses the messages
            self._fail(episode, Failure(f"what step returned cannot be given: {error}"))
            return
        if (room := self._room(episode, trajectory)) < 1:
            trajectory.segments.pop()
            self._truncate(episode, trajectory)
            return
        sampling = replace(self._sampling, n=1, max_completion_length=min(room, self._sampling.max_completion_length))
        try:
            self._request([episode], trajectory.context, sampling)
        except InputError as error:  # for example, for token ids that the model does not have
            trajectory.segments.pop()
            self._fail(episode, Failure(f"nothing can be sampled after what step returned: {error}"))

    def _room(self, episode: Episode, trajectory: Trajectory) -> int:
        """The number of tokens that may still be sampled."""
        context, branches = len(trajectory.context), 1 + sum(segment.begins_branch for segment in trajectory.segments)
        room, most = self._sampling.max_completion_length, self._limits.response_tokens
        if most is not None:
            room = most - max(context - len(trajectory.prompt.token_ids), len(trajectory.token_ids))
        if self._limits.context is not None:
            room = min(room, self._limits.context - context)
        if branches == 1 or self._limits.packed_tokens is None:
            return room
        tokens = sum(len(segment.token_ids) for segment in trajectory.segments)
        left = self._limits.packed_tokens + branches - tokens  # a branch's last token needs no row
        if left < 1 <= room and not self._warned:
            self._warned = True
            _log.warning(
                "%s: its %d branches have %d tokens together, and the loss has sums over whole sequences, for which "
                "trainer.max_tokens_per_micro_batch, %d, must hold them all: it ends as truncated, as others may",
                *(self._where(episode), branches, tokens, self._limits.packed_tokens),
            )
        return min(room, left)

    def _given(self, episode: Episode, given: Any) -> Segment:
        """The segment of what was given; it begins a branch if the trajectory cannot continue from what was sampled."""
        if isinstance(given, Branch):
            return self._anew(episode, given.given)
        try:
            return self._following(episode, given)
        except HistoryRewritten as past:
            assert episode.messages is not None
            given = answering(episode.messages[-1], copy_nested(given, "it"))
            segment = self._anew(episode, [*episode.messages, *given])
            episode.messages = [*past.messages, *given]
            return segment

    def _following(self, episode: Episode, given: Any) -> Segment:
        """The segment of what was given after a turn. Sampled text is never encoded again: of a chat, only the tokens
        after the answer are taken."""
        if is_tokens(given):
            return Segment(list(given))
        assert episode.trajectory is not None
        if isinstance(given, str):
            return Segment(episode.tokens.following(episode.messages, given), text=given)
        if episode.messages is not None:
            given = answering(episode.messages[-1], copy_nested(given, "it"))
        ids = episode.tokens.following(episode.messages, given)
        assert episode.messages is not None
        episode.messages += given
        last = episode.trajectory.segments[-1].token_ids[-1]
        ended = episode.trajectory.finish_reason == "stop" and ids[:1] == [last]  # the template's end of an answer
        return Segment(ids[ended:], text=said_by(given))

    def _anew(self, episode: Episode, given: Any) -> Segment:
        """The segment that begins a branch."""
        episode.messages = copy_nested(given, "it") if is_chat(given) else None
        if is_tokens(given):
            return Segment(list(given), begins_branch=True)
        text = given if isinstance(given, str) else said_by(given)
        return Segment(episode.tokens.prompt(given), text=text, begins_branch=True)

    def _truncate(self, episode: Episode, trajectory: Trajectory) -> None:
        trajectory.finish_reason = "truncated"
        self._cut(episode)

    def _cut(self, episode: Episode) -> None:
        episode.cut, self._failures.in_a_row = True, 0
        self._calls.call(episode, episode.environment.cut)

    def _end(self, episode: Episode, end: Any) -> None:
        if wrong := wrong_end(end):
            self._fail(episode, Failure(wrong))
            return
        assert episode.trajectory is not None
        if end.reward is not None or episode.rewarded:
            count(end.reward, episode.trajectory)
        episode.trajectory.environment = episode.environment.variant
        episode.end = end
        self._failures.in_a_row = 0
        self._over(episode)

    def _fail(self, episode: Episode, failure: Failure) -> None:
        episode.failure = failure
        self._failures.add(self._where(episode), failure)
        self._over(episode)

    def _over(self, episode: Episode) -> None:
        episodes = self._of_prompt[episode.group]
        if self._ended is not None and all(other.end is not None or other.failure is not None for other in episodes):
            self._ended(episodes)
