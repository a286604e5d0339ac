"""Whether the tensors that a graph is bound to are where they were: asked at every launch, of as few as can be."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..torch_private import trace as torch_trace


class Addresses:
    """Where tensors lie.

    Of views of one tensor, such as gradients in a flat buffer, that tensor alone is asked. A parameter is a tensor of
    its own, wherever its data lies, as anyone can give it other data.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        owners = [torch_trace.viewed_tensor(tensor) for tensor in tensors]
        first = {id(owner): i for i, owner in reversed(list(enumerate(owners)))}
        self._numbers = sorted(first.values())
        self._asked = [owners[i] for i in self._numbers]
        self._known = list(map(Tensor.data_ptr, self._asked))

    def __len__(self) -> int:
        return len(self._asked)

    def moved(self) -> int | None:
        """The number of the first tensor that is elsewhere, or whose owner is; None as it must be."""
        now = list(map(Tensor.data_ptr, self._asked))
        if now == self._known:
            return None
        return next(i for i, a, b in zip(self._numbers, now, self._known, strict=True) if a != b)
