"""Whole runs on several processes, in every layout, beside those of one process: for `matrix.py`.

Processes are forked from one that has imported everything. What a layout is held against is run once a family.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from safetensors.torch import load_file

from lockstep.cli import main as command
from lockstep.generator.kv_cache import KVCache
from lockstep.generator.scheduler import Scheduler
from lockstep.models import Decoder, save_model
from lockstep.models.families import FAMILIES
from lockstep.models.init import initialize
from lockstep.models.tokenizer import byte_tokenizer, save_tokenizer

REWARD = """
def low(completion_ids, **_):
    "The share of small tokens."
    return [sum(t < 200 for t in ids) / len(ids) for ids in completion_ids]
"""
TIMED = ("time/", "perf/", "memory/")

# Processes, and how many of them share products of the trainer and of the generator; the rest is data parallel.
DEGREES = ("2.1.1", "2.1.2", "2.2.1", "2.2.2", "4.2.1", "4.2.2", "4.2.4", "4.1.2", "4.1.4", "4.4.2")
DEGREES += ("8.1.1", "8.1.8", "8.2.8", "8.4.2", "8.4.8", "8.8.4", "8.8.8")
CAPTURED = "4.2.2"  # as graphs
CELLS = ("1.4", "2.1", "4.2", "8.4")  # processes that do two steps, and those that do the third

LIKELY = ["--sampling.top-p", "0.95"]
PRESSED = ["--generator.kv-cache-tokens", "128", "--generator.page-size", "16"]
PRESSED += ["--generator.max-num-batched-tokens", "24"]


def assert_degrees_agree(family: str, layout: str, folder: Path) -> None:
    """With prompts in chunks, samples that are preempted and prefixes found again: no token differs; all is one
    process's in every bit but, where the trainer's products are shared, what follows from gradients. Weights then have
    the bits of the same degree on other processes, and are within 1e-5 of one's."""
    ranks, tp, generator_tp = map(int, layout.split("."))
    shards = str(max(ranks // tp, 2))
    prompts = str(max(ranks // tp, 4))
    options = [*run_of(family, folder.parent), "--trainer.prompts-per-step", prompts, "--steps", "3"]
    # Where weights differ in their last bits, a token may be among the likely ones in one run and not in the other, and
    # has a gradient in one alone: these runs sample from all tokens.
    options += ["--parallel.batch-shards", shards, *([] if tp > 1 else LIKELY)]
    one = once(folder.parent / f"one {shards} {options[-1]}", 1, *options)
    flags = ["--parallel.generator-tp", str(generator_tp), *PRESSED]
    flags += ["--compile.capture", "step"] if layout == CAPTURED else []
    shared = ["--parallel.tp", str(tp)]
    other = trained(folder / "run", ranks, [*options, *shared, *flags])
    assert min(other["pressed"]) > 0, f"preempted, and found again: {other['pressed']}"
    if tp == 1:
        return assert_same_run(one, other, 3)
    assert_trained(other, 3)
    first = [[line for line in run["rollouts.jsonl"] if line["step"] == 0] for run in (one, other)]
    assert first[0] == first[1] != []
    assert_same_weights(once(folder.parent / f"tp {tp} {shards}", tp, *options, *shared), other)
    for name, weight in one["weights"].items():
        assert (other["weights"][name] - weight).norm() <= 1e-5 * weight.norm(), name
    return None


def assert_cells_agree(family: str, layout: str, folder: Path) -> None:
    """Steps of two updates, of eight shards in two cells of several micro-batches each; other processes go on where
    some have saved. Other cells have other bits."""
    ranks, then = map(int, layout.split("."))
    options = [*run_of(family, folder.parent), "--trainer.prompts-per-step", "16", "--checkpoint.interval", "2"]
    options += ["--trainer.max-tokens-per-micro-batch", "64", "--trainer.num-iterations", "2"]
    options += ["--parallel.batch-shards", "8", *LIKELY]
    cells = ["--parallel.cell", "4", "--steps", "2"]
    one = once(folder.parent / "cells", 1, *options, *cells[:3], "3")
    trained(folder / "run", ranks, options + cells)
    assert_same_run(one, trained(folder / "run", then, ["train", "--resume", str(folder / "run"), "--steps", "3"]), 3)
    if ranks == 1:
        other = trained(folder / "flat", 1, [*options, "--parallel.cell", "8", "--steps", "3"])
        assert other["metrics.jsonl"][0]["reward/mean"] == one["metrics.jsonl"][0]["reward/mean"]
        assert any(not torch.equal(other["weights"][key], tensor) for key, tensor in one["weights"].items())


def run_of(family: str, folder: Path, made: Callable[[str, Path], object] | None = None) -> list[str]:
    """The command of a run with a random tiny model, made here: by `made`, else one that eight ranks can share."""
    if not (folder / "in").exists():
        (folder / "in").mkdir(parents=True)
        (made or shared_by_eight)(family, folder / "in")
        save_tokenizer(byte_tokenizer(), folder / "in")
        (folder / "rewards.py").write_text(REWARD)
        lines = [json.dumps({"prompt": "hello " * (3 + i % 4)}) + "\n" for i in range(19)]
        (folder / "data.jsonl").write_text("".join(lines))
    options = ["train", "dataset", "--model", str(folder / "in"), "--task.data", str(folder / "data.jsonl")]
    options += ["--task.reward", f"{folder / 'rewards.py'}:low", "--task.validation-prompts", "0"]
    options += ["--sampling.num-generations", "4", "--sampling.max-completion-length", "8"]
    options += ["--device", "cpu", "--optimizer.learning-rate", "3e-3"]
    return [*options, "--optimizer.epsilon", "1e-6"]  # a gradient of rounding errors alone is not made an update


def shared_by_eight(family: str, path: Path) -> None:
    config = next(iter(FAMILIES[family].architectures.values()))
    heads = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 16} if config.mla is None else {"num_heads": 8}
    if family == "olmoe":  # whose heads are the hidden state's parts
        heads["hidden_size"] = 256
    config = replace(config, **heads)
    config = replace(config, eos_token_ids=(byte_tokenizer().eos_token_id,))
    model = initialize(Decoder(config, torch.float32), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if model.init_constants.get(name) == 0:
                # Beside what the steps alone made, 1e-5 of the norm would ask for more than float32 has: of a bias of
                # keys the gradient falls with the frequency that its elements rotate at, to rounding errors, and AdamW
                # makes as large steps of it.
                parameter.normal_(0, 0.5, generator=generator)
            else:
                parameter.mul_(4 if parameter.dim() > 1 else 1)  # tokens differ from one another
    save_model(model, path)


def trained(run: Path, count: int, options: list[str]) -> dict[str, Any]:
    """What a run on so many processes wrote, without times, and how its cache was pressed, summed over processes."""
    given = options if "--resume" in options else [*options, "--run-dir", str(run)]
    codes, pressed = zip(*on_ranks(count, commanded, given), strict=True)
    assert not any(codes), codes
    found: dict[str, Any] = {"weights": load_file(run / "model" / "model.safetensors")}
    found["pressed"] = [sum(counts) for counts in zip(*pressed, strict=True)]
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        found[name] = [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines]
    return found


_known: dict[Path, dict[str, Any]] = {}


def once(run: Path, count: int, *options: str) -> dict[str, Any]:
    """`trained`, kept."""
    if run not in _known:
        _known[run] = trained(run, count, list(options))
    return _known[run]


def commanded(options: list[str]) -> tuple[int, tuple[int, int]]:
    """The exit code of `lockstep` on this rank, how often samples were preempted, and pages that were found again."""
    preempted, matched, hits = Scheduler.preempt, KVCache.match, [0, 0]

    def preempt(self: Scheduler, *about: Any) -> Any:
        hits[0] += 1
        return preempted(self, *about)

    def match(self: KVCache, *about: Any) -> list[int]:
        found = matched(self, *about)
        hits[1] += len(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_exit_now", lambda code: None)
        patch.setattr(Scheduler, "preempt", preempt)
        patch.setattr(KVCache, "match", match)
        return command.main(options), (hits[0], hits[1])


def assert_trained(run: dict[str, Any], steps: int) -> None:
    """In no step a token differed, and each changed the weights."""
    found = run["metrics.jsonl"]
    assert all(step["grad_norm"] > 0 and step["parity/tokens_different"] == 0 for step in found) and len(found) == steps


def assert_same_run(one: dict[str, Any], other: dict[str, Any], steps: int) -> None:
    """In every bit: rollouts, losses, norms and weights."""
    assert_trained(one, steps)
    assert one["metrics.jsonl"] == other["metrics.jsonl"] and one["rollouts.jsonl"] == other["rollouts.jsonl"] != []
    assert_same_weights(one, other)


def assert_same_weights(one: dict[str, Any], other: dict[str, Any]) -> None:
    a, b = one["weights"], other["weights"]
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
