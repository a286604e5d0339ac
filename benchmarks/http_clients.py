"""Clients of an HTTP server that hold each answer to what was expected: a process of them, which `serve.py` starts.

A line of JSON on standard input says what they do, the next that they begin; their result is a line on standard output.
Nothing that is slow to import is imported.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
import time
from typing import Any


def digest(token_ids: list[int], logprobs: list[float], model_logprobs: list[float]) -> str:
    """Of every bit of a sample."""
    exact = [token_ids, [x.hex() for x in logprobs], [x.hex() for x in model_logprobs]]
    return hashlib.sha256(json.dumps(exact).encode()).hexdigest()


async def exchange(url: str, path: str, body: bytes, held: list[Any]) -> tuple[int, bytes]:
    """(status, body) of a request over a connection that is kept in `held`; a bare client, which costs little."""
    host, port = url.removeprefix("http://").split(":")
    if not held:
        held += await asyncio.open_connection(host, int(port), limit=1 << 24)
    reader, writer = held
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
    return int(lines[0].split()[1]), await reader.readexactly(length)


def check(request: dict[str, Any], status: int, body: bytes) -> str:
    """What is wrong with an answer; empty: nothing."""
    if status != 200:
        return f"status {status}: {body[:200]!r}"
    if not request["digest"]:
        return ""
    choice = json.loads(body)["choices"][0]
    content = choice["logprobs"]["content"]
    columns = [[entry[name] for entry in content] for name in ("logprob", "model_logprob")]
    return "" if digest(choice["token_ids"], *columns) == request["digest"] else "other bits"


class Client:
    """Clients of one process: `count` at a time, over `requests`, once each or at random for some seconds."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.requests = spec, spec["requests"]
        self.bodies = [json.dumps(request["body"]).encode() for request in self.requests]
        self.left = list(range(len(self.requests)))
        self.draw = random.Random(spec["seed"])
        self.until = time.monotonic() + spec["seconds"]
        self.result: dict[str, Any] = {"done": 0, "left": 0, "wrong": [], "latencies": []}
        self.answers: list[tuple[int, int, bytes]] = []

    async def run(self) -> dict[str, Any]:
        self.until = time.monotonic() + self.spec["seconds"]
        await asyncio.gather(*(self.one() for _ in range(self.spec["count"])))
        for i, status, body in self.answers:
            self.note(check(self.requests[i], status, body))
        return self.result

    def note(self, wrong: str) -> None:
        self.result["done"] += 1
        if wrong:
            self.result["wrong"].append(wrong)

    async def one(self) -> None:
        held: list[Any] = []
        while (i := self.next()) is not None:
            if self.spec["leaving"] and self.draw.random() < self.spec["leaving"]:
                await self.leave(i)
                continue
            began = time.monotonic()
            status, body = await exchange(self.spec["url"], self.requests[i]["path"], self.bodies[i], held)
            self.result["latencies"].append(time.monotonic() - began)
            if self.spec["seconds"]:
                self.note(check(self.requests[i], status, body))
            else:
                self.answers.append((i, status, body))
        if held:
            held[1].close()

    def next(self) -> int | None:
        if self.spec["seconds"]:
            return self.draw.randrange(len(self.requests)) if time.monotonic() < self.until else None
        return self.left.pop() if self.left else None

    async def leave(self, i: int) -> None:
        """Ask, and go before the answer."""
        held: list[Any] = []
        asking = exchange(self.spec["url"], self.requests[i]["path"], self.bodies[i], held)
        try:
            await asyncio.wait_for(asking, self.draw.random() * 0.05)
            self.note("")
        except TimeoutError:
            self.result["left"] += 1
        if held:
            held[1].close()


def main() -> None:
    client = Client(json.loads(sys.stdin.readline()))
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asyncio.run(client.run())))


if __name__ == "__main__":
    main()
