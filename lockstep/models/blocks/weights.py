"""How a block makes its parameters."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from ...distributed.placement import WHOLE, Placement
from ...distributed.spread import Spread


class Weight(Protocol):
    """What a decoder gives its blocks.

    Attributes:
        spread: the ranks that share the model's products.
    """

    spread: Spread

    def __call__(self, *shape: int, on: Placement = WHOLE, fill: float | None = None) -> nn.Parameter:
        """An uninitialized parameter of the compute dtype, of which this rank has its part.

        Args:
            shape: of the whole.
            on: how it lies on a mesh.
            fill: what a random model has in it; None: 1 in a vector, and small random numbers in anything else.
        """
