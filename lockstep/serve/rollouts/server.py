"""The server of a run, in the event loop that environments run in."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from concurrent.futures import Future
from typing import Self

from ...environments.calls import event_loop
from ...environments.remote import RemoteEnvironment
from ...machine import server_api_key
from ..app import make_app
from ..server import SEND_TIMEOUT_S, listen, make_http_server, socket_url
from ..settings import Settings
from .routes import PREFIX, end_rollout, take_rollout
from .service import Playing, RolloutService

MAX_WAITING = 1 << 20  # turns that wait for a place: those of all rollouts of a step may
START_TIMEOUT_S = 60.0  # seconds for the server, and what plays rollouts, to start or to end


class RolloutServer:
    """Serves the rollouts in the registry of `environment` within a `with` block. Each of several ranks serves its own,
    rank r at the port of the registry's address plus r.

    Raises `InputError` if the address cannot be listened on, and what `RemoteEnvironment.playing` raises when it is
    entered.
    """

    def __init__(self, run: Playing, environment: type[RemoteEnvironment]) -> None:
        host, port = environment.registry.address
        key = server_api_key() or None
        name, port = run.config.model or run.config.arch, port + run.world.rank * (port > 0)
        self._settings = Settings(served_model_name=name, host=host, port=port, api_key=key, max_waiting=MAX_WAITING)
        self._settings.validate()
        self._environment, self._service = environment, RolloutService(run, environment, self._settings)
        self._started: Future[None] = Future()
        self._stop = asyncio.Event()

    def __enter__(self) -> Self:
        self._socket, registry = listen(self._settings.host, self._settings.port), self._environment.registry
        registry.url, registry.model = socket_url(self._socket), self._settings.name
        self._served = asyncio.run_coroutine_threadsafe(self._serve(), event_loop())
        self._served.add_done_callback(self._ended)
        try:
            self._started.result(START_TIMEOUT_S)
        except BaseException:
            self.__exit__()
            raise
        if registry.address[1]:
            print(f"rollouts are played at {registry.url}{self._settings.warning}", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._environment.registry.url = ""
        event_loop().call_soon_threadsafe(self._stop.set)
        with contextlib.suppress(Exception):  # what it raised while starting was reported
            self._served.result(START_TIMEOUT_S)

    def _ended(self, served: Future[None]) -> None:
        if not self._started.done():
            self._started.set_exception(served.exception() or RuntimeError("the server ended as it began"))

    async def _serve(self) -> None:
        app = make_app(self._service, PREFIX, {"/rollouts": take_rollout, f"{PREFIX}/end": end_rollout})
        http = make_http_server(app, int(SEND_TIMEOUT_S))
        answering = asyncio.create_task(http.serve(sockets=[self._socket]))
        try:
            async with self._environment.playing():
                self._started.set_result(None)
                await self._stop.wait()
        finally:
            self._service.stopping = http.should_exit = True
            self._environment.registry.end_waits()
            await answering
            self._socket.close()
