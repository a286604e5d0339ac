"""Compile Triton kernels in parallel before they are launched. At their first launches they would be compiled one by
one, which takes most of a cold start."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from threading import Lock, Thread
from types import ModuleType
from typing import Any

import torch
from triton import AsyncCompileMode, knobs
from triton.runtime import build, driver
from triton.runtime._async_compile import FutureKernel
from triton.runtime.jit import JITFunction

from .compile_processes import MIN_CORES, PACKAGE, CompileProcesses, Kernel, worker_count


def _copying(load: Callable[[str, str], ModuleType]) -> Callable[[str, str], ModuleType]:
    """Make `load` return a module that later loads leave as it is. Python has one module object for all C extensions
    of a name, and writes into it what a file defines that is loaded again. All of Triton's launchers share a name in
    versions that build one for each signature, so while threads load kernels, a kernel could get another's launcher."""
    one_at_a_time = Lock()

    def load_copy(name: str, path: str) -> ModuleType:
        copy = ModuleType(name)
        with one_at_a_time:
            vars(copy).update(vars(load(name, path)))
        return copy

    return load_copy


build._load_module_from_path = _copying(build._load_module_from_path)


class _CompilePool(ThreadPoolExecutor):
    """Threads that also prepare each kernel for launch: some versions of Triton build a launcher with a C compiler,
    which takes as long as compiling the kernel.

    Attributes:
        next_kernel: the kernel that is submitted next, if known.
        functions: those whose kernels were asked for. On exit what failed is forgotten, which some versions of Triton
            would keep as the kernel to launch.
    """

    def __init__(self, processes: CompileProcesses | None = None) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        super().__init__(worker_count(), initializer=_set_device, initargs=(device,))
        self._processes = processes
        self.next_kernel: Kernel | None = None
        self.functions: set[JITFunction] = set()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for kernels, *_ in chain.from_iterable(f.device_caches.values() for f in self.functions):
            for key, found in list(kernels.items()):
                if isinstance(found, FutureKernel) and found.kernel is None:
                    del kernels[key]

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        kernel, self.next_kernel = self.next_kernel, None
        return super().submit(_compile_and_load, compile_kernel, self._processes, kernel)


def _set_device(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def _compile_and_load(
    compile_kernel: Callable[[], Any], processes: CompileProcesses | None, kernel: Kernel | None
) -> Any:
    if processes is not None and kernel is not None:
        processes.compile(kernel)
    compiled = compile_kernel()  # from the cache, or here if it is not there
    if compiled.run is None:  # reading `run` builds the launcher and loads the binary
        raise RuntimeError("a compiled kernel has no launcher")
    return compiled


def hash_compiler() -> None:
    """Hash Triton's own files in the background: half a second that the first look-up in its cache would wait for."""
    from triton.runtime.cache import triton_key

    Thread(target=triton_key, daemon=True).start()


@dataclass(frozen=True)
class MissingKernels:
    """`listed`: the kernels that launches have lacked so far, each once, for `preload` in another process. `add`: list
    and compile those kernels of this package that another process has listed."""

    listed: dict[Kernel, None]
    add: Callable[[Iterable[Kernel]], None]


@contextmanager
def compile_only(compiles: bool = True) -> Iterator[MissingKernels]:
    """Within this context a launch only compiles and loads its kernel, on any core; on exit all of them are loaded.
    Without `compiles`, kernels are only listed. With enough cores, other processes compile this package's kernels.

    A kernel that fails to compile or load is left to its first launch, which reports why. Triton has no switch that
    disables launches, so `JITFunction.run` is replaced meanwhile; no other thread may launch.

    Returns:
        the record to which kernels are added as they are launched.
    """
    run, listed = JITFunction.run, dict[Kernel, None]()

    def compile_kernel(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        pool.next_kernel = None
        pool.functions.add(kernel)
        try:
            with _jit_cache_hook(list_kernel):
                return run(kernel, *args, grid=grid, warmup=True, **kwargs)
        except TypeError:  # one of its constants cannot be described, so it cannot be listed
            return run(kernel, *args, grid=grid, warmup=True, **kwargs)

    def list_kernel(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        pool.next_kernel = fn.module, fn.name, compile["specialization_data"]
        listed[pool.next_kernel] = None
        return not compiles

    def add(kernels: Iterable[Kernel]) -> None:
        with _jit_cache_hook(list_kernel):
            for kernel in kernels:
                if kernel not in listed:
                    pool.next_kernel = None
                    _preload(kernel, pool)

    JITFunction.run = compile_kernel
    try:
        with (
            _start_processes(compiles) as processes,
            _CompilePool(processes) as pool,
            AsyncCompileMode(pool, ignore_errors=True),
        ):
            yield MissingKernels(listed, add)
    finally:
        JITFunction.run = run


def _start_processes(compiles: bool) -> AbstractContextManager[CompileProcesses | None]:
    """Processes that compile kernels, if they are of use and can be started."""
    if compiles and worker_count() >= MIN_CORES:
        with suppress(Exception):
            return closing(CompileProcesses(worker_count()))
    return nullcontext()


@contextmanager
def _jit_cache_hook(hook: Callable[..., bool]) -> Iterator[None]:
    """Report kernels that this process does not have yet to `hook`, unless another one is installed."""
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = before or hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def preload(kernels: Iterable[Kernel]) -> int:
    """Load kernels of this package on all cores, from Triton's cache where it has them; return how many were found.

    The list is a hint: a kernel that no longer exists or is for another device is skipped, and compiled at its launch.
    """
    with _CompilePool() as pool, AsyncCompileMode(pool, ignore_errors=True):
        return sum(_preload(kernel, pool) for kernel in kernels)


def _preload(kernel: Kernel, pool: _CompilePool) -> bool:
    """Load a kernel; return whether it is one of this package whose description still fits. One that is loaded already
    is not loaded again: some versions of Triton unload the old one, which a graph may hold."""
    module, name, description = kernel
    with suppress(Exception):
        if module.startswith(PACKAGE):
            function = getattr(import_module(module), name)
            loaded, *_ = function.device_caches[driver.active.get_current_device()]
            if json.loads(description)["key"] not in loaded:
                pool.functions.add(function)
                function.preload(description)
            return True
    return False


def preload_in_background(kernels: Iterable[Kernel]) -> Future[int]:
    """Run `preload` on a thread of its own. The calling thread must launch none of these kernels before they are
    loaded. Their modules are imported here, so that no two threads import the same one."""
    kernels = list(kernels)
    for module in {module for module, *_ in kernels}:
        if module.startswith(PACKAGE):
            with suppress(ImportError):
                import_module(module)
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    thread = ThreadPoolExecutor(1, initializer=_set_device, initargs=(device,))
    loading = thread.submit(preload, kernels)
    thread.shutdown(wait=False)  # the thread ends when its work is done
    return loading
