"""How what is given becomes tokens, and what was sampled a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..types import Segment
from .base import Encode
from .environment import Message

Messages = list[Message]


class Said(NamedTuple):
    """What was sampled as a chat message, whether it began a call that is none, and the message that stands for it
    where the chat template is asked what follows."""

    message: Message
    malformed: bool
    in_chat: Message


def plain(turn: Segment) -> Said:
    """A text without calls."""
    message = {"role": "assistant", "content": turn.text}
    return Said(message, False, message)


class Tokens(NamedTuple):
    """How given text becomes tokens, once; the text of tokens, for people; and what was sampled as a message.
    `following(messages, given)` has the tokens of text or messages that follow an answer, the last of `messages` (None:
    the prompt was no chat). `with_tools`: the same where the model may call these (`Environment.tools`). `tokenizer` is
    the model's own, for code that works with one."""

    prompt: Encode
    following: Callable[[Messages | None, str | Messages], list[int]]
    text: Callable[[list[int]], str] = str
    said: Callable[[Segment], Said] = plain
    with_tools: Callable[[Sequence[Mapping[str, Any]]], Tokens] | None = None
    tokenizer: Any = None


def answering(answer: Message, given: Messages) -> Messages:
    """Messages of tools with the ids of the calls that they answer in order, where those have some."""
    ids = iter([call["id"] for call in answer.get("tool_calls", []) if "id" in call])
    asks = [message.get("role") == "tool" and "tool_call_id" not in message for message in given]
    found = [next(ids, None) if asked else None for asked in asks]
    return [
        message if one is None else {**message, "tool_call_id": one} for message, one in zip(given, found, strict=True)
    ]


def said_by(messages: Messages) -> str:
    """Messages as a text for people."""
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
