"""`lockstep serve` under load: clients for minutes, each answer held to its bits in process; and what HTTP costs.

The server and its clients are processes of their own. Requests are token ids in and out unless said otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import http_clients
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


# ---- in process ----


def in_process(
    folder: Path, args: argparse.Namespace, first: list[Request], rounds: dict[str, list[list[Request]]]
) -> tuple[list[Any], dict[str, list[float]]]:
    """The completions of the first requests, and by path the seconds of each round but the first, without a server: as
    many are given to the engine at a time as a server's clients have open."""
    from lockstep.config import GeneratorConfig
    from lockstep.session.generate import LLM

    with LLM(folder, device=args.device, config=GeneratorConfig(max_num_seqs=args.concurrent)) as llm:
        _, sampling, _ = as_engine_takes_them(make_requests(len(KINDS), args.prompt, (args.new, args.new), TOKENS))
        engine = llm.engine_for(args.concurrent, args.context, sampling)
        completions = [group[0] for group in engine.generate(*as_engine_takes_them(first))] if first else []
        times = {
            path: [seconds(partial(keep_open, engine, one, args.concurrent), args.device) for one in of_path]
            for path, of_path in rounds.items()
        }
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return completions, {path: of_path[1:] for path, of_path in times.items()}


def keep_open(engine: Any, requests: list[Request], concurrent: int) -> None:
    """All requests, at most `concurrent` given to the engine at a time."""
    waiting, unfinished = list(zip(*as_engine_takes_them(requests), strict=True))[::-1], 0
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


class Clients:
    """Several processes of clients, which begin together."""

    def __init__(self, url: str, requests: list[Request], clients: int, seconds: float = 0, leaving: float = 0) -> None:
        self.processes = []
        for number in range(CLIENT_PROCESSES):
            own = requests if seconds else requests[number::CLIENT_PROCESSES]
            spec = {"url": url, "requests": [vars(r) for r in own], "count": clients // CLIENT_PROCESSES}
            spec |= {"seconds": seconds, "leaving": leaving, "seed": number}
            command = [sys.executable, http_clients.__file__]
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

    def results(self) -> dict[str, Any]:
        """Of all, added up."""
        found = [json.loads(process.stdout.readline()) for process in self.processes if process.stdout is not None]
        return {name: sum((f[name] for f in found), start=type(found[0][name])()) for name in found[0]}


# ---- what is measured ----


def loaded(
    url: str, process: subprocess.Popen[str], requests: list[Request], args: argparse.Namespace
) -> dict[str, Any]:
    """Clients for some minutes, some of whom leave; every answer has the bits of its request alone."""
    memory: list[tuple[float, float]] = []
    clients = Clients(url, requests, args.clients, args.minutes * 60, leaving=0.05)
    clients.begin()
    until = time.monotonic() + args.minutes * 60
    while time.monotonic() < until:
        memory.append((resident_mib(process), used_gpu_mib(args.device)))
        time.sleep(min(5.0, args.minutes * 6))
    results = clients.results()
    latencies = sorted(results.pop("latencies"))
    third = memory[len(memory) // 3 :]
    halves = third[: len(third) // 2], third[len(third) // 2 :]
    return {
        "clients": args.clients,
        "minutes": args.minutes,
        "answers": results["done"],
        "clients_left": results["left"],
        "wrong": len(results["wrong"]),
        "first_wrong": results["wrong"][:3],
        "median_latency_s": statistics.median(latencies),
        "p99_latency_s": latencies[int(len(latencies) * 0.99)],
        "resident_mib": [statistics.mean(m[0] for m in half) for half in halves],
        "gpu_mib": [statistics.mean(m[1] for m in half) for half in halves],
    }


def overhead_rounds(path: str, args: argparse.Namespace) -> list[list[Request]]:
    """The same lengths again and again; the first round makes what is made late."""
    requests = make_requests(args.rounds * args.concurrent, args.prompt, (args.new // 2, args.new), path, seed=1)
    return [fresh(requests, i) for i in range(args.repeats + 1)]


def sampled(requests: list[Request]) -> int:
    return sum(r.body.get("sampling_params", r.body)["max_tokens"] for r in requests)


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


def unseeded(request: Request) -> Request:
    """Without a seed of its own, whose tokens vLLM draws row by row."""
    return replace(request, body={name: value for name, value in request.body.items() if name != "seed"})


def vllm_served(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The overhead's completions through vLLM's own server, if it is installed."""
    rounds = [[unseeded(r) for r in of_round] for of_round in overhead_rounds(COMPLETIONS, args)]
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
            times = [served_s(url, of_round, args.concurrent) for of_round in rounds]
        finally:
            process.terminate()
    return {"served_s": sorted(times[1:]), "served_tokens_per_s": sampled(rounds[0]) / statistics.median(times[1:])}


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=["load", "overhead"], nargs="*", default=["load", "overhead"])
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--clients", type=int, default=64, help="of the load (default: 64)")
    parser.add_argument("--minutes", type=float, default=2.0, help="of the load (default: 2)")
    parser.add_argument("--requests", type=int, default=256, help="different ones of the load (default: 256)")
    parser.add_argument("--concurrent", type=int, default=256, help="samples at once (default: 256)")
    parser.add_argument("--rounds", type=int, default=8, help="requests a concurrent client (default: 8)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--new", type=int, default=256, help="sampled tokens, at most (default: 256)")
    parser.add_argument("--context", type=int, default=1024, help="--max-model-len of the server (default: 1024)")
    parser.add_argument("--peer", choices=["vllm", "none"], default="none")


def measure(args: argparse.Namespace, report: Report) -> bool:
    from lockstep.models.init import init_folder

    figures = report.figures
    figures["arch"] = args.arch or ("tiny" if args.device == "cpu" else "qwen3-0.6b")
    rows = [["part", "", ""]]
    report.tables.append(rows)

    def keep(name: str, found: dict[str, Any]) -> None:
        figures[name] = found
        rows.extend([name, key, str(value)] for key, value in found.items())
        report.save()

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        init_folder(figures["arch"], folder, seed=0)
        if args.only:
            ours(folder, args, keep)
        if args.peer == "vllm":
            keep("vLLM's server", vllm_served(folder, args))
    return bool(figures.get("load", {}).get("wrong"))


def ours(folder: Path, args: argparse.Namespace, keep: Callable[[str, dict[str, Any]], None]) -> None:
    """One engine in process and one server do all that is asked for."""
    load, paths = "load" in args.only, (TOKENS, COMPLETIONS) if "overhead" in args.only else ()
    requests = make_requests(args.requests, args.prompt, (args.new // 4, args.new), TOKENS) if load else []
    rounds = {path: overhead_rounds(path, args) for path in paths}
    completions, alone = in_process(folder, args, requests, rounds)
    with server(folder, args) as (url, process):
        for path, of_path in rounds.items():
            times = [served_s(url, of_round, args.concurrent) for of_round in of_path]
            found = compared(sampled(of_path[0]), alone[path], times[1:])
            keep(f"overhead, {path}", {"concurrent": args.concurrent, "requests": len(of_path[0])} | found)
        if load:
            keep("load", loaded(url, process, [*map(expecting, requests, completions)], args))


def expecting(request: Request, completion: Any) -> Request:
    bits = http_clients.digest(completion.token_ids, completion.logprobs, completion.model_logprobs)
    return replace(request, digest=bits)
