"""Answers as JSON, whole or streamed as server-sent events. Floats are written such that they are read back exactly."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError
from .ticket import ClientLeft, Ticket


class EventStream(Response):
    """Sends an answer's chunks, holding its ticket, then `[DONE]`; if an error occurs, it is the last event instead."""

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, chunks: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._ticket, self._chunks = ticket, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._ticket:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for chunk in self._chunks:
                    await send({"type": "http.response.body", "body": encode_event(chunk), "more_body": True})
            last = b"data: [DONE]\n\n"
        except ApiError as error:
            last = encode_event(error.body)
        except ClientLeft:
            return
        await send({"type": "http.response.body", "body": last, "more_body": False})


def encode_event(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def json_response(content: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")
