"""The mesh of a run's processes: named axes with their sizes and this rank's place. Plain data, no process groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """One axis: how many ranks lie along it, and which of them this process is. `pushes`: whether the ranks store
    columns and rows directly into one another's memory (`push/`). For small messages that is faster than a collective;
    it is not differentiable."""

    name: str
    size: int = 1
    rank: int = 0
    pushes: bool = False

    @property
    def group(self) -> str:
        """The name of the axis's process group in graphs, such as `@fsdp`. Each rank binds the name to its own group,
        so that all ranks run the same graph."""
        return f"@{self.name}"

    def local_items(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's items when `items` are dealt round-robin."""
        return items[self.rank :: self.size]

    def max_local_items(self, count: int) -> int:
        """The largest number of items on any rank when `count` are dealt round-robin."""
        return -(-count // self.size)


@dataclass(frozen=True)
class Mesh:
    """The axes of one role, trainer or generator:

    - `fsdp`: a step's prompts are dealt out along it, and weights, gradients and moments are sharded.
    - `tp`: attention heads and the output columns of matrix products are sharded along it (`Placement`).
    - `ep`: reserved for experts; its size is always 1 so far.

    Attributes:
        ranks_per_cell: see `Cells.ranks_per_cell`; the ranks of a cell are neighbours along `fsdp`.
    """

    fsdp: Axis = Axis("fsdp")
    ep: Axis = Axis("ep")
    tp: Axis = Axis("tp")
    ranks_per_cell: int = 1

    @property
    def cells(self) -> tuple[Axis, Axis]:
        """`fsdp` as two axes: the ranks of this rank's cell, and the ranks at its place in every cell."""
        cell, place = divmod(self.fsdp.rank, self.ranks_per_cell)
        within = Axis("cell", self.ranks_per_cell, place)
        between = Axis("cells", self.fsdp.size // self.ranks_per_cell, cell)
        return within, between

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes with more than one rank."""
        return tuple(axis for axis in (self.fsdp, self.ep, self.tp) if axis.size > 1)

    @property
    def collective_axes(self) -> tuple[Axis, ...]:
        """The axes along which graphs have collectives: `axes` and, where a cell spans several ranks, both `cells`."""
        return *self.axes, *(self.cells if self.ranks_per_cell > 1 else ())


ONE_RANK = Mesh()


def all_to_all_axes(axes: Sequence[Axis]) -> list[Axis]:
    """Of the axes along which graphs have collectives, those with all-to-alls. Where a cell spans several ranks,
    gradients travel along `cell` and `cells`, and `fsdp` has none."""
    in_cells = any(axis.name == "cell" for axis in axes)
    return [axis for axis in axes if axis.name != "fsdp" or not in_cells]
