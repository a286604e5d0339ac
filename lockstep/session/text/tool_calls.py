"""Tool calls in sampled text: the type of a format and what all formats (`tool_formats`) share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...user_functions import is_unicode


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is the JSON text of an object. `id`: the id that the model gave the call, if its format has ids."""

    name: str
    arguments: str
    id: str = field(default="", compare=False)


Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": a JSON schema}}
_OPEN_THOUGHT, _CLOSE_THOUGHT = "<think>", "</think>"
UNKNOWN_TOOL = "unknown"
CALL_ID_LENGTH = 9  # characters of a call's id: Mistral's templates accept no other length
MAX_DEPTH = 100  # levels of a call's arguments; a deeper one stays text
Parsed = tuple[str, list[ToolCall]]  # the text without its calls, and the calls


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models calls tools.

    Attributes:
        call_starts: how a call may begin, anywhere in the text or, with `only_at_start`, only there.
        parser: returns the text and the calls of a whole completion, given the tools.
        tools: those that the model may call.
        special_token: one that identifies the format's chat templates; empty if calls are marked by plain text. With
            it, text is parsed with special tokens, and the chat template is given structured calls; otherwise the
            template is given the text with the calls in it.
        opens_thought: whether the generation prompt opens a thought that the completion continues.
        thinking: returns a completion's thoughts, if its chat template takes them as a message's `thinking`.
        stable_length: returns how many characters of a growing text can no longer change meaning; None: those before
            any possible call.
    """

    call_starts: tuple[str, ...]
    only_at_start: bool
    parser: Callable[[str, Sequence[Tool]], Parsed]
    tools: tuple[Tool, ...] = ()
    special_token: str = ""
    opens_thought: bool = False
    thinking: Callable[[str], str] | None = None
    stable_length: Callable[[str], int] | None = None

    def for_tools(self, tools: Sequence[Tool]) -> ToolFormat | None:
        """The format that parses completions when these tools may be called; None if a completion is only text."""
        return replace(self, tools=tuple(tools)) if tools or self.special_token else None

    def parse(self, text: str) -> Parsed:
        """The text and the calls of a whole completion. Its thought is not searched for calls."""
        thought = self.thought_length(text)
        said, calls = self.parser(text[thought:], self.tools)
        return text[:thought] + said, calls

    def thought_length(self, text: str) -> int:
        """The length of the thought that a text, possibly still growing, begins with."""
        if not self.opens_thought and not text.lstrip().startswith(_OPEN_THOUGHT):
            return 0
        end = text.find(_CLOSE_THOUGHT)
        return len(text) if end < 0 else end + len(_CLOSE_THOUGHT)

    def message(self, text: str) -> tuple[dict[str, Any], bool]:
        """A whole completion as a chat message, and whether it contains a malformed call."""
        said, calls = self.parse(text)
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if calls:
            message["tool_calls"] = [self._call_for_template(i, call) for i, call in enumerate(calls)]
        answer = said[self.thought_length(said) :]
        if self.only_at_start:
            is_malformed = answer.lstrip().startswith(self.call_starts)
        else:
            is_malformed = any(start in answer for start in self.call_starts)
        return message, is_malformed

    def _call_for_template(self, number: int, call: ToolCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": json.loads(call.arguments)}
        result: dict[str, Any] = {"type": "function", "function": function}
        if self.special_token:
            result["id"] = call.id or f"{number:0{CALL_ID_LENGTH}d}"
        return result

    def in_chat(self, text: str, message: dict[str, Any], malformed: bool) -> dict[str, Any]:
        """The message given to the chat template for a completion when rendering what follows it. A malformed call is
        shown as a call of the tool `UNKNOWN_TOOL`, because the environment's reply to it follows."""
        if not self.special_token:
            return {"role": "assistant", "content": text}
        calls = message.get("tool_calls", [])
        if malformed:
            unknown_call = self._call_for_template(len(calls), ToolCall(UNKNOWN_TOOL, "{}"))
            message = {**message, "tool_calls": [*calls, unknown_call]}
        return self.add_thinking(message, self.extract_thinking(text))

    def extract_thinking(self, text: str) -> str:
        """The thoughts in a completion, if they are not part of its message's content."""
        return "" if self.thinking is None else self.thinking(text)

    def add_thinking(self, message: dict[str, Any], thought: str) -> dict[str, Any]:
        """The message with the thought before it, in the form that the chat template takes."""
        if self.thinking is None or not thought:
            return message
        return {**message, "thinking": thought} | ({"content": ""} if "tool_calls" in message else {})

    def stable_text(self, text: str) -> str:
        """The part of a growing text that `parse` will return whatever follows, so that it can be shown already."""
        return self.parse(text[: self._stable_length(text)])[0]

    def _stable_length(self, text: str) -> int:
        if self.stable_length is not None:
            return self.stable_length(text)
        thought = self.thought_length(text)
        said = text[thought:]
        if self.only_at_start:
            beginning = said.lstrip()
            may_be_call = any(beginning.startswith(s) or s.startswith(beginning) for s in self.call_starts)
            return thought if may_be_call else len(text)
        return thought + min(length_before(said, start) for start in self.call_starts)


def begins_thought(prompt: str) -> bool:
    """Whether the text of a prompt ends by opening a thought."""
    return prompt.rstrip().endswith(_OPEN_THOUGHT)


def length_before(text: str, wanted: str) -> int:
    """The number of characters before the first occurrence of `wanted`, or before a prefix of it at the end."""
    found = text.find(wanted)
    if found >= 0:
        return found
    sizes = range(min(len(wanted) - 1, len(text)), 0, -1)
    return len(text) - next((size for size in sizes if text.endswith(wanted[:size])), 0)


def parse_call(value: Any, arguments: tuple[str, ...]) -> ToolCall | None:
    """A call from its JSON value, or None. Its arguments, an object or its JSON text, are under one of these names. An
    id that no template accepts is dropped."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    given: Any = next((value[name] for name in arguments if name in value), {})
    if isinstance(given, str):
        given = parse_json(given)
    if not isinstance(given, dict):
        return None
    call_id = value.get("id")
    if not isinstance(call_id, str) or len(call_id) != CALL_ID_LENGTH:
        call_id = ""
    text = _readable_json(given)
    return ToolCall(value["name"], text, call_id) if text is not None and is_unicode(value["name"]) else None


def parse_json(text: str) -> Any:
    """The JSON value; None if the text is not strict JSON, or holds what clients could not read."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    return None if _readable_json(value) is None else value


def _readable_json(value: Any) -> str | None:
    """The JSON of a value that a model wrote; None for what clients could not read: infinities (as which 1e999 is
    read), half a surrogate pair, more than `MAX_DEPTH` levels."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        return None
    return text if _is_nested_at_most(value, MAX_DEPTH) else None


def _is_nested_at_most(value: Any, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return not isinstance(value, list) or (levels > 0 and all(_is_nested_at_most(one, levels - 1) for one in value))


def refuse_constant(constant: str) -> None:
    """Raise `ValueError` for a constant that is not JSON: NaN or an infinity."""
    raise ValueError(f"{constant} is no JSON")
