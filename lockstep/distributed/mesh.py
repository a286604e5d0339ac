"""The mesh that the processes of a run lie on, axis by axis; one of ones is a process by itself. Data alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """One axis: how many ranks lie along it, and which of them this process is. `pushes`: whether the ranks store
    columns and rows into one another's memory (`push/`), which takes less time than a collective where there are few,
    and has no gradient."""

    name: str
    size: int = 1
    rank: int = 0
    pushes: bool = False

    @property
    def group(self) -> str:
        """What graphs call its processes, `@fsdp`: each rank has bound the name to its own group, so that all ranks
        have the same graph."""
        return f"@{self.name}"

    def own(self, items: Sequence[T]) -> Sequence[T]:
        """Those of `items` that fall to this rank when they are dealt out in turn."""
        return items[self.rank :: self.size]

    def most(self, count: int) -> int:
        """The most of `count` items that a rank has."""
        return -(-count // self.size)


@dataclass(frozen=True)
class Mesh:
    """What each axis is for:

    - `fsdp`: a step's prompts are dealt out along it, and weights, gradients and moments are cut.
    - `tp`: heads are cut along it, and the output columns of products (`Placement`).
    - `ep`: experts would be. It is of one so far.

    Attributes:
        lanes: neighbours along `fsdp` whose gradients are added up before they leave them (`Cells.lanes`).
    """

    fsdp: Axis = Axis("fsdp")
    ep: Axis = Axis("ep")
    tp: Axis = Axis("tp")
    lanes: int = 1

    @property
    def cells(self) -> tuple[Axis, Axis]:
        """`fsdp` as two axes: the ranks of a cell, and those that have the same place in each cell."""
        cell, lane = divmod(self.fsdp.rank, self.lanes)
        return Axis("cell", self.lanes, lane), Axis("cells", self.fsdp.size // self.lanes, cell)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Those that have several ranks."""
        return tuple(axis for axis in (self.fsdp, self.ep, self.tp) if axis.size > 1)

    @property
    def in_graphs(self) -> tuple[Axis, ...]:
        """Those that graphs have collectives along: `axes`, and both of `cells` where these are of several ranks."""
        return *self.axes, *(self.cells if self.lanes > 1 else ())


ALONE = Mesh()


def exchanging(axes: Sequence[Axis]) -> list[Axis]:
    """Those of all that graphs have collectives along on which every rank sends every other one its part: along `fsdp`
    they do so within cells and between these, where there are several."""
    in_cells = any(axis.name == "cell" for axis in axes)
    return [axis for axis in axes if not (axis.name == "fsdp" and in_cells)]
