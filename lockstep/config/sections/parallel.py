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
    """Processes that weights, gradients and moments are sharded over; times `tp`, it is the number of all processes. 0
    for as many as torchrun started."""
    tp: int = between(1, 64, default=1)
    """Tensor-parallel training: neighbouring processes that train on the same micro-batches, each with its part of the
    heads and of every product's output columns. It changes no bit of log-probabilities, but gradients' summation
    order."""
    generator_tp: int = between(0, 64, default=1)
    """Tensor-parallel generation: neighbouring processes that generate the same samples together, each with its part of
    the heads and of every product's output columns. It makes decode steps faster and each process's KV cache smaller.
    With 1, a run that does not fit uses the fewest with which it does; 0 chooses, for a run by memory, load and
    measured links, elsewhere by memory. No bit depends on it."""
    zero_stage: Literal[2, 3] | None = None
    """What data-parallel processes shard. 2: gradients and the optimizer's state; each process reads the whole weights,
    which its generator holds anyway. 3: weights too, which are all-gathered layer by layer. Left out: 2 if `tp` and
    `generator_tp` are 1, else 3. No bit depends on it."""
    symmetric_memory: bool = True
    """Let processes that generate together store results directly into one another's memory, which is faster than a
    collective, if all are on one host and their GPUs can reach it. No bit depends on it."""
    batch_shards: int = between(0, 1 << 16, default=0)
    """Shards that a step's prompts are dealt into, each packed separately; 0 is one per process, or per group of `tp`.
    Bits depend on this number, not on the number of processes, which must divide it."""
    cell: int = between(1, 1 << 16, default=8)
    """Consecutive shards whose gradients are summed first, before these sums are added up. Bits depend on it if there
    are more shards than that."""
    balance_batch: bool = True
    """Deal a step's prompts to shards by the number of tokens in their samples, the longest first, so that shards are
    about equal; off: in turn. Bits depend on it if there are several shards."""
    timeout: float = between(1, 86400, default=300.0)
    """Seconds that a process waits for the others before it ends the run."""

    def check(self) -> None:
        for name, shared in {"tp": self.tp, "generator_tp": self.generator_tp}.items():
            refuse(
                self.zero_stage == 2 and shared > 1,
                f"parallel.zero_stage is 2 and parallel.{name} {shared}: processes that share products have parts of "
                "the weights, which lie whole nowhere; leave parallel.zero_stage out, or set it to 3",
            )

    def ineffective_if_given(self) -> Iterator[tuple[str, str]]:
        yield from super().ineffective_if_given()
        if self.generator_tp == 1:
            yield "symmetric_memory", "with parallel.generator_tp 1: no process generates together with another"


GENERATION_LAYOUT_FIELDS = "generator_tp", "symmetric_memory", "timeout"
PARITY_LAYOUT_FIELDS = *GENERATION_LAYOUT_FIELDS, "fsdp", "tp"


def check_layout(c: ParallelConfig, *read: str) -> None:
    """Raise `InputError` naming the first field other than `read` that is set, where nothing is trained."""
    for item in fields(c):
        refuse(
            getattr(c, item.name) != item.default and item.name not in read,
            f"parallel.{item.name} is {getattr(c, item.name)}: it is for processes that train, and nothing is trained "
            "here; remove it",
        )
