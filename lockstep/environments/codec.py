"""Conversions: what an environment gives to tokens, and sampled turns to chat messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..types import Segment
from .base import Encode
from .environment import Message

Messages = list[Message]


class TurnMessage(NamedTuple):
    """A sampled turn as a chat message; whether a call in it is malformed; and the message by which the chat template
    is given the turn when it renders what follows."""

    message: Message
    malformed: bool
    in_chat: Message


def parse_plain_turn(turn: Segment) -> TurnMessage:
    """A turn as plain text, without tool calls."""
    message = {"role": "assistant", "content": turn.text}
    return TurnMessage(message, False, message)


class ChatCodec(NamedTuple):
    """The conversions of a model.

    Attributes:
        encode_prompt: the tokens of a prompt.
        encode_following: the tokens of text or messages that follow an answer, which is the last of the messages given
            first (None: the prompt was not a chat).
        decode: the text of tokens, for people.
        parse_turn: a sampled turn as a message.
        with_tools: the conversions for a model that may call these tools (`Environment.tools`).
        tokenizer: the model's, for code that needs one.
    """

    encode_prompt: Encode
    encode_following: Callable[[Messages | None, str | Messages], list[int]]
    decode: Callable[[list[int]], str] = str
    parse_turn: Callable[[Segment], TurnMessage] = parse_plain_turn
    with_tools: Callable[[Sequence[Mapping[str, Any]]], ChatCodec] | None = None
    tokenizer: Any = None


def with_call_ids(answer: Message, given: Messages) -> Messages:
    """Messages with the ids of the calls that tools' messages answer, in order, if the calls have ids."""
    call_ids = iter([call["id"] for call in answer.get("tool_calls", []) if "id" in call])
    messages: Messages = []
    for message in given:
        if message.get("role") == "tool" and "tool_call_id" not in message:
            call_id = next(call_ids, None)
            if call_id is not None:
                message = {**message, "tool_call_id": call_id}
        messages.append(message)
    return messages


def messages_text(messages: Messages) -> str:
    """Messages as a text for people."""
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
