"""Servers in threads of this process, and clients of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from processes import DEADLINE

from lockstep.serve.server import Server
from lockstep.serve.settings import Settings
from lockstep.session.generate import LLM

KEY = "a key"


class Running:
    """A server that runs, and what asks it."""

    def __init__(self, llm: LLM, server: Server, thread: threading.Thread) -> None:
        self.llm, self.server, self.thread = llm, server, thread
        self.engine, self.url = server.service.batcher.engine, server.url
        key = server.service.settings.api_key
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key=key or "none", max_retries=0, timeout=60)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=60)

    @property
    def idle(self) -> bool:
        """Whether every page is free and nothing runs or waits."""
        cache, scheduler = self.engine.cache, self.engine.scheduler
        return cache.num_free == cache.num_pages and not scheduler.busy and not self.server.service.open_samples

    def metric(self, name: str) -> float:
        """The value of one that has no labels."""
        lines = (line.split() for line in self.http.get("/metrics").text.splitlines())
        return next(float(value) for found, value in filter(lambda line: len(line) == 2, lines) if found == name)

    @contextmanager
    def held(self, launches: int = 0) -> Iterator[Held]:
        """Within it the engine launches as often, and waits: on a busy machine too nothing is finished before its
        time."""
        advance = Held(self.engine.advance, launches)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.engine, "advance", advance)
            try:
                yield advance
            finally:
                advance.free.set()


class Held:
    """`Engine.advance`, which after so many launches waits until it is `free`; it has `begun` so many."""

    def __init__(self, advance: Callable[[], Any], launches: int) -> None:
        self._advance, self._launches = advance, launches
        self.begun, self.free = 0, threading.Event()

    def __call__(self) -> Any:
        self.begun += 1
        if self.begun > self._launches:
            assert self.free.wait(DEADLINE), "it was never let go"
        return self._advance()


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Running]:
    """A server of the model in `folder`; it is stopped in the end, and must have ended in order."""
    given = Settings(**{"served_model_name": "tiny", "port": 0, "max_model_len": 512, "max_num_seqs": 16, **settings})
    failures: list[BaseException] = []
    with LLM(folder, device="cpu", config=given.generator) as llm:
        server = Server(llm, given)

        def run() -> None:
            try:
                server.run()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            with httpx.Client() as client:
                assert client.get(f"{server.url}/health").json() == {"status": "ok"}
            yield Running(llm, server, thread)
        finally:
            server.stop()
            thread.join(60)
    assert not thread.is_alive() and not failures
