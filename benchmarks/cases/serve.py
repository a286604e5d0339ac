"""`lockstep serve` under load: clients for minutes, each answer held to its bits in process; and what HTTP costs.

The server and its clients are processes of their own. Requests are token ids in and out unless said otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Report, peer_environment, seconds

CLIENT_PROCESSES = 4
KINDS: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 0.0}]
TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


@dataclass(frozen=True)
class Request:
    """What is sent, and what must come back: `digest` of it, if that is known."""

    path: str
    body: dict[str, Any]
    prompt: list[int]
    digest: str = ""


def make_requests(count: int, prompt: int, new: tuple[int, int], path: str, seed: int = 0) -> list[Request]:
    """Prompts of other random tokens each, all kinds of sampling for tokens, and completions of `new` lengths."""
    draw = random.Random(seed)
    made = []
    for i in range(count):
        ids = [draw.randrange(256) for _ in range(prompt)]
        kind = KINDS[i % len(KINDS)] if path == TOKENS else KINDS[0]
        sampling = {**kind, "max_tokens": draw.randint(*new), "seed": i, "ignore_eos": True}
        body = {"token_ids": ids, "sampling_params": sampling} if path == TOKENS else {"prompt": ids, **sampling}
        made.append(Request(path, {"model": "served", **body}, ids))
    return made


def digest(token_ids: list[int], logprobs: list[float], model_logprobs: list[float]) -> str:
    """Of every bit of a sample."""
    exact = [token_ids, [x.hex() for x in logprobs], [x.hex() for x in model_logprobs]]
    return hashlib.sha256(json.dumps(exact).encode()).hexdigest()


# ---- in process ----


def in_process(
    folder: Path, args: argparse.Namespace, rounds: list[list[Request]]
) -> tuple[list, dict[str, list[float]]]:
    """The completions of the first round's requests, and the seconds of the others by an engine without a server: in
    turn with all requests given to it at once, and with as many open at a time as a server's clients have."""
    from lockstep.config import GeneratorConfig
    from lockstep.session.generate import LLM

    with LLM(folder, device=args.device, config=GeneratorConfig(max_num_seqs=args.concurrent)) as llm:
        work = [as_engine_takes_them(requests) for requests in rounds]
        engine = llm.engine_for(args.concurrent, args.context, work[0][1][: len(KINDS)])
        first = engine.generate(*work[0])
        device = args.device
        queued = [seconds(lambda one=one: engine.generate(*one), device) for one in work[1::2]]
        opened = [seconds(lambda one=one: keep_open(engine, one, args.concurrent), device) for one in work[2::2]]
    if device == "cuda":
        torch.cuda.empty_cache()
    return [group[0] for group in first], {"queued": queued, "open": opened}


def keep_open(engine: Any, work: tuple[list, list, list], concurrent: int) -> None:
    """All requests, at most `concurrent` given to the engine at a time."""
    waiting, unfinished = list(zip(*work, strict=True))[::-1], 0
    while waiting or unfinished:
        while waiting and unfinished < concurrent:
            engine.add_request(*waiting.pop())
            unfinished += 1
        unfinished -= sum(sample.completion is not None for sample in engine.advance())


def as_engine_takes_them(requests: list[Request]) -> tuple[list, list, list]:
    """Prompts, sampling parameters and identities."""
    from lockstep.types import GENERATE_DOMAIN, SampleIdentity, SamplingParams

    prompts, sampling, identities = [], [], []
    for request in requests:
        given = request.body.get("sampling_params", request.body)
        kept = {name: given[name] for name in ("temperature", "top_p", "ignore_eos") if name in given}
        prompts.append(request.prompt)
        sampling.append(SamplingParams(**kept, max_completion_length=given["max_tokens"]))
        identities.append(SampleIdentity(given["seed"], GENERATE_DOMAIN, 0, 0))
    return prompts, sampling, identities


# ---- the server's process ----


@contextmanager
def server(folder: Path, args: argparse.Namespace) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(URL, process) of a server of the model."""
    command = [sys.executable, "-m", "lockstep", "serve", "--port", "0", "--served-model-name", "served"]
    command += ["--model", str(folder), "--device", args.device, "--max-model-len", str(args.context)]
    command += ["--max-num-seqs", str(args.concurrent)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                print(line, end="", file=sys.stderr)
                if "serving" in line:
                    break
            else:
                raise SystemExit("the server ended before it served; its own message is above")
            yield line.split(" at ")[1].split()[0], process
        finally:
            process.terminate()
            code = process.wait(120)
    assert code == 0, f"the server ended with {code}: {process}"


def resident_mib(process: subprocess.Popen[str]) -> float:
    """Memory of the server's process."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def used_gpu_mib(device: str) -> float:
    """Memory that is taken on the GPU, by all processes."""
    if device == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


# ---- clients ----


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


def part(_: str) -> dict[str, Any]:
    """A process of clients: its work comes on standard input, and so does the word to begin."""
    client = Client(json.loads(sys.stdin.readline()))
    print("ready", flush=True)
    sys.stdin.readline()
    return asyncio.run(client.run())


class Clients:
    """Several processes of clients, which begin together."""

    def __init__(self, url: str, requests: list[Request], clients: int, seconds: float = 0, leaving: float = 0) -> None:
        self.processes = []
        for number in range(CLIENT_PROCESSES):
            own = requests if seconds else requests[number::CLIENT_PROCESSES]
            spec = {"url": url, "requests": [vars(r) for r in own], "count": clients // CLIENT_PROCESSES}
            spec |= {"seconds": seconds, "leaving": leaving, "seed": number}
            command = [sys.executable, sys.argv[0], "serve", "--part", "clients"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(spec) + "\n")
            process.stdin.flush()
            self.processes.append(process)
        for process in self.processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"

    def begin(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)  # each ends once it has told its result

    def results(self) -> dict[str, Any]:
        """Of all, added up."""
        found = [json.loads(process.stdout.readline()) for process in self.processes if process.stdout is not None]
        return {name: sum((f[name] for f in found), start=type(found[0][name])()) for name in found[0]}


# ---- what is measured ----


def load(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Clients for some minutes, some of whom leave; every answer has the bits of its request alone."""
    requests = make_requests(args.requests, args.prompt, (args.new // 4, args.new), TOKENS)
    completions, _ = in_process(folder, args, [requests])
    expected = [
        Request(r.path, r.body, r.prompt, digest(c.token_ids, c.logprobs, c.model_logprobs))
        for r, c in zip(requests, completions, strict=True)
    ]
    memory: list[tuple[float, float, float]] = []
    with server(folder, args) as (url, process):
        clients = Clients(url, expected, args.clients, args.minutes * 60, leaving=0.05)
        clients.begin()
        began = time.monotonic()
        while clients.running:
            memory.append((time.monotonic() - began, resident_mib(process), used_gpu_mib(args.device)))
            time.sleep(min(5.0, args.minutes * 6))
        results = clients.results()
    latencies = sorted(results.pop("latencies"))
    third = memory[len(memory) // 3 :]
    half = len(third) // 2
    return {
        "clients": args.clients,
        "minutes": args.minutes,
        "answers": results["done"],
        "clients_left": results["left"],
        "wrong": len(results["wrong"]),
        "first_wrong": results["wrong"][:3],
        "median_latency_s": statistics.median(latencies),
        "p99_latency_s": latencies[int(len(latencies) * 0.99)],
        "resident_mib": [statistics.mean(m[1] for m in part) for part in (third[:half], third[half:])],
        "gpu_mib": [statistics.mean(m[2] for m in part) for part in (third[:half], third[half:])],
    }


def overhead(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the same requests in process and through the server, `concurrent` at a time."""
    figures: dict[str, Any] = {"concurrent": args.concurrent, "requests": args.rounds * args.concurrent}
    lengths = args.new // 2, args.new
    for path in (TOKENS, COMPLETIONS):
        requests = make_requests(args.rounds * args.concurrent, args.prompt, lengths, path, seed=1)
        tokens = sum(r.body.get("sampling_params", r.body)["max_tokens"] for r in requests)
        rounds = [fresh(requests, i) for i in range(2 * args.repeats + 1)]  # the first makes what is made late
        _, alone = in_process(folder, args, rounds)
        with server(folder, args) as (url, _):
            times = [served_s(url, of_round, args.concurrent) for of_round in rounds[: args.repeats + 1]]
        figures[path] = compared(tokens, alone["open"], times[1:]) | {"queued_s": sorted(alone["queued"])}
    return figures


def served_s(url: str, requests: list[Request], concurrent: int) -> float:
    """Seconds of all requests, from the first that is sent to the last answer."""
    clients = Clients(url, requests, concurrent)
    began = time.perf_counter()
    clients.begin()
    results = clients.results()
    took = time.perf_counter() - began
    assert results["done"] == len(requests) and not results["wrong"], results["wrong"][:3]
    return took


def fresh(requests: list[Request], round_: int) -> list[Request]:
    """The same lengths with prompts that no cache has."""
    name = "token_ids" if requests[0].path == TOKENS else "prompt"
    prompts = [[round_, *request.prompt[1:]] for request in requests]
    return [Request(r.path, {**r.body, name: ids}, ids) for r, ids in zip(requests, prompts, strict=True)]


def compared(tokens: int, alone: list[float], served: list[float]) -> dict[str, Any]:
    """Tokens a second of both, with as many requests open; how much longer the server takes."""
    one, other = statistics.median(alone), statistics.median(served)
    return {
        "tokens": tokens,
        "in_process_s": sorted(alone),
        "served_s": sorted(served),
        "in_process_tokens_per_s": tokens / one,
        "served_tokens_per_s": tokens / other,
        "overhead": other / one - 1,
    }


def vllm_served(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The completions of `overhead` through vLLM's own server, if it is installed."""
    requests = make_requests(args.rounds * args.concurrent, args.prompt, (args.new // 2, args.new), COMPLETIONS, seed=1)
    tokens = sum(r.body["max_tokens"] for r in requests)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", "18765"]
    command += ["--served-model-name", "served", "--max-model-len", str(args.context)]
    command += ["--max-num-seqs", str(args.concurrent), "--dtype", "bfloat16", "--gpu-memory-utilization", "0.6"]
    log = Path(tempfile.gettempdir()) / "vllm-server.log"
    environment = peer_environment(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process:
        try:
            url = "http://127.0.0.1:18765"
            deadline = time.monotonic() + 300
            while process.poll() is None and time.monotonic() < deadline and "startup complete" not in log.read_text():
                time.sleep(1)
            assert process.poll() is None, log.read_text()[-2000:]
            times = [served_s(url, fresh(requests, i), args.concurrent) for i in range(args.repeats + 1)]
        finally:
            process.terminate()
    return {"served_s": sorted(times[1:]), "served_tokens_per_s": tokens / statistics.median(times[1:])}


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=["load", "overhead"], nargs="+", default=["load", "overhead"])
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--clients", type=int, default=64, help="of the load (default: 64)")
    parser.add_argument("--minutes", type=float, default=2.0, help="of the load (default: 2)")
    parser.add_argument("--requests", type=int, default=256, help="different ones of the load (default: 256)")
    parser.add_argument("--concurrent", type=int, default=256, help="samples at once (default: 256)")
    parser.add_argument("--rounds", type=int, default=4, help="requests a concurrent client (default: 4)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--new", type=int, default=256, help="sampled tokens, at most (default: 256)")
    parser.add_argument("--context", type=int, default=1024, help="--max-model-len of the server (default: 1024)")
    parser.add_argument("--peer", choices=["vllm", "none"], default="none")


def measure(args: argparse.Namespace, report: Report) -> bool:
    from lockstep.models.init import init_folder

    parts = {"load": load, "overhead": overhead, "vLLM's server": vllm_served}
    chosen = [*args.only, *(["vLLM's server"] if args.peer == "vllm" else [])]
    figures = report.figures
    figures["arch"] = args.arch or ("tiny" if args.device == "cpu" else "qwen3-0.6b")
    rows = [["part", "", ""]]
    report.tables.append(rows)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        init_folder(figures["arch"], folder, seed=0)
        for name in chosen:
            figures[name] = parts[name](folder, args)
            rows += [[name, key, str(value)] for key, value in figures[name].items()]
            report.save()
    return bool(figures.get("load", {}).get("wrong"))
