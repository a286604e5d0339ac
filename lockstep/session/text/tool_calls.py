"""Calls of tools in sampled text, in the formats that chat templates teach. What is no well-formed call stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import InputError
from ...models.tokenizer import render_chat


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is the JSON text of an object."""

    name: str
    arguments: str


Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": a JSON schema}}
Parsed = tuple[str, list[ToolCall]]  # the text without the calls in it, and these


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models calls tools.

    Attributes:
        starts: how a call may begin, anywhere in a text or, where `only_first`, at its beginning.
        parser: the text and the calls of a whole completion, where these tools may be called.
    """

    starts: tuple[str, ...]
    only_first: bool
    parser: Callable[[str, Sequence[Tool]], Parsed]
    tools: tuple[Tool, ...] = ()

    def parse(self, text: str) -> Parsed:
        """The text and the calls of a whole completion."""
        return self.parser(text, self.tools)

    def message(self, text: str) -> tuple[dict[str, Any], bool]:
        """The chat message that a whole completion is, and whether it began a call that is none."""
        said, calls = self.parse(text)
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if calls:
            named = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]
            message["tool_calls"] = [{"type": "function", "function": function} for function in named]
        starts = said.lstrip().startswith if self.only_first else said.__contains__
        return message, not calls and any(map(starts, self.starts))

    def safe(self, text: str) -> int:
        """Characters of a growing text that no call can begin in: they may be shown already."""
        if self.only_first:
            begun = text.lstrip()
            possible = any(begun.startswith(start) or start.startswith(begun) for start in self.starts)
            return 0 if possible else len(text)
        return min(before(text, start) for start in self.starts)


def before(text: str, wanted: str) -> int:
    """Characters before the first place where `wanted` stands, or begins to at the end."""
    found = text.find(wanted)
    if found >= 0:
        return found
    for size in range(min(len(wanted) - 1, len(text)), 0, -1):
        if text.endswith(wanted[:size]):
            return len(text) - size
    return len(text)


def _call(value: Any, arguments: tuple[str, ...]) -> ToolCall | None:
    """A call from its JSON, whose arguments are under one of these names: an object, or its text."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    given: Any = next((value[name] for name in arguments if name in value), {})
    if isinstance(given, str):
        given = _loads(given)
    return ToolCall(value["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None


def _loads(text: str) -> Any:
    """The JSON value, strictly: no NaN, which no client could read; None for what is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


def _between(text: str, read: Callable[[str], ToolCall | None]) -> Parsed:
    """Calls between `<tool_call>` and `</tool_call>`, any number of them."""
    calls: list[ToolCall] = []
    kept, place = "", 0
    while (start := text.find(_OPENING, place)) >= 0 and (end := text.find(_CLOSING, start)) >= 0:
        start = text.rfind(_OPENING, start, end)  # one that was begun anew
        call = read(text[start + len(_OPENING) : end])
        end += len(_CLOSING)
        kept += text[place:start] if call else text[place:end]
        calls += [call] if call else []
        place = end
    return kept + text[place:], calls


def _hermes(text: str, _: Sequence[Tool]) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""
    return _between(text, lambda inner: _call(_loads(inner), ("arguments",)))


_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _coder(text: str, tools: Sequence[Tool]) -> Parsed:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>` (Qwen3-Coder, Qwen3.5).
    A value is text where the tool's schema says so, and JSON elsewhere, if it is some."""

    def read(inner: str) -> ToolCall | None:
        found = _FUNCTION.fullmatch(inner)
        if found is None or _PARAMETER.sub("", found[2]).strip():
            return None
        types = _types(found[1], tools)
        arguments: dict[str, Any] = {}
        for key, value in _PARAMETER.findall(found[2]):
            read_value = None if types.get(key) == "string" else _loads(value)
            arguments[key] = value if read_value is None and value.strip() != "null" else read_value
        return ToolCall(found[1], json.dumps(arguments, ensure_ascii=False))

    return _between(text, read)


def _types(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """The type that a tool's schema has for each parameter."""
    for tool in tools:
        if tool["function"]["name"] == name:
            schema = tool["function"].get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            found = properties.items() if isinstance(properties, dict) else ()
            return {key: value.get("type") for key, value in found if isinstance(value, dict)}
    return {}


_PYTHON_TAG = "<|python_tag|>"


def _llama(text: str, _: Sequence[Tool]) -> Parsed:
    """The whole text is `{"name": ..., "parameters": {...}}`, or several with semicolons between (Llama 3)."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    calls: list[ToolCall] = []
    rest = text.strip().removeprefix(_PYTHON_TAG).lstrip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return text, []
        call = _call(value, ("parameters", "arguments"))
        if call is None:
            return text, []
        calls.append(call)
        after = rest[end:].lstrip()
        if after and not after.startswith(";"):
            return text, []
        rest = after[1:].lstrip()
    return ("", calls) if calls else (text, [])


HERMES = ToolFormat((_OPENING,), False, _hermes)
CODER = ToolFormat((_OPENING,), False, _coder)
LLAMA = ToolFormat(("{", _PYTHON_TAG), True, _llama)

_PROBE: Tool = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer", "description": "A number."}}},
    },
}
_ASKED, _CALLED = "What is the question?", {"name": "probe", "arguments": {"x": 1}}


def tool_format(tokenizer: Any) -> ToolFormat | None:
    """The format of the tokenizer's chat template: the one that reads a call out of what the template makes of it. None
    for a template that shows no tools, or calls them in a form that is not known here."""
    user = {"role": "user", "content": _ASKED}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "0", "function": _CALLED}]}
    try:
        shown = render_chat(tokenizer, [user], {"tools": [_PROBE]})
        text = render_chat(tokenizer, [user, call], {"tools": [_PROBE]})
    except InputError:
        return None
    if "A number." not in shown:
        return None
    said = text[len(shown) :] if text.startswith(shown) else text[text.rfind(_ASKED) + len(_ASKED) :]
    said = said.partition(tokenizer.eos_token)[0] if tokenizer.eos_token else said
    wanted = [ToolCall("probe", '{"x": 1}')]
    formats = (replace(form, tools=(_PROBE,)) for form in (HERMES, CODER, LLAMA))
    return next((replace(form, tools=()) for form in formats if form.parse(said)[1] == wanted), None)
