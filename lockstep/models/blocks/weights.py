"""How a block makes its parameters."""

from __future__ import annotations

import torch
from torch import nn

from ...distributed.mesh import Mesh
from ...distributed.placement import WHOLE, Placement
from ...distributed.spread import Spread


class Weight:
    """What a decoder gives its blocks, and what it was told of each parameter.

    Attributes:
        spread: the ranks that share the model's products.
        placed, filled: how each lies on a mesh, and what is in it in a random model, if that is no random number.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str, mesh: Mesh, memory: bool) -> None:
        self.placed: dict[nn.Parameter, Placement] = {}
        self.filled: dict[nn.Parameter, float] = {}
        self.spread, self.mesh = Spread(mesh.tp, device), mesh
        self._dtype, self._device, self._memory = dtype, device, memory

    def __call__(self, *shape: int, on: Placement = WHOLE, fill: float | None = None) -> nn.Parameter:
        """An uninitialized parameter of the compute dtype, of which this rank has its part; `shape` is of the whole.
        `fill`: what a random model has in it; None: 1 in a vector, and small random numbers in anything else."""
        own = on.shape_on(self.mesh, shape)
        made = torch.empty(own if self._memory else (), dtype=self._dtype, device=self._device)
        parameter = nn.Parameter(made.expand(own))
        self.placed[parameter] = on
        if fill is not None or len(shape) == 1:
            self.filled[parameter] = 1.0 if fill is None else fill
        return parameter
