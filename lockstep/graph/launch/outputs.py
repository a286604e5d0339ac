"""What a launch returned, by name, and how long it stays right."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..torch_private import trace as torch_trace


class Outputs(dict[str, Tensor]):
    """A launch's outputs by name.

    Those that the function declared to be lasting stay right for as long as someone holds this: they are copied if the
    same graph is launched again meanwhile. So read them here, each time anew, and not through a tensor that was taken
    from here before.
    """

    __slots__ = ("__weakref__",)

    def save(self, names: Iterable[str]) -> None:
        """Copy those of these outputs that are still here, in one launch."""
        with torch.inference_mode(False), torch.no_grad():
            kept = {name: self[name] for name in names if name in self}
            copies = [torch.empty_like(tensor) for tensor in kept.values()]
            if kept:
                torch_trace.copy_all(copies, list(kept.values()))
        self.update(zip(kept, copies, strict=True))
