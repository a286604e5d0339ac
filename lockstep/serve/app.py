"""The FastAPI application: routes, API keys, and a uniform error format."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..errors import FieldError
from .errors import ApiError, bad_field, shutting_down
from .events import json_response
from .routes.chat import complete_chat
from .routes.completions import complete_text
from .routes.tokens import generate_tokens
from .service import Service
from .ticket import ClientLeft

Route = Callable[[Service, Request], Awaitable[Response]]

ROUTES: dict[str, Route] = {
    "/v1/chat/completions": complete_chat,
    "/v1/completions": complete_text,
    "/inference/v1/generate": generate_tokens,
}
HEALTH = "/health"


def make_app(service: Service, prefix: str = "", extra_routes: Mapping[str, Route] = {}) -> FastAPI:
    """The application for a service. The paths of the model's routes begin with `prefix`, which may have path
    parameters; `extra_routes` are additional POST routes."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="lockstep", version=__version__, lifespan=lifespan, openapi_url=None)
    post_routes = {prefix + path: answer for path, answer in ROUTES.items()} | dict(extra_routes)
    models = f"{prefix}/v1/models"
    get_routes = {models: _list_models, f"{models}/{{name:path}}": _get_model, "/metrics": _metrics, HEALTH: _health}
    for method, routes in (("POST", post_routes), ("GET", get_routes)):  # plain routes: handlers read the bodies
        for path, answer in routes.items():
            app.add_route(path, partial(answer, service), methods=[method])
    for kind in (ApiError, FieldError, HTTPException, ClientLeft, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _handle_error)
    app.add_middleware(_Guard, service=service, paths=[*post_routes, *get_routes])
    return app


def _model_card(service: Service) -> dict[str, Any]:
    card = {"id": service.settings.name, "object": "model", "created": 0, "owned_by": "lockstep"}
    return {**card, "max_model_len": service.context}


async def _list_models(service: Service, _: Request) -> Response:
    return json_response({"object": "list", "data": [_model_card(service)]})


async def _get_model(service: Service, request: Request) -> Response:
    service.check_model(request.path_params["name"])
    return json_response(_model_card(service))


async def _metrics(service: Service, _: Request) -> Response:
    page, kind = service.metrics.render()
    return Response(page, media_type=kind)


async def _health(service: Service, _: Request) -> Response:
    if service.stopping:
        raise shutting_down()
    return json_response({"status": "ok"})


def _error_response(error: ApiError) -> Response:
    retry = {"retry-after": "1"} if error.status in (429, 503) else None
    return json_response(error.body, error.status, retry)


async def _handle_error(request: Request, error: Exception) -> Response:
    if isinstance(error, (ClientLeft, ClientDisconnect)):
        return Response(status_code=499)  # nobody reads it, but metrics count it
    if isinstance(error, FieldError):
        error = bad_field(error.field, str(error))
    if isinstance(error, HTTPException):  # an unknown path, or the wrong method for a route
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    fault = ApiError(500, "the server has a fault; its log says which")
    return _error_response(error if isinstance(error, ApiError) else fault)


class _Guard:
    """Requires the API key everywhere but at `HEALTH`, counts answers by route and status, and answers requests that
    still do not come, or whose answers are not read, when the server has shut down."""

    def __init__(self, app: ASGIApp, service: Service, paths: list[str]) -> None:
        self._app, self._service, self._requests = app, service, service.metrics.requests
        self._paths = [(path, re.compile(re.sub(r"\\{[\w:]+\\}", ".+", re.escape(path)))) for path in paths]
        key = service.settings.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        begun = False

        async def counting(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                path = next((path for path, form in self._paths if form.fullmatch(scope["path"])), "other")
                self._requests.labels(path, str(message["status"])).inc()
            await send(message)

        allowed = scope["path"] == HEALTH or self._has_key(scope)
        try:
            await (self._app if allowed else _UNAUTHORIZED)(scope, receive, counting)
        except asyncio.CancelledError:
            if not self._service.stopping:
                raise
            if not begun:
                await _error_response(shutting_down())(scope, receive, counting)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")  # RFC 9110, 11.1: case-insensitive
        return self._key is None or (scheme.lower() == b"bearer" and secrets.compare_digest(key, self._key))


_UNAUTHORIZED = _error_response(ApiError(401, "the API key is missing or wrong", code="invalid_api_key"))
