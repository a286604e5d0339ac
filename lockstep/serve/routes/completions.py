"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...types import Trajectory
from ..batcher import Job, Update
from ..bodies import CompletionBody, read_body
from ..errors import refused
from ..events import EventStream, answered
from ..service import Service
from ..text import GrowingText, Stops, completion_logprobs, visible
from ..ticket import Ticket
from .common import drawn_by, head, usage

USUAL_LENGTH = 16  # new tokens where a request does not say, as in OpenAI's interface


async def completions(service: Service, request: Request) -> Response:
    """Continue texts, or token ids. Of several prompts the sample s of prompt p is choice p * n + s."""
    body = await read_body(request, CompletionBody, service.settings.max_body_mib << 20)
    service.check_model(body.model)
    if body.logprobs:
        raise refused("logprobs", "logprobs must be 0 or null: there are log-probabilities of sampled tokens alone")
    texts = _prompts(body.prompt)
    service.require_place(len(texts) * body.n, "prompt")  # before all are encoded
    encode = service.policy.encode
    prompts = await service.encoded("prompt", lambda: [encode(t) if isinstance(t, str) else t for t in texts])
    service.seeded(body)
    length = body.max_tokens or USUAL_LENGTH
    jobs = [service.job(ids, body, length, "prompt", group) for group, ids in enumerate(prompts)]
    begin = head("text_completion", "cmpl", body, service.settings.name)
    ticket = service.open(request, jobs, body.stream)
    if body.stream:
        return EventStream(ticket, _chunks(service, body, begin, ticket))
    async with ticket:
        groups = await ticket.completions()
    choices = [
        _choice(service, body, place, jobs[place // body.n], completion)
        for place, completion in enumerate(c for group in groups for c in group)
    ]
    sampled = sum(len(c.token_ids) for group in groups for c in group)
    return answered({**begin, "choices": choices, "usage": usage(jobs, sampled)})


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt, a text or token ids, as a list of one; several as they are."""
    prompts = [prompt] if _is_one(prompt) else prompt
    if not (isinstance(prompts, list) and prompts and all(map(_is_one, prompts))):
        raise refused("prompt", "prompt must be a string, a list of token ids, or a list of either")
    return prompts


def _is_one(prompt: Any) -> bool:
    is_list = isinstance(prompt, list) and bool(prompt)
    return isinstance(prompt, str) or (is_list and all(type(token) is int for token in prompt))


def _choice(service: Service, body: CompletionBody, place: int, job: Job, completion: Trajectory) -> dict[str, Any]:
    text, _ = visible(_decode(service, body)(completion.token_ids), stops_of(job, body), None)
    choice: dict[str, Any] = {"index": place, "text": text, "finish_reason": completion.finish_reason}
    choice["logprobs"] = _logprobs(service, body, completion, 0)
    if body.return_token_ids:
        choice |= {"prompt_token_ids": job.prompt_ids, "token_ids": completion.token_ids}
    return choice | drawn_by(completion)


def _decode(service: Service, body: CompletionBody) -> Callable[[list[int]], str]:
    return service.policy.decode if body.skip_special_tokens else service.policy.with_special


def stops_of(job: Job, body: CompletionBody) -> Stops:
    """What ends its texts: a run's own server samples with the run's stop strings."""
    return Stops(job.sampling.stop, body.include_stop_str_in_output)


def _logprobs(
    service: Service, body: CompletionBody, sampled: Trajectory | Update, offset: int
) -> dict[str, Any] | None:
    return None if body.logprobs is None else completion_logprobs(service.names(body), sampled, offset)


async def _chunks(
    service: Service, body: CompletionBody, begin: dict[str, Any], ticket: Ticket
) -> AsyncIterator[dict[str, Any]]:
    decode, stops = _decode(service, body), stops_of(ticket.jobs[0], body)
    texts = [GrowingText(decode, stops, None) for _ in range(body.n * len(ticket.jobs))]
    shown = [0] * len(texts)
    sampled = 0
    async for prompt, update in ticket.updates():
        place = prompt * body.n + update.sample
        sampled += len(update.token_ids)
        text, _ = texts[place].feed(update)
        choice: dict[str, Any] = {"index": place, "text": text, "finish_reason": None}
        choice["logprobs"] = _logprobs(service, body, update, shown[place])
        shown[place] += len(text)
        if body.return_token_ids:
            choice["token_ids"] = update.token_ids
        if update.completion is not None:
            choice["finish_reason"] = update.completion.finish_reason
            choice |= drawn_by(update.completion)
        if text or update.completion is not None or body.logprobs is not None or body.return_token_ids:
            yield {**begin, "choices": [choice]}
    if body.stream_options.include_usage:
        yield {**begin, "choices": [], "usage": usage(ticket.jobs, sampled)}
