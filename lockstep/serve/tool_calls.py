"""Calls of tools in sampled text, in the formats that chat templates teach. What is no well-formed call stays text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is the JSON text of an object."""

    name: str
    arguments: str


Parsed = tuple[str, list[ToolCall]]  # the text without the calls in it, and these


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models calls tools.

    Attributes:
        mark: what its chat templates contain.
        starts: how a call may begin, anywhere in a text or, where `only_first`, at its beginning.
        parse: the text and the calls of a whole completion.
    """

    mark: str
    starts: tuple[str, ...]
    only_first: bool
    parse: Callable[[str], Parsed]

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


def hermes(text: str) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times (Qwen, Hermes)."""
    opening, closing = "<tool_call>", "</tool_call>"
    calls: list[ToolCall] = []
    kept, place = "", 0
    while (start := text.find(opening, place)) >= 0 and (end := text.find(closing, start)) >= 0:
        start = text.rfind(opening, start, end)  # one that was begun anew
        call = _call(_loads(text[start + len(opening) : end]), ("arguments",))
        end += len(closing)
        kept += text[place:start] if call else text[place:end]
        calls += [call] if call else []
        place = end
    return kept + text[place:], calls


def llama(text: str) -> Parsed:
    """The whole text is `{"name": ..., "parameters": {...}}`, or several with semicolons between (Llama 3)."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    calls: list[ToolCall] = []
    rest = text.strip().removeprefix(PYTHON_TAG).lstrip()
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


PYTHON_TAG = "<|python_tag|>"
FORMATS = (
    ToolFormat("<tool_call>", ("<tool_call>",), False, hermes),
    ToolFormat(PYTHON_TAG, ("{", PYTHON_TAG), True, llama),
    ToolFormat('"parameters":', ("{", PYTHON_TAG), True, llama),
)


def tool_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template teaches; None for one without tools, or with calls in a form not known here."""
    if not template or "tools" not in template:
        return None
    return next((form for form in FORMATS if form.mark in template), None)
