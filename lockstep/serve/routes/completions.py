"""`/v1/completions`."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...types import Trajectory
from ..batcher import Update
from ..bodies import CompletionBody, read_body
from ..errors import refused
from ..service import Service
from ..text import completion_logprobs, visible
from ..ticket import Ticket
from .common import TextRequest, drawn_by, head

USUAL_LENGTH = 16  # default of max_tokens, as in OpenAI's API


async def completions(service: Service, request: Request) -> Response:
    body = await read_body(request, CompletionBody, service.settings.max_body_mib << 20)
    service.check_model(body.model)
    if body.logprobs:
        raise refused("logprobs", "logprobs must be 0 or null: there are log-probabilities of sampled tokens alone")
    texts = _prompts(body.prompt)
    service.require_place(len(texts) * body.n, "prompt")  # before encoding them
    encode = service.policy.encode
    prompts = await service.encoded("prompt", lambda: [encode(t) if isinstance(t, str) else t for t in texts])
    service.seeded(body)
    length = body.max_tokens or USUAL_LENGTH
    jobs = [service.job(ids, body, length, "prompt", group) for group, ids in enumerate(prompts)]
    asked = TextRequest(service, body, jobs, head("text_completion", "cmpl", body, service.settings.name))
    return await asked.answer(request, _choice, _chunks, {})


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts as a list, also if there is one: a text, or token ids."""
    prompts = [prompt] if _is_one(prompt) else prompt
    if not (isinstance(prompts, list) and prompts and all(map(_is_one, prompts))):
        raise refused("prompt", "prompt must be a string, a list of token ids, or a list of either")
    return prompts


def _is_one(prompt: Any) -> bool:
    is_list = isinstance(prompt, list) and bool(prompt)
    return isinstance(prompt, str) or (is_list and all(type(token) is int for token in prompt))


def _choice(asked: TextRequest, place: int, completion: Trajectory) -> dict[str, Any]:
    text, _ = visible(asked.decode(completion.token_ids), asked.stops, None)
    choice: dict[str, Any] = {"index": place, "text": text, "finish_reason": completion.finish_reason}
    choice["logprobs"] = _logprobs(asked, completion, 0)
    if asked.body.return_token_ids:
        job = asked.jobs[place // asked.body.n]
        choice |= {"prompt_token_ids": job.prompt_ids, "token_ids": completion.token_ids}
    return choice | drawn_by(completion)


def _logprobs(asked: TextRequest, sampled: Trajectory | Update, offset: int) -> dict[str, Any] | None:
    names = asked.service.names(asked.body)
    return None if asked.body.logprobs is None else completion_logprobs(names, sampled, offset)


def _chunks(asked: TextRequest, ticket: Ticket) -> AsyncIterator[dict[str, Any]]:
    offsets: Counter[int] = Counter()  # characters in each choice's tokens so far, as text may be held back

    def choice(place: int, update: Update, text: str, _: Any) -> dict[str, Any]:
        logprobs = _logprobs(asked, update, offsets[place])
        offsets[place] += sum(map(len, logprobs["tokens"])) if logprobs else 0
        return {"text": text, "logprobs": logprobs}

    return asked.chunks(ticket, choice)
