"""A stand-in for CUDA graphs on machines without a GPU."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.graph.launch.cudagraph import Run


class FakeRecorder:
    """Does on a CPU what `CudaRecorder` does where it can go wrong.

    A replay works on the memory that its arguments had when it was recorded, wherever they are by then, and every
    replay first overwrites with garbage whatever lies in the pool and was not to be kept.
    """

    def __init__(self) -> None:
        self.pool_used, self.overwritable_addresses = False, set[int]()
        self.inside, self.reserved = False, 0
        self._in_pool: list[weakref.ref[Tensor]] = []
        self._allotted: list[Tensor] = []

    def record(
        self, run: Run, arguments: Sequence[Tensor], keep: Sequence[Tensor] = (), lasting: Sequence[int] = ()
    ) -> _FakeRecording:
        self.poison(keep)
        outputs = self.run(run, arguments)
        for i in lasting:
            outputs[i] = outputs[i].clone()
        return _FakeRecording(self, run, arguments, keep, outputs)

    def capture(self, run: Run, arguments: Sequence[Tensor], lasting: Mapping[int, Tensor]) -> _FakeRecording:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            shaped = run([mode.from_tensor(argument) for argument in arguments])
        outputs = [torch.full(x.shape, _garbage(x.dtype), dtype=x.dtype) for x in shaped]
        self._in_pool += map(weakref.ref, outputs)
        for i, tensor in lasting.items():
            outputs[i] = tensor
        return _FakeRecording(self, run, arguments, (), outputs)

    @contextlib.contextmanager
    def in_pool(self) -> Iterator[None]:
        self.pool_used = self.inside = True
        self.poison()
        try:
            yield
        finally:
            self.inside = False

    def reserve(self, size: int) -> None:
        assert not self._in_pool and not self._allotted, "the first in its pool"
        self.reserved += size

    def allocate_overwritable(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        self._allotted += (made := make())
        self.overwritable_addresses.update(tensor.data_ptr() for tensor in made if tensor.numel())
        return made

    def run(self, run: Run, arguments: Sequence[Tensor]) -> list[Tensor]:
        self.pool_used = True
        for tensor in self._allotted:
            tensor.fill_(_garbage(tensor.dtype))
        outputs = [r.clone() for r in run(arguments)]
        self._in_pool += map(weakref.ref, outputs)
        return outputs

    def poison(self, keep: Sequence[Tensor] = ()) -> None:
        """What any graph's replay may do to all that lies in the pool."""
        kept = {tensor.data_ptr() for tensor in keep}
        for tensor in self._allotted:
            tensor.fill_(_garbage(tensor.dtype))
        self._in_pool = [reference for reference in self._in_pool if reference() is not None]
        for reference in self._in_pool:
            output = reference()
            if output is not None and output.data_ptr() not in kept:
                output.fill_(_garbage(output.dtype))

    def weak_ref_tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def reserved_bytes(self) -> int:
        held = [tensor for reference in self._in_pool if (tensor := reference()) is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def close(self) -> None:
        self._in_pool.clear()


class _FakeRecording:
    def __init__(
        self,
        recorder: FakeRecorder,
        run: Run,
        arguments: Sequence[Tensor],
        keep: Sequence[Tensor],
        outputs: list[Tensor],
    ) -> None:
        self._recorder, self._run, self._keep, self.outputs = recorder, run, list(keep), outputs
        self._memory = [a.detach() for a in arguments]  # tensors of its own on the memory of now

    def replay(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._recorder.poison(self._keep)
            for output, result in zip(self.outputs, self._run(self._memory), strict=True):
                output.copy_(result)

    def close(self) -> None:
        self.outputs, self._keep, self._memory = [], [], []


def _garbage(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
