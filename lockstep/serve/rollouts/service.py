"""Requests as turns of a run's rollouts.

The run itself samples each turn, with its own settings and random keys, so a turn has the same bits as in a rollout
that is played in process, and is checked for parity like every other.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from fastapi import Request

from ...environments.environment import Turn
from ...environments.remote import BUSY, LIMIT, OVER, RemoteEnvironment, TurnRefused
from ...session.build import TrainingSession
from ...session.evaluation import EvaluationContext
from ...types import SampleIdentity, Segment, Trajectory
from ..batcher import Job, Update
from ..bodies import ChatBody, SamplingFields, TokenSampling
from ..chat_prompt import Message
from ..errors import ApiError, bad_field
from ..service import Service
from ..settings import Settings
from ..text import StopStrings
from ..ticket import Ticket

Playing = TrainingSession | EvaluationContext  # whose rollouts are played
_STATUS = {OVER: 410, LIMIT: 400, BUSY: 409}  # by the code of `TurnRefused`
_CODES = {OVER: "rollout_over", LIMIT: "context_length_exceeded"}


class RolloutService(Service):
    def __init__(self, run: Playing, environment: type[RemoteEnvironment], settings: Settings) -> None:
        super().__init__(run.policy, run.engine, settings, run.context, run.config.seed)
        self.registry, self.sampling, self._seed = environment.registry, replace(run.sampling, n=1), run.config.seed
        self._max_prompt_tokens = run.max_prompt_tokens
        self._stops = {*self.sampling.stop_token_ids, *run.policy.model.config.eos_token_ids}
        self._turns: dict[Job, asyncio.Task[None]] = {}

    def ensure_seed(self, body: SamplingFields) -> int:
        if body.seed is not None:
            raise _fixed_by_run("seed", body.seed, "its seed, step and sample")
        body.seed = self._seed
        return self._seed

    def job(self, prompt_ids: list[int], body: SamplingFields, max_tokens: int, field: str, group: int = 0) -> Job:
        prefix = "sampling_params." if isinstance(body, TokenSampling) else ""
        for name in ("temperature", "top_p", "top_k", "min_p", "n", "ignore_eos"):
            given, own = getattr(body, name), getattr(self.sampling, name)
            if name in body.model_fields_set and given != own:
                raise _fixed_by_run(f"{prefix}{name}", given, own)
        if other := set(body.stop) - set(self.sampling.stop):
            raise _fixed_by_run(f"{prefix}stop", sorted(other), list(self.sampling.stop))
        if len(prompt_ids) >= self.context:
            message = f"the prompt has {len(prompt_ids)} tokens; the run has room for {self.context} with what follows"
            raise bad_field(field, message, "context_length_exceeded")
        most = min(max_tokens, self.sampling.max_completion_length)
        further = tuple(token for token in body.stop_token_ids if token not in self._stops)
        sampling = replace(self.sampling, max_completion_length=most, stop_token_ids=further)
        self.check(prompt_ids, replace(sampling, max_completion_length=1), field, group)
        return Job(prompt_ids, sampling, SampleIdentity(self._seed, 0, 0, 0))

    def with_sampled_tokens(self, request: Request, messages: list[Message]) -> list[Message]:
        rollout = self.rollout(request)
        answers = [message for message in messages if message["role"] == "assistant"]
        if not rollout.turns:
            rollout.given_answers = len(answers)
        turns, stops = list(rollout.turns), StopStrings(self.sampling.stop)
        for message in reversed(answers[rollout.given_answers :]):
            if turns:  # the latest turn before with its text, else with more text, as a thought, else the latest
                said, texts = message["content"].strip(), [turn.text for turn in turns]
                fits = [(stops.cut(text).strip() == said, said in text, i) for i, text in enumerate(texts)]
                place = max(fits)[-1]
                message.setdefault("token_ids", turns[place].token_ids)
                del turns[place:]
        return messages

    def stop_strings(self, body: ChatBody) -> tuple[str, ...]:
        return self.sampling.stop

    def rollout(self, request: Request) -> RemoteEnvironment:
        """The rollout that a request belongs to, by its path or its session header. Raises `ApiError` if it is over, or
        never existed."""
        name = request.path_params["rollout"]
        found = self.registry.rollouts.get(request.headers.get("x-session-id", "") if name == "session" else name)
        if found is None:
            raise ApiError(410, "this rollout is over, or never was", code="rollout_over")
        return found

    def open_ticket(self, request: Request, jobs: list[Job], stream: bool = False) -> Ticket:
        begun, most = bool(self.rollout(request).turns), self._max_prompt_tokens
        if len(jobs) > 1:
            raise bad_field("prompt", f"there are {len(jobs)} prompts; a turn of a rollout has one")
        if not begun and most is not None and (count := len(jobs[0].prompt_ids)) > most:
            message = f"the first prompt has {count} tokens; the run allows {most}"
            raise ApiError(400, message, code="context_length_exceeded")
        return super().open_ticket(request, jobs, stream)

    def submit_ticket(self, ticket: Ticket) -> None:
        self.open_samples += 1
        (job,) = ticket.jobs
        self._turns[job] = asyncio.create_task(self._turn(ticket, job))

    def close_ticket(self, ticket: Ticket) -> None:
        self.open_samples -= 1
        (job,) = ticket.jobs
        self._turns.pop(job).cancel()  # the run still samples the turn, for a client that asks again

    async def _turn(self, ticket: Ticket, job: Job) -> None:
        item: Update | Exception
        try:
            rollout, sampling = self.rollout(ticket.request), job.sampling
            turn = await rollout.turn(job.prompt_ids, sampling.max_completion_length, sampling.stop_token_ids)
            item = _update(job, turn)
        except ApiError as error:
            item = error
        except TurnRefused as error:
            item = ApiError(_STATUS[error.code], str(error), code=_CODES.get(error.code, error.code))
        ticket.news.put_nowait((job, item))


def _fixed_by_run(field: str, given: Any, own: Any) -> ApiError:
    return bad_field(field, f"{field} is {given!r}; the run samples with its own, {own!r}: leave it out")


def _update(job: Job, turn: Turn) -> Update:
    """A whole turn as an update, as the engine would make it."""
    sampled = turn.sampled
    assert sampled is not None and sampled.logprobs is not None and sampled.model_logprobs is not None
    reason = "length" if turn.finish_reason == "truncated" else turn.finish_reason
    whole = Trajectory([Segment(job.prompt_ids), sampled], reason, job.identity)
    return Update(0, sampled.token_ids, sampled.logprobs, sampled.model_logprobs, whole)
