"""What a launch reads and leaves: inputs copied to memory of the graph's own, static tensors by address, outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..torch_private import trace as torch_trace


class OwnInputs:
    """Buffers for inputs like the given ones; their addresses stay.

    Inputs that lie side by side in one buffer have buffers that lie alike in one, so a launch whose inputs lie so too
    costs one copy, and one more for each that lies elsewhere.

    Attributes:
        tensors: the buffers, in the order of the inputs.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._places = _places(inputs)
        self._first = min(self._places, default=None)
        self._run: Tensor | None = None
        self.tensors = [x.new_empty_strided(x.shape, x.stride()) for x in inputs]  # a graph holds for these strides
        if self._first is None:
            return
        first = inputs[self._first]
        self._run = first.new_empty(first.untyped_storage().nbytes(), dtype=torch.uint8)
        for i, place in self._places.items():
            own = self._run[place : place + inputs[i].nbytes]
            self.tensors[i] = own.view(inputs[i].dtype).view(inputs[i].shape)

    def fill(self, inputs: Sequence[Tensor]) -> bool:
        """Copy a launch's inputs in; their shapes, dtypes and device are those of the first ones. Returns whether they
        all lie in one buffer as here: `fill_whole` would do."""
        elsewhere: Sequence[int] = range(len(inputs))
        with torch.inference_mode(False), torch.no_grad():
            if self._run is not None and self._first is not None:
                storage = inputs[self._first].untyped_storage()
                begin, at = storage.data_ptr(), list(map(Tensor.data_ptr, inputs))
                if at[self._first] == begin + self._places[self._first] and storage.nbytes() == self._run.numel():
                    self._run.copy_(self._run.new_empty(0).set_(storage))
                    elsewhere = [i for i in elsewhere if at[i] != begin + self._places.get(i, -1)]
            if elsewhere:
                torch_trace.copy_all([self.tensors[i] for i in elsewhere], [inputs[i] for i in elsewhere])
        return bool(inputs) and not elsewhere

    def fill_whole(self, buffer: Tensor) -> None:
        """Copy a launch's inputs in, which lie in a buffer, uint8, like others for which `fill` returned True."""
        assert self._run is not None
        self._run.copy_(buffer)


def _places(inputs: Sequence[Tensor]) -> dict[int, int]:
    """Where inputs begin in the buffer that most of them lie in, in bytes, by number; empty if they fill less than half
    of it, or are fewer than two."""
    begins = [x.untyped_storage().data_ptr() for x in inputs]
    for begin, count in Counter(begins).most_common(1):
        lie_in = [i for i, x in enumerate(inputs) if begins[i] == begin and x.numel() and x.is_contiguous()]
        size = sum(inputs[i].nbytes for i in lie_in)
        if count > 1 and lie_in and 2 * size >= inputs[lie_in[0]].untyped_storage().nbytes():
            return {i: inputs[i].data_ptr() - begin for i in lie_in}
    return {}


class Addresses:
    """Where tensors lie. Of views of one tensor, such as gradients in a flat buffer, that tensor alone is asked; a
    parameter is a tensor of its own, as anyone can give it other data."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        owners = [torch_trace.viewed_tensor(tensor) for tensor in tensors]
        first = {id(owner): i for i, owner in reversed(list(enumerate(owners)))}
        self._numbers = sorted(first.values())
        self._asked = [owners[i] for i in self._numbers]
        self._known = list(map(Tensor.data_ptr, self._asked))

    def moved(self) -> int | None:
        """The number of the first tensor that is elsewhere, or whose owner is; None as it must be."""
        now = list(map(Tensor.data_ptr, self._asked))
        if now == self._known:
            return None
        return next(i for i, a, b in zip(self._numbers, now, self._known, strict=True) if a != b)


class Outputs(dict[str, Tensor]):
    """A launch's outputs by name. Those that the function declared to be lasting stay right for as long as someone
    holds this, as they are copied if the graph is launched again meanwhile: read them here, each time anew."""

    __slots__ = ("__weakref__",)

    def save(self, names: Iterable[str]) -> None:
        """Copy those of these outputs that are still here, in one launch."""
        with torch.inference_mode(False), torch.no_grad():
            kept = {name: self[name] for name in names if name in self}
            copies = [torch.empty_like(tensor) for tensor in kept.values()]
            if kept:
                torch_trace.copy_all(copies, list(kept.values()))
        self.update(zip(kept, copies, strict=True))
