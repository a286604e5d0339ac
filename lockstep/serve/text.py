"""What a client sees of a sample: its text up to a stop string, the tool calls taken out of it, and its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..models.tokenizer import TextStream
from ..session.text.tool_calls import ToolCall, ToolFormat, length_before
from ..types import Trajectory
from .batcher import Update


@dataclass(frozen=True)
class StopStrings:
    """Stop strings. A text ends before the first of them or, if `included`, with it."""

    strings: tuple[str, ...]
    included: bool = False

    def cut(self, text: str) -> str:
        """A finished text, cut at its first stop string."""
        places = ((text.find(one), len(one) * self.included) for one in self.strings)
        return text[: min((place + size for place, size in places if place >= 0), default=len(text))]


def split_answer(text: str, stop: StopStrings, form: ToolFormat | None) -> tuple[str, list[ToolCall]]:
    """A finished text without its tool calls, cut at its first stop string; and the calls."""
    said, calls = form.parse(text) if form is not None else (text, [])
    return stop.cut(said), calls


class StreamedText:
    """The visible text of one sample, piece by piece. What may become a stop string or a tool call is held back; the
    pieces together are what `split_answer` gives for the whole text."""

    def __init__(self, decode: Callable[[list[int]], str], stop: StopStrings, form: ToolFormat | None) -> None:
        self._text, self._decode, self._stream = "", decode, TextStream(decode)
        self._stop, self._form = stop, form
        self._token_ids: list[int] = []
        self._shown = 0

    def feed(self, update: Update) -> tuple[str, list[ToolCall]]:
        """The new text; and, with the completion, the calls."""
        if update.completion is not None:
            text, calls = split_answer(self._decode(update.completion.token_ids), self._stop, self._form)
            return text[self._shown :], calls
        self._token_ids += update.token_ids
        self._text += self._stream.feed(self._token_ids)
        text = self._text if self._form is None else self._form.stable_text(self._text)
        new = text[self._shown :]  # no stop string begins before this
        piece = new[: min((length_before(new, s) for s in self._stop.strings), default=len(new))]
        self._shown += len(piece)
        return piece, []


def chat_logprobs(token_text: Callable[[int], str], sampled: Trajectory | Update) -> list[dict[str, Any]]:
    """An entry per token, as in chat completions. `logprob` is in the model's own distribution; `sampled_logprob`, an
    addition to OpenAI's fields, is in the sampled distribution, after temperature and filters."""
    columns = zip(sampled.token_ids, sampled.model_logprobs, sampled.logprobs, strict=True)
    return [
        {
            "token": (token := token_text(token_id)),
            "bytes": None if "\N{REPLACEMENT CHARACTER}" in token else list(token.encode()),
            "logprob": own,
            "sampled_logprob": after_filters,
            "top_logprobs": [],
        }
        for token_id, own, after_filters in columns
    ]


def completion_logprobs(token_text: Callable[[int], str], sampled: Trajectory | Update, offset: int) -> dict[str, Any]:
    """Log-probabilities as in `/v1/completions`, for tokens whose text begins at character `offset`. `top_logprobs` has
    the sampled token alone; clients of vLLM read it."""
    entries = chat_logprobs(token_text, sampled)
    tokens = [entry["token"] for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "sampled_logprobs": [entry["sampled_logprob"] for entry in entries],
        "top_logprobs": [{entry["token"]: entry["logprob"]} for entry in entries],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else [],
    }
