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

    def own(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's items when `items` are dealt round-robin."""
        return items[self.rank :: self.size]

    def most(self, count: int) -> int:
        """The largest number of items on any rank when `count` are dealt round-robin."""
        return -(-count // self.size)


@dataclass(frozen=True)
class Mesh:
    """The axes of one role, trainer or generator:

    - `fsdp`: a step's prompts are dealt out along it, and weights, gradients and moments are sharded.
    - `tp`: attention heads and the output columns of matrix products are sharded along it (`Placement`).
    - `ep`: reserved for experts; its size is always 1 so far.

    Attributes:
        lanes: number of neighbours along `fsdp` that sum their gradients among themselves first (`Cells.lanes`).
    """

    fsdp: Axis = Axis("fsdp")
    ep: Axis = Axis("ep")
    tp: Axis = Axis("tp")
    lanes: int = 1

    @property
    def cells(self) -> tuple[Axis, Axis]:
        """`fsdp` as two axes: the ranks of this rank's cell, and the ranks at its place in every cell."""
        cell, lane = divmod(self.fsdp.rank, self.lanes)
        return Axis("cell", self.lanes, lane), Axis("cells", self.fsdp.size // self.lanes, cell)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes with more than one rank."""
        return tuple(axis for axis in (self.fsdp, self.ep, self.tp) if axis.size > 1)

    @property
    def in_graphs(self) -> tuple[Axis, ...]:
        """The axes along which graphs have collectives: `axes` and, where a cell spans several ranks, both `cells`."""
        return *self.axes, *(self.cells if self.lanes > 1 else ())


ALONE = Mesh()


def exchanging(axes: Sequence[Axis]) -> list[Axis]:
    """Of the axes along which graphs have collectives, those with all-to-alls. Where a cell spans several ranks,
    gradients travel along `cell` and `cells`, and `fsdp` has none."""
    in_cells = any(axis.name == "cell" for axis in axes)
    return [axis for axis in axes if not (axis.name == "fsdp" and in_cells)]
