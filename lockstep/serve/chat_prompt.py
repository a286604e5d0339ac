"""Chat messages to token ids. Given text is encoded once; what was sampled, and comes back as tokens, stays tokens.

An answer's message has its `token_ids` when its request asked for them. Sent back with the conversation they stand in
the next prompt as they are, between the pieces of text that the template puts around them, so a conversation's prompt
begins with the last one's prompt and what was sampled after it. Where the template no longer renders a turn as it was
(it removes thinking, say) or the client has changed it, its text is encoded as all text is.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

from ..errors import InputError
from ..models.tokenizer import check_size, encode_text, render_chat
from ..session.text.messages import Message
from ..session.text.policy import Policy
from ..session.text.tool_calls import ToolFormat, begins_thought
from .errors import refused

MOST_TURNS = 512  # whose tokens are looked for in a prompt, each with the template


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt's token ids; of its messages' turns that came with token ids, how many stand in it as they were sampled,
    and how many had to be encoded again; and whether it begins a thought, which the completion goes on with."""

    token_ids: list[int]
    kept: int = 0
    encoded_again: int = 0
    thinks: bool = False


def encode_chat(
    policy: Policy, messages: list[Message], variables: dict[str, Any], form: ToolFormat | None
) -> ChatPrompt:
    """Token ids of checked messages through the model's template with these `variables`, its tools among them.
    `InputError`: the template refuses the messages, or they are larger than any prompt."""
    config = policy.model.config
    check_size(messages, config.max_position_embeddings, policy.longest_token)
    of_turns = [_sampled(message, f"messages[{i}].token_ids", config.vocab_size) for i, message in enumerate(messages)]
    if sum(map(bool, of_turns)) > MOST_TURNS:
        raise refused("messages", f"more than {MOST_TURNS} messages have token_ids; send older ones without")
    told = [_told(policy, *turn, form) for turn in zip(messages, of_turns, strict=True)]
    text = render_chat(policy.tokenizer, told, variables)
    check_size(text, config.max_position_embeddings, policy.longest_token)  # with tools and calls
    ids: list[int] = []
    place = kept = lost = 0  # characters of `text` that `ids` stand for; turns
    for i, sampled in enumerate(of_turns):
        if sampled:
            turn = _turn(policy, text, _begun(policy, told[:i], variables), sampled, form)
            if turn is None:
                lost += 1
                continue
            ids += encode_text(policy.tokenizer, text[place : turn[0]]) + sampled
            place, kept = turn[1], kept + 1
    return ChatPrompt(ids + encode_text(policy.tokenizer, text[place:]), kept, lost, begins_thought(text))


def _sampled(message: Message, where: str, vocabulary: int) -> list[int]:
    """The token ids that a message came with, or none."""
    token_ids = message.get("token_ids") or []
    if token_ids and message["role"] != "assistant":
        raise refused(where, f"{where}: the message is of role {message['role']}; only an assistant's was sampled")
    if not isinstance(token_ids, list) or not all(type(t) is int and 0 <= t < vocabulary for t in token_ids):
        raise refused(where, f"{where} must be a list of token ids, each below {vocabulary}")
    return token_ids


def _told(policy: Policy, message: Message, sampled: list[int], form: ToolFormat | None) -> Message:
    """A message as the template takes it, with its thought: as the client tells it, or as it was sampled."""
    told = {name: value for name, value in message.items() if name != "token_ids"}
    if form is None:
        return told
    thought = message.get("reasoning") or form.thoughts(policy.as_read(sampled, form))
    return form.with_thought(told, thought) if isinstance(thought, str) else told


def _begun(policy: Policy, told: list[Message], variables: dict[str, Any]) -> str | None:
    """The text that a turn was sampled after; None where the template refuses a conversation that ends there."""
    with suppress(InputError):
        return render_chat(policy.tokenizer, told, variables)
    return None


def _turn(
    policy: Policy, text: str, before: str | None, sampled: list[int], form: ToolFormat | None
) -> tuple[int, int] | None:
    """Where a turn that was sampled after `before` stands in `text`: from there up to where given text goes on. None
    where `text` has not what was sampled. A generation prompt may have had an end that turns of the past have not."""
    if before is None:
        return None
    ended = sampled[-1] in policy.model.config.eos_token_ids
    tokenizer = policy.tokenizer
    closing = tokenizer.decode(sampled[-1:], skip_special_tokens=False) if ended else tokenizer.eos_token
    start = len(commonprefix([text, before]))
    end = text.find(closing, start) if closing else -1
    if end < 0 or not _same(text[start:end], policy.as_read(sampled, form), form):
        return None
    return start, end + len(closing) * ended


def _same(rendered: str, sampled: str, form: ToolFormat | None) -> bool:
    """Whether a template has rendered what was sampled: but for space around it, and the spelling of tool calls."""
    if rendered.strip() == sampled.strip():
        return True
    if form is None:
        return False
    if form.thoughts(rendered) != form.thoughts(sampled):
        return False
    form = replace(form, thinks=False)  # of the past nobody knows how its generation prompt ended
    (text, calls), (sampled_text, sampled_calls) = form.parse(rendered), form.parse(sampled)
    return bool(calls) and calls == sampled_calls and text.strip() == sampled_text.strip()
