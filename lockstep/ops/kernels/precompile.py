"""Compiling Triton kernels side by side before they are launched; at their first launches they are compiled one by one,
which takes most of a cold start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

MAX_WORKERS = 32


class _Pool(ThreadPoolExecutor):
    """Threads that also ready each kernel for its launch: some versions of Triton have a C compiler build a launcher,
    which takes as long as the kernel."""

    def __init__(self) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        workers = min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        super().__init__(workers, initializer=_use, initargs=(device,))

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        return super().submit(_ready, compile_kernel)


def _use(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def _ready(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    assert kernel.run is not None  # builds the launcher and loads the binary
    return kernel


@contextmanager
def compiling_only() -> Iterator[None]:
    """Within, a launch only has its kernel compiled and loaded, on any core; at the end all are.

    One that does not compile or load is left to its first launch, which says why. Triton has no switch that turns
    launches off, so for this long `JITFunction.run` is another function; no other thread may launch.
    """
    run = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    try:
        with _Pool() as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        JITFunction.run = run
