"""How the generator reads weights: the trainer's own, in place, or this rank's part of them."""

from __future__ import annotations

from collections.abc import Callable

from ..models import Decoder


class SharedWeights:
    """The trainer's weights, in place. `version` is read at every use, so an update is visible immediately."""

    def __init__(self, model: Decoder, version: Callable[[], int] = lambda: 0) -> None:
        self.model = model
        self._version = version

    @property
    def version(self) -> int:
        return self._version()
