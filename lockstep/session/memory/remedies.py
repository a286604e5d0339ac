"""What is done about a plan: a run's configuration adapted to it, or a refusal that says what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...config import RunConfig
from ...errors import InputError
from ...models.checks import require_degree
from .plan import MemoryPlan, patterns, plan
from .terms import GIB
from .workload import Workload

_MOST_RANKS, _MOST_TOGETHER = 1024, 8


def adapted(w: Workload, found: MemoryPlan) -> RunConfig:
    """The workload's configuration with the layers that its plan computes again."""
    config = w.config
    if found.again == 0 or config.compile.recompute or config.compile.activation_memory_gib:
        return config
    return replace(config, compile=replace(config.compile, recompute=patterns(w, found.again)))


def refusal(w: Workload, found: MemoryPlan) -> str:
    """Why a plan does not fit, its terms, and what would."""
    each = "a GPU" if w.on_gpu else "a process"
    cures = list(remedies(w, found.memory)) or ["a smaller model, or GPUs with more memory"]
    return (
        f"the run needs {found.total / GIB:.1f} GiB {each} and may take {found.memory / GIB:.1f}:\n{found.table()}\n"
        f"What would fit: {'; '.join(cures)}"
    )


def remedies(w: Workload, memory: int) -> Iterator[str]:
    """Settings, each by itself, with which the workload fits in so much memory."""
    c = w.config
    if c.generator.kv_cache_tokens and _fits(replace(c, generator=replace(c.generator, kv_cache_tokens=0)), w, memory):
        yield "--generator.kv-cache-tokens 0, which plans the cache"
    tokens = c.trainer.max_tokens_per_micro_batch
    while (tokens := tokens // 2) >= max(256, w.prompt_room):
        if _fits(replace(c, trainer=replace(c.trainer, max_tokens_per_micro_batch=tokens)), w, memory):
            yield f"--trainer.max-tokens-per-micro-batch {tokens}"
            break
    full = replace(c, compile=replace(c.compile, recompute=("full",), activation_memory_gib=0.0))
    if not c.compile.recompute and c.compile.capture == "step" and _fits(full, w, memory):
        yield "--compile.recompute full"
    offloaded = replace(c, optimizer=replace(c.optimizer, offload=True))
    if w.on_gpu and not c.optimizer.offload and _fits(offloaded, w, memory):
        yield f"--optimizer.offload, with {12 * w.layout.size / GIB:.1f} GiB of the host's memory a GPU"
    if (larger := in_larger_groups(w, memory)) is not w:
        together = larger.config.parallel.generator_tp
        yield f"--parallel.generator-tp {together}, so many GPUs having a part of the weights each"
    if ranks := _ranks(w, memory):
        yield f"{ranks} GPUs (torchrun), over which masters, moments and gradients are sharded"


def in_larger_groups(w: Workload, memory: int) -> Workload:
    """The workload with the fewest processes generating together, more than there were, with which it fits; itself,
    where there are none."""
    c = w.config
    for together in range(c.parallel.generator_tp + 1, min(w.ranks, _MOST_TOGETHER) + 1):
        larger = replace(c, parallel=replace(c.parallel, generator_tp=together))
        if _shared(w, together) and _fits(larger, w, memory):
            return replace(w, config=larger)
    return w


def _shared(w: Workload, together: int) -> bool:
    """Whether so many neighbours can share a model that generates, and nobody asks for its weights whole."""
    if w.config.parallel.zero_stage == 2:
        return False
    try:
        require_degree(w.model, together, "parallel.generator_tp")
    except InputError:
        return False
    return w.ranks % together == 0 and w.config.trainer.prompts_per_step % (w.ranks // together) == 0


def _ranks(w: Workload, memory: int) -> int | None:
    """The fewest processes more, each twice as many, that a step's prompts can be dealt to."""
    ranks = w.ranks
    while (ranks := ranks * 2) <= min(_MOST_RANKS, w.config.trainer.prompts_per_step):
        if w.config.trainer.prompts_per_step % ranks == 0:
            parallel = replace(w.config.parallel, batch_shards=max(ranks, w.config.parallel.batch_shards))
            if plan(replace(w, ranks=ranks, config=replace(w.config, parallel=parallel)), memory).fits:
                return ranks
    return None


def _fits(config: RunConfig, w: Workload, memory: int) -> bool:
    return plan(replace(w, config=config), memory).fits
