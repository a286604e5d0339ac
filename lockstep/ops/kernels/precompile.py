"""Compiling Triton kernels side by side before they are launched; at their first launches they are compiled one by one,
which takes most of a cold start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

MAX_WORKERS = 32


@contextmanager
def compiling_only() -> Iterator[None]:
    """Within, a launch only has its kernel compiled, on any core; at the end all are.

    One that does not compile is left to its first launch, which says why. Triton has no switch that turns launches off,
    so for this long `JITFunction.run` is another function; no other thread may launch.
    """
    run = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    try:
        workers = min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        with ThreadPoolExecutor(workers) as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        JITFunction.run = run
