"""The known formats of tool calls in chat templates, a row each. A malformed call stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...errors import InputError
from ...models.tokenizer import render_chat
from .tool_calls import (
    CALL_ID,
    Parsed,
    Tool,
    ToolCall,
    ToolFormat,
    before,
    begins_thought,
    call_of,
    loads,
    refuse_constant,
)

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


def _between(text: str, read: Callable[[str], ToolCall | None]) -> Parsed:
    """Calls between `<tool_call>` and `</tool_call>`, any number of them."""
    calls: list[ToolCall] = []
    kept, place = "", 0
    while (start := text.find(_OPENING, place)) >= 0 and (end := text.find(_CLOSING, start)) >= 0:
        start = text.rfind(_OPENING, start, end)  # a second opening mark restarts the call
        call = read(text[start + len(_OPENING) : end])
        end += len(_CLOSING)
        kept += text[place:start] if call else text[place:end]
        calls += [call] if call else []
        place = end
    return kept + text[place:], calls


def _hermes(text: str, _: Sequence[Tool]) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""
    return _between(text, lambda inner: call_of(loads(inner), ("arguments",)))


_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAME = re.compile(r"\s*([^<>\s]+)(.*)", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _coder(text: str, tools: Sequence[Tool]) -> Parsed:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>` (Qwen3-Coder, Qwen3.5)."""
    return _between(text, lambda inner: _typed(_FUNCTION.fullmatch(inner), _PARAMETER, tools))


def _glm(text: str, tools: Sequence[Tool]) -> Parsed:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>` (GLM-4.5)."""
    return _between(text, lambda inner: _typed(_NAME.fullmatch(inner), _ARGUMENT, tools))


def _typed(call: re.Match[str] | None, argument: re.Pattern[str], tools: Sequence[Tool]) -> ToolCall | None:
    """A call from its name and arguments; None if there is other text among them. A value is a string if the tool's
    schema says so or it is not valid JSON, else the JSON value."""
    if call is None or argument.sub("", call[2]).strip():
        return None
    types, arguments = _types(call[1], tools), dict[str, Any]()
    for key, value in argument.findall(call[2]):
        read_value = None if types.get(key) == "string" else loads(value)
        arguments[key] = value if read_value is None and value.strip() != "null" else read_value
    return ToolCall(call[1], json.dumps(arguments, ensure_ascii=False))


def _types(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    for tool in tools:
        if tool["function"]["name"] == name:
            schema = tool["function"].get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            found = properties.items() if isinstance(properties, dict) else ()
            return {key: value.get("type") for key, value in found if isinstance(value, dict)}
    return {}


_PYTHON_TAG = "<|python_tag|>"


def _llama(text: str, _: Sequence[Tool]) -> Parsed:
    """The whole text is `{"name": ..., "parameters": {...}}`, or several separated by semicolons (Llama 3)."""
    decoder = json.JSONDecoder(parse_constant=refuse_constant)
    calls: list[ToolCall] = []
    rest = text.strip().removeprefix(_PYTHON_TAG).lstrip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return text, []
        call = call_of(value, ("parameters", "arguments"))
        if call is None:
            return text, []
        calls.append(call)
        after = rest[end:].lstrip()
        if after and not after.startswith(";"):
            return text, []
        rest = after[1:].lstrip()
    return ("", calls) if calls else (text, [])


# A message; its recipient may come before or after the channel.
_MESSAGE = re.compile(
    r"(?P<before>[^<]*)<\|channel\|>(?P<channel>\w+)(?P<after>[^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>(?P<body>.*)",
    re.DOTALL,
)
_BETWEEN = ("<|end|>", "<|call|>", "<|return|>", "<|start|>assistant")
_PARTS = re.compile("|".join(map(re.escape, _BETWEEN)))
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


def _harmony(text: str, tools: Sequence[Tool]) -> Parsed:
    """Messages in channels: one in `commentary` to `functions.NAME` is a call; `analysis` is a thought and left out
    (gpt-oss)."""
    calls: list[ToolCall] = []
    kept = []
    for part in _PARTS.split(text):
        found = _MESSAGE.fullmatch(part)
        if found is None:
            kept.append(part)
            continue
        name = _callee(found)
        if name is None:
            kept += [found["body"]] * (found["channel"] != "analysis")
            continue
        call = call_of({"name": name, "arguments": loads(found["body"])}, ("arguments",)) if tools else None
        calls += [call] if call else []
        kept += [] if call else [part]
    return "".join(kept), calls


def _callee(message: re.Match[str]) -> str | None:
    recipient = _RECIPIENT.search(message["before"] + message["after"])
    return recipient[1] if recipient is not None and message["channel"] == "commentary" else None


def _settled(text: str) -> int:
    """The length of all finished messages, and of the last one before any possible end mark unless it is a call."""
    start = max((part.end() for part in _PARTS.finditer(text)), default=0)
    found = _MESSAGE.fullmatch(text, start)
    if found is None or _callee(found) is not None:
        return start
    return start + min(before(text[start:], mark) for mark in _BETWEEN)


_CALLS = "[TOOL_CALLS]"
_NAMED_CALL = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def _mistral(text: str, tools: Sequence[Tool]) -> Parsed:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]`, or with newer tokenizers one
    `[TOOL_CALLS]NAME[ARGS]{...}` per call (Mistral)."""
    said, *parts = text.split(_CALLS)
    values: list[Any] = []
    for part in parts:
        if (named := _NAMED_CALL.fullmatch(part)) is not None:
            values.append({"name": named[1], "id": named[2], "arguments": loads(named[3])})
        else:
            found = loads(part)
            values += found if isinstance(found, list) and found else [found]
    calls = [call_of(value, ("arguments",)) for value in values]
    well = [call for call in calls if call is not None]
    return (said, well) if tools and well and len(well) == len(calls) else (text, [])


def _analysis(text: str) -> str:
    found = map(_MESSAGE.fullmatch, _PARTS.split(text))
    return "\n".join(one["body"] for one in found if one is not None and one["channel"] == "analysis")


_HARMONY = ToolFormat(("to=functions.",), False, _harmony, special="<|channel|>", thinking=_analysis, settled=_settled)

FORMATS = {
    "Hermes and Qwen": ToolFormat((_OPENING,), False, _hermes),
    "Qwen-Coder": ToolFormat((_OPENING,), False, _coder),
    "GLM": ToolFormat((_OPENING,), False, _glm),
    "Llama 3": ToolFormat(("{", _PYTHON_TAG), True, _llama),
    "gpt-oss": _HARMONY,
    "Mistral": ToolFormat((_CALLS,), False, _mistral, special=_CALLS),
}

_PROBE: Tool = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer", "description": "A number."}}},
    },
}
_ASKED, _CALLED = "What is the question?", {"name": "probe", "arguments": {"x": 1}}


def may_be_special(tokenizer: Any) -> bool:
    """Whether the chat template names a special token of a format. Does not render it, which would import Jinja."""
    template = str(tokenizer.chat_template or "")
    return any(form.special in template for form in FORMATS.values() if form.special)


def tool_format(tokenizer: Any, variables: dict[str, Any] | None = None) -> ToolFormat | None:
    """The format of the tokenizer's chat template with these variables: the one whose parser recovers a call that the
    template rendered. None if the template shows no tools or its format is not known here."""
    user = {"role": "user", "content": _ASKED}
    calls = [{"type": "function", "id": "0" * CALL_ID, "function": _CALLED}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        shown = render_chat(tokenizer, [user], {**(variables or {}), "tools": [_PROBE]})
        text = render_chat(tokenizer, [user, call], {**(variables or {}), "tools": [_PROBE]})
    except InputError:
        return None
    if "A number." not in shown:
        return None
    said = text[len(shown) :] if text.startswith(shown) else text[text.rfind(_ASKED) + len(_ASKED) :]
    parts = said.split(tokenizer.eos_token) if tokenizer.eos_token else [said]
    wanted = [ToolCall("probe", '{"x": 1}')]
    read = (form for form in FORMATS.values() if any(form.parser(part, (_PROBE,))[1] == wanted for part in parts))
    form = next(read, None)
    return form and replace(form, thinks=begins_thought(shown))
