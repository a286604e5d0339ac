"""A text request in progress, and parts that the answers of several routes share."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...session.text.tool_calls import ToolCall, ToolFormat
from ...types import Trajectory
from ..batcher import Job, Update
from ..bodies import ChatBody, CompletionBody
from ..events import EventStream, json_response
from ..service import Service
from ..text import StopStrings, StreamedText
from ..ticket import Ticket

Content = dict[str, Any]


def response_head(kind: str, prefix: str, body: ChatBody | CompletionBody, model: str) -> Content:
    """The fields that an answer, or each chunk of it, begins with. `seed` is the seed that sampled it."""
    made = {"id": f"{prefix}-{body.request_id or uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
    return {**made, "model": model, "seed": body.seed}


def weights_version(completion: Trajectory) -> dict[str, int]:
    """The version of the weights that sampled a completion: the number of updates, 0 for weights as loaded."""
    return {"weights_version": completion.weight_versions[-1]} if completion.weight_versions else {}


def token_usage(jobs: list[Job], sampled: int) -> dict[str, int]:
    read = sum(len(job.prompt_ids) for job in jobs)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


@dataclass(frozen=True)
class TextRequest:
    """A request for text. Its answer, or each chunk of it, begins with `head`; `form` says how tool calls are read
    (None: all is text). Sample s of prompt p is choice p * n + s."""

    service: Service
    body: ChatBody | CompletionBody
    jobs: list[Job]
    head: Content
    form: ToolFormat | None = None

    def decode(self, token_ids: list[int]) -> str:
        """Sampled tokens as text, as `form` reads it; with special tokens if the client asks for them."""
        policy = self.service.policy
        if self.body.skip_special_tokens:
            return policy.decode_for(token_ids, self.form)
        return policy.decode_with_special_tokens(token_ids)

    @property
    def stops(self) -> StopStrings:
        """The stop strings of the job, not of the body: a run's server samples with the run's."""
        return StopStrings(self.jobs[0].sampling.stop, self.body.include_stop_str_in_output)

    async def answer(
        self,
        request: Request,
        choice: Callable[[TextRequest, int, Trajectory], Content],
        chunks: Callable[[TextRequest, Ticket], AsyncIterator[Content]],
        extra: Content,
    ) -> Response:
        """The whole answer, made of each completion's `choice` and `extra`; or a stream of `chunks`."""
        ticket = self.service.open_ticket(request, self.jobs, self.body.stream)
        if self.body.stream:
            return EventStream(ticket, chunks(self, ticket))
        async with ticket:
            samples = [completion for of_job in await ticket.completions() for completion in of_job]
        choices = [choice(self, place, completion) for place, completion in enumerate(samples)]
        sampled = sum(len(completion.token_ids) for completion in samples)
        return json_response({**self.head, "choices": choices, **extra, "usage": token_usage(self.jobs, sampled)})

    async def chunks(
        self, ticket: Ticket, choice: Callable[[int, Update, str, list[ToolCall]], Content]
    ) -> AsyncIterator[Content]:
        """A chunk for each new piece of a sample, then the usage if asked for. `choice` makes a chunk's content from
        the choice's index, the update, and its text and calls."""
        body, sampled = self.body, 0
        texts = [StreamedText(self.decode, self.stops, self.form) for _ in range(body.n * len(self.jobs))]
        async for prompt, update in ticket.updates():
            place, completion = prompt * body.n + update.sample, update.completion
            sampled += len(update.token_ids)
            text, calls = texts[place].feed(update)
            content = {"index": place, "finish_reason": None, **choice(place, update, text, calls)}
            if body.return_token_ids:
                content["token_ids"] = update.token_ids
            if completion is not None:
                content["finish_reason"] = "tool_calls" if calls else completion.finish_reason
                content |= weights_version(completion)
            if text or completion is not None or content["logprobs"] is not None or body.return_token_ids:
                yield {**self.head, "choices": [content]}
        if body.stream_options.include_usage:
            yield {**self.head, "choices": [], "usage": token_usage(self.jobs, sampled)}
