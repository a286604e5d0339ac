"""How the generator reaches weights: the trainer's own (colocated, nothing copied), or a snapshot of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..models import Decoder


class SharedWeights:
    """The trainer's weights in place. `version` is read at every use, so an update is seen at once."""

    def __init__(self, model: Decoder, version: Callable[[], int] = lambda: 0) -> None:
        self.model = model
        self._version = version

    @property
    def version(self) -> int:
        """Number of updates that made the weights."""
        return self._version()


class SnapshotWeights:
    """A copy that changes only in `update`, for roles that run apart."""

    def __init__(self, source: Decoder) -> None:
        self.model = Decoder(source.config, source.embed.dtype, source.embed.device)
        self.model.masks = source.masks
        self.version = -1
        self.update(source, 0)

    def update(self, source: Decoder, version: int) -> None:
        """Copy `source`'s weights and take `version` for them."""
        with torch.no_grad():
            new = _tensors(source)
            for name, own in _tensors(self.model).items():  # a value head is the trainer's alone
                own.copy_(new[name])
        self.version = version


def _tensors(model: Decoder) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
