"""Chat messages to token ids: text is encoded, but sampled turns that come back with token ids keep them.

An answer's message has its `token_ids` if the request asked for them. Sent back with the conversation, they stand in
the next prompt unchanged, between the encoded text that the template puts around them, so that the prompt begins with
the previous prompt and what was sampled after it. A turn that the template no longer renders as it was sampled (it may
remove thinking), or that the client has changed, is encoded as text. A stop string at the end of a turn's tokens may be
left out of its text.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InputError
from ..models.tokenizer import encode_continuation, encode_text, render_chat, require_prompt_fits
from ..session.text.messages import Message
from ..session.text.policy import Policy
from ..session.text.tool_calls import ToolFormat, begins_thought
from .errors import bad_field
from .text import StopStrings

MAX_SAMPLED_TURNS = 512  # the most turns with token ids in a prompt: locating each renders the template


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt.

    Attributes:
        kept, encoded_again: how many turns with token ids keep those, and how many had to be encoded as text.
        thinks: whether the prompt ends within a thought, which the completion continues.
    """

    token_ids: list[int]
    kept: int = 0
    encoded_again: int = 0
    thinks: bool = False


def encode_chat(
    policy: Policy,
    messages: list[Message],
    variables: dict[str, Any],
    form: ToolFormat | None,
    stops: tuple[str, ...] = (),
) -> ChatPrompt:
    """Encode checked messages with the model's template and these `variables`, which include tools; `stops` are the
    stop strings of sampled turns. `InputError`: the template refuses the messages, they have a token that the model
    does not, or they are larger than any prompt may be."""
    config = policy.model.config
    require_prompt_fits(messages, config.max_position_embeddings, policy.max_token_bytes)
    sampled_tokens = [_sampled_tokens(message, i, config.vocab_size) for i, message in enumerate(messages)]
    if sum(map(bool, sampled_tokens)) > MAX_SAMPLED_TURNS:
        raise bad_field("messages", f"more than {MAX_SAMPLED_TURNS} messages have token_ids; send older ones without")
    turns = zip(messages, sampled_tokens, strict=True)
    template_messages = [_template_message(policy, message, sampled, form) for message, sampled in turns]
    text = render_chat(policy.tokenizer, template_messages, variables)
    require_prompt_fits(text, config.max_position_embeddings, policy.max_token_bytes)  # with tools and calls
    ids: list[int] = []
    encoded = kept = lost = 0  # characters of `text` encoded so far; turns
    for i, sampled in enumerate(sampled_tokens):
        if not sampled:
            continue
        before = _render_before(policy, template_messages[:i], variables)
        turn = None if before is None else _locate_turn(policy, text, before, sampled, form, stops)
        if turn is None or turn.start < encoded:  # not rendered as it was sampled, or only where an earlier turn is
            lost += 1
            continue
        ids += _encode_after(policy, ids, text[encoded : turn.start]) + sampled
        encoded, kept = turn.stop, kept + 1
    ids += _encode_after(policy, ids, text[encoded:])
    return ChatPrompt(policy.known(ids), kept, lost, begins_thought(text))


def _encode_after(policy: Policy, ids: list[int], text: str) -> list[int]:
    return (encode_continuation if ids else encode_text)(policy.tokenizer, text)


def _sampled_tokens(message: Message, index: int, vocabulary: int) -> list[int]:
    """The token ids that a message came with, checked; [] if there are none."""
    where, token_ids = f"messages[{index}].token_ids", message.get("token_ids") or []
    if token_ids and message["role"] != "assistant":
        raise bad_field(where, f"{where}: the message is of role {message['role']}; only an assistant's was sampled")
    if not isinstance(token_ids, list) or not all(type(t) is int and 0 <= t < vocabulary for t in token_ids):
        raise bad_field(where, f"{where} must be a list of token ids, each below {vocabulary}")
    return token_ids


def _template_message(policy: Policy, message: Message, sampled: list[int], form: ToolFormat | None) -> Message:
    """A message as the template takes it, with its thought: the client's `reasoning`, or the one that was sampled."""
    known = {name: value for name, value in message.items() if name != "token_ids"}
    if form is None:
        return known
    thought = message.get("reasoning") or form.extract_thinking(policy.decode_for(sampled, form))
    return form.add_thinking(known, thought) if isinstance(thought, str) else known


def _render_before(policy: Policy, earlier_messages: list[Message], variables: dict[str, Any]) -> str | None:
    """The text that a turn was sampled after; None if the template refuses a conversation that ends there."""
    try:
        return render_chat(policy.tokenizer, earlier_messages, variables)
    except InputError:
        return None


def _locate_turn(
    policy: Policy, text: str, before: str, sampled: list[int], form: ToolFormat | None, stops: tuple[str, ...]
) -> slice | None:
    """The range in `text` of a turn that was sampled after `before`, including the text of its last token if that ended
    it; None if `text` does not have what was sampled. The range begins after the common prefix, since the generation
    prompt may end in text that past turns do not have."""
    ended = sampled[-1] in policy.model.config.eos_token_ids
    end_token = sampled[-1] if ended else policy.end_of_answer
    closing = "" if end_token is None else policy.tokenizer.decode([end_token], skip_special_tokens=False)
    start = _common_length(text, before)
    end = text.find(closing, start) if closing else -1
    if end < 0 or not _is_same_turn(text[start:end], policy.decode_for(sampled, form), form, StopStrings(stops)):
        return None
    return slice(start, end + len(closing) * ended)


def _common_length(one: str, other: str) -> int:
    """The length of the common prefix. Comparing slices takes a fiftieth of the time of comparing characters."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda last: one[: last + 1] != other[: last + 1])


def _is_same_turn(rendered: str, sampled: str, form: ToolFormat | None, stop: StopStrings) -> bool:
    """Whether `rendered` is what was sampled, except for surrounding whitespace, the formatting of tool calls, and what
    a stop string cuts off."""
    if rendered.strip() in (sampled.strip(), stop.cut(sampled).strip()):
        return True
    if form is None:
        return False
    if form.extract_thinking(rendered) != form.extract_thinking(sampled):
        return False
    form = replace(form, opens_thought=False)  # how the generation prompt of a past turn ended is unknown
    (text, calls), (sampled_text, sampled_calls) = form.parse(rendered), form.parse(sampled)
    is_same_text = text.strip() in (sampled_text.strip(), stop.cut(sampled_text).strip())
    return bool(calls) and calls == sampled_calls and is_same_text
