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
from ..errors import bad_field
from ..service import Service
from ..text import completion_logprobs, split_answer
from ..ticket import Ticket
from .common import TextRequest, response_head, weights_version

DEFAULT_MAX_TOKENS = 16  # default of max_tokens, as in OpenAI's API


async def complete_text(service: Service, request: Request) -> Response:
    body = await read_body(request, CompletionBody, service.settings.max_body_mib << 20)
    service.check_model(body.model)
    if body.logprobs:
        raise bad_field("logprobs", "logprobs must be 0 or null: there are log-probabilities of sampled tokens alone")
    texts = _prompts(body.prompt)
    service.require_capacity(len(texts) * body.n, "prompt")  # before encoding them
    encode = service.policy.encode
    prompts = await service.run_encoder("prompt", lambda: [encode(t) if isinstance(t, str) else t for t in texts])
    service.ensure_seed(body)
    length = body.max_tokens or DEFAULT_MAX_TOKENS
    jobs = [service.job(ids, body, length, "prompt", group) for group, ids in enumerate(prompts)]
    head = response_head("text_completion", "cmpl", body, service.settings.name)
    text_request = TextRequest(service, body, jobs, head)
    return await text_request.answer(request, _choice, _chunks, {})


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts as a list, also if there is one: a text, or token ids."""
    prompts = [prompt] if _is_prompt(prompt) else prompt
    if not (isinstance(prompts, list) and prompts and all(map(_is_prompt, prompts))):
        raise bad_field("prompt", "prompt must be a string, a list of token ids, or a list of either")
    return prompts


def _is_prompt(prompt: Any) -> bool:
    is_list = isinstance(prompt, list) and bool(prompt)
    return isinstance(prompt, str) or (is_list and all(type(token) is int for token in prompt))


def _choice(text_request: TextRequest, place: int, completion: Trajectory) -> dict[str, Any]:
    text, _ = split_answer(text_request.decode(completion.token_ids), text_request.stops, None)
    choice: dict[str, Any] = {"index": place, "text": text, "finish_reason": completion.finish_reason}
    choice["logprobs"] = _logprobs(text_request, completion, 0)
    if text_request.body.return_token_ids:
        job = text_request.jobs[place // text_request.body.n]
        choice |= {"prompt_token_ids": job.prompt_ids, "token_ids": completion.token_ids}
    return choice | weights_version(completion)


def _logprobs(text_request: TextRequest, sampled: Trajectory | Update, offset: int) -> dict[str, Any] | None:
    names = text_request.service.token_namer(text_request.body)
    return None if text_request.body.logprobs is None else completion_logprobs(names, sampled, offset)


def _chunks(text_request: TextRequest, ticket: Ticket) -> AsyncIterator[dict[str, Any]]:
    offsets: Counter[int] = Counter()  # characters in each choice's tokens so far, as text may be held back

    def choice(place: int, update: Update, text: str, _: Any) -> dict[str, Any]:
        logprobs = _logprobs(text_request, update, offsets[place])
        offsets[place] += sum(map(len, logprobs["tokens"])) if logprobs else 0
        return {"text": text, "logprobs": logprobs}

    return text_request.chunks(ticket, choice)
