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
    CALL_ID_LENGTH,
    Parsed,
    Tool,
    ToolCall,
    ToolFormat,
    begins_thought,
    length_before,
    parse_call,
    parse_json,
    refuse_constant,
)

_OPEN_TAG, _CLOSE_TAG = "<tool_call>", "</tool_call>"


def _parse_between_tags(text: str, read: Callable[[str], ToolCall | None]) -> Parsed:
    """Calls between `<tool_call>` and `</tool_call>`, any number of them."""
    calls: list[ToolCall] = []
    kept, place = "", 0
    while (start := text.find(_OPEN_TAG, place)) >= 0 and (end := text.find(_CLOSE_TAG, start)) >= 0:
        start = text.rfind(_OPEN_TAG, start, end)  # a second opening mark restarts the call
        call = read(text[start + len(_OPEN_TAG) : end])
        end += len(_CLOSE_TAG)
        if call is None:
            kept += text[place:end]
        else:
            kept += text[place:start]
            calls.append(call)
        place = end
    return kept + text[place:], calls


def _parse_hermes(text: str, _: Sequence[Tool]) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""
    return _parse_between_tags(text, lambda inner: parse_call(parse_json(inner), ("arguments",)))


_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAME = re.compile(r"\s*([^<>\s]+)(.*)", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _parse_coder(text: str, tools: Sequence[Tool]) -> Parsed:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>` (Qwen3-Coder, Qwen3.5)."""
    return _parse_between_tags(text, lambda inner: _build_call(_FUNCTION.fullmatch(inner), _PARAMETER, tools))


def _parse_glm(text: str, tools: Sequence[Tool]) -> Parsed:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>` (GLM-4.5)."""
    return _parse_between_tags(text, lambda inner: _build_call(_NAME.fullmatch(inner), _ARGUMENT, tools))


def _build_call(call: re.Match[str] | None, argument: re.Pattern[str], tools: Sequence[Tool]) -> ToolCall | None:
    """A call from its name and arguments; None if there is other text among them."""
    if call is None or argument.sub("", call[2]).strip():
        return None
    types = _argument_types(call[1], tools)
    arguments = {key: _argument(value, types.get(key, set())) for key, value in argument.findall(call[2])}
    return ToolCall(call[1], json.dumps(arguments, ensure_ascii=False))


_TYPE_NAMES = {bool: ("boolean",), int: ("integer", "number"), float: ("number",), list: ("array",), dict: ("object",)}


def _argument(text: str, types: set[str]) -> Any:
    """A value as its text: the JSON value, or the text itself if that is not valid JSON, or if a string is among these
    types and the JSON value, other than null, is of none of them."""
    value = parse_json(text)
    if value is None:
        return None if text.strip() == "null" else text
    return text if "string" in types and types.isdisjoint(_TYPE_NAMES.get(type(value), ())) else value


def _argument_types(name: str, tools: Sequence[Tool]) -> dict[str, set[str]]:
    """The types that a tool's schema allows for each argument; empty where it names none."""
    for tool in tools:
        if tool["function"]["name"] == name:
            schema = tool["function"].get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            found = properties.items() if isinstance(properties, dict) else ()
            return {key: _types(value) for key, value in found}
    return {}


def _types(schema: Any) -> set[str]:
    """The types that a schema, or one of its alternatives, names."""
    if not isinstance(schema, dict):
        return set()
    schemas = [schema, *_as_list(schema.get("anyOf")), *_as_list(schema.get("oneOf"))]
    types = [name for one in schemas if isinstance(one, dict) for name in _as_list(one.get("type"))]
    return {name for name in types if isinstance(name, str)}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_PYTHON_TAG = "<|python_tag|>"


def _parse_llama(text: str, _: Sequence[Tool]) -> Parsed:
    """The whole text is `{"name": ..., "parameters": {...}}`, or several separated by semicolons (Llama 3)."""
    decoder = json.JSONDecoder(parse_constant=refuse_constant)
    calls: list[ToolCall] = []
    rest = text.strip().removeprefix(_PYTHON_TAG).lstrip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return text, []
        call = parse_call(value, ("parameters", "arguments"))
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
    r"(?P<before>[^<]*)<\|channel\|>(?P<channel>\w++)(?P<after>[^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>(?P<body>.*)",
    re.DOTALL,
)
_BETWEEN = ("<|end|>", "<|call|>", "<|return|>", "<|start|>assistant")
_PARTS = re.compile("|".join(map(re.escape, _BETWEEN)))
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


def _parse_harmony(text: str, tools: Sequence[Tool]) -> Parsed:
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
            if found["channel"] != "analysis":
                kept.append(found["body"])
            continue
        call = parse_call({"name": name, "arguments": parse_json(found["body"])}, ("arguments",)) if tools else None
        if call is None:
            kept.append(part)
        else:
            calls.append(call)
    return "".join(kept), calls


def _callee(message: re.Match[str]) -> str | None:
    recipient = _RECIPIENT.search(message["before"] + message["after"])
    return recipient[1] if recipient is not None and message["channel"] == "commentary" else None


def _harmony_stable_length(text: str) -> int:
    """The length of all finished messages, and of the last one before any possible end mark unless it is a call."""
    start = max((part.end() for part in _PARTS.finditer(text)), default=0)
    found = _MESSAGE.fullmatch(text, start)
    if found is None or _callee(found) is not None:
        return start
    return start + min(length_before(text[start:], mark) for mark in _BETWEEN)


_CALLS = "[TOOL_CALLS]"
_NAMED_CALL = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def _parse_mistral(text: str, tools: Sequence[Tool]) -> Parsed:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]`, or with newer tokenizers one
    `[TOOL_CALLS]NAME[ARGS]{...}` per call (Mistral)."""
    said, *parts = text.split(_CALLS)
    values: list[Any] = []
    for part in parts:
        if (named := _NAMED_CALL.fullmatch(part)) is not None:
            values.append({"name": named[1], "id": named[2], "arguments": parse_json(named[3])})
        else:
            found = parse_json(part)
            values += found if isinstance(found, list) and found else [found]
    calls = [call for value in values if (call := parse_call(value, ("arguments",))) is not None]
    return (said, calls) if tools and calls and len(calls) == len(values) else (text, [])


def _extract_analysis(text: str) -> str:
    messages = map(_MESSAGE.fullmatch, _PARTS.split(text))
    return "\n".join(found["body"] for found in messages if found is not None and found["channel"] == "analysis")


_HARMONY = ToolFormat(
    ("to=functions.",),
    only_at_start=False,
    parser=_parse_harmony,
    special_token="<|channel|>",
    thinking=_extract_analysis,
    stable_length=_harmony_stable_length,
)

FORMATS = {
    "Hermes and Qwen": ToolFormat((_OPEN_TAG,), False, _parse_hermes),
    "Qwen-Coder": ToolFormat((_OPEN_TAG,), False, _parse_coder),
    "GLM": ToolFormat((_OPEN_TAG,), False, _parse_glm),
    "Llama 3": ToolFormat(("{", _PYTHON_TAG), True, _parse_llama),
    "gpt-oss": _HARMONY,
    "Mistral": ToolFormat((_CALLS,), False, _parse_mistral, special_token=_CALLS),
}

_PROBE: Tool = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer", "description": "A number."}}},
    },
}
_PROBE_QUESTION, _PROBE_CALL = "What is the question?", {"name": "probe", "arguments": {"x": 1}}


def may_use_special_tokens(tokenizer: Any) -> bool:
    """Whether the chat template names a special token of a format. Does not render it, which would import Jinja."""
    template = str(tokenizer.chat_template or "")
    return any(form.special_token in template for form in FORMATS.values() if form.special_token)


def tool_format(tokenizer: Any, variables: dict[str, Any] | None = None) -> ToolFormat | None:
    """The format of the tokenizer's chat template with these variables: the one whose parser recovers a call that the
    template rendered. None if the template shows no tools or its format is not known here."""
    user = {"role": "user", "content": _PROBE_QUESTION}
    calls = [{"type": "function", "id": "0" * CALL_ID_LENGTH, "function": _PROBE_CALL}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    variables = {**(variables or {}), "tools": [_PROBE]}
    try:
        shown = render_chat(tokenizer, [user], variables)
        text = render_chat(tokenizer, [user, call], variables)
    except InputError:
        return None
    if "A number." not in shown:
        return None
    said = text[len(shown) :] if text.startswith(shown) else text[text.rfind(_PROBE_QUESTION) + len(_PROBE_QUESTION) :]
    parts = said.split(tokenizer.eos_token) if tokenizer.eos_token else [said]
    wanted = [ToolCall("probe", '{"x": 1}')]
    for form in FORMATS.values():
        if any(form.parser(part, (_PROBE,))[1] == wanted for part in parts):
            return replace(form, opens_thought=begins_thought(shown))
    return None
