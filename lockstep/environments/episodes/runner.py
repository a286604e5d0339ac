"""`EpisodeRunner`, one round: the samples of several prompts, from start to end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from ...errors import HistoryRewritten, InputError, PromptTooLong, refuse
from ...machine import fast_thread_switching
from ...types import SampleIdentity, SamplingParams, Segment, Trajectory
from ...user_functions import as_input_error, copy_nested, one_line
from ..calls import Answer, ConcurrentCalls, Failure
from ..codec import messages_text, with_call_ids
from ..environment import Branch, End, Environment, Next, Turn, named_rewards
from .answers import end_error, is_chat, is_tokens, prompt_failure, reward_error, set_rewards, step_error
from .episode import Episode, EpisodeContext, GroupRequest, Sampler

Started = list[tuple[Episode, Any]]  # each with what `start` returned
_log = logging.getLogger("lockstep")

MAX_TURNS_BETWEEN_LAUNCHES = 64  # finished turns handled between launches, if environments are instant


class EpisodeRunner:
    def __init__(self, context: EpisodeContext) -> None:
        self._environment, self._codec, self._limits = context.environment, context.codec, context.limits
        self._failures, self._timings = context.failures, context.timings
        self._make_sampler, self._on_group_end = context.make_sampler, context.on_group_end
        self._calls = ConcurrentCalls(self._limits.timeout, self._environment.instant)
        self._sampler: Sampler | None = None
        self._sampling_episodes: dict[tuple[int, int], Episode] = {}  # by request and sample: those in the generator
        self._sampled_turns: deque[tuple[Episode, Trajectory]] = deque()  # not yet handled
        self.sampled_tokens = 0  # of all turns
        self._warned_of_branches = False  # that they do not fit together
        self._episodes: list[Episode] = []
        self._started: dict[int, Started] = {}  # by group, until all its samples have started

    def run(
        self, requests: Sequence[GroupRequest], sampling: SamplingParams, identity: SampleIdentity
    ) -> list[list[Episode]]:
        """Play the problems, and return the episodes of each: `sampling.n` samples, numbered from `identity.sample` on.
        Random numbers are keyed by `identity` with the group's number. `InputError`: a prompt is empty or refused.
        `LockstepError`: too many environments failed in a row."""
        self._requests, self._sampling, self._identity = {r.group: r for r in requests}, sampling, identity
        self._groups: dict[int, list[Episode]] = {}
        with as_input_error(f"task.environment: {self._environment.__name__}() raised"):
            for request in requests:
                group = self._groups[request.group] = []
                for sample in range(identity.sample, identity.sample + sampling.n):
                    group.append(Episode(self._environment(), request.group, sample, self._codec))
                    self._episodes.append(group[-1])
        try:
            for episode in self._episodes:
                request = self._requests[episode.group]
                self._calls.call(episode, episode.environment.start, request.row, request.seed)
            with nullcontext() if self._environment.instant else fast_thread_switching():
                self._run_to_end()
        finally:
            self._calls.abandon()
            for request_id in {request_id for request_id, _ in self._sampling_episodes}:
                assert self._sampler is not None
                self._sampler.abort(request_id)
        return list(self._groups.values())

    def _run_to_end(self) -> None:
        """Handle answers and sample until all episodes have ended."""
        total = left = len(self._episodes)
        while left:
            busy = bool(self._sampling_episodes or self._sampled_turns)
            with nullcontext() if busy or self._environment.instant else self._timings.measure("environment"):
                answers = self._calls.answers(wait=not busy)
            self._handle_answers(answers)
            if self._sampling_episodes:
                self._advance()
            turns = len(self._sampled_turns)
            for _ in range(min(turns, MAX_TURNS_BETWEEN_LAUNCHES) if self._environment.instant else turns):
                self._handle_turn(*self._sampled_turns.popleft())
            left = len(self._sampling_episodes) + len(self._sampled_turns) + len(self._calls)
            self._timings.report_progress(f"{total - left} of {total}")

    def close(self) -> None:
        """Close the environments."""
        for episode in self._episodes:
            try:
                episode.environment.close()
            except (Exception, SystemExit) as error:
                _log.warning("%s: close raised %s: %s", self._where(episode), type(error).__name__, one_line(error))

    def _where(self, episode: Episode) -> str:
        return f"{self._requests[episode.group].where} sample {episode.sample}"

    def _handle_answers(self, answers: list[Answer]) -> None:
        ready: list[Started] = []
        for answer in answers:
            episode: Episode = answer.key  # type: ignore[assignment]
            if episode.trajectory is None:
                ready += self._record_start(episode, answer.value)
                continue
            episode.trajectory.segments[-1].wait_s += answer.seconds
            if isinstance(answer.value, Failure):
                self._fail(episode, answer.value)
            elif episode.cut:
                self._end(episode, answer.value)
            else:
                self._handle_step(episode, episode.trajectory, answer.value)
        if ready:
            self._begin(ready)

    def _record_start(self, episode: Episode, value: Any) -> list[Started]:
        """Record a result of `start`, and return what can begin: the group, once all its samples have started."""
        try:
            value = copy_nested(value, "what start returned") if isinstance(value, list) else value
        except InputError as error:
            value = Failure(str(error))
        if not self._environment.begin_together:
            return [[(episode, value)]]
        started = self._started.setdefault(episode.group, [])
        started.append((episode, value))
        return [self._started.pop(episode.group)] if len(started) == self._sampling.n else []

    def _begin(self, ready: list[Started]) -> None:
        """Encode the prompts, and request a first turn of all episodes that began alike at once."""
        beginnings: list[tuple[list[Episode], Any]] = []  # episodes that begin alike, and their prompt
        for started in ready:
            began = [(episode, prompt) for episode, prompt in started if not isinstance(prompt, Failure)]
            for episode, value in started:
                if isinstance(value, Failure):
                    self._fail(episode, value)
            episodes, prompts = [episode for episode, _ in began], [prompt for _, prompt in began]
            failure = prompt_failure(prompts, self._environment.begin_alike)
            if failure is not None:
                for episode in episodes:
                    self._fail(episode, failure)
            elif len(began) == len(started) and all(prompt == prompts[0] for prompt in prompts):
                beginnings.append((episodes, prompts[0]))
            else:  # a request's samples have consecutive numbers
                beginnings += [([episode], prompt) for episode, prompt in began]
        with self._timings.measure("encode"):
            encoded = [(episodes, self._encode_prompt(episodes, prompt)) for episodes, prompt in beginnings]
        if self._sampler is None and encoded:
            samplings = [replace(self._sampling, n=len(episodes)) for episodes, _ in encoded]
            self._sampler = self._make_sampler([prompt_ids for _, prompt_ids in encoded], samplings)
        for episodes, prompt_ids in encoded:
            self._request_turn(episodes, prompt_ids, replace(self._sampling, n=len(episodes)))

    def _encode_prompt(self, episodes: list[Episode], prompt: Any) -> list[int]:
        """The tokens of the prompt of these episodes."""
        where, codec = self._requests[episodes[0].group].where, self._codec
        tokenized, chat = is_tokens(prompt), is_chat(prompt)
        try:
            if codec.with_tools is not None and (tools := self._tools(episodes[0].environment)):
                codec = codec.with_tools(tools)
                refuse(
                    isinstance(prompt, str),
                    "the environment has tools, and its prompt is a text, which shows the model none: `start` must "
                    "return messages, with which the chat template shows them, or tokens",
                )
            ids = prompt if tokenized else codec.encode_prompt(prompt)
            text = codec.decode(prompt) if tokenized else prompt
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        except OverflowError as error:
            raise InputError(f"{where}: start returned token ids that no model has: {one_line(prompt)}") from error
        if not ids:
            raise InputError(f"{where}: the prompt has no tokens")
        limit = self._limits.prompt_tokens
        if limit is not None and len(ids) > limit:
            why = f" ({self._limits.prompt_reason})" if self._limits.prompt_reason else ""
            raise InputError(f"{where}: the prompt has {len(ids)} tokens; at most {limit} are allowed{why}")
        for episode in episodes:
            episode.codec, episode.prompt = codec, text
            episode.messages = list(prompt) if chat else None
        return ids

    def _tools(self, environment: Environment) -> Sequence[Mapping[str, Any]]:
        what = f"task.environment: {self._environment.__name__}.tools"
        with as_input_error(f"{what} raised"):
            tools = environment.tools
        if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
            raise InputError(f"{what} is {one_line(tools, repr)}; it must be a property that lists JSON schemas")
        return tools

    def _sampling_of(self, environment: Environment, sampling: SamplingParams) -> SamplingParams:
        """How the next turn of an environment is sampled. Raises `InputError` if it changes what it may not."""
        what = f"task.environment: {self._environment.__name__}.until"
        with as_input_error(f"{what} raised"):
            changed = environment.until(sampling)
        limit, stops = sampling.max_completion_length, sampling.stop_token_ids
        if (
            not isinstance(changed, SamplingParams)
            or replace(changed, max_completion_length=limit, stop_token_ids=stops) != sampling
            or not (0 < changed.max_completion_length <= limit and set(stops) <= set(changed.stop_token_ids))
        ):
            allowed = "it may lower max_completion_length and add stop_token_ids to what it is given"
            raise InputError(f"{what} returned {one_line(changed, repr)}; {allowed}")
        return changed

    def _request_turn(self, episodes: list[Episode], token_ids: list[int], sampling: SamplingParams) -> None:
        assert self._sampler is not None
        first = min(episode.sample for episode in episodes)
        if len(episodes) == 1:
            sampling = self._sampling_of(episodes[0].environment, sampling)
        trajectory = episodes[0].trajectory
        branch = sum(segment.begins_branch for segment in trajectory.segments) if trajectory is not None else 0
        domain = self._identity.domain + (branch << 8)  # positions repeat in a branch, but random keys must not
        identity = replace(self._identity, group=episodes[0].group, sample=first, domain=domain)
        request_id = self._sampler.add_request(token_ids, sampling, identity)
        self._sampling_episodes |= {(request_id, episode.sample): episode for episode in episodes}

    def _advance(self) -> None:
        assert self._sampler is not None
        for output in self._sampler.advance():
            key = output.request_id, output.identity.sample
            if output.completion is not None and key in self._sampling_episodes:  # others are not of this round
                self._sampled_turns.append((self._sampling_episodes.pop(key), output.completion))

    def _handle_turn(self, episode: Episode, completion: Trajectory) -> None:
        """Add a sampled turn to its trajectory, and ask the environment what follows."""
        turn = completion.segments[-1]
        self.sampled_tokens += len(turn.token_ids)
        if episode.trajectory is None:
            episode.trajectory = completion
        else:
            segments, routes = episode.trajectory.segments, completion.prompt.route_digests
            if routes is not None and segments[-1].begins_branch:
                segments[-1].route_digests = routes
            elif routes is not None:
                known = len(routes) - len(segments[-1].token_ids)
                segments[-1].route_digests, segments[-2].last_route = routes[known:], routes[known - 1]
            segments.append(turn)
            episode.trajectory.finish_reason = completion.finish_reason
        if completion.finish_reason == "length" and len(turn.token_ids) < self._sampling.max_completion_length:
            episode.trajectory.finish_reason = "truncated"
        episode.turns += 1
        parsed = episode.codec.parse_turn(turn)
        if episode.messages is not None:
            episode.messages.append(parsed.in_chat)
        last = episode.trajectory.cut_off or episode.turns >= self._limits.turns
        reason = episode.trajectory.finish_reason
        argument = Turn(turn.text, list(turn.token_ids), reason, parsed.message, parsed.malformed, last, turn)
        self._calls.call(episode, episode.environment.step, argument)

    def _handle_step(self, episode: Episode, trajectory: Trajectory, given: Any) -> None:
        """Go on as a result of `step` says."""
        if isinstance(given, Next):
            if error := reward_error(given.reward):
                self._fail(episode, Failure(error))
                return
            trajectory.segments[-1].rewards, given = named_rewards(given.reward), given.given
            episode.rewarded = True
        if isinstance(given, End):
            self._end(episode, given)
        elif error := step_error(given):
            self._fail(episode, Failure(error))
        elif trajectory.cut_off:
            self._cut(episode)
        elif episode.turns >= self._limits.turns:
            self._truncate(episode, trajectory)
        else:
            self._continue(episode, trajectory, given)

    def _continue(self, episode: Episode, trajectory: Trajectory, given: Any) -> None:
        """Sample the turn after what was given, or cut the trajectory if there is no room."""
        try:
            trajectory.segments.append(self._given_segment(episode, given))
        except PromptTooLong:
            self._truncate(episode, trajectory)
            return
        except InputError as error:  # for example, the template refuses the messages
            self._fail(episode, Failure(f"what step returned cannot be given: {error}"))
            return
        room = self._room(episode, trajectory)
        if room < 1:
            trajectory.segments.pop()
            self._truncate(episode, trajectory)
            return
        sampling = replace(self._sampling, n=1, max_completion_length=min(room, self._sampling.max_completion_length))
        try:
            self._request_turn([episode], trajectory.context, sampling)
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
        packed_room = self._limits.packed_tokens + branches - tokens  # a branch's last token needs no row
        if packed_room < 1 <= room and not self._warned_of_branches:
            self._warned_of_branches = True
            _log.warning(
                "%s: its %d branches have %d tokens together, and the loss has sums over whole sequences, for which "
                "trainer.max_tokens_per_micro_batch, %d, must hold them all: it ends as truncated, as others may",
                *(self._where(episode), branches, tokens, self._limits.packed_tokens),
            )
        return min(room, packed_room)

    def _given_segment(self, episode: Episode, given: Any) -> Segment:
        """The segment of what was given; it begins a branch if the trajectory cannot continue from what was sampled."""
        if isinstance(given, Branch):
            return self._branch_segment(episode, given.given)
        try:
            return self._following_segment(episode, given)
        except HistoryRewritten as past:
            assert episode.messages is not None
            given = with_call_ids(episode.messages[-1], copy_nested(given, "it"))
            segment = self._branch_segment(episode, [*episode.messages, *given])
            episode.messages = [*past.messages, *given]
            return segment

    def _following_segment(self, episode: Episode, given: Any) -> Segment:
        """The segment of what was given after a turn. Sampled text is never encoded again: of a chat, only the tokens
        after the answer are taken."""
        if is_tokens(given):
            return Segment(list(given))
        assert episode.trajectory is not None
        if isinstance(given, str):
            return Segment(episode.codec.encode_following(episode.messages, given), text=given)
        if episode.messages is not None:
            given = with_call_ids(episode.messages[-1], copy_nested(given, "it"))
        ids = episode.codec.encode_following(episode.messages, given)
        assert episode.messages is not None
        episode.messages += given
        last = episode.trajectory.segments[-1].token_ids[-1]
        if episode.trajectory.finish_reason == "stop" and ids[:1] == [last]:  # the template's end of an answer
            ids = ids[1:]
        return Segment(ids, text=messages_text(given))

    def _branch_segment(self, episode: Episode, given: Any) -> Segment:
        """The segment that begins a branch."""
        episode.messages = copy_nested(given, "it") if is_chat(given) else None
        if is_tokens(given):
            return Segment(list(given), begins_branch=True)
        text = given if isinstance(given, str) else messages_text(given)
        return Segment(episode.codec.encode_prompt(given), text=text, begins_branch=True)

    def _truncate(self, episode: Episode, trajectory: Trajectory) -> None:
        trajectory.finish_reason = "truncated"
        self._cut(episode)

    def _cut(self, episode: Episode) -> None:
        episode.cut, self._failures.in_a_row = True, 0
        self._calls.call(episode, episode.environment.cut)

    def _end(self, episode: Episode, end: Any) -> None:
        if error := end_error(end):
            self._fail(episode, Failure(error))
            return
        assert episode.trajectory is not None
        if end.reward is not None or episode.rewarded:
            set_rewards(episode.trajectory, end.reward)
        episode.trajectory.environment = episode.environment.variant
        episode.end = end
        self._failures.in_a_row = 0
        self._report_if_group_ended(episode.group)

    def _fail(self, episode: Episode, failure: Failure) -> None:
        episode.failure = failure
        self._failures.add(self._where(episode), failure)
        self._report_if_group_ended(episode.group)

    def _report_if_group_ended(self, group: int) -> None:
        episodes = self._groups[group]
        if self._on_group_end and all(e.end is not None or e.failure is not None for e in episodes):
            self._on_group_end(episodes)
