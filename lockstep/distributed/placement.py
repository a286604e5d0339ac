"""How a parameter is sharded over a mesh, declared where the parameter is created."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .mesh import Axis, Mesh


@dataclass(frozen=True)
class Placement:
    """The dimension of a parameter that each axis shards evenly; None: every rank along the axis has it whole.

    `fsdp` shards every parameter whatever its shape: a rank's part by the other axes is flattened, padded, cut into
    equal shards, and all-gathered before use (`trainer.parameters.Layout`).

    Attributes:
        tp: the dimension of outputs or heads. A dimension that is summed over is never sharded.
        ep: the dimension of experts.
        blocks: sizes of the blocks fused along `tp`'s dimension, each of which is sharded separately; the pattern
            repeats if the dimension is longer. (): one block.
    """

    tp: int | None = None
    ep: int | None = None
    blocks: tuple[int, ...] = ()

    def part_shape(self, mesh: Mesh, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a rank's part of a parameter of this shape, before `fsdp` shards it. Raises `ValueError` where
        an axis does not divide the dimension, or a block of it."""
        sizes = list(shape)
        for axis, dim, blocks in self._cuts(mesh):
            if any(block % axis.size for block in blocks or (sizes[dim],)):
                raise ValueError(f"{list(shape)}: {axis.size} ranks of {axis.name} cannot share dimension {dim} evenly")
            sizes[dim] //= axis.size
        return tuple(sizes)

    def take_part(self, x: Tensor, mesh: Mesh) -> Tensor:
        """This rank's part of a whole parameter, before `fsdp` shards it; a view where it is one block."""
        for axis, dim, blocks in self._cuts(mesh):
            again = x.shape[dim] // sum(blocks) if blocks else 0
            parts = x.split(list(blocks * again) or x.shape[dim], dim)
            sizes = [part.shape[dim] // axis.size for part in parts]
            own = [part.narrow(dim, axis.rank * n, n) for part, n in zip(parts, sizes, strict=True)]
            x = own[0] if len(own) == 1 else torch.cat(own, dim)
        return x

    def _cuts(self, mesh: Mesh) -> Iterator[tuple[Axis, int, tuple[int, ...]]]:
        """The axes with several ranks that shard the parameter, each with the dimension and its blocks."""
        for axis, dim, blocks in ((mesh.ep, self.ep, ()), (mesh.tp, self.tp, self.blocks)):
            if dim is not None and axis.size > 1:
                yield axis, dim, blocks


WHOLE = Placement()  # norms, the embedding table, and routers: every rank picks experts from all of their scores
ROWS = Placement(tp=0)  # the weight of a matrix product, [outputs, inputs]
