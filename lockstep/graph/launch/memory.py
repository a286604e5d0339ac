"""The memory of a launch: buffers that user inputs are copied into, addresses of static inputs, and outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..torch_private import trace as torch_trace


class InputBuffers:
    """Buffers at fixed addresses for inputs like the given ones.

    If the given inputs share one storage, so do their buffers, at the same offsets. A launch whose inputs lie the same
    way then costs one copy of the storage, and one more launch for inputs that lie elsewhere.

    Attributes:
        tensors: the buffers, in the order of the inputs.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._places = _places(inputs)
        self._first = min(self._places, default=None)
        self._run: Tensor | None = None
        self.tensors = [x.new_empty_strided(x.shape, x.stride()) for x in inputs]  # strides of the capture
        if self._first is None:
            return
        first = inputs[self._first]
        self._run = first.new_empty(first.untyped_storage().nbytes(), dtype=torch.uint8)
        for i, place in self._places.items():
            own = self._run[place : place + inputs[i].nbytes]
            self.tensors[i] = own.view(inputs[i].dtype).view(inputs[i].shape)

    def fill(self, inputs: Sequence[Tensor]) -> bool:
        """Copy a launch's inputs in; shapes, dtypes and device are those given at the start. Returns whether all lie in
        one storage at the same offsets as the buffers, so that `fill_whole` suffices."""
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
        """Copy in a launch's inputs that fill `buffer`, uint8, with a layout for which `fill` returned True."""
        assert self._run is not None
        self._run.copy_(buffer)


def _places(inputs: Sequence[Tensor]) -> dict[int, int]:
    """Byte offsets of inputs in the storage that most of them share, by index; empty if only one lies there, or they
    fill less than half of it."""
    begins = [x.untyped_storage().data_ptr() for x in inputs]
    for begin, count in Counter(begins).most_common(1):
        lie_in = [i for i, x in enumerate(inputs) if begins[i] == begin and x.numel() and x.is_contiguous()]
        size = sum(inputs[i].nbytes for i in lie_in)
        if count > 1 and lie_in and 2 * size >= inputs[lie_in[0]].untyped_storage().nbytes():
            return {i: inputs[i].data_ptr() - begin for i in lie_in}
    return {}


class Addresses:
    """The addresses of tensors, to detect that one has moved. For views of one tensor, such as gradients in a flat
    buffer, only that tensor is checked. A parameter is checked itself, as its `.data` may be replaced."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        owners = [torch_trace.base_tensor(tensor) for tensor in tensors]
        first = {id(owner): i for i, owner in reversed(list(enumerate(owners)))}
        self._numbers = sorted(first.values())
        self._asked = [owners[i] for i in self._numbers]
        self._known = list(map(Tensor.data_ptr, self._asked))

    def moved(self) -> int | None:
        """The index of the first tensor that has moved, or whose base has; None if none has."""
        now = list(map(Tensor.data_ptr, self._asked))
        if now == self._known:
            return None
        return next(i for i, a, b in zip(self._numbers, now, self._known, strict=True) if a != b)


class Outputs(dict[str, Tensor]):
    """A launch's outputs by name. Lasting outputs (`Program.lasting`) stay valid while this object is referenced: the
    graph's next launch replaces them here with copies, so look them up here at every use."""

    __slots__ = ("__weakref__",)

    def save(self, names: Iterable[str]) -> None:
        """Replace the named outputs by copies, in one launch."""
        with torch.inference_mode(False), torch.no_grad():
            kept = {name: self[name] for name in names if name in self}
            copies = [torch.empty_like(tensor) for tensor in kept.values()]
            if kept:
                torch_trace.copy_all(copies, list(kept.values()))
        self.update(zip(kept, copies, strict=True))
