"""What follows from a plan: a configuration adapted to it, or a refusal that says what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from ...config import LOGITS, RunConfig, resolve_parallel
from ...errors import InputError
from ...models.checks import is_divisible
from .plan import MemoryPlan, keeps_logits, plan, plans_recompute, recompute_patterns, traces_functions
from .terms import GIB
from .workload import Workload

_MAX_RANKS, _MAX_GENERATOR_TP = 1024, 8


def adapt_config(w: Workload, found: MemoryPlan) -> RunConfig:
    """The workload's configuration, with `compile.recompute` as planned."""
    c = w.config.compile
    if plans_recompute(c):
        recomputed = recompute_patterns(w, found.recomputed)
    else:
        recomputed = c.recompute + (LOGITS,) * (keeps_logits(c) and found.recomputed.logits)
    return w.config if recomputed == c.recompute else replace(w.config, compile=replace(c, recompute=recomputed))


def refusal_message(w: Workload, found: MemoryPlan) -> str:
    """The message for a plan that does not fit: its terms, and what would fit."""
    each = "a GPU" if w.on_gpu else "a process"
    suggestions = list(suggest_remedies(w, found.memory)) or ["a smaller model, or GPUs with more memory"]
    if not w.on_gpu:
        suggestions.append("GPUs, for which lockstep plan --device-memory-gib 80 plans")
    return (
        f"the run needs {found.total / GIB:.1f} GiB {each} and may take {found.memory / GIB:.1f}:\n"
        f"{found.title}\n{found.table()}\n"
        f"What would fit: {'; '.join(suggestions)}"
    )


def suggest_remedies(w: Workload, memory: int) -> Iterator[str]:
    """Settings with which the workload fits in `memory`: each by itself or, if none suffices, several together."""
    sufficient = [flag for flag, changed in _changes(w, memory) if _fits(changed, memory)]
    combined, smallest = _combine_changes(w, memory)
    if sufficient:
        yield from sufficient
    elif _fits(smallest, memory):
        yield " and ".join(combined)
    if (larger := enlarge_generator_groups(w, memory)) is not w:
        ranks = larger.config.parallel.generator_tp
        yield f"--parallel.generator-tp {ranks}, so many GPUs having a part of the weights each"
    if not w.on_gpu:  # more processes of a host would share its memory
        return
    if more := _fewest_ranks(w, memory) or _fewest_ranks(smallest, memory):
        now, then = w.config.parallel, more.config.parallel
        flags, _ = _combine_changes(_on_ranks(w, more.ranks) or more, memory)  # on so many, perhaps fewer
        flags += [f"--parallel.fsdp {more.groups}"] if now.fsdp else []
        if now.batch_shards not in (w.groups, then.batch_shards):
            flags.append(f"--parallel.batch-shards {then.batch_shards}")
        also = f", with {' and '.join(flags)}" if flags else ""
        yield f"{more.ranks} GPUs (torchrun), over which masters, moments and gradients are sharded{also}"


def _changes(w: Workload, memory: int) -> Iterator[tuple[str, Workload]]:
    """The flags that could be given, each with the workload that it changes this one to."""
    c = w.config
    if c.generator.kv_cache_tokens:
        yield "--generator.kv-cache-tokens 0, which plans the cache", w.with_settings("generator", kv_cache_tokens=0)
    fewer = w
    tokens: int = c.trainer.max_tokens_per_micro_batch
    while (tokens := tokens // 2) >= max(256, w.longest_prompt + c.max_response_length):
        fewer = w.with_settings("trainer", max_tokens_per_micro_batch=tokens)
        if _fits(fewer, memory):
            break
    if fewer is not w:
        yield f"--trainer.max-tokens-per-micro-batch {fewer.config.trainer.max_tokens_per_micro_batch}", fewer
    may_recompute = traces_functions(c.compile) and "recompute" in c.compile.pass_names
    if may_recompute and not c.compile.recompute and not plans_recompute(c.compile):
        yield "--compile.recompute full", w.with_settings("compile", recompute=("full",), activation_memory_gib=0.0)
    if w.on_gpu and not c.optimizer.offload:
        on_host = f"with {12 * w.layout.size / GIB:.1f} GiB of the host's memory a GPU"
        yield f"--optimizer.offload, {on_host}", w.with_settings("optimizer", offload=True)


def _combine_changes(w: Workload, memory: int) -> tuple[list[str], Workload]:
    """Make one change after another until the workload fits or none is left; return their flags and the workload."""
    flags: list[str] = []
    while not _fits(w, memory):
        remaining = [(flag, changed) for flag, changed in _changes(w, memory) if flag not in flags]
        if not remaining:
            break
        flag, w = remaining[0]
        flags.append(flag)
    return flags, w


def enlarge_generator_groups(w: Workload, memory: int) -> Workload:
    """The workload with the smallest larger number of processes generating together with which it fits; `w` itself if
    there is none."""
    if w.config.parallel.zero_stage == 2:  # which needs whole weights
        return w
    prompts = w.config.trainer.prompts_per_step
    for degree in range(w.config.parallel.generator_tp + 1, min(w.ranks, _MAX_GENERATOR_TP) + 1):
        larger = w.with_settings("parallel", generator_tp=degree)
        is_even = w.ranks % degree == 0 and prompts % (w.ranks // degree) == 0
        if is_even and is_divisible(w.model, degree) and plan(larger, memory).fits:
            return larger
    return w


def _fewest_ranks(w: Workload, memory: int) -> Workload | None:
    """The workload on the fewest processes with which it fits, by doubling, among those that may share its steps."""
    ranks = w.ranks
    while (ranks := ranks * 2) <= min(_MAX_RANKS, w.config.trainer.prompts_per_step):
        larger = _on_ranks(w, ranks)
        if larger is not None and _fits(larger, memory):
            return larger
    return None


def _on_ranks(w: Workload, ranks: int) -> Workload | None:
    """The workload on so many processes, with one shard each if these cannot share as many as it has; None if these
    processes cannot do its steps."""
    for shards in (w.config.parallel.batch_shards, 0):
        parallel = replace(w.config.parallel, fsdp=0, batch_shards=shards)
        with suppress(InputError):
            return replace(w, config=resolve_parallel(replace(w.config, parallel=parallel), ranks), ranks=ranks)
    return None


def _fits(w: Workload, memory: int) -> bool:
    return plan(fit_generator_groups(w, memory), memory).fits


def fit_generator_groups(w: Workload, memory: int) -> Workload:
    """The workload as a run would change it: if it does not fit with `parallel.generator_tp` 1, in larger groups."""
    if w.config.parallel.generator_tp != 1 or plan(w, memory).fits:
        return w
    return enlarge_generator_groups(w, memory)
