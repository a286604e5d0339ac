"""CUDA graphs: one memory pool and one stream for all of them.

A recorded graph reads and writes the addresses that it was recorded with, so its inputs must not move. What it returns
lies in the pool, where the next replay of *any* graph of the pool may overwrite it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..ir.captured import GraphError
from ..torch_private import trace as torch_trace

ALLOCATOR_SETTINGS = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # torch reads either
Run = Callable[[Sequence[Tensor]], list[Tensor]]


class Recording(Protocol):
    """One recorded graph. `outputs` are the same tensors after every replay. It is replayed in any mode of autograd."""

    outputs: list[Tensor]

    def replay(self) -> None:
        """Run it again; does not wait for the device."""

    def close(self) -> None:
        """Give its memory back; it cannot be replayed any more."""


class CudaRecorder:
    """Makes recordings that share one pool. Record the largest first: its temporaries' memory serves the others.

    Attributes:
        worked: something ran in the pool since this was last set to False; what is `allotted` holds nothing then.
        allotted: addresses of tensors in memory that the pool goes on using (`allot`).
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise GraphError(f"CUDA graphs need a GPU; the tensors are on {device}")
        self.worked, self.allotted = False, set[int]()
        self._device = device
        self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool()
        self._stream = torch.cuda.Stream(device)

    def record(
        self, run: Run, arguments: Sequence[Tensor], keep: Sequence[Tensor] = (), lasting: Sequence[int] = ()
    ) -> Recording:
        """Run once for real with the pool's memory, which also compiles and loads kernels, then record. The recording's
        outputs are those of the real run.

        Args:
            keep: tensors of the pool whose values are needed later. Memory that someone holds is never given to a
                recording, so only a recorder that checks its caller looks at them.
            lasting: numbers of outputs that the recording copies out of the pool, where no other overwrites them.
        """
        torch.cuda.empty_cache()  # memory that others left is of no use to the pool, which takes its own from here on
        results = [r.clone() for r in self.run(run, arguments)]  # outside the pool
        recording = self._captured(run, arguments, {i: results[i] for i in lasting}, "thread_local")
        if in_pool := [i for i in range(len(results)) if i not in lasting]:
            torch_trace.copy_all([recording.outputs[i] for i in in_pool], [results[i] for i in in_pool])
        return recording

    def capture(self, run: Run, arguments: Sequence[Tensor], lasting: Mapping[int, Tensor]) -> Recording:
        """Record without a run before it, for which kernels are better loaded. Outputs hold nothing until a replay.

        Args:
            lasting: of outputs by number, tensors outside the pool that the recording copies them to.
        """
        torch.cuda.current_blas_handle()  # is made before a stream captures
        return self._captured(run, arguments, lasting, "relaxed")  # in which kernels of torch may be loaded

    def _captured(
        self, run: Run, arguments: Sequence[Tensor], lasting: Mapping[int, Tensor], errors: str
    ) -> _CudaRecording:
        graph = torch.cuda.CUDAGraph()
        pool: Any = self._open_pool().id
        streams = torch.cuda.stream(self._stream)  # torch's own is not left where an end of a capture fails
        with streams, torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode=errors):
            outputs = run(arguments)
            if lasting:
                torch_trace.copy_all([*lasting.values()], [outputs[i] for i in lasting])
        for i, tensor in lasting.items():
            outputs[i] = tensor
        return _CudaRecording(graph, outputs)

    def run(self, run: Run, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Run once with the pool's memory, without recording; what it returns lies in the pool."""
        with self.working():
            return run(arguments)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """What is computed meanwhile has the pool's memory, in order with what comes before and after."""
        self.worked = True
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._open_pool()):
                yield
        finally:
            current.wait_stream(self._stream)

    def reserve(self, size: int) -> None:
        """Have the pool begin with so many bytes in one piece, before anything is in it: where tensors of many sizes
        come and go, pieces of the sizes of the first leave gaps that none of the others fits. Nothing where the
        allocator was told to split no large piece (`max_split_size_mb`)."""
        if any("max_split_size_mb" in os.environ.get(name, "") for name in ALLOCATOR_SETTINGS):
            return
        torch.cuda.empty_cache()  # which a pool does not do for itself
        with self.working():
            torch.empty(size, dtype=torch.uint8, device=self._device)

    def allot(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Tensors in memory that the pool goes on using: whatever runs in it overwrites them. Before any recording."""
        made = [self.borrow(tensor) for tensor in self.run(lambda _: make(), [])]
        self.allotted.update(tensor.data_ptr() for tensor in made if tensor.numel())
        return made

    def _open_pool(self) -> torch.cuda.MemPool:
        if self._pool is None:
            raise GraphError("the pool of CUDA graphs is closed")
        return self._pool

    def borrow(self, tensor: Tensor) -> Tensor:
        """The same memory, without keeping the pool from giving it to others."""
        size = tensor.untyped_storage().nbytes()
        if size == 0:
            return tensor
        data = tensor.untyped_storage().data_ptr(), False
        about = {"version": 3, "data": data, "shape": (size,), "typestr": "|u1"}
        memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=about), device=tensor.device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def reserved_bytes(self) -> int:
        """Memory that the pool holds."""
        return sum(segment["total_size"] for segment in self._pool.snapshot()) if self._pool is not None else 0

    def close(self) -> None:
        """Let go of the pool: after all recordings are closed, and before a process group is."""
        if self._pool is not None:
            torch.cuda.synchronize(self._device)
            torch_trace.clear_matmul_workspaces()
            self._pool = None


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: list[Tensor]) -> None:
        self._graph, self.outputs = graph, outputs

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self.outputs = []
        self._graph.reset()
