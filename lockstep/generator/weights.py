"""How the generator reaches weights: the trainer's own (colocated, nothing copied), or a snapshot of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..models import Decoder, ModelPart


class SharedWeights:
    """The trainer's weights in place. `version` is read at every use, so an update is seen at once."""

    def __init__(self, model: Decoder, version: Callable[[], int] = lambda: 0) -> None:
        self.model = model
        self._version = version

    @property
    def version(self) -> int:
        """Number of updates that made the weights."""
        return self._version()


class PartWeights(SharedWeights):
    """This rank's part of the trainer's weights, brought up to date where the version is another."""

    def __init__(self, part: ModelPart, version: Callable[[], int] = lambda: 0) -> None:
        super().__init__(part.model, version)
        self._part, self._made = part, version()

    @property
    def version(self) -> int:
        """See `SharedWeights`."""
        if (version := super().version) != self._made:
            self._part.update()
            self._made = version
        return version


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
