"""How a parameter lies on a mesh, declared where the parameter is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .mesh import Axis, Mesh


@dataclass(frozen=True)
class Placement:
    """Which dimension of a parameter the ranks of an axis cut, each taking an equal part; None: all have it whole.

    On `fsdp` every parameter is cut, whatever its shape: what a rank has of it by the other axes is flattened, padded
    and cut into equal parts, and gathered before it is computed with (`trainer.parameters.Layout`).

    Attributes:
        tp: the outputs of a product or a head, never what is summed over, so that no sum is split.
        ep: the experts.
        blocks: sizes of what is fused along `tp`'s dimension, in turn where that is longer, each of which is cut by
            itself; (): one block.
    """

    tp: int | None = None
    ep: int | None = None
    blocks: tuple[int, ...] = ()

    def shape_on(self, mesh: Mesh, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The part of a parameter of this shape that a rank has, before `fsdp` cuts it. `ValueError`: an axis does not
        divide what it cuts."""
        sizes = list(shape)
        for axis, dim, blocks in self._cuts(mesh):
            if any(block % axis.size for block in blocks or (sizes[dim],)):
                raise ValueError(f"{list(shape)}: {axis.size} ranks of {axis.name} cannot share dimension {dim} evenly")
            sizes[dim] //= axis.size
        return tuple(sizes)

    def cut(self, x: Tensor, mesh: Mesh) -> Tensor:
        """The part of a whole parameter that a rank has, before `fsdp` cuts it; a view where it is of one block."""
        for axis, dim, blocks in self._cuts(mesh):
            again = x.shape[dim] // sum(blocks) if blocks else 0
            parts = x.split(list(blocks * again) or x.shape[dim], dim)
            sizes = [part.shape[dim] // axis.size for part in parts]
            own = [part.narrow(dim, axis.rank * n, n) for part, n in zip(parts, sizes, strict=True)]
            x = own[0] if len(own) == 1 else torch.cat(own, dim)
        return x

    def _cuts(self, mesh: Mesh) -> Iterator[tuple[Axis, int, tuple[int, ...]]]:
        """The axes of several ranks that cut the parameter, with the dimension and its blocks."""
        for axis, dim, blocks in ((mesh.ep, self.ep, ()), (mesh.tp, self.tp, self.blocks)):
            if dim is not None and axis.size > 1:
                yield axis, dim, blocks


WHOLE = Placement()  # norms, the embedding's table, and routers: every rank chooses experts from all their scores
ROWS = Placement(tp=0)  # a product's weight [outputs, inputs]
