"""A recorded graph's own memory for the inputs that come with each launch, and the copying into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..torch_private import trace as torch_trace


class OwnInputs:
    """Buffers for inputs like the given ones; their addresses stay.

    Inputs that lie side by side in one buffer have buffers that lie alike in one. Then a launch whose inputs lie so too
    costs one copy, and one more for each input that lies elsewhere.

    Attributes:
        tensors: the buffers, in the order of the inputs.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._places = _places(inputs)
        self._first = min(self._places, default=None)
        self._run: Tensor | None = None
        self.tensors = [x.new_empty(x.shape) for x in inputs]
        if self._first is None:
            return
        first = inputs[self._first]
        self._run = first.new_empty(first.untyped_storage().nbytes(), dtype=torch.uint8)
        for i, place in self._places.items():
            own = self._run[place : place + inputs[i].nbytes]
            self.tensors[i] = own.view(inputs[i].dtype).view(inputs[i].shape)

    def fill(self, inputs: Sequence[Tensor]) -> bool:
        """Copy a launch's inputs in; their shapes, dtypes and device are those of the first ones.

        Returns:
            whether the buffer that they lie in has all of them, and they lie in it as here: `fill_whole` would do.
        """
        if not inputs:
            return False
        with torch.inference_mode(False), torch.no_grad():
            return self._fill(inputs)

    def fill_whole(self, buffer: Tensor) -> None:
        """Copy a launch's inputs in, which lie in a buffer, uint8, like others for which `fill` returned True."""
        assert self._run is not None
        self._run.copy_(buffer)

    def _fill(self, inputs: Sequence[Tensor]) -> bool:
        elsewhere: Sequence[int] = range(len(inputs))
        if self._run is not None and self._first is not None:
            storage = inputs[self._first].untyped_storage()
            begin, at = storage.data_ptr(), list(map(Tensor.data_ptr, inputs))
            if at[self._first] == begin + self._places[self._first] and storage.nbytes() == self._run.numel():
                self._run.copy_(self._run.new_empty(0).set_(storage))
                elsewhere = [i for i in elsewhere if at[i] != begin + self._places.get(i, -1)]
        if elsewhere:
            torch_trace.copy_all([self.tensors[i] for i in elsewhere], [inputs[i] for i in elsewhere])
        return not elsewhere


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
