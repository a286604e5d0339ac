"""`/v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...session.text.messages import RESERVED_WITH_TOOLS, check_variables, normalize_chat, validate_tools
from ...session.text.tool_calls import CALL_ID_LENGTH, ToolCall, ToolFormat
from ...types import Trajectory
from ..batcher import Update
from ..bodies import ChatBody, read_body
from ..chat_prompt import ChatPrompt, encode_chat
from ..errors import bad_field
from ..service import Service
from ..text import chat_logprobs, split_answer
from ..ticket import Ticket
from .common import TextRequest, response_head, weights_version


async def complete_chat(service: Service, request: Request) -> Response:
    body = await read_body(request, ChatBody, service.settings.max_body_mib << 20)
    service.check_model(body.model)
    if body.top_logprobs:
        raise bad_field("top_logprobs", "top_logprobs must be 0: there are log-probabilities of sampled tokens alone")
    messages = service.with_sampled_tokens(request, normalize_chat(body.messages))
    form = _tool_format(service, body)
    variables = {**service.policy.template_variables, **_template_variables(service, body)}
    if form is not None and form.tools:
        variables["tools"] = body.tools
    read = form or service.tool_format
    encode = partial(encode_chat, service.policy, messages, variables, read, service.stop_strings(body))
    prompt = await service.run_encoder("messages", encode)
    service.metrics.turns.labels("kept").inc(prompt.kept)
    service.metrics.turns.labels("encoded_again").inc(prompt.encoded_again)
    if form is not None:
        form = replace(form, opens_thought=prompt.thinks)
    service.ensure_seed(body)
    job = service.job(prompt.token_ids, body, _max_tokens(service, body, prompt), "messages")
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    text_request = TextRequest(service, body, [job], response_head(kind, "chatcmpl", body, service.settings.name), form)
    return await text_request.answer(request, _choice, _chunks, _prompt_ids(text_request))


def _template_variables(service: Service, body: ChatBody) -> dict[str, Any]:
    effort = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
    template = service.policy.tokenizer.chat_template
    check_variables(template, body.chat_template_kwargs, "chat_template_kwargs", RESERVED_WITH_TOOLS)
    check_variables(template, effort, "")
    return {**body.chat_template_kwargs, **effort}


def _tool_format(service: Service, body: ChatBody) -> ToolFormat | None:
    """How tool calls and thoughts are read from the answer; None: the template has no known format."""
    if body.tool_choice not in ("auto", "none"):
        raise bad_field("tool_choice", 'tool_choice must be "auto" or "none": sampling is not constrained')
    tools = validate_tools(body.tools)
    tools = tools if body.tool_choice == "auto" else []
    if service.tool_format is None and tools:
        message = "the model's chat template has no tools, or calls them in a form that is not known here"
        raise bad_field("tools", message)
    return service.tool_format and service.tool_format.for_tools(tools)


def _max_tokens(service: Service, body: ChatBody, prompt: ChatPrompt) -> int:
    """The limit that the request sets, or else the room that the context leaves."""
    if body.max_tokens and body.max_completion_tokens not in (None, body.max_tokens):
        raise bad_field("max_tokens", "max_tokens is another number than max_completion_tokens; give one of them")
    return body.max_completion_tokens or body.max_tokens or max(1, service.context - len(prompt.token_ids))


def _choice(text_request: TextRequest, index: int, completion: Trajectory) -> dict[str, Any]:
    said = text_request.decode(completion.token_ids)
    text, calls = split_answer(said, text_request.stops, text_request.form)
    message: dict[str, Any] = {"role": "assistant", "content": text.strip() or None if calls else text}
    message |= _extra_fields(text_request, said, calls)
    choice = {"index": index, "message": message, "finish_reason": "tool_calls" if calls else completion.finish_reason}
    choice["logprobs"] = _logprobs(text_request, completion)
    if text_request.body.return_token_ids:
        choice["token_ids"] = message["token_ids"] = completion.token_ids
    return choice | weights_version(completion)


def _extra_fields(text_request: TextRequest, said: str, calls: list[ToolCall]) -> dict[str, Any]:
    """The fields of an answer's message besides its content: tool calls, and thoughts that are not part of it."""
    assert text_request.form is not None or not calls
    shown = [_call(call) for call in calls]
    thought = text_request.form.extract_thinking(said) if text_request.form is not None else ""
    return ({"tool_calls": shown} if shown else {}) | ({"reasoning": thought} if thought else {})


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id or uuid.uuid4().hex[:CALL_ID_LENGTH], "type": "function", "function": function}


def _logprobs(text_request: TextRequest, sampled: Trajectory | Update) -> dict[str, Any] | None:
    if not text_request.body.logprobs:
        return None
    return {"content": chat_logprobs(text_request.service.token_namer(text_request.body), sampled), "refusal": None}


async def _chunks(text_request: TextRequest, ticket: Ticket) -> AsyncIterator[dict[str, Any]]:
    def choice(_: int, update: Update, text: str, calls: list[ToolCall]) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text} if text else {}
        if update.completion is not None:
            delta |= _extra_fields(text_request, text_request.decode(update.completion.token_ids), calls)
            for i, call in enumerate(delta.get("tool_calls", [])):
                call["index"] = i
        return {"delta": delta, "logprobs": _logprobs(text_request, update)}

    role_chunk = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    for index in range(text_request.jobs[0].sampling.n):
        yield {**text_request.head, "choices": [{"index": index, **role_chunk}], **_prompt_ids(text_request)}
    async for chunk in text_request.chunks(ticket, choice):
        yield chunk


def _prompt_ids(text_request: TextRequest) -> dict[str, Any]:
    return {"prompt_token_ids": text_request.jobs[0].prompt_ids} if text_request.body.return_token_ids else {}
