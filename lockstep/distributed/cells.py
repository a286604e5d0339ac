"""Cells: consecutive shards of a step whose gradients are added up by themselves. Data alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Cells:
    """How the gradients of a step's shards are added up on ranks that each have every `ranks`-th shard.

    With one cell every shard's gradient goes to the sum. With several, the gradients of a cell's shards are added up
    from 0, and the cells' sums to the sum: its bits follow from `shards` and `size`, and not from `ranks`.

    A round is what the ranks compute at once, as many shards as there are ranks.

    Attributes:
        size: shards of a cell; the last may have fewer.
    """

    shards: int = 1
    size: int = 1
    ranks: int = 1

    @cached_property
    def several(self) -> bool:
        """Whether there is more than one."""
        return self.shards > self.size

    @property
    def of_a_round(self) -> int:
        """Shards of the cells that a round has whole; 0 where its shards are all of one cell, or of a part of it."""
        return self.size if self.several and self.ranks >= self.size else 0

    @property
    def lanes(self) -> int:
        """Ranks of a cell where all ranks are several whole ones, whose sums can be made before they travel; else 1."""
        return self.size if self.several and self.ranks > self.size and self.ranks % self.size == 0 else 1

    @cached_property
    def span_rounds(self) -> bool:
        """Whether a cell takes several rounds, so that its sum must be kept apart from that of the cells before it."""
        return self.several and self.ranks < self.size

    def end_with(self, number: int) -> bool:
        """Whether one of those that span rounds ends with a micro-batch's round of this number, from 0."""
        done = (number + 1) * self.ranks
        return self.span_rounds and (done % self.size == 0 or done == self.shards)


ONE_CELL = Cells()
