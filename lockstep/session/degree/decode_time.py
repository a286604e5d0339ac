"""The time of a decode step, as far as it depends on how many processes share the model. Kernel launches and arithmetic
are left out: they are taken to be equal for all choices."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...generator.cache_capacity import bytes_per_token, capacity_per_sequence
from ...models import num_parameters
from ..memory import MemoryPlan, Workload


@dataclass(frozen=True)
class CollectiveTimes:
    """Seconds that tensor-parallel ranks spend on collectives: per layer, and once per step in the head."""

    layer: float = 0.0
    head: float = 0.0


@dataclass(frozen=True)
class Load:
    """The load of a group of ranks that generate together.

    Attributes:
        fits: whether its plan fits.
        sequences: the group's share of a step's samples. rows: how many of these run at once.
    """

    ranks: int
    fits: bool
    sequences: int
    rows: int

    @staticmethod
    def of(w: Workload, plan: MemoryPlan) -> Load:
        g = w.config.generator
        held = plan.cache_tokens // (capacity_per_sequence(g, w.sequence_tokens) - g.page_size)
        rows = max(1, min(w.trained_sequences, g.max_num_seqs, held))
        return Load(w.config.parallel.generator_tp, plan.fits, w.trained_sequences, rows)

    @property
    def waves(self) -> int:
        """How many batches of `rows` the sequences make, one after another."""
        return -(-self.sequences // self.rows)


@dataclass(frozen=True)
class DecodeTime:
    """Seconds of a decode step of all rows of a `load`, in parts: reading this rank's part of the weights, `weights /
    (ranks * bandwidth)`, and of the cache, `rows * tokens * bytes_per_token / bandwidth`; and collectives, `layers *
    layer + head`."""

    load: Load
    weights: float
    cache: float
    exchanges: float

    @staticmethod
    def of(w: Workload, load: Load, bandwidth: float, collectives: CollectiveTimes) -> DecodeTime:
        """The time for a workload, from measured memory bandwidth (bytes per second) and times of collectives.

        Assumes that every expert is read, the embedding table only if it is the head, and completions are half done.
        """
        c, ranks = w.model, load.ranks
        unread = 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size
        tokens = w.longest_prompt + w.config.max_response_length / 2
        cache_bytes = load.rows * tokens * bytes_per_token(c.per_rank(ranks), w.dtype)
        weight_bytes = (num_parameters(c) - unread) * w.b / ranks
        exchanges = c.num_layers * collectives.layer + collectives.head
        return DecodeTime(load, weight_bytes / bandwidth, cache_bytes / bandwidth, exchanges)

    @property
    def step(self) -> float:
        return self.weights + self.cache + self.exchanges

    @property
    def of_all(self) -> float:
        """Seconds for a token of every sequence, in all waves: what is compared."""
        return self.load.waves * self.step

    def to_dict(self) -> dict[str, Any]:
        """The entry in the summary, in milliseconds."""
        parts = {f"{n}_ms": 1e3 * getattr(self, n) for n in ("step", "weights", "cache", "exchanges", "of_all")}
        return asdict(self.load) | {name: float(f"{value:.4g}") for name, value in parts.items()}

    def describe(self) -> str:
        load = self.load
        waves = f" in {load.waves} waves" if load.waves > 1 else ""
        parts = ", ".join(f"{n} {1e3 * getattr(self, n):.3g}" for n in ("weights", "cache", "exchanges"))
        return (
            f"{load.ranks}: {load.sequences} sequences a group{waves}, a decode step of {load.rows} rows "
            f"{1e3 * self.step:.3g} ms ({parts})" + ("" if load.fits else "; does not fit")
        )
