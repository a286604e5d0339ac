"""`/v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...config import TEMPLATE_ARGUMENTS
from ...session.text.tool_calls import ToolCall, ToolFormat
from ...types import Trajectory
from ..batcher import Job, Update
from ..bodies import ChatBody, read_body
from ..chat_prompt import ChatPrompt, checked_messages, encode_chat
from ..errors import refused
from ..events import EventStream, answered
from ..service import Service
from ..text import GrowingText, Stops, chat_logprobs, visible
from ..ticket import Ticket
from .common import drawn_by, head, usage

CALL_ID = 9  # characters of a call's id: Mistral's templates take no others


@dataclass(frozen=True)
class _Chat:
    """A request that is under way."""

    service: Service
    body: ChatBody
    job: Job
    form: ToolFormat | None

    def decode(self, token_ids: list[int]) -> str:
        """What was sampled, as `form` reads it, or as the client asks for it."""
        policy = self.service.policy
        return policy.as_read(token_ids, self.form) if self.body.skip_special_tokens else policy.with_special(token_ids)

    @property
    def stops(self) -> Stops:
        return Stops(self.job.sampling.stop, self.body.include_stop_str_in_output)

    @property
    def head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.body.stream else "chat.completion"
        return head(kind, "chatcmpl", self.body, self.service.settings.name)


async def chat(service: Service, request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatBody, service.settings.max_body_mib << 20)
    service.check_model(body.model)
    if body.top_logprobs:
        raise refused("top_logprobs", "top_logprobs must be 0: there are log-probabilities of sampled tokens alone")
    messages = service.remembered(request, checked_messages(body.messages))
    form = _tool_format(service, body)
    variables = {**service.policy.template_variables, **_variables(service, body)}
    if form is not None and form.tools:
        variables["tools"] = body.tools
    read = form or service.tool_format
    prompt = await service.encoded("messages", partial(encode_chat, service.policy, messages, variables, read))
    service.metrics.turns.labels("kept").inc(prompt.kept)
    service.metrics.turns.labels("encoded_again").inc(prompt.encoded_again)
    if form is not None:
        form = replace(form, thinks=prompt.thinks)
    service.seeded(body)
    job = service.job(prompt.token_ids, body, _max_tokens(service, body, prompt), "messages")
    asked = _Chat(service, body, job, form)
    ticket = service.open(request, [job], body.stream)
    if body.stream:
        return EventStream(ticket, _chunks(asked, ticket))
    async with ticket:
        (samples,) = await ticket.completions()
    return answered(_answer(asked, samples))


def _variables(service: Service, body: ChatBody) -> dict[str, Any]:
    given, template = body.chat_template_kwargs, str(service.policy.tokenizer.chat_template)
    for name in given:
        if name in (*TEMPLATE_ARGUMENTS, "tools"):
            raise refused(
                f"chat_template_kwargs.{name}", f"chat_template_kwargs sets {name}, which is no variable of it"
            )
    if body.reasoning_effort:
        given = {**given, "reasoning_effort": body.reasoning_effort}
    for name in given:
        if name not in template:
            where = name if name == "reasoning_effort" else f"chat_template_kwargs.{name}"
            raise refused(where, f"{where} has no effect: the model's chat template does not read it")
    return given


def _tool_format(service: Service, body: ChatBody) -> ToolFormat | None:
    """How the model is to call the tools; None where it is given none and all that it says is text."""
    if body.tool_choice not in ("auto", "none"):
        raise refused("tool_choice", 'tool_choice must be "auto" or "none": sampling is not constrained')
    for i, tool in enumerate(body.tools):
        function = tool.get("function")
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if tool.get("type") != "function" or not named:
            raise refused(f"tools[{i}]", f'tools[{i}] must be {{"type": "function", "function": {{"name": ...}}}}')
    tools = body.tools if body.tool_choice == "auto" else []
    if service.tool_format is None and tools:
        raise refused("tools", "the model's chat template has no tools, or calls them in a form that is not known here")
    return service.tool_format and service.tool_format.reading(tools)


def _max_tokens(service: Service, body: ChatBody, prompt: ChatPrompt) -> int:
    """What the request asks for, or what the context leaves."""
    if body.max_tokens and body.max_completion_tokens not in (None, body.max_tokens):
        raise refused("max_tokens", "max_tokens is another number than max_completion_tokens; give one of them")
    return body.max_completion_tokens or body.max_tokens or max(1, service.context - len(prompt.token_ids))


def _answer(asked: _Chat, samples: list[Trajectory]) -> dict[str, Any]:
    choices = [_choice(asked, i, completion) for i, completion in enumerate(samples)]
    answer = {**asked.head, "choices": choices}
    if asked.body.return_token_ids:
        answer["prompt_token_ids"] = asked.job.prompt_ids
    return {**answer, "usage": usage([asked.job], sum(len(c.token_ids) for c in samples))}


def _choice(asked: _Chat, index: int, completion: Trajectory) -> dict[str, Any]:
    said = asked.decode(completion.token_ids)
    text, calls = visible(said, asked.stops, asked.form)
    message: dict[str, Any] = {"role": "assistant", "content": text.strip() or None if calls else text}
    message |= _beside(asked, said, calls)
    choice = {"index": index, "message": message, "finish_reason": "tool_calls" if calls else completion.finish_reason}
    choice["logprobs"] = _logprobs(asked, completion)
    if asked.body.return_token_ids:
        choice["token_ids"] = message["token_ids"] = completion.token_ids
    return choice | drawn_by(completion)


def _beside(asked: _Chat, said: str, calls: list[ToolCall]) -> dict[str, Any]:
    """What an answer's message has beside its content: calls, and thoughts that are no part of it."""
    assert asked.form is not None or not calls
    shown = [_call(call) for call in calls]
    thought = asked.form.thoughts(said) if asked.form is not None else ""
    return ({"tool_calls": shown} if shown else {}) | ({"reasoning": thought} if thought else {})


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id or uuid.uuid4().hex[:CALL_ID], "type": "function", "function": function}


def _logprobs(asked: _Chat, sampled: Trajectory | Update) -> dict[str, Any] | None:
    if not asked.body.logprobs:
        return None
    return {"content": chat_logprobs(asked.service.names(asked.body), sampled), "refusal": None}


async def _chunks(asked: _Chat, ticket: Ticket) -> AsyncIterator[dict[str, Any]]:
    begin, body, n = asked.head, asked.body, asked.job.sampling.n
    texts = [GrowingText(asked.decode, asked.stops, asked.form) for _ in range(n)]
    sampled = 0
    for index in range(n):
        first = {**begin, "choices": [_delta(index, {"role": "assistant", "content": ""})]}
        yield first | ({"prompt_token_ids": asked.job.prompt_ids} if body.return_token_ids else {})
    async for _, update in ticket.updates():
        sampled += len(update.token_ids)
        text, calls = texts[update.sample].feed(update)
        delta: dict[str, Any] = {"content": text} if text else {}
        if update.completion is not None:
            delta |= _beside(asked, asked.decode(update.completion.token_ids), calls)
            for i, call in enumerate(delta.get("tool_calls", [])):
                call["index"] = i
        choice = _delta(update.sample, delta, _logprobs(asked, update))
        if body.return_token_ids:
            choice["token_ids"] = update.token_ids
        if update.completion is not None:
            choice["finish_reason"] = "tool_calls" if calls else update.completion.finish_reason
            choice |= drawn_by(update.completion)
        if delta or update.completion is not None or body.logprobs or body.return_token_ids:
            yield {**begin, "choices": [choice]}
    if body.stream_options.include_usage:
        yield {**begin, "choices": [], "usage": usage([asked.job], sampled)}


def _delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
