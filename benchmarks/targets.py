"""The figures of each part that a target is set for, as lines of `all.py`'s summary."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

WORST = 5  # products that are named
Figures = dict[str, Any]
Lines = Iterator[str]


def at_most(what: str, value: float, limit: float) -> str:
    return f"{what}: {value:.3g}, at most {limit:g}{'' if value <= limit else '  MISSED'}"


def at_least(what: str, value: float, limit: float) -> str:
    return f"{what}: {value:,.4g}, at least {limit:,g}{'' if value >= limit else '  MISSED'}"


def seed_workload(f: Figures) -> Lines:
    runs = {name: s for name, s in f["systems"].items() if "step_s" in s}
    ours = [s for s in runs.values() if "certificate" in s]
    for name, s in zip(("cold", "warm"), ours, strict=False):
        steps = len(s["step_s"])
        yield at_most(f"{name}: start-up s", s["startup_s"], 30 if name == "cold" else 6)
        yield at_most(f"{name}: generate s of ten steps", s["generate_s"] * 10 / steps, 1.3)
        yield at_most(f"{name}: train s of ten steps", s["train_s"] * 10 / steps, 0.5)
        yield at_most(
            f"{name}: s in all, ten steps", s["startup_s"] + s["steps_s"] * 10 / steps, 32 if name == "cold" else 8
        )
        yield at_most(
            f"{name}: tokens different of {s['certificate']['tokens_checked']}", s["certificate"]["tokens_different"], 0
        )
        yield at_most(f"{name}: recompiles", s["recompiles"][-1], 0)
        yield "start-up: " + ", ".join(f"{part} {seconds:.1f}" for part, seconds in s["startup"].items())
        yield f"replays of {steps} steps: {s['replays']}"
    for name, s in runs.items():
        if "certificate" not in s and ours:
            later = [statistics.median(x["step_s"][1:]) for x in (s, ours[-1])]
            yield at_least(f"{name}: a step, times ours", later[0] / later[1], 10)


def startup(f: Figures) -> Lines:
    for name, run in f["runs"].items():
        limits = (30, 32) if name == "cold" else (6, 8)
        yield at_most(f"{name}: start-up s", run["startup_s"], limits[0])
        yield at_most(f"{name}: s in all, ten steps", run["startup_s"] + run["steps_s"] * 10 / f["steps"], limits[1])
        yield "start-up: " + ", ".join(f"{part} {seconds:.1f}" for part, seconds in run["startup"].items())
        if name != "cold":
            yield at_most(f"{name}: traces", run["compile"]["traces"], 0)
    if len(parts := f["sharing"]) == 3:
        seconds = {name: part["process_s"] for name, part in parts.items()}
        apart = seconds["trainer"] + seconds["generator"]
        yield at_least("trainer and generator apart, over both in one process", apart / seconds["both"], 1.0)


def flex(f: Figures) -> Lines:
    yield at_most(
        "words of decoded rows that differ from packed ones", sum(r.get("different", 0) for r in f["records"]), 0
    )


def fsdp(f: Figures) -> Lines:
    for name, way in f["ways"].items():
        same = all(way[f"same_{what}"] for what in ("rollouts", "weights"))
        yield at_most(f"{name}: tokens different of {way['tokens_checked']}", way["tokens_different"], 0)
        yield f"{name}: rollouts and weights {'the same' if same else 'DIFFER'}"


def settings(f: Figures) -> Lines:
    cases = f["cases"]
    yield at_most(f"of {len(cases)} settings do not hold", len(f["wrong"]), 0)
    checked = [c for c in cases.values() if "tokens_checked" in c]
    what = f"tokens different of {sum(c['tokens_checked'] for c in checked)}"
    yield at_most(what, sum(c["tokens_different"] for c in checked), 0)
    yield from (f"{name}: {'; '.join(odd)}" for name, odd in f["wrong"].items())


WITH_A_PASS, PLAIN = "grpo, beta 0.01", "grpo"  # steps with one more forward pass, of a reference, and without


def algorithms(f: Figures) -> Lines:
    found = f["algorithms"]
    ran = {name: a for name, a in found.items() if "failed" not in a}
    one_pass = ran[WITH_A_PASS]["step_s"] - ran[PLAIN]["step_s"] if {WITH_A_PASS, PLAIN} <= ran.keys() else 0.0
    for name, a in ran.items():
        what, step = f"{name}: a step, over {a.get('floor', PLAIN)}'s", a["ratio"]["step"]
        if name == "ppo" and one_pass > 0:  # the critic's values are a forward pass that its floor does not have
            yield f"{what}: {step:.3g}"
            floor = ran[a["floor"]]["step_s"]
            what, step = f"{what} and a forward pass", step * floor / (floor + one_pass)
        yield at_most(what, step, 1.03)
    what = f"tokens different of {sum(a['tokens_checked'] for a in ran.values())}"
    yield at_most(what, sum(a["tokens_different"] for a in ran.values()), 0)
    yield at_most("recompiles", f["recompiles"], 0)
    yield from (f"{name} FAILED: {found[name]['failed']}" for name in found.keys() - ran.keys())


def algorithms_bits(f: Figures) -> Lines:
    found = f["algorithms"]
    yield at_most(
        f"of {len(found)} algorithms, those with other bits", sum(bool(a["wrong"]) for a in found.values()), 0
    )
    yield from (f"{name}: {'; '.join(a['wrong'])}" for name, a in found.items() if a["wrong"])


def algorithms_learning(f: Figures) -> Lines:
    runs = f["runs"]
    what = f"tokens different of {sum(r['tokens_checked'] for r in runs.values())}"
    yield at_most(what, sum(r["tokens_different"] for r in runs.values()), 0)
    yield at_most("algorithms that do not hold", sum(map(bool, f["wrong"].values())), 0)
    yield from (line for found in f["wrong"].values() for line in found)


def gpu_tests(f: Figures) -> Lines:
    yield f"{f['passed']} passed, {f['skipped']} skipped" + ("" if f.get("complete") else ", not ended")
    yield at_most("failed", f["failed"], 0)
    words = f["words"]
    yield at_most(
        f"words different of {sum(w for n, (w, _) in words.items() if 'CONTROL' not in n):,}",
        sum(d for n, (_, d) in words.items() if "CONTROL" not in n),
        0,
    )
    yield from (f"FAILED {name}" for name in f["failures"])


def capture(f: Figures) -> Lines:
    for part in [key for key in f if key == "train" or key.startswith("decode ")]:
        ways = {way: w for way, w in f[part].items() if "failed" not in w}
        time = (lambda w: w["forward_backward"]["ms"]) if part == "train" else (lambda w: w["ms_a_step"])
        yield f"{part}: " + ", ".join(f"{way} {time(w):.2f} ms" for way, w in ways.items())
        yield at_most(f"{part}: ways that differ or failed", sum(not w.get("identical") for w in f[part].values()), 0)
        if {"captured", "CUDA graph"} <= ways.keys():
            memory = ways["CUDA graph"].get("reserved_gib", 0) / (ways["captured"].get("reserved_gib") or math.inf)
            yield at_most(f"{part}: memory with CUDA graphs over without", memory, 1.07)
            graph = ways["CUDA graph"]
            if part == "train":
                step = graph["step"]
                yield f"train: Python ms a step from an idle device {step['python_ms']:.3f}"
                yield at_most("train: Python ms a step behind another", step["queued_python_ms"], 0.2)
            else:
                yield at_most(f"{part}: host ms", graph["host_ms_a_step"], 0.2)


def compile_ways(f: Figures) -> Lines:
    ways = {way: w for way, w in f["ways"].items() if "failed" not in w}
    yield ", ".join(f"{way} {w['forward_backward']['ms']:.2f} ms" for way, w in ways.items())
    odd = [way for way, w in f["ways"].items() if not (w.get("holds") and w.get("repeats"))]
    yield at_most(f"ways that failed or do not hold{': ' * bool(odd) + ', '.join(odd)}", len(odd), 0)


def learning(f: Figures) -> Lines:
    rewards = [r for r in f["curve"]["reward/mean"] if r is not None]
    yield f"{len(rewards)} steps in {f.get('seconds', math.nan):.0f} s"
    if len(rewards) >= 20:
        first, last = statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])
        yield at_least(f"mean reward {first:.3f} to {last:.3f}, gain", last - first, 0.2)
    exact = {step: v.get("validation/rewards/correct/mean") for step, v in f["validation"].items()}
    yield "held-out problems solved: " + ", ".join(f"{step}: {v}" for step, v in exact.items())
    if f["certificate"]:
        yield at_most(
            f"tokens different of {f['certificate']['tokens_checked']}", f["certificate"]["tokens_different"], 0
        )


def families(f: Figures) -> Lines:
    for name, s in f["families"].items():
        if "failed" in s:
            yield f"{name}: FAILED {s['failed'][:100]}"
            continue
        checked = f"{s['tokens_checked']} tokens and {s['choices_checked']} choices"
        yield at_most(f"{name}: different of {checked}", s["tokens_different"] + s["tokens_routed_differently"], 0)
        yield at_most(f"{name}: recompiles", s["recompiles"], 0)


GENERATE = {"seed": 36000, "mid": 65000, "big": 45000, "one": 1150}


def generate(f: Figures) -> Lines:
    for name, case in f["cases"].items():
        if "ratio" in case:
            yield at_least("mixed arrivals over fixed lengths", case["ratio"], 0.85)
            continue
        systems = case["systems"]
        rate = systems["lockstep"]["tokens_per_s"]
        yield from (f"{name}: {peer} {s['tokens_per_s']:,.0f}" for peer, s in systems.items() if "vLLM" in peer)
        yield at_least(f"{name}: tokens a second", rate, GENERATE[name]) if name in GENERATE else f"{name}: {rate:,.0f}"


def kernels(f: Figures) -> Lines:
    for part, found in f.items():
        if isinstance(found, dict) and "groups" in found:
            largest = ", ".join(f"{g['what']} {g['us']:.0f}" for g in found["groups"][:4])
            yield f"{part}: {sum(g['us'] for g in found['groups']):.0f} us; {largest}"


def endurance(f: Figures) -> Lines:
    settled = f["memory_gib"][len(f["memory_gib"]) // 10 :]
    yield at_least("steps", f["steps"], 200)
    yield at_most("recompiles", f["recompiles"], 0)
    yield at_most(f"tokens different of {f['tokens_checked']:.0f}", f["tokens_different"], 0)
    yield at_most("GiB that memory grew by", settled[-1] - settled[0], 0.1)


def parity_cost(f: Figures) -> Lines:
    for part, cost in f["cost"].items():
        yield at_most(part, cost, 1.05)


def train_step(f: Figures) -> Lines:
    for name, s in f["systems"].items():
        limit = {"lockstep, all tokens": 90, "lockstep, the RL step's work": 50}.get(name)
        yield at_most(f"{name}: ms", 1e3 * s["median_s"], limit) if limit else f"{name}: {1e3 * s['median_s']:.1f} ms"


OPS = {  # limits on our time over the fastest other's, by operator and part of the case
    ("attention", " forward"): 1.0,
    ("attention", "forward and backward"): 1 / 0.9,
    ("attention", "shared"): 0.5,
    ("logprobs", "plain"): 1.0,
}


def ops(f: Figures) -> Lines:
    linear = []
    for r in f["records"]:
        ours = r["ours"]["median_s"]
        if r["op"] == "linear":
            linear.append((ours / min(t["median_s"] for t in r["others"].values()), r["case"]))
        for (op, part), limit in OPS.items():
            others = {n: t for n, t in r["others"].items() if n != "cuDNN"}
            if r["op"] == op and r["case"].endswith(part) and others:
                fastest = min(t["median_s"] for t in others.values())
                yield at_most(f"{op} {r['case']}, over {' and '.join(others)}", ours / fastest, limit)
        if r["op"] == "attention" and "decode 256x1024" in r["case"]:
            yield at_least(f"attention {r['case']}, of the bandwidth", r["floor_s"] / ours, 0.8)
        if r["op"] == "sampling" and r["case"].startswith("40x151936") and "top-p 0.95" in r["case"]:
            yield at_most(f"sampling {r['case']}, ms", 1e3 * ours, 0.15)
    if linear:
        mean = math.prod(ratio for ratio, _ in linear) ** (1 / len(linear))
        yield at_most("linear over the fastest library, geometric mean", mean, 1.03)
        for ratio, case in sorted(linear, reverse=True)[:WORST]:
            yield at_most(f"linear over the fastest library, {case}", ratio, 1.15)


def moe(f: Figures) -> Lines:
    for r in f["records"]:
        if "torch" in r["others"]:
            yield at_most(
                f"grouped {r['case']}, over torch's", r["ours"]["median_s"] / r["others"]["torch"]["median_s"], 1.1
            )
    for name, s in f["steps"].items():
        yield f"{name}: {1e3 * s['median_s']:.1f} ms, floor {1e3 * s['floor_s']:.1f}"


def decode_layer(f: Figures) -> Lines:
    for rows, parts in f["rows"].items():
        layer = parts["layer"]
        yield at_most(f"{rows} sequences, over library calls", layer["fused_us"] / layer["library_us"], 0.6)


def growth(f: Figures) -> Lines:
    for part in ("train_sizes", "train_lengths", "generate"):
        for r in f[part]:
            if "failed" in r:
                yield f"{part} {r['name']}: {r['failed'][:80]}"
            else:
                rate = r["tokens"] / r["median_s"]
                yield f"{part} {r['name']}: {rate:,.0f} tokens a second, {r['peak_gib'] or 0:.0f} GiB"


READERS: dict[str, Callable[[Figures], Lines]] = {
    read.__name__: read
    for read in (
        *(seed_workload, gpu_tests, capture, learning, compile_ways, families, generate, kernels, endurance),
        *(parity_cost, train_step, ops, moe, decode_layer, growth, startup, flex, fsdp, settings),
        *(algorithms, algorithms_learning, algorithms_bits),
    )
}


def key_figures(figures: Figures | None) -> list[str]:
    """What a benchmark's file says; nothing where there is no file or no target. A file may be incomplete."""
    reader = READERS.get((figures or {}).get("benchmark", ""))
    found = [figures["where"]] if figures and "where" in figures else []
    if figures is not None and reader is not None:
        try:
            found.extend(reader(figures))
        except (KeyError, IndexError, ValueError, TypeError, ZeroDivisionError, statistics.StatisticsError) as error:
            found.append(f"incomplete ({type(error).__name__}: {error})")
    return found
