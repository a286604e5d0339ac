"""A plan: every term, the capacity of the KV cache, and what the backward pass recomputes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from ...config import ELEMENTWISE, FULL, LOGITS, RECORDINGS, CompileConfig, recordings
from ...generator.cache_capacity import HOST_CACHE, capacity_per_sequence, round_capacity
from . import terms
from .terms import GIB, NOTHING, Recomputed
from .workload import Workload

STAYS: dict[str, Callable[[Workload], int]] = {
    "weights": terms.weights,
    "shard of the weights": terms.shard,
    "masters": terms.masters,
    "moments": terms.moments,
    "chunks of the state": terms.offloaded_chunks,
    "gradients": terms.gradients,
    "reference or teacher": terms.frozen,
    "sampled supports": terms.supports,
    "CUDA and NCCL": terms.context,
}
CACHE, KEPT, WORKING, TRANSIT = "KV cache", "activations", "head and backward", "in transit"
GENERATION, CHECK, ALLOCATOR = "generation", "start-up check", "allocator"


@dataclass(frozen=True)
class MemoryPlan:
    """The memory, in bytes, that one process takes of its device.

    Attributes:
        memory: what it may take of the device. terms: by name, without overlap.
        cache_tokens: the capacity of the KV cache. recomputed: what the backward pass recomputes.
        fits: whether the terms fit, with a cache of at least one sequence.
        zero_stage: see `Workload.zero_stage`; 0 for one process. together: how many processes generate together.
        host: the terms in the host's memory, by name.
        lent: whether the trainer's graphs use the cache's memory while nothing is generated; their terms are then only
            what does not fit there.
        pool: the bytes in the pool of recorded graphs or, with a `lent` cache, in the trainer's pool, which includes
            the cache; 0 unless steps are recorded whole.
        title: the workload's.
    """

    memory: int
    terms: Mapping[str, int]
    cache_tokens: int
    recomputed: Recomputed
    fits: bool
    zero_stage: int = 0
    together: int = 1
    host: Mapping[str, int] = field(default_factory=dict)
    lent: bool = False
    pool: int = 0
    title: str = ""

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    def to_dict(self) -> dict[str, Any]:
        shown = {name: round(size / GIB, 3) for name, size in self.terms.items() if size}
        about = dict[str, Any](
            cache_tokens=self.cache_tokens, layers_computed_again=self.recomputed.layers, fits=self.fits
        )
        about |= {"elementwise_computed_again": True} if self.recomputed.elementwise else {}
        about |= {"logits_computed_again": True} if self.recomputed.logits else {}
        about |= {"zero_stage": self.zero_stage, "generator_tp": self.together} if self.zero_stage else {}
        about |= {"lent": True} if self.lent else {}
        about |= {"pool_gib": round(self.pool / GIB, 3)} if self.pool else {}
        return {"memory_gib": round(self.memory / GIB, 3), "planned_gib": round(self.total / GIB, 3), **about} | {
            "terms_gib": shown,
            "host_gib": {name: round(size / GIB, 3) for name, size in self.host.items()},
        }

    def table(self) -> str:
        """A line for each term of 0.01 GiB or more, largest first, and their sum."""
        rows = sorted(((size, name) for name, size in self.terms.items() if size >= GIB / 100), reverse=True)
        lines = [f"  {name:<22} {size / GIB:>8.2f} GiB" for size, name in rows]
        there = self.recomputed.layers, self.recomputed.elementwise, self.recomputed.logits
        names = f"{self.recomputed.layers} layers", "norms and activations", "logits"
        parts = [name for name, is_there in zip(names, there, strict=True) if is_there]
        recomputed = f", {' and '.join(parts)} computed again" if parts else ""
        stage = f", ZeRO stage {self.zero_stage}" if self.zero_stage else ""
        shared = f", {self.together} generate together" if self.together > 1 else ""
        lent = ", in whose memory the trainer computes in between" if self.lent else ""
        about = f"KV cache of {self.cache_tokens:,} tokens{lent}{recomputed}{stage}{shared}"
        lines.append(f"  {'together':<22} {self.total / GIB:>8.2f} of {self.memory / GIB:.2f} GiB; {about}")
        return "\n".join(lines + [f"  on the host: {name} {size / GIB:.2f} GiB" for name, size in self.host.items()])


def plan(w: Workload, memory: int) -> MemoryPlan:
    """The plan of a workload on a device with `memory` bytes. It recomputes the least that leaves room for the cache
    that the workload wants, or for half of the largest possible cache. The cache is `lent` where that is better."""
    found, least = _apart(w, memory), Recomputed(logits=not keeps_logits(w.config.compile))
    if found.fits and found.recomputed == least or not _recorded_whole(w):
        return found
    lent = _lent(w, memory)
    better = (lent.recomputed, -lent.cache_tokens) < (found.recomputed, -found.cache_tokens)
    return lent if lent.fits and (better or not found.fits) else found


def _apart(w: Workload, memory: int) -> MemoryPlan:
    """A plan with the cache in memory of its own."""
    ways = _ways(w)
    cheapest = _with(w, memory, ways[-1], 0)
    room, wanted, least_cache = _cache_room(w, cheapest), _wanted(w), _least(w)
    target = wanted if w.config.generator.kv_cache_tokens else min(wanted, max(room // 2, least_cache))
    for recomputed in ways if room >= least_cache else ways[-1:]:
        found = _with(w, memory, recomputed, 0)
        if (room := _cache_room(w, found)) >= target:
            break
    return _filled(w, memory, recomputed, room)


def _lent(w: Workload, memory: int) -> MemoryPlan:
    """A plan with the cache in memory that the trainer's graphs use in turn: recomputes the least with which these fit,
    and has as large a cache as fits."""
    for recomputed in _ways(w):
        found = _with(w, memory, recomputed, 0, lent=True)
        if found.total <= memory:
            break
    in_turn = sum(found.terms[name] for name in (KEPT, WORKING, TRANSIT))
    pages = (int((memory - found.total) / (1 + terms.ALLOCATOR)) + in_turn) // terms.cache(w, 0) - 1
    return _filled(w, memory, recomputed, max(0, pages) * w.config.generator.page_size, lent=True)


def _filled(w: Workload, memory: int, recomputed: Recomputed, room: int, lent: bool = False) -> MemoryPlan:
    """A plan with the cache that the configuration sets, or with up to `room` tokens of the cache that is wanted."""
    wanted = _wanted(w)
    tokens = wanted if w.config.generator.kv_cache_tokens else min(wanted, round_capacity(room))
    done = _with(w, memory, recomputed, max(tokens, 0), lent)
    return replace(done, fits=done.total <= memory and tokens >= _least(w))


def _recorded_whole(w: Workload) -> bool:
    """Whether steps of both roles are recorded as whole CUDA graphs, with all their memory from the graphs' pool."""
    modes = recordings(w.config.compile.cudagraph_mode or "none")
    return w.on_gpu and _graphs(w) and all(RECORDINGS[mode].whole for mode in modes)


def _ways(w: Workload) -> list[Recomputed]:
    """The choices of what to recompute, the least first: nothing, elementwise operators, the logits too, and then 1 to
    all layers too. If the configuration or the capture decides: its choice, and where possible that with the logits
    too. With tensor parallelism nothing elementwise is recomputed, as that saves little and would gather again. Logits
    that no pass keeps are always recomputed."""
    c, layers, alone = w.config.compile, w.model.num_layers, w.tp == 1
    if c.recompute:
        given = sum(any(p == FULL or fnmatchcase(f"layers.{i}", p) for p in c.recompute) for i in range(layers))
        return _with_logits(c, Recomputed(given, alone and ELEMENTWISE in c.recompute, not keeps_logits(c)))
    more = [(0, True, False), *((n, True, True) for n in range(layers + 1))]
    ways = [NOTHING, *(Recomputed(n, elementwise and alone, logits) for n, elementwise, logits in more)]
    ways = list(dict.fromkeys(way._replace(logits=way.logits or not keeps_logits(c)) for way in ways))
    if c.activation_memory_gib > 0:
        return [next((way for way in ways if terms.kept(w, way) <= c.activation_memory_gib * GIB), ways[-1])]
    return ways if chooses(c) else _with_logits(c, ways[0])


def _with_logits(c: CompileConfig, way: Recomputed) -> list[Recomputed]:
    """`way` and, if it keeps logits and the plan may configure otherwise (`adapted`), `way` with logits recomputed."""
    both = [way, way._replace(logits=True)]
    return both if not way.logits and "recompute" in c.pass_names else [way]


def keeps_logits(c: CompileConfig) -> bool:
    """Whether a graph pass keeps the logits for the backward pass."""
    return c.chosen[0].graphs and c.keeps_logits


def chooses(c: CompileConfig) -> bool:
    """Whether a plan decides what is recomputed: whole functions are traced, and the configuration does not say."""
    return traces(c) and "recompute" in c.pass_names and not c.recompute and c.activation_memory_gib == 0


def traces(c: CompileConfig) -> bool:
    """Whether whole functions are traced, so that passes decide what is kept."""
    way = c.chosen[0]
    return way.graphs and not way.by_sizes


def _with(w: Workload, memory: int, recomputed: Recomputed, tokens: int, lent: bool = False) -> MemoryPlan:
    """The plan that recomputes `recomputed` and has a cache of `tokens` tokens; `fits` is not decided yet."""
    cache = terms.cache(w, tokens) if tokens else 0
    in_pool, pool = _pool(w, recomputed, lent)
    found = {name: term(w) for name, term in STAYS.items()} | {CACHE: cache} | in_pool
    pool = max(pool, cache * lent) * _recorded_whole(w)
    if lent:
        for name in (KEPT, WORKING, TRANSIT):  # these fill the cache's memory first
            found[name], cache = max(0, found[name] - cache), max(0, cache - found[name])
    taken = sum(size for name, size in found.items() if name != "CUDA and NCCL")
    found[ALLOCATOR] = terms.allocator(w, taken)
    stage, together = w.zero_stage * w.sharded, w.config.parallel.generator_tp
    host = terms.host(w, _checks(w))
    return MemoryPlan(memory, found, tokens, recomputed, False, stage, together, host, lent, pool, w.title)


def _pool(w: Workload, recomputed: Recomputed, lent: bool) -> tuple[dict[str, int], int]:
    """The terms of both roles' steps and the start-up check, and the pool's size. These take turns in the pool, so the
    later terms are what they need beyond the earlier ones. With a `lent` cache the generator's graphs have their own
    pool."""
    graphs = _graphs(w)
    found = {KEPT: terms.kept(w, recomputed), WORKING: terms.working(w, recomputed), TRANSIT: terms.transit(w)}
    if not graphs:  # eager autograd holds all gradients at once, and all gathered weights
        whole = w.layout.one_rank.size * w.b
        found[WORKING] += whole
        found[TRANSIT] = whole * (w.sharded and w.zero_stage == 3)
    held = sum(found.values())
    prefill, scoring = terms.prefill(w), max(0, terms.scoring(w, graphs) - held)
    pool = held + (scoring if lent else max(prefill - held, scoring))
    found[GENERATION] = pool - held + prefill * lent
    check = max(
        terms.eager(w) * _checks(w), terms.machine_check(w, recomputed) * (w.on_gpu and w.config.parity != "off")
    )
    beside = terms.copies_here(w) + terms.HASHES if _checks(w) and w.on_gpu else 0  # of what an update writes
    found[CHECK] = max(0, check - pool) + beside
    return found, max(pool, check)


def _graphs(w: Workload) -> bool:
    return w.config.compile.capture is not None and w.config.compile.chosen[0].graphs


def _checks(w: Workload) -> bool:
    """Whether graphs are checked against eager."""
    return _graphs(w) and w.config.compile.verify != "off"


def _least(w: Workload) -> int:
    """The tokens of a cache that holds one sequence."""
    return capacity_per_sequence(w.config.generator, w.sequence_tokens) - w.config.generator.page_size


def _wanted(w: Workload) -> int:
    """The tokens of the cache that the configuration sets, or that all sequences need at once."""
    g = w.config.generator
    return g.kv_cache_tokens or min(w.sequences, g.max_num_seqs) * capacity_per_sequence(g, w.sequence_tokens)


def _cache_room(w: Workload, without: MemoryPlan) -> int:
    """The tokens of a cache in the memory that the plan `without` one leaves."""
    left: float = without.memory - without.total
    left = left / (1 + terms.ALLOCATOR) if w.on_gpu else min(left, HOST_CACHE)
    page = terms.cache(w, 0)
    return max(0, int(left) // page - 1) * w.config.generator.page_size


def patterns(w: Workload, recomputed: Recomputed) -> tuple[str, ...]:
    """The patterns of `compile.recompute` for this; a layer's modules need a pattern of their own."""
    c, found = w.model, [ELEMENTWISE] * recomputed.elementwise + [LOGITS] * recomputed.logits
    for layer in range(recomputed.layers):
        found.append(f"layers.{layer}")
        if c.mla is not None or c.is_moe(layer):
            found.append(f"layers.{layer}.*")
    return tuple(found)
