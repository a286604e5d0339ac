"""How a parameter lies on a mesh, declared where the parameter is made. Data alone: models may import it."""

from __future__ import annotations

from dataclasses import dataclass

from .mesh import Mesh


@dataclass(frozen=True)
class Placement:
    """Which dimension of a parameter the ranks of an axis cut, each taking an equal part; None: all have it whole.

    On `fsdp` every parameter is cut, whatever its shape: what a rank has of it by the other axes is flattened, padded
    and cut into equal parts, and gathered before it is computed with (`trainer.parameters.Layout`).

    Attributes:
        tp: the outputs of a product or a head, never what is summed over, so that no sum is split.
        ep: the experts.
        blocks: sizes of what is fused along `tp`'s dimension, each of which is cut by itself; (): one block.
    """

    tp: int | None = None
    ep: int | None = None
    blocks: tuple[int, ...] = ()

    def shape_on(self, mesh: Mesh, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The part of a parameter of this shape that a rank has, before `fsdp` cuts it.

        Raises:
            ValueError: an axis does not divide what it cuts.
        """
        sizes = list(shape)
        for axis, dim, blocks in ((mesh.ep, self.ep, ()), (mesh.tp, self.tp, self.blocks)):
            if dim is None or axis.size == 1:
                continue
            if any(block % axis.size for block in blocks or (sizes[dim],)):
                raise ValueError(f"{list(shape)}: {axis.size} ranks of {axis.name} cannot share dimension {dim} evenly")
            sizes[dim] //= axis.size
        return tuple(sizes)


WHOLE = Placement()  # norms, and routers: every rank chooses experts from all their scores
ROWS = Placement(tp=0)  # a product's weight [outputs, inputs], or a table of the vocabulary
