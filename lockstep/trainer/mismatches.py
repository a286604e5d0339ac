"""Which tokens differ between generator and trainer, for error messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from math import fsum, isnan, nan
from typing import NamedTuple

from torch import Tensor

from ..types import PackedBatch
from .step import bits_differ

MAX_MISMATCHES = 8
_COMPARED = "route_C", "logprob_C", "model_logprob_C"  # of `step.Scored`
ScoredBatches = list[tuple[PackedBatch, dict[str, Tensor]]]  # batches, each with the tensors of its `step.Scored`


@dataclass(frozen=True)
class Mismatch:
    """A sampled token whose log-probability has other bits in the trainer or, of kind "experts", that was routed
    differently there (both values are then digests, see `ops.route_digest`). `position` counts a trajectory's sampled
    tokens from 0."""

    request: str
    position: int
    kind: str  # "experts", "sampled" or "model"
    generator: float
    trainer: float


class Deltas(NamedTuple):
    """Differences, trainer minus generator, of the model's log-probabilities over sampled tokens: their mean, and the
    mean and maximum of their absolute values; NaN if any is NaN."""

    average: float
    mean: float
    largest: float

    @staticmethod
    def of(batches: Sequence[tuple[float, ...]]) -> Deltas:
        if not batches:
            return Deltas(nan, nan, nan)
        counts, sums, sizes, largest = zip(*batches, strict=True)
        worst = nan if any(map(isnan, largest)) else max(largest)
        return Deltas(fsum(sums) / sum(counts), fsum(sizes) / sum(counts), worst)


def sum_deltas(checked: ScoredBatches) -> list[tuple[float, ...]]:
    """For each batch with tokens: their number, and the differences' sum, absolute sum and absolute maximum."""
    found: list[tuple[float, ...]] = []
    for batch, scored in checked:
        delta_C = (scored["model_logprob_C"].double() - batch.old_model_logprob_C.double())[batch.valid_C]
        if len(delta_C):
            size_C = delta_C.abs()
            found.append((len(delta_C), delta_C.sum().item(), size_C.sum().item(), size_C.max().item()))
    return found


def find_mismatches(checked: ScoredBatches) -> list[Mismatch]:
    """The first differing tokens, in packed order. Waits for the device, so it is called only after a difference."""
    found = (mismatch for batch, scored in checked for mismatch in _mismatches_of(batch, scored))
    return list(islice(found, MAX_MISMATCHES))


def _mismatches_of(batch: PackedBatch, scored: dict[str, Tensor]) -> Iterator[Mismatch]:
    starts = [0, *accumulate(s.length for s in batch.sequences)]
    generated = batch.old_route_C, batch.old_logprob_C, batch.old_model_logprob_C
    for kind, name, generator_C in zip(("experts", "sampled", "model"), _COMPARED, generated, strict=True):
        trainer_C = scored.get(name)
        if generator_C is None or trainer_C is None:
            continue
        different_C = bits_differ(trainer_C, generator_C) | (trainer_C - generator_C != 0)  # NaN differs from itself
        for row in (different_C & batch.valid_C).nonzero().flatten().tolist():
            index = int(batch.sequence_C[row])
            sequence = batch.sequences[index]
            position = row - starts[index] + (sequence.part_offset or 0)
            yield Mismatch(sequence.name, position, kind, generator_C[row].item(), trainer_C[row].item())
