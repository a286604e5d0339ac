"""CUDA graphs that share one memory pool and one stream.

A recorded graph reads and writes the addresses that it was recorded with, so its inputs must not move. Its outputs lie
in the pool, where the next replay of *any* graph of the pool may overwrite them.
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
    """One recorded graph. `outputs` are the same tensors after every replay. Replay works in any autograd mode."""

    outputs: list[Tensor]

    def replay(self) -> None:
        """Run it again; does not wait for the device."""

    def close(self) -> None:
        """Release the memory; the recording cannot be replayed any more."""


class CudaRecorder:
    """Makes recordings that share one pool. Record the largest first: later ones reuse the memory of its temporaries.

    Attributes:
        pool_used: something ran in the pool since this was last set to False, so it overwrote the tensors from
            `allocate_overwritable`.
        overwritable_addresses: the addresses of these tensors.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise GraphError(f"CUDA graphs need a GPU; the tensors are on {device}")
        self.pool_used, self.overwritable_addresses = False, set[int]()
        self._device = device
        self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool()
        self._stream = torch.cuda.Stream(device)

    def record(
        self, run: Run, arguments: Sequence[Tensor], keep: Sequence[Tensor] = (), lasting: Sequence[int] = ()
    ) -> Recording:
        """Run once in the pool's memory, which also compiles and loads kernels, then record. The recording's outputs
        hold the results of that run.

        Args:
            keep: tensors in the pool whose values are needed later. Not used here, as no recording gets memory that is
                still referenced; a recorder that checks its caller may use it.
            lasting: indices of outputs that the recording copies out of the pool, where no other one overwrites them.
        """
        torch.cuda.empty_cache()  # the pool cannot reuse blocks cached outside it, and is about to allocate its own
        results = [r.clone() for r in self.run(run, arguments)]  # outside the pool
        recording = self._captured(run, arguments, {i: results[i] for i in lasting}, "thread_local")
        if in_pool := [i for i in range(len(results)) if i not in lasting]:
            torch_trace.copy_all([recording.outputs[i] for i in in_pool], [results[i] for i in in_pool])
        return recording

    def capture(self, run: Run, arguments: Sequence[Tensor], lasting: Mapping[int, Tensor]) -> Recording:
        """Record without a run before; kernels should be loaded by then. Outputs are undefined until a replay.

        Args:
            lasting: by output index, tensors outside the pool that the recording copies these outputs to.
        """
        torch.cuda.current_blas_handle()  # cuBLAS handles cannot be made during a capture
        return self._captured(run, arguments, lasting, "relaxed")  # lets torch load kernels during the capture

    def _captured(
        self, run: Run, arguments: Sequence[Tensor], lasting: Mapping[int, Tensor], errors: str
    ) -> _CudaRecording:
        graph = torch.cuda.CUDAGraph()
        pool: Any = self._open_pool().id
        streams = torch.cuda.stream(self._stream)  # restored even if ending a capture fails
        with streams, torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode=errors):
            outputs = run(arguments)
            if lasting:
                torch_trace.copy_all([*lasting.values()], [outputs[i] for i in lasting])
        for i, tensor in lasting.items():
            outputs[i] = tensor
        return _CudaRecording(graph, outputs)

    def run(self, run: Run, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Run once in the pool's memory, without recording; the results lie in the pool."""
        with self.in_pool():
            return run(arguments)

    @contextlib.contextmanager
    def in_pool(self) -> Iterator[None]:
        """Within, computations allocate from the pool; they are ordered with the work before and after."""
        self.pool_used = True
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._open_pool()):
                yield
        finally:
            current.wait_stream(self._stream)

    def reserve(self, size: int) -> None:
        """Let the still empty pool begin with one block of `size` bytes, against fragmentation: blocks sized for the
        first tensors fit few of the later ones. Does nothing if the allocator may not split large blocks
        (`max_split_size_mb`)."""
        if any("max_split_size_mb" in os.environ.get(name, "") for name in ALLOCATOR_SETTINGS):
            return
        torch.cuda.empty_cache()  # a pool does not do this by itself
        with self.in_pool():
            torch.empty(size, dtype=torch.uint8, device=self._device)

    def allocate_overwritable(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Tensors in memory that the pool may reuse: whatever runs in it overwrites them. Call before any recording."""
        made = [self.weak_ref_tensor(tensor) for tensor in self.run(lambda _: make(), [])]
        self.overwritable_addresses.update(tensor.data_ptr() for tensor in made if tensor.numel())
        return made

    def _open_pool(self) -> torch.cuda.MemPool:
        if self._pool is None:
            raise GraphError("the pool of CUDA graphs is closed")
        return self._pool

    def weak_ref_tensor(self, tensor: Tensor) -> Tensor:
        """A tensor on the same memory that does not keep the pool from reusing it."""
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
        """Release the pool; call it after all recordings are closed and before the process group is destroyed."""
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
