"""Cells: runs of consecutive shards of a step whose gradients are summed before they join the total. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Cells:
    """The order in which the gradients of a step's shards are summed; each rank has every `ranks`-th shard.

    With one cell, every shard's gradient is added to the total. With several, each cell's gradients are summed from 0
    and the cell sums are added to the total, whose bits depend on `shards` and `size` but not on `ranks`.

    A round is what the ranks compute at the same time: one micro-batch each, of as many shards as there are ranks.

    Attributes:
        size: shards in a cell; the last cell may have fewer.
    """

    shards: int = 1
    size: int = 1
    ranks: int = 1

    @cached_property
    def has_several(self) -> bool:
        """Whether there is more than one cell."""
        return self.shards > self.size

    @property
    def cell_size_in_round(self) -> int:
        """Shards per cell where a round consists of whole cells; 0 where a round lies within one cell."""
        return self.size if self.has_several and self.ranks >= self.size else 0

    @property
    def ranks_per_cell(self) -> int:
        """Ranks that sum their gradients before exchanging them with other cells: a cell's, if all ranks form several
        whole cells, else 1."""
        whole_cells = self.has_several and self.ranks > self.size and self.ranks % self.size == 0
        return self.size if whole_cells else 1

    @cached_property
    def span_rounds(self) -> bool:
        """Whether a cell takes several rounds, so that its running sum needs a buffer apart from the total."""
        return self.has_several and self.ranks < self.size

    def ends_cell(self, number: int) -> bool:
        """Whether a cell that spans several rounds ends with round `number`, counted from 0."""
        done = (number + 1) * self.ranks
        return self.span_rounds and (done % self.size == 0 or done == self.shards)


ONE_CELL = Cells()
