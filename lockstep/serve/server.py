"""A server as a process: the engine in the thread that runs it, HTTP in another, and signals that end both.

The first SIGTERM or Ctrl-C stops taking connections and lets requests finish, for a while; another ends at once.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ..errors import InputError, LockstepError, Terminated
from ..machine import many_connections, settled, short_turns
from ..session.generate import LLM
from ..session.signals import handled_by
from ..types import SamplingParams
from .app import make_app
from .errors import closing
from .service import Service
from .settings import Settings

LEAVING = 2.0  # seconds that answers have to be sent once the last request was ended
KEEP_ALIVE = 75  # seconds of an idle connection: more than clients keep theirs, which would meet it as it closes
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Kinds of sampling that graphs are made for before the first request.
_KINDS = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(temperature=0.0)]


class Server:
    """An `LLM` that answers on a socket, from `run` until `stop`. `InputError`: the settings do not go with the model,
    or it cannot listen there."""

    def __init__(self, llm: LLM, settings: Settings) -> None:
        settings.validate()
        context = settings.context(llm.context)
        self._socket = listen(settings.host, settings.port)  # before graphs are made, which takes longer
        try:
            engine = llm.engine_for(llm.config.generator.max_num_seqs, context, _KINDS)
            self.service = Service(llm.policy, engine, settings, context, llm.config.seed)
        except BaseException:
            self._socket.close()
            raise
        self._deadline, self._ended = float("inf"), threading.Event()
        self._http = http_server(make_app(self.service), int(settings.shutdown_seconds + LEAVING) + 1)
        self.url = url_of(self._socket)

    def run(self) -> None:
        """Answer until `stop`; the calling thread is the engine's. Raises `LockstepError` when the engine fails."""
        thread = threading.Thread(target=self._serve, name="http", daemon=True)
        batcher = self.service.batcher
        with short_turns(), settled():
            thread.start()
            try:
                while not self._ended.is_set():
                    batcher.turn(wait=0.5 if self.service.stopping else None)
                    if time.monotonic() > self._deadline:
                        batcher.end(closing())
            except BaseException:
                self.service.stopping = self._http.should_exit = True
                batcher.end(closing())
                thread.join(LEAVING)
                raise
        if not self.service.stopping:
            raise LockstepError("the HTTP server ended by itself; see the messages before this one")

    def _serve(self) -> None:
        try:
            self._http.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self._ended.set()
            self.service.batcher.wake()

    def stop(self) -> None:
        """End once what runs has finished, or `shutdown_seconds` are over. A signal handler may call it."""
        self._deadline = time.monotonic() + self.service.settings.shutdown_seconds
        self.service.stopping = self._http.should_exit = True
        self.service.batcher.wake()


def listen(host: str, port: int) -> socket.socket:
    """A socket there. Raises `InputError`."""
    many_connections()
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.create_server((host, port), family=family, backlog=2048)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else the end of an answer waits 40 ms for an ack
        return found
    except (OSError, UnicodeError) as error:  # the latter of a name that is none, such as a..b
        raise InputError(f"cannot listen on {host}, port {port} ({error}); give another --host or --port") from error


def url_of(socket: socket.socket) -> str:
    host, port = socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def http_server(app: FastAPI, leaving: int) -> uvicorn.Server:
    """What answers with an application, and has so many seconds to send its answers once it is told to end."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=leaving,
    )
    return uvicorn.Server(config)


def serve(load: Callable[[], LLM], settings: Settings) -> None:
    """Answer with the model that `load` gives until a signal ends the process; where is told on standard error."""
    with load() as llm:
        server = Server(llm, settings)
        with _stopped_by_signals(server):
            print(f"serving {settings.name} at {server.url}{settings.remark}", file=sys.stderr, flush=True)
            server.run()


def _stopped_by_signals(server: Server) -> AbstractContextManager[None]:
    """Within it the first signal stops the server, and another raises: `KeyboardInterrupt`, or `Terminated`."""

    def handle(number: int, _: FrameType | None) -> None:
        if not server.service.stopping:
            server.stop()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise Terminated(signal.Signals(number))

    return handled_by(handle, [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN])
