"""Errors in the format of OpenAI's API."""

from __future__ import annotations

from typing import Any

MAX_MESSAGE_LENGTH = 2000  # characters
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error to answer a request with: the status, and a message for its sender. `param` is the invalid field, `code`
    an identifier for programs, such as `context_length_exceeded`."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code  # message and param may contain what a client sent
        self.message, self.param = message[:MAX_MESSAGE_LENGTH], param and param[:MAX_MESSAGE_LENGTH]

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_field(param: str, message: str, code: str | None = None) -> ApiError:
    """Status 400: the field `param` is invalid."""
    return ApiError(400, message, param, code)


def shutting_down() -> ApiError:
    """Status 503, for requests that arrive or are still open while the server shuts down."""
    return ApiError(503, "the server is shutting down")
