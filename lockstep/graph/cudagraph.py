"""CUDA graphs: one memory pool and one stream for all of them, and a stand-in for machines without a GPU.

A recorded graph reads and writes the addresses that it was recorded with, so its inputs must not move. What it returns
lies in the pool, where the next replay of *any* graph of the pool may overwrite it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from . import compat
from .ir import GraphError

Run = Callable[[Sequence[Tensor]], list[Tensor]]


class Recording(Protocol):
    """One recorded graph. `outputs` are the same tensors after every replay."""

    outputs: list[Tensor]

    def replay(self) -> None:
        """Run it again; does not wait for the device."""

    def close(self) -> None:
        """Give its memory back; it cannot be replayed any more."""


class Recorder(Protocol):
    """Makes recordings that share one pool. Record the largest first: its temporaries' memory serves the others."""

    def record(self, run: Run, arguments: Sequence[Tensor]) -> Recording:
        """Run once for real with the pool's memory, which also compiles and loads kernels, then record.

        The recording's outputs are those of the real run.
        """

    def close(self) -> None:
        """Let go of the pool: after all recordings are closed, and before a process group is."""


class CudaRecorder:
    """`torch.cuda.CUDAGraph`s."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise GraphError(f"CUDA graphs need a GPU; the tensors are on {device}")
        self._device = device
        self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool()
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Run, arguments: Sequence[Tensor]) -> _CudaRecording:
        if self._pool is None:
            raise GraphError("the pool of CUDA graphs is closed")
        with self._side_stream(), torch.cuda.use_mem_pool(self._pool):
            results = run(arguments)
        results = [r.clone() for r in results]  # outside the pool
        graph = torch.cuda.CUDAGraph()
        pool = compat.graph_pool(self._pool)
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = run(arguments)
        if outputs:
            compat.copy_all(outputs, results)
        return _CudaRecording(graph, outputs)

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        """What is launched within runs on the stream of the recordings, in order with what comes before and after."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def close(self) -> None:
        if self._pool is not None:
            torch.cuda.synchronize(self._device)
            compat.clear_matmul_workspaces()
            self._pool = None


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: list[Tensor]) -> None:
        self._graph, self.outputs = graph, outputs

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self.outputs = []
        self._graph.reset()


class FakeRecorder:
    """Does on a CPU what `CudaRecorder` does where it can go wrong.

    A replay works on the memory that its arguments had when it was recorded, wherever they are by then, and every
    replay first overwrites the outputs of all recordings with garbage.
    """

    def __init__(self) -> None:
        self._recordings: list[_FakeRecording] = []

    def record(self, run: Run, arguments: Sequence[Tensor]) -> _FakeRecording:
        recording = _FakeRecording(run, arguments, self.poison)
        self._recordings.append(recording)
        return recording

    def poison(self) -> None:
        """What any graph's replay may do to the outputs of all."""
        for recording in self._recordings:
            for output in recording.outputs:
                output.fill_(_garbage(output.dtype))

    def close(self) -> None:
        self._recordings.clear()


class _FakeRecording:
    def __init__(self, run: Run, arguments: Sequence[Tensor], poison: Callable[[], None]) -> None:
        self._run, self._poison = run, poison
        self._memory = [a.detach() for a in arguments]  # tensors of its own on the memory of now
        poison()
        self.outputs = [r.clone() for r in run(arguments)]

    def replay(self) -> None:
        self._poison()
        for output, result in zip(self.outputs, self._run(self._memory), strict=True):
            output.copy_(result)

    def close(self) -> None:
        self.outputs = []


def _garbage(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
