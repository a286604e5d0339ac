"""Section `parallel`."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from ...errors import refuse
from .section import Section, between


@dataclass(frozen=True)
class ParallelConfig(Section):
    """Several processes, started with torchrun: each trains on its share of a step with a shard of the weights."""

    fsdp: int = between(0, 4096, default=0)
    """Processes that weights, gradients and moments are sharded over, times `tp` all that there are; 0 for as many as
    torchrun started."""
    tp: int = between(1, 64, default=1)
    """Neighbouring processes that train on the same micro-batches, each with its part of the heads and of every
    product's output columns. Log-probabilities do not depend on it in any bit; sums in gradients have another order."""
    generator_tp: int = between(0, 64, default=1)
    """Neighbouring processes that generate the same samples together, each with its part of the heads and of every
    product's output columns: a decode step takes less time, and the KV cache less of each one's memory. 1 is more
    for a run that does not fit so; 0 chooses, for a run from memory, load and measured links, elsewhere from memory.
    No bit depends on it."""
    zero_stage: Literal[2, 3] | None = None
    """What several processes shard of a micro-batch's work. 2: gradients and the optimizer's state; weights are read
    where they lie whole, as they do for the generator. 3: weights too, which are gathered layer by layer. Left out: 2
    with `tp` and `generator_tp` 1, and 3 otherwise. No bit depends on it."""
    symmetric_memory: bool = True
    """Whether processes that generate together store their words straight into one another's memory, which takes less
    time than a collective, where all are of one host and their GPUs reach it. No bit depends on it."""
    batch_shards: int = between(0, 1 << 16, default=0)
    """Parts that a step's prompts are dealt into, each packed by itself; 0 is one a process, or a group of `tp`. Bits
    depend on this number and not on that of the processes, which must divide it."""
    cell: int = between(1, 1 << 16, default=8)
    """Consecutive shards whose gradients are added up by themselves, before their sums are. Where there are more shards
    than that, bits depend on it."""
    balance_batch: bool = True
    """Deal a step's prompts to shards by the tokens of their samples, the longest first, so that shards have about as
    many; otherwise in turn. Where there are several shards, bits depend on it."""
    timeout: float = between(1, 86400, default=300.0)
    """Seconds a process waits for the others before it ends the run."""

    def check(self) -> None:
        for name, shared in {"tp": self.tp, "generator_tp": self.generator_tp}.items():
            refuse(
                self.zero_stage == 2 and shared > 1,
                f"parallel.zero_stage is 2 and parallel.{name} {shared}: processes that share products have parts of "
                "the weights, which lie whole nowhere; leave parallel.zero_stage out, or set it to 3",
            )

    def unread(self) -> Iterator[tuple[str, str]]:
        yield from super().unread()
        if self.generator_tp == 1:
            yield "symmetric_memory", "with parallel.generator_tp 1: no process generates together with another"


LAYOUT_OF_GENERATION = "generator_tp", "symmetric_memory", "timeout"
LAYOUT_OF_PARITY = *LAYOUT_OF_GENERATION, "fsdp", "tp"


def check_layout(c: ParallelConfig, *read: str) -> None:
    """Raise `InputError` naming what would have no effect where there are no steps: all but these fields."""
    for item in fields(c):
        refuse(
            getattr(c, item.name) != item.default and item.name not in read,
            f"parallel.{item.name} is {getattr(c, item.name)}: it is for processes that train, and nothing is trained "
            "here; remove it",
        )
