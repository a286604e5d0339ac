"""Calls of tools in sampled text: what a format of them is, and what all formats share. `tool_formats` has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is the JSON text of an object. `id`: what the model calls the call by, where its format has that."""

    name: str
    arguments: str
    id: str = field(default="", compare=False)


Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": a JSON schema}}
_THINK, _THOUGHT = "<think>", "</think>"
NAMELESS = "unknown"
CALL_ID = 9  # characters of a call's id: Mistral's templates take no others
Parsed = tuple[str, list[ToolCall]]  # the text without the calls in it, and these


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models calls tools.

    Attributes:
        starts: how a call may begin, anywhere in a text or, where `only_first`, at its beginning.
        parser: the text and the calls of a whole completion, where these tools may be called.
        special: a special token that its chat templates name; empty where its marks are text. What is parsed is the
            text with special tokens, and the chat template is given calls as calls; other templates show a text that
            has calls in it as it is.
        thinks: the generation prompt begins a thought, which the text goes on with.
        thinking: the thoughts in a completion, where its chat template takes them as a message's `thinking`.
        settled: characters of a growing text of which is known what they are; None: those that no call can begin in.
    """

    starts: tuple[str, ...]
    only_first: bool
    parser: Callable[[str, Sequence[Tool]], Parsed]
    tools: tuple[Tool, ...] = ()
    special: str = ""
    thinks: bool = False
    thinking: Callable[[str], str] | None = None
    settled: Callable[[str], int] | None = None

    def reading(self, tools: Sequence[Tool]) -> ToolFormat | None:
        """What completions are read with where these tools may be called; None where all of them is text."""
        return replace(self, tools=tuple(tools)) if tools or self.special else None

    def parse(self, text: str) -> Parsed:
        """The text and the calls of a whole completion. There are no calls within its thought."""
        thought = self.thought(text)
        said, calls = self.parser(text[thought:], self.tools)
        return text[:thought] + said, calls

    def thought(self, text: str) -> int:
        """Characters of the thought that a text, or a growing one so far, begins with."""
        if not self.thinks and not text.lstrip().startswith(_THINK):
            return 0
        end = text.find(_THOUGHT)
        return len(text) if end < 0 else end + len(_THOUGHT)

    def message(self, text: str) -> tuple[dict[str, Any], bool]:
        """The chat message that a whole completion is, and whether a call that it began is none."""
        said, calls = self.parse(text)
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if calls:
            message["tool_calls"] = [self._shown(i, call.name, call) for i, call in enumerate(calls)]
        answer = said[self.thought(said) :]
        starts = answer.lstrip().startswith if self.only_first else answer.__contains__
        return message, any(map(starts, self.starts))

    def _shown(self, number: int, name: str, call: ToolCall | None = None) -> dict[str, Any]:
        arguments = {} if call is None else json.loads(call.arguments)
        shown = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {**shown, "id": (call and call.id) or f"{number:0{CALL_ID}d}"} if self.special else shown

    def in_chat(self, text: str, message: dict[str, Any], malformed: bool) -> dict[str, Any]:
        """What stands for a completion among the messages that the chat template is given, to tell what follows it: a
        call that is none is shown as one of a tool without a name, for there is an answer to it."""
        if not self.special:
            return {"role": "assistant", "content": text}
        calls = message.get("tool_calls", [])
        shown = {**message, "tool_calls": [*calls, self._shown(len(calls), NAMELESS)]} if malformed else message
        return self.with_thought(shown, self.thoughts(text))

    def thoughts(self, text: str) -> str:
        """The thoughts in a completion, where they are no part of its message's content."""
        return "" if self.thinking is None else self.thinking(text)

    def with_thought(self, message: dict[str, Any], thought: str) -> dict[str, Any]:
        """A message as the chat template takes it with what was thought before it."""
        if self.thinking is None or not thought:
            return message
        return {**message, "thinking": thought} | ({"content": ""} if "tool_calls" in message else {})

    def certain(self, text: str) -> str:
        """What `parse` will have of a growing text, whatever follows: it may be shown already."""
        return self.parse(text[: self._known(text)])[0]

    def _known(self, text: str) -> int:
        if self.settled is not None:
            return self.settled(text)
        thought = self.thought(text)
        said = text[thought:]
        if self.only_first:
            begun = said.lstrip()
            possible = any(begun.startswith(start) or start.startswith(begun) for start in self.starts)
            return thought if possible else len(text)
        return thought + min(before(said, start) for start in self.starts)


def begins_thought(prompt: str) -> bool:
    """Whether the text of a prompt ends within a thought that it begins."""
    return prompt.rstrip().endswith(_THINK)


def before(text: str, wanted: str) -> int:
    """Characters before the first place where `wanted` stands, or begins to at the end."""
    found = text.find(wanted)
    if found >= 0:
        return found
    sizes = range(min(len(wanted) - 1, len(text)), 0, -1)
    return len(text) - next((size for size in sizes if text.endswith(wanted[:size])), 0)


def call_of(value: Any, arguments: tuple[str, ...]) -> ToolCall | None:
    """A call from its JSON, whose arguments are under one of these names: an object, or its text. An id that no
    template takes is left out."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    given: Any = next((value[name] for name in arguments if name in value), {})
    if isinstance(given, str):
        given = loads(given)
    if not isinstance(given, dict):
        return None
    named = value.get("id")
    called = named if isinstance(named, str) and len(named) == CALL_ID else ""
    return ToolCall(value["name"], json.dumps(given, ensure_ascii=False), called)


def loads(text: str) -> Any:
    """The JSON value, strictly: no NaN, which no client could read; None for what is none."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None


def refuse_constant(constant: str) -> None:
    """What JSON has not: NaN and infinities."""
    raise ValueError(f"{constant} is no JSON")
