"""The server process: the engine in the thread that calls `Server.run`, HTTP in another, and signals that end both.

The first SIGTERM or Ctrl-C stops accepting connections and lets requests finish for a while; another ends at once.
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
from ..machine import fast_thread_switching, freeze_gc, raise_open_files_limit
from ..session.generate import LLM
from ..session.signals import handle_signals
from ..types import SamplingParams
from .app import make_app
from .errors import shutting_down
from .service import Service
from .settings import Settings

SEND_TIMEOUT_S = 2.0  # seconds for sending answers once the last request has ended
KEEP_ALIVE = 75  # seconds until an idle connection closes: longer than clients keep it, so none uses it as it closes
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Kinds of sampling that graphs are made for before the first request.
_WARM_UP_SAMPLING = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(temperature=0.0)]


class Server:
    """Serves an `LLM` on a socket, from `run` until `stop`. `InputError`: the settings do not fit the model, or the
    address cannot be listened on."""

    def __init__(self, llm: LLM, settings: Settings) -> None:
        settings.validate()
        context = settings.context(llm.context)
        self._socket = listen(settings.host, settings.port)  # before graphs are made, which takes long
        try:
            engine = llm.engine_for(llm.config.generator.max_num_seqs, context, _WARM_UP_SAMPLING)
            self.service = Service(llm.policy, engine, settings, context, llm.config.seed)
        except BaseException:
            self._socket.close()
            raise
        self._deadline, self._http_ended = float("inf"), threading.Event()
        self._http = make_http_server(make_app(self.service), int(settings.shutdown_seconds + SEND_TIMEOUT_S) + 1)
        self.url = socket_url(self._socket)

    def run(self) -> None:
        """Serve until `stop`. The engine runs in the calling thread. Raises `LockstepError` if the engine fails."""
        thread = threading.Thread(target=self._run_http, name="http", daemon=True)
        batcher = self.service.batcher
        with fast_thread_switching(), freeze_gc():
            thread.start()
            try:
                while not self._http_ended.is_set():
                    batcher.step(wait=0.5 if self.service.stopping else None)
                    if time.monotonic() > self._deadline:
                        batcher.abort_all(shutting_down())
            except BaseException:
                self.service.stopping = self._http.should_exit = True
                batcher.abort_all(shutting_down())
                thread.join(SEND_TIMEOUT_S)
                raise
        if not self.service.stopping:
            raise LockstepError("the HTTP server ended by itself; see the messages before this one")

    def _run_http(self) -> None:
        try:
            self._http.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self._http_ended.set()
            self.service.batcher.wake()

    def stop(self) -> None:
        """End once running requests have finished, or after `shutdown_seconds`. Signal handlers may call this."""
        self._deadline = time.monotonic() + self.service.settings.shutdown_seconds
        self.service.stopping = self._http.should_exit = True
        self.service.batcher.wake()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `InputError`."""
    raise_open_files_limit()
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.create_server((host, port), family=family, backlog=2048)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else the end of an answer waits 40 ms for an ACK
        return found
    except (OSError, UnicodeError) as error:  # the latter for an invalid name, such as a..b
        raise InputError(f"cannot listen on {host}, port {port} ({error}); give another --host or --port") from error


def socket_url(socket: socket.socket) -> str:
    host, port = socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_http_server(app: FastAPI, shutdown_timeout: int) -> uvicorn.Server:
    """A uvicorn server for `app`; once told to end, it has `shutdown_timeout` seconds to send its answers."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=shutdown_timeout,
    )
    return uvicorn.Server(config)


def serve(load: Callable[[], LLM], settings: Settings) -> None:
    """Serve the model that `load` returns until a signal ends the process. The address is printed on standard error."""
    with load() as llm:
        server = Server(llm, settings)
        with _stop_on_signals(server):
            print(f"serving {settings.name} at {server.url}{settings.warning}", file=sys.stderr, flush=True)
            server.run()


def _stop_on_signals(server: Server) -> AbstractContextManager[None]:
    """A context in which the first signal stops the server, and another raises `KeyboardInterrupt` or `Terminated`."""

    def handle(number: int, _: FrameType | None) -> None:
        if not server.service.stopping:
            server.stop()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise Terminated(signal.Signals(number))

    return handle_signals(handle, [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN])
