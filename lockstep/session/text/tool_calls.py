"""Tool calls in sampled text: the type of a format and what all formats (`tool_formats`) share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is the JSON text of an object. `id`: the id that the model gave the call, if its format has ids."""

    name: str
    arguments: str
    id: str = field(default="", compare=False)


Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": a JSON schema}}
_THINK, _THOUGHT = "<think>", "</think>"
NAMELESS = "unknown"
CALL_ID = 9  # characters of a call's id: Mistral's templates accept no other length
Parsed = tuple[str, list[ToolCall]]  # the text without its calls, and the calls


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models calls tools.

    Attributes:
        starts: how a call may begin, anywhere in the text or, with `only_first`, only at its beginning.
        parser: returns the text and the calls of a whole completion, given the tools.
        tools: those that the model may call.
        special: a special token that identifies the format's chat templates; empty if calls are marked by plain text.
            With it, text is parsed with special tokens, and the chat template is given structured calls; otherwise the
            template is given the text with the calls in it.
        thinks: whether the generation prompt opens a thought that the completion continues.
        thinking: returns a completion's thoughts, if its chat template takes them as a message's `thinking`.
        settled: returns how many characters of a growing text can no longer change meaning; None: those before any
            possible call.
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
        """The format that parses completions when these tools may be called; None if a completion is only text."""
        return replace(self, tools=tuple(tools)) if tools or self.special else None

    def parse(self, text: str) -> Parsed:
        """The text and the calls of a whole completion. Its thought is not searched for calls."""
        thought = self.thought(text)
        said, calls = self.parser(text[thought:], self.tools)
        return text[:thought] + said, calls

    def thought(self, text: str) -> int:
        """The length of the thought that a text, possibly still growing, begins with."""
        if not self.thinks and not text.lstrip().startswith(_THINK):
            return 0
        end = text.find(_THOUGHT)
        return len(text) if end < 0 else end + len(_THOUGHT)

    def message(self, text: str) -> tuple[dict[str, Any], bool]:
        """A whole completion as a chat message, and whether it contains a malformed call."""
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
        """The message given to the chat template for a completion when rendering what follows it. A malformed call is
        shown as a call of the tool `NAMELESS`, because the environment's reply to it follows."""
        if not self.special:
            return {"role": "assistant", "content": text}
        calls = message.get("tool_calls", [])
        shown = {**message, "tool_calls": [*calls, self._shown(len(calls), NAMELESS)]} if malformed else message
        return self.with_thought(shown, self.thoughts(text))

    def thoughts(self, text: str) -> str:
        """The thoughts in a completion, if they are not part of its message's content."""
        return "" if self.thinking is None else self.thinking(text)

    def with_thought(self, message: dict[str, Any], thought: str) -> dict[str, Any]:
        """The message with the thought before it, in the form that the chat template takes."""
        if self.thinking is None or not thought:
            return message
        return {**message, "thinking": thought} | ({"content": ""} if "tool_calls" in message else {})

    def certain(self, text: str) -> str:
        """The part of a growing text that `parse` will return whatever follows, so that it can be shown already."""
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
    """Whether the text of a prompt ends by opening a thought."""
    return prompt.rstrip().endswith(_THINK)


def before(text: str, wanted: str) -> int:
    """The number of characters before the first occurrence of `wanted`, or before a prefix of it at the end."""
    found = text.find(wanted)
    if found >= 0:
        return found
    sizes = range(min(len(wanted) - 1, len(text)), 0, -1)
    return len(text) - next((size for size in sizes if text.endswith(wanted[:size])), 0)


def call_of(value: Any, arguments: tuple[str, ...]) -> ToolCall | None:
    """A call from its JSON value, or None. Its arguments, an object or its JSON text, are under one of these names. An
    id that no template accepts is dropped."""
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
    """The JSON value, or None if the text is not strict JSON (NaN is refused, since clients could not read it)."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None


def refuse_constant(constant: str) -> None:
    """Raise `ValueError` for a constant that is not JSON: NaN or an infinity."""
    raise ValueError(f"{constant} is no JSON")
