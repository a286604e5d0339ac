"""Conversions: what an environment gives to tokens, and sampled turns to chat messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..types import Segment
from .base import Encode
from .environment import Message

Messages = list[Message]


class Said(NamedTuple):
    """A sampled turn as a chat message; whether a call in it is malformed; and the message by which the chat template
    is given the turn when it renders what follows."""

    message: Message
    malformed: bool
    in_chat: Message


def plain(turn: Segment) -> Said:
    """A turn as plain text, without tool calls."""
    message = {"role": "assistant", "content": turn.text}
    return Said(message, False, message)


class Tokens(NamedTuple):
    """The conversions of a model.

    Attributes:
        prompt: the tokens of a prompt.
        following: the tokens of text or messages that follow an answer, which is the last of the messages given first
            (None: the prompt was not a chat).
        text: the text of tokens, for people.
        said: a sampled turn as a message.
        with_tools: the conversions for a model that may call these tools (`Environment.tools`).
        tokenizer: the model's, for code that needs one.
    """

    prompt: Encode
    following: Callable[[Messages | None, str | Messages], list[int]]
    text: Callable[[list[int]], str] = str
    said: Callable[[Segment], Said] = plain
    with_tools: Callable[[Sequence[Mapping[str, Any]]], Tokens] | None = None
    tokenizer: Any = None


def answering(answer: Message, given: Messages) -> Messages:
    """Messages with the ids of the calls that tools' messages answer, in order, if the calls have ids."""
    ids = iter([call["id"] for call in answer.get("tool_calls", []) if "id" in call])
    asks = [message.get("role") == "tool" and "tool_call_id" not in message for message in given]
    found = [next(ids, None) if asked else None for asked in asks]
    return [
        message if one is None else {**message, "tool_call_id": one} for message, one in zip(given, found, strict=True)
    ]


def said_by(messages: Messages) -> str:
    """Messages as a text for people."""
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
