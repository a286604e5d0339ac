"""How a block makes its parameters."""

from __future__ import annotations

import torch
from torch import nn

from ...distributed.mesh import Mesh
from ...distributed.placement import WHOLE, Placement
from ...distributed.spread import Spread


class WeightFactory:
    """The factory for parameters that a decoder passes to its blocks; it records how each was declared.

    Attributes:
        spread: the tensor-parallel ranks.
        placements: each parameter's placement on the mesh.
        init_constants: the constant of each parameter that a random model fills with one.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str, mesh: Mesh, memory: bool) -> None:
        self.placements: dict[nn.Parameter, Placement] = {}
        self.init_constants: dict[nn.Parameter, float] = {}
        self.spread, self.mesh = Spread(mesh.tp, device), mesh
        self._dtype, self._device, self._memory = dtype, device, memory

    def __call__(self, *shape: int, on: Placement = WHOLE, fill: float | None = None) -> nn.Parameter:
        """An uninitialized parameter of the compute dtype: this rank's part of a whole of shape `shape`. `fill`: the
        constant that a random model fills it with; None: 1 for a vector, and small random numbers otherwise."""
        own = on.part_shape(self.mesh, shape)
        made = torch.empty(own if self._memory else (), dtype=self._dtype, device=self._device)
        parameter = nn.Parameter(made.expand(own))
        self.placements[parameter] = on
        if fill is not None or len(shape) == 1:
            self.init_constants[parameter] = 1.0 if fill is None else fill
        return parameter
