"""A plan: every term, the capacity of the KV cache, and what the backward pass recomputes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ...config import ELEMENTWISE, FULL, LOGITS, RECORDINGS, CompileConfig, recordings
from ...generator.cache_capacity import HOST_CACHE, capacity_per_sequence, round_capacity
from . import terms
from .terms import GIB, Recomputed
from .workload import Workload

PERSISTENT_TERMS: dict[str, Callable[[Workload], int]] = {
    "weights": terms.weights,
    "shard of the weights": terms.shard,
    "masters": terms.masters,
    "moments": terms.moments,
    "chunks of the state": terms.offloaded_chunks,
    "gradients": terms.gradients,
    "reference or teacher": terms.frozen,
    "sampled supports": terms.sampling_supports,
    "CUDA and NCCL": terms.context,
}
KEPT_STATE = "kept part of the state"
RESERVE = 0.03  # of the memory, which kept state leaves to what a plan may be wrong by
CACHE, ACTIVATIONS, WORKSPACE, TRANSIT = "KV cache", "activations", "head and backward", "in transit"
GENERATION, CHECK, ALLOCATOR = "generation", "start-up check", "allocator"
_IN_LENT_CACHE = ACTIVATIONS, WORKSPACE, TRANSIT  # the terms that use a lent cache's memory, in this order


@dataclass(frozen=True)
class MemoryPlan:
    """The memory, in bytes, that one process takes of its device.

    Attributes:
        memory: what it may take of the device. terms: by name, without overlap.
        cache_tokens: the capacity of the KV cache. recomputed: what the backward pass recomputes.
        fits: whether the terms fit, with a cache of at least one sequence.
        zero_stage: see `Workload.zero_stage`; 0 for one process. generator_tp: how many processes generate together.
        host: the terms in the host's memory, by name.
        lends_cache: whether the trainer's graphs use the cache's memory while nothing is generated; their terms are
            then only what does not fit there.
        pool: the bytes in the pool of recorded graphs or, if the cache is lent, in the trainer's pool, which includes
            the cache; 0 unless steps are recorded whole.
        title: the workload's.
    """

    memory: int
    terms: Mapping[str, int]
    cache_tokens: int
    recomputed: Recomputed
    fits: bool
    zero_stage: int
    generator_tp: int
    host: Mapping[str, int]
    lends_cache: bool
    pool: int
    title: str

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    @property
    def costs(self) -> tuple[Any, ...]:
        """What plans are compared by; less is better."""
        return self.recomputed, -self.cache_tokens, -self.terms.get(KEPT_STATE, 0)

    def to_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "memory_gib": round(self.memory / GIB, 3),
            "planned_gib": round(self.total / GIB, 3),
            "cache_tokens": self.cache_tokens,
            "layers_computed_again": self.recomputed.layers,
            "fits": self.fits,
        }
        if self.recomputed.elementwise:
            result["elementwise_computed_again"] = True
        if self.recomputed.logits:
            result["logits_computed_again"] = True
        if self.zero_stage:
            result |= {"zero_stage": self.zero_stage, "generator_tp": self.generator_tp}
        if self.lends_cache:
            result["lent"] = True
        if self.pool:
            result["pool_gib"] = round(self.pool / GIB, 3)
        result["terms_gib"] = {name: round(size / GIB, 3) for name, size in self.terms.items() if size}
        result["host_gib"] = {name: round(size / GIB, 3) for name, size in self.host.items()}
        return result

    def table(self) -> str:
        """A line for each term of 0.01 GiB or more, largest first, and their sum."""
        rows = sorted(((size, name) for name, size in self.terms.items() if size >= GIB / 100), reverse=True)
        lines = [f"  {name:<22} {size / GIB:>8.2f} GiB" for size, name in rows]
        names = f"{self.recomputed.layers} layers", "norms and activations", "logits"
        parts = [name for name, is_recomputed in zip(names, self.recomputed, strict=True) if is_recomputed]
        recomputed = f", {' and '.join(parts)} computed again" if parts else ""
        stage = f", ZeRO stage {self.zero_stage}" if self.zero_stage else ""
        shared = f", {self.generator_tp} generate together" if self.generator_tp > 1 else ""
        lent = ", in whose memory the trainer computes in between" if self.lends_cache else ""
        about = f"KV cache of {self.cache_tokens:,} tokens{lent}{recomputed}{stage}{shared}"
        lines.append(f"  {'together':<22} {self.total / GIB:>8.2f} of {self.memory / GIB:.2f} GiB; {about}")
        return "\n".join(lines + [f"  on the host: {name} {size / GIB:.2f} GiB" for name, size in self.host.items()])


def plan(w: Workload, memory: int) -> MemoryPlan:
    """The plan of a workload on a device with `memory` bytes. It recomputes the least that leaves room for the cache
    that the workload wants, or for half of the largest possible cache. The cache is lent where that is better. What is
    left holds as much as possible of a state that is otherwise on the host."""
    own, least = _plan_with_own_cache(w, memory), Recomputed(logits=not keeps_logits(w.config.compile))
    is_best = own.recomputed == least and not w.offloads
    if own.fits and is_best or not _records_whole_steps(w):
        return own
    lent = _plan_with_lent_cache(w, memory)
    return lent if lent.fits and (lent.costs < own.costs or not own.fits) else own


def _plan_with_own_cache(w: Workload, memory: int) -> MemoryPlan:
    """A plan with the cache in memory of its own."""
    choices = _recompute_choices(w)
    most, least = _tokens_that_fit(w, _plan_with_cache(w, memory, choices[-1], 0)), _min_cache_tokens(w)
    target = _wanted_cache_tokens(w)
    if not w.config.generator.kv_cache_tokens:
        target = min(target, max(most // 2, least))
    for recomputed in choices if most >= least else choices[-1:]:
        tokens = _tokens_that_fit(w, _plan_with_cache(w, memory, recomputed, 0))
        if tokens >= target:
            break
    return _plan_with_largest_cache(w, memory, recomputed, tokens)


def _plan_with_lent_cache(w: Workload, memory: int) -> MemoryPlan:
    """A plan with the cache in memory that the trainer's graphs use in turn: recomputes the least with which these fit,
    and has as large a cache as fits."""
    for recomputed in _recompute_choices(w):
        found = _plan_with_cache(w, memory, recomputed, 0, lends_cache=True)
        if found.total <= memory:
            break
    in_turn = sum(found.terms[name] for name in _IN_LENT_CACHE)
    pages = (int((memory - found.total) / (1 + terms.ALLOCATOR)) + in_turn) // terms.cache(w, 0) - 1
    tokens = max(0, pages) * w.config.generator.page_size
    return _plan_with_largest_cache(w, memory, recomputed, tokens, lends_cache=True)


def _plan_with_largest_cache(
    w: Workload, memory: int, recomputed: Recomputed, most: int, lends_cache: bool = False
) -> MemoryPlan:
    """A plan with the cache that the configuration sets, or with up to `most` tokens of the cache that is wanted; and
    with the chunks of offloaded state that then fit."""
    tokens = w.config.generator.kv_cache_tokens or min(_wanted_cache_tokens(w), round_capacity(most))
    found = _plan_with_cache(w, memory, recomputed, max(tokens, 0), lends_cache)
    found = replace(found, fits=found.total <= memory and tokens >= _min_cache_tokens(w))
    left = int((memory * (1 - RESERVE) - found.total) / (1 + terms.ALLOCATOR))
    kept = terms.kept_state(w, left) if found.fits else 0
    return replace(found, terms=_with_allocator(w, {**found.terms, KEPT_STATE: kept})) if kept else found


def _records_whole_steps(w: Workload) -> bool:
    """Whether steps of both roles are recorded as whole CUDA graphs, with all their memory from the graphs' pool."""
    modes = recordings(w.config.compile.cudagraph_mode or "none")
    return w.on_gpu and _captures_graphs(w) and all(RECORDINGS[mode].whole for mode in modes)


def _recompute_choices(w: Workload) -> list[Recomputed]:
    """The choices of what to recompute, the least first: nothing, elementwise operators, the logits too, and then 1 to
    all layers too. If the configuration or the capture decides: its choice, and where possible that with the logits
    too. With tensor parallelism nothing elementwise is recomputed, as that saves little and would gather again. With
    offloading it always is, as copying the state that then fits would take longer. Logits that no pass keeps are always
    recomputed."""
    c, layers = w.config.compile, w.model.num_layers
    elementwise, logits = w.tp == 1, not keeps_logits(c)
    if c.recompute:
        given = sum(any(p == FULL or fnmatchcase(f"layers.{i}", p) for p in c.recompute) for i in range(layers))
        return _with_and_without_logits(c, Recomputed(given, elementwise and ELEMENTWISE in c.recompute, logits))
    choices = [Recomputed(0, False, logits), Recomputed(0, elementwise, logits)]
    choices += [Recomputed(n, elementwise, True) for n in range(layers + 1)]
    choices = list(dict.fromkeys(choices))
    if c.activation_memory_gib > 0:
        limit = c.activation_memory_gib * GIB
        return [next((choice for choice in choices if terms.activations(w, choice) <= limit), choices[-1])]
    if not plans_recompute(c):
        return _with_and_without_logits(c, choices[0])
    return choices[1:] if w.offloads and elementwise else choices


def _with_and_without_logits(c: CompileConfig, choice: Recomputed) -> list[Recomputed]:
    """`choice` and, if it keeps logits and a plan may change that (`adapt_config`), the same with logits recomputed."""
    if choice.logits or "recompute" not in c.pass_names:
        return [choice]
    return [choice, choice._replace(logits=True)]


def keeps_logits(c: CompileConfig) -> bool:
    """Whether a graph pass keeps the logits for the backward pass."""
    return c.plugins[0].graphs and c.keeps_logits


def plans_recompute(c: CompileConfig) -> bool:
    """Whether a plan decides what is recomputed: whole functions are traced, and the configuration does not say."""
    return traces_functions(c) and "recompute" in c.pass_names and not c.recompute and c.activation_memory_gib == 0


def traces_functions(c: CompileConfig) -> bool:
    """Whether whole functions are traced, so that passes decide what is kept."""
    capture = c.plugins[0]
    return capture.graphs and not capture.by_sizes


def _plan_with_cache(
    w: Workload, memory: int, recomputed: Recomputed, tokens: int, lends_cache: bool = False
) -> MemoryPlan:
    """The plan that recomputes `recomputed` and has a cache of `tokens` tokens; `fits` is not decided yet."""
    cache = terms.cache(w, tokens) if tokens else 0
    in_pool, pool = _pool_terms(w, recomputed, lends_cache)
    found = {name: term(w) for name, term in PERSISTENT_TERMS.items()} | {CACHE: cache} | in_pool
    pool = max(pool, cache * lends_cache) * _records_whole_steps(w)
    if lends_cache:
        for name in _IN_LENT_CACHE:
            found[name], cache = max(0, found[name] - cache), max(0, cache - found[name])
    return MemoryPlan(
        memory=memory,
        terms=_with_allocator(w, found),
        cache_tokens=tokens,
        recomputed=recomputed,
        fits=False,
        zero_stage=w.zero_stage if w.sharded else 0,
        generator_tp=w.config.parallel.generator_tp,
        host=terms.host(w, _checks_graphs(w)),
        lends_cache=lends_cache,
        pool=pool,
        title=w.title,
    )


def _with_allocator(w: Workload, found: Mapping[str, int]) -> dict[str, int]:
    allocated = sum(size for name, size in found.items() if name not in ("CUDA and NCCL", ALLOCATOR))
    return {**found, ALLOCATOR: terms.allocator(w, allocated)}


def _pool_terms(w: Workload, recomputed: Recomputed, lends_cache: bool) -> tuple[dict[str, int], int]:
    """The terms of both roles' steps and the start-up check, and the pool's size. These take turns in the pool, so the
    later terms are what they need beyond the earlier ones. If the cache is lent, the generator's graphs have their own
    pool."""
    has_graphs, checks_graphs = _captures_graphs(w), _checks_graphs(w)
    found = {
        ACTIVATIONS: terms.activations(w, recomputed),
        WORKSPACE: terms.workspace(w, recomputed),
        TRANSIT: terms.transit(w),
    }
    if not has_graphs:  # eager autograd holds all gradients at once, and all gathered weights
        whole = w.layout.one_rank.size * w.b
        found[WORKSPACE] += whole
        found[TRANSIT] = whole * (w.sharded and w.zero_stage == 3)
    held = sum(found.values())
    prefill, scoring = terms.prefill(w), max(0, terms.scoring(w, has_graphs) - held)
    pool = held + (scoring if lends_cache else max(prefill - held, scoring))
    found[GENERATION] = pool - held + prefill * lends_cache
    machine_check = terms.machine_check(w, recomputed) if w.on_gpu and w.config.parity != "off" else 0
    check = max(terms.eager_check(w) if checks_graphs else 0, machine_check)
    copies = terms.device_copies(w) + terms.HASHES if checks_graphs and w.on_gpu else 0  # of what an update writes
    found[CHECK] = max(0, check - pool) + copies
    return found, max(pool, check)


def _captures_graphs(w: Workload) -> bool:
    return w.config.compile.capture is not None and w.config.compile.plugins[0].graphs


def _checks_graphs(w: Workload) -> bool:
    """Whether graphs are checked against eager."""
    return _captures_graphs(w) and w.config.compile.verify != "off"


def _min_cache_tokens(w: Workload) -> int:
    """The tokens of a cache that holds one sequence."""
    return capacity_per_sequence(w.config.generator, w.sequence_tokens) - w.config.generator.page_size


def _wanted_cache_tokens(w: Workload) -> int:
    """The tokens of the cache that the configuration sets, or that all sequences need at once."""
    g = w.config.generator
    return g.kv_cache_tokens or min(w.sequences, g.max_num_seqs) * capacity_per_sequence(g, w.sequence_tokens)


def _tokens_that_fit(w: Workload, without_cache: MemoryPlan) -> int:
    """The tokens of a cache in the memory that the plan `without_cache` leaves."""
    left: float = without_cache.memory - without_cache.total
    left = left / (1 + terms.ALLOCATOR) if w.on_gpu else min(left, HOST_CACHE)
    page = terms.cache(w, 0)
    return max(0, int(left) // page - 1) * w.config.generator.page_size


def recompute_patterns(w: Workload, recomputed: Recomputed) -> tuple[str, ...]:
    """The patterns of `compile.recompute` for this; a layer's modules need a pattern of their own."""
    c, found = w.model, [ELEMENTWISE] * recomputed.elementwise + [LOGITS] * recomputed.logits
    for layer in range(recomputed.layers):
        found.append(f"layers.{layer}")
        if c.mla is not None or c.is_moe(layer):
            found.append(f"layers.{layer}.*")
    return tuple(found)
