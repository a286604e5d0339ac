"""Section `parallel`."""

from dataclasses import dataclass

from .section import Section, between


@dataclass(frozen=True)
class ParallelConfig(Section):
    """Several processes, started with torchrun: each trains on its share of a step with a shard of the weights."""

    fsdp: int = between(0, 4096, default=0)
    """Processes that weights, gradients and moments are sharded over; 0 for all that torchrun started."""
    batch_shards: int = between(0, 1 << 16, default=0)
    """Parts that a step's prompts are dealt into, each packed by itself; 0 is one a process. Bits depend on this number
    and not on that of the processes, which must divide it."""
    cell: int = between(1, 1 << 16, default=8)
    """Consecutive shards whose gradients are added up by themselves, before their sums are. Where there are more shards
    than that, bits depend on it."""
    timeout: float = between(1, 86400, default=300.0)
    """Seconds a process waits for the others before it ends the run."""
