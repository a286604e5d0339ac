"""Processes that compile Triton kernels into Triton's cache on disk while the calling process does other work.

A compiler holds the GIL for part of its time, so compiling in threads slows a thread that traces a model: it made the
first start of a 0.6B model on 16 cores take a quarter longer.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

PACKAGE = __package__.partition(".")[0] + "."
TIMEOUT_S = 120.0  # the longest wait for a kernel; after that no other is requested
MAX_WORKERS = 32  # threads, and processes, that compile in parallel
MIN_CORES = 4  # fewer than this are busy without more processes
PIPE_BYTES = 1 << 19  # bytes: enough that no thread blocks on its request, as each has at most one pending
NICE = 5  # tracing, which all else waits for, takes precedence
POLL_S = 1.0  # seconds between checks that the parent is alive

Kernel = tuple[str, str, str]  # module, name, and Triton's own description of its arguments, constants and options


def worker_count() -> int:
    """How many threads or processes compile in parallel."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


class CompileProcesses:
    """`count` processes, forked from one that has imported what they need, which starts while the caller goes on.

    Whatever happens to them, `compile` returns, and the caller compiles what is not in the cache by then. They end when
    this is closed or the caller's process ends.
    """

    def __init__(self, count: int) -> None:
        target = driver.active.get_current_target()
        about = json.dumps([count, target.backend, target.arch, target.warp_size])
        path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))  # so that imports match
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, about],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=PIPE_BYTES,
            stderr=subprocess.DEVNULL,  # the caller compiles what failed, and reports the error
            text=True,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C goes to the parent, and these end with it
        )
        self._request_numbers, self._write_lock = itertools.count(), threading.Lock()
        self._pending: dict[int, threading.Event] = {}
        self._ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def compile(self, kernel: Kernel) -> None:
        """Wait until a kernel of this package has been compiled or has failed to."""
        if self._ended or not kernel[0].startswith(PACKAGE):
            return
        done, number = threading.Event(), next(self._request_numbers)
        self._pending[number] = done
        assert self._process.stdin is not None
        with self._write_lock, suppress(OSError, ValueError):  # the process has ended, or was closed
            print(json.dumps([number, *kernel]), file=self._process.stdin, flush=True)
        if not self._ended and not done.wait(TIMEOUT_S):
            self._ended = True

    def close(self) -> None:
        assert self._process.stdin is not None
        with self._write_lock, suppress(OSError):
            self._process.stdin.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError, KeyError):  # something that an import printed
                self._pending.pop(int(line)).set()
        self._ended = True
        for done in list(self._pending.values()):
            done.set()
        self._process.wait()


def _serve(count: int, *target: Any) -> None:
    """Compile the kernels that lines of standard input name; answer with the lines' numbers."""
    answers = os.dup(1)
    os.dup2(2, 1)  # for anything else that prints
    os.nice(NICE)
    stub = SimpleNamespace(get_current_device=lambda: 0, get_current_target=lambda: GPUTarget(*target))
    driver.set_active(stub)  # has all that compilation asks of a driver
    with suppress(ImportError):  # if it is elsewhere, each worker computes it
        from triton.runtime.cache import triton_key

        triton_key()  # a hash of all of Triton, cached for the forked workers
    fork = get_context("fork")
    pool = ProcessPoolExecutor(count, mp_context=fork, initializer=_start_worker, initargs=(os.getpid(),))
    try:
        for line in sys.stdin:
            number, *kernel = json.loads(line)
            pool.submit(_compile, *kernel).add_done_callback(partial(_answer, answers, number))
    finally:
        os._exit(0)  # does not wait for the workers, which end with this process


def _answer(answers: int, number: int, _: Future[None]) -> None:
    with suppress(OSError):  # the parent is gone
        os.write(answers, f"{number}\n".encode())


def _start_worker(parent: int) -> None:
    gc.disable()  # each collection would walk all of torch
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


def _compile(module: str, name: str, description: str) -> None:
    kernel = getattr(import_module(module), name).preload(description)
    with suppress(Exception):  # without an NVIDIA GPU's libraries
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)  # some versions of Triton build it with a C compiler


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
