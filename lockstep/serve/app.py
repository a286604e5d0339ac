"""The FastAPI application: routes, API keys, and a uniform error format."""

from __future__ import annotations

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
from .errors import ApiError, closing, refused
from .events import answered
from .routes.chat import chat
from .routes.completions import completions
from .routes.tokens import tokens
from .service import Service
from .ticket import ClientLeft

Route = Callable[[Service, Request], Awaitable[Response]]

ROUTES: dict[str, Route] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/inference/v1/generate": tokens,
}
HEALTH = "/health"


def make_app(service: Service, under: str = "", more: Mapping[str, Route] = {}) -> FastAPI:  # noqa: B006
    """The application for a service. The paths of the model's routes begin with `under`, which may have path
    parameters; `more` are additional POST routes."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="lockstep", version=__version__, lifespan=lifespan, openapi_url=None)
    posted = {under + path: answer for path, answer in ROUTES.items()} | dict(more)
    models = f"{under}/v1/models"
    asked = {models: _models, f"{models}/{{name:path}}": _model, "/metrics": _metrics, HEALTH: _health}
    for method, routes in (("POST", posted), ("GET", asked)):  # plain routes: handlers read the bodies
        for path, answer in routes.items():
            app.add_route(path, partial(answer, service), methods=[method])
    for kind in (ApiError, FieldError, HTTPException, ClientLeft, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _error)
    app.add_middleware(_Guard, service=service, paths=[*posted, *asked])
    return app


def _card(service: Service) -> dict[str, Any]:
    card = {"id": service.settings.name, "object": "model", "created": 0, "owned_by": "lockstep"}
    return {**card, "max_model_len": service.context}


async def _models(service: Service, _: Request) -> Response:
    return answered({"object": "list", "data": [_card(service)]})


async def _model(service: Service, request: Request) -> Response:
    service.check_model(request.path_params["name"])
    return answered(_card(service))


async def _metrics(service: Service, _: Request) -> Response:
    page, kind = service.metrics.page()
    return Response(page, media_type=kind)


async def _health(service: Service, _: Request) -> Response:
    if service.stopping:
        raise closing()
    return answered({"status": "ok"})


def _told(error: ApiError) -> Response:
    retry = {"retry-after": "1"} if error.status in (429, 503) else None
    return answered(error.body, error.status, retry)


async def _error(request: Request, error: Exception) -> Response:
    if isinstance(error, (ClientLeft, ClientDisconnect)):
        return Response(status_code=499)  # nobody reads it, but metrics count it
    if isinstance(error, FieldError):
        error = refused(error.field, str(error))
    if isinstance(error, HTTPException):  # an unknown path, or the wrong method for a route
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    fault = ApiError(500, "the server has a fault; its log says which")
    return _told(error if isinstance(error, ApiError) else fault)


class _Guard:
    """Requires the API key everywhere but at `HEALTH`, and counts answers by route and status."""

    def __init__(self, app: ASGIApp, service: Service, paths: list[str]) -> None:
        self._app, self._requests = app, service.metrics.requests
        self._paths = [(path, re.compile(re.sub(r"\\{[\w:]+\\}", ".+", re.escape(path)))) for path in paths]
        key = service.settings.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = next((path for path, form in self._paths if form.fullmatch(scope["path"])), "other")
                self._requests.labels(path, str(message["status"])).inc()
            await send(message)

        allowed = scope["path"] == HEALTH or self._knows_key(scope)
        await (self._app if allowed else _WRONG_KEY)(scope, receive, counting)

    def _knows_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")  # RFC 9110, 11.1: case-insensitive
        return self._key is None or (scheme.lower() == b"bearer" and secrets.compare_digest(key, self._key))


_WRONG_KEY = _told(ApiError(401, "the API key is missing or wrong", code="invalid_api_key"))
