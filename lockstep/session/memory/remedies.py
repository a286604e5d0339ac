"""What follows from a plan: a configuration adapted to it, or a refusal that says what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...config import LOGITS, RunConfig
from ...models.checks import is_divisible
from .plan import MemoryPlan, chooses, keeps_logits, patterns, plan, traces
from .terms import GIB
from .workload import Workload

_MOST_RANKS, _MOST_TOGETHER = 1024, 8


def adapted(w: Workload, found: MemoryPlan) -> RunConfig:
    """The workload's configuration, with `compile.recompute` as planned."""
    c = w.config.compile
    if chooses(c):
        recomputed = patterns(w, found.recomputed)
    else:
        recomputed = c.recompute + (LOGITS,) * (keeps_logits(c) and found.recomputed.logits)
    return w.config if recomputed == c.recompute else replace(w.config, compile=replace(c, recompute=recomputed))


def refusal(w: Workload, found: MemoryPlan) -> str:
    """The message for a plan that does not fit: its terms, and what would fit."""
    each = "a GPU" if w.on_gpu else "a process"
    cures = list(remedies(w, found.memory)) or ["a smaller model, or GPUs with more memory"]
    if not w.on_gpu:
        cures.append("GPUs, for which lockstep plan --device-memory-gib 80 plans")
    return (
        f"the run needs {found.total / GIB:.1f} GiB {each} and may take {found.memory / GIB:.1f}:\n"
        f"{found.title}\n{found.table()}\n"
        f"What would fit: {'; '.join(cures)}"
    )


def remedies(w: Workload, memory: int) -> Iterator[str]:
    """Settings with which the workload fits in `memory`: each by itself or, if none suffices, several together."""
    alone = [said for said, changed in _changes(w, memory) if _fits(changed, memory)]
    together, least = _together(w, memory)
    yield from alone or ([" and ".join(together)] if _fits(least, memory) else [])
    if (larger := in_larger_groups(w, memory)) is not w:
        ranks = larger.config.parallel.generator_tp
        yield f"--parallel.generator-tp {ranks}, so many GPUs having a part of the weights each"
    for begin, settings in ((w, []), (least, together)):
        if more := _ranks(begin, memory):
            settings = [*settings, f"--parallel.fsdp {more // w.tp}"] if w.config.parallel.fsdp else settings
            also = f", with {' and '.join(settings)}" if settings else ""
            yield f"{more} GPUs (torchrun), over which masters, moments and gradients are sharded{also}"
            break


def _changes(w: Workload, memory: int) -> Iterator[tuple[str, Workload]]:
    """The settings that could be changed, each with the changed workload."""
    c = w.config
    if c.generator.kv_cache_tokens:
        yield "--generator.kv-cache-tokens 0, which plans the cache", w.having("generator", kv_cache_tokens=0)
    fewer = w
    tokens: int = c.trainer.max_tokens_per_micro_batch
    while (tokens := tokens // 2) >= max(256, w.longest_prompt + c.max_response_length):
        fewer = w.having("trainer", max_tokens_per_micro_batch=tokens)
        if _fits(fewer, memory):
            break
    if fewer is not w:
        yield f"--trainer.max-tokens-per-micro-batch {fewer.config.trainer.max_tokens_per_micro_batch}", fewer
    can_say = traces(c.compile) and "recompute" in c.compile.pass_names
    if can_say and not c.compile.recompute and not chooses(c.compile):
        yield "--compile.recompute full", w.having("compile", recompute=("full",), activation_memory_gib=0.0)
    if w.on_gpu and not c.optimizer.offload:
        on_host = f"with {12 * w.layout.size / GIB:.1f} GiB of the host's memory a GPU"
        yield f"--optimizer.offload, {on_host}", w.having("optimizer", offload=True)


def _together(w: Workload, memory: int) -> tuple[list[str], Workload]:
    """Changes settings one after another until the workload fits or none is left; returns them and the workload."""
    said = list[str]()
    while not _fits(w, memory) and (left := [one for one in _changes(w, memory) if one[0] not in said]):
        (first, w), *_ = left
        said.append(first)
    return said, w


def in_larger_groups(w: Workload, memory: int) -> Workload:
    """The workload with the smallest larger number of processes generating together with which it fits; `w` itself if
    there is none."""
    prompts, alone = w.config.trainer.prompts_per_step, w.config.parallel.zero_stage == 2  # which has the weights whole
    for together in range(w.config.parallel.generator_tp + 1, 1 if alone else min(w.ranks, _MOST_TOGETHER) + 1):
        larger = w.having("parallel", generator_tp=together)
        dealt = w.ranks % together == 0 and prompts % (w.ranks // together) == 0
        if dealt and is_divisible(w.model, together) and plan(larger, memory).fits:
            return larger
    return w


def _ranks(w: Workload, memory: int) -> int | None:
    """The fewest processes with which it fits, by doubling, among those that evenly divide a step's prompts."""
    ranks = w.ranks
    while (ranks := ranks * 2) <= min(_MOST_RANKS, w.config.trainer.prompts_per_step):
        if w.config.trainer.prompts_per_step % ranks == 0:
            shards = max(ranks // w.tp, w.config.parallel.batch_shards)
            if _fits(replace(w.having("parallel", batch_shards=shards), ranks=ranks), memory):
                return ranks
    return None


def _fits(w: Workload, memory: int) -> bool:
    return plan(as_run(w, memory), memory).fits


def as_run(w: Workload, memory: int) -> Workload:
    """The workload as a run would change it: if it does not fit with `parallel.generator_tp` 1, in larger groups."""
    alone = w.config.parallel.generator_tp == 1
    return in_larger_groups(w, memory) if alone and not plan(w, memory).fits else w
