"""The machine of a run: versions and hardware, and environment variables of `torchrun`, CUDA, NCCL and OpenMP.

Also the number of threads, how they wait (set before torch is imported), and limits of the operating system.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from . import __version__
from .errors import InputError, refuse

if TYPE_CHECKING:
    import torch

MIN_ADDRESS_SPACE = 1 << 30  # bytes, most of which imports take
MAX_OPEN_FILES = 1 << 16  # of a server process
MAX_THREADS_WITH_GPU = 8
SLOW_AFTER_S = 10.0  # seconds after which `report_if_slow` prints
SWITCH_INTERVAL_S = 0.0005  # seconds that a thread may keep the GIL when another asks for it
OPENMP_SPIN_COUNT = "2000"  # about 0.1 ms, the time from one operator to the next
_CGROUPS = "/sys/fs/cgroup"
_PINNED_FROM = 64 << 20  # bytes from which on a host buffer is pinned
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable
_TOUCHING_THREADS = 8
_PARENT_POLL_S = 0.5  # seconds between looks whether the parent is still there
_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_THREAD_COUNT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_visible_gpu: tuple[int, str] | None = None  # this process's local rank and GPU, set by `restrict_to_local_gpu`
_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "datasets")


def describe(device: torch.device) -> dict[str, str]:
    """Versions and descriptions by name; packages that are not installed are left out."""
    import platform
    from importlib import metadata

    found = {"lockstep": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["device"] = _device(device)
    if device.type == "cuda":
        import torch

        found["cuda"] = str(torch.version.cuda)
    return found | {"platform": platform.platform(terse=True), "host": platform.machine()}


def _device(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    threads = torch.get_num_threads()
    return f"CPU with {os.cpu_count()} cores, {threads} {'thread' if threads == 1 else 'threads'}"


def server_api_key() -> str | None:
    """A server's API key; from the environment, since other users of the machine could see it in a command line."""
    return os.environ.get("LOCKSTEP_API_KEY")


def limit_openmp_spinning() -> None:
    """Let OpenMP's idle threads sleep soon, unless the environment says how they wait. Call before importing torch.

    By default they spin: if anything else occupies a core, each operator waits for a thread that waits for that core.
    If they slept at once, nearly every operator of a small model would wake them, which takes as long as the operator.
    GNU's OpenMP, which torch uses on Linux, can spin for a count and then sleep.
    """
    if not any(name in os.environ for name in _WAIT_VARIABLES):
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": OPENMP_SPIN_COUNT}


def limit_cpu_threads(device: torch.device) -> None:
    """Limit torch's CPU threads, unless the environment sets their number: at most 8 for a process with a GPU, and the
    processes of one host share its cores equally. Raises `InputError` like `local_world_size`."""
    import torch

    if any(name in os.environ for name in _THREAD_COUNT_VARIABLES):
        return
    limit = max((os.cpu_count() or 1) // local_world_size(), 1)
    if device.type == "cuda":
        limit = min(limit, MAX_THREADS_WITH_GPU)
    torch.set_num_threads(min(torch.get_num_threads(), limit))


def require_torch_defaults() -> None:
    """`InputError`: the program has set torch's default dtype or device, which tensors made here would have too."""
    import torch

    for name, now, needed, argument in (
        ("dtype", torch.get_default_dtype(), torch.float32, "torch.float32"),
        ("device", torch.get_default_device().type, "cpu", "None"),
    ):
        refuse(
            now != needed,
            f"torch's default {name} is {now}, and everything here needs {needed}: call "
            f"torch.set_default_{name}({argument}) before, and set yours again afterwards",
        )


@contextlib.contextmanager
def fast_thread_switching() -> Iterator[None]:
    """A context in which a thread that asks for the GIL gets it after 0.5 ms instead of 5: a thread that launches work
    on a device asks several times per launch, next to threads of a server or of tools."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def freeze_gc() -> Iterator[None]:
    """A context in which the garbage collector ignores all earlier objects: a full collection would now and then block
    every thread for 0.1 s."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def pause_gc_for_imports() -> Iterator[None]:
    """A context without garbage collection, unless torch is imported already: imported objects live as long as the
    process, and scanning them repeatedly takes 0.2 to 0.3 s of a start. Afterwards the collector ignores them."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def address_space_limit() -> int | None:
    """The limit of this process's address space in bytes (`ulimit -v`); None: unlimited."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def cgroup_memory_limit() -> int | None:
    """The memory limit of this process's control groups (cgroups, as a container has), which all of their processes
    share, in bytes; None: no limit."""
    from pathlib import Path

    limits = list[int]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):  # version 2, and version 1
                continue
            root, name = Path(_CGROUPS), "memory.max"
            if controllers:
                root, name = root / "memory", "memory.limit_in_bytes"
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):  # of a container this is its own
                    with contextlib.suppress(OSError, ValueError):  # "max"
                        limits.append(int((folder / name).read_text()))
    return min(limits, default=None)


def require_address_space() -> None:
    """`InputError`: the address space is too small for what is imported. Libraries would fail to load, or end the
    process without a message."""
    limit = address_space_limit()
    if limit is not None and limit < MIN_ADDRESS_SPACE:
        raise InputError(
            f"this process may address {limit / 2**30:.2f} GiB of memory (ulimit -v); torch alone takes most of 1: "
            "raise the limit, or ulimit -v unlimited"
        )


def describe_thread_limits() -> str:
    """For a message: the limits that may keep threads and processes from starting, and what to do about them."""
    import resource

    threads, limit = resource.getrlimit(resource.RLIMIT_NPROC)[0], address_space_limit()
    count = "any number of" if threads == resource.RLIM_INFINITY else f"{threads:,}"
    memory = "any memory" if limit is None else f"{limit / 2**30:.2f} GiB"
    return (
        f"this user may have {count} processes and threads (ulimit -u), this process may address {memory} (ulimit -v), "
        "of which each thread takes a stack: raise the limit that is used up, or the container's own (pids.max)"
    )


def open_files_limit() -> int:
    """How many files this process may have open (`ulimit -n`)."""
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_open_files_limit() -> None:
    """Raise the limit of open files as far as allowed, since each connection is one: most systems begin at 1024."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if 0 <= soft < limit:  # not `RLIM_INFINITY`
        with contextlib.suppress(ValueError, OSError):  # a system may have a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class Launch(NamedTuple):
    """This process among those that `torchrun` started: its rank, its local rank, and the number of processes."""

    rank: int = 0
    local_rank: int = 0
    processes: int = 1


def is_multi_process() -> bool:
    """Whether `torchrun` started this process with others."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_torchrun_worker() -> bool:
    """Whether `torchrun` supervises this process, and also reports its failure."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def when_parent_is_gone(parent: int, act: Callable[[], object]) -> None:
    """Call `act`, on a thread, soon after `parent` has ended, the process that started this one."""

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        act()

    threading.Thread(target=wait, daemon=True).start()


@functools.cache
def end_with_launcher() -> None:
    """From here on ask this process to end, as SIGTERM does, if the `torchrun` that started it ends first. A killed one
    does not end its processes, which would go on holding their GPUs."""
    if is_torchrun_worker():
        launcher = os.getppid()
        when_parent_is_gone(launcher, lambda: _end_without(launcher))


def _end_without(launcher: int) -> None:
    if torchrun_launch().local_rank == 0:
        print(f"lockstep: torchrun (process {launcher}) is gone: ending, as by SIGTERM", file=sys.stderr, flush=True)
    os.environ.pop("TORCHELASTIC_RUN_ID", None)  # nobody supervises this process any more
    os.kill(os.getpid(), signal.SIGTERM)


def torchrun_report_note() -> str:
    """A line to add to an error message when `torchrun` will print its own report below."""
    return "\n(what torchrun says of it follows, with a traceback of its own)" if is_torchrun_worker() else ""


def torchrun_launch() -> Launch:
    """This process's `Launch` from `torchrun`'s variables; rank 0 of 1 without them. `InputError`: one is missing, not
    a number, or out of range."""
    if not is_multi_process():
        return Launch()
    values = []
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        text = os.environ.get(name, "")
        if not text.isdecimal():
            raise InputError(f"WORLD_SIZE is set and {name} is {text!r}; start several processes with torchrun")
        values.append(int(text))
    rank, local_rank, processes = values
    if not (processes and rank < processes and local_rank < processes):
        where = f"RANK is {rank} and LOCAL_RANK {local_rank}, of a WORLD_SIZE of {processes}"
        raise InputError(f"{where}: ranks count from 0; start several processes with torchrun")
    return Launch(rank, local_rank, processes)


def local_world_size() -> int:
    """The number of processes on this machine. `InputError`: `LOCAL_WORLD_SIZE` is not a positive number."""
    count = os.environ.get("LOCAL_WORLD_SIZE", str(torchrun_launch().processes))
    if not count.isdecimal() or int(count) < 1:
        raise InputError(
            f"LOCAL_WORLD_SIZE is {count!r}; it must be how many processes this machine has, as torchrun says"
        )
    return int(count)


@contextlib.contextmanager
def report_if_slow(activity: str) -> Iterator[None]:
    """A context in which rank 0 prints, after a while, that it is still busy with `activity`."""
    message = f"still {activity}, {SLOW_AFTER_S:.0f} s"
    timer = threading.Timer(SLOW_AFTER_S, print, (message,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if torchrun_launch().rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def restrict_to_local_gpu() -> None:
    """If there are several processes, make only its own GPU visible to each, so that it is `cuda:0` in every process
    and graph. Call before CUDA counts its devices; calling again changes nothing."""
    global _visible_gpu
    launch, given = torchrun_launch(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if launch.processes == 1 or (launch.local_rank, given) == _visible_gpu:
        return
    visible = [str(i) for i in range(launch.local_rank + 1)] if given is None else given.split(",")
    own = visible[launch.local_rank] if launch.local_rank < len(visible) else ""
    os.environ["CUDA_VISIBLE_DEVICES"] = own
    _visible_gpu = launch.local_rank, own


def prepare_nccl(communicators: int = 1) -> None:
    """Set the environment variables that NCCL needs for collectives in CUDA graphs. Call it before making a group.

    Collectives of several `communicators` in one graph run concurrently: FSDP gathers a layer's weights while the
    previous layer runs tensor-parallel collectives. By itself each device may start two such kernels in either order,
    and ranks that choose differently deadlock. NCCL (2.26 on) is told to start them in the order in which the host
    launched or recorded them: that of the graph, the same on all ranks. Neither waits for the other to end if CUDA has
    events for this (12.3 on; in recordings, a driver of 12.9 on). NCCL reads the variable once per process.

    NVLink multicast is off unless it was set. Buffers are not registered while graphs are recorded, which fails under
    expandable segments. Symmetric memory must accept that each process sees its GPU as device 0
    (`restrict_to_local_gpu`), and gets no multicast address, which is never used.

    Raises:
        InputError: buffer registration and expandable segments are both requested.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if communicators > 1:
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    expandable = [
        name
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", "")
    ]
    if not expandable:
        return
    for name in ("NCCL_GRAPH_REGISTER", "NCCL_LOCAL_REGISTER", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"):
        if os.environ.get(name, "0").lower() not in ("0", "false", "n", "no"):
            raise InputError(
                f"{name} is {os.environ[name]} and {expandable[0]} has expandable_segments: buffers registered with "
                "NCCL while a CUDA graph is recorded must not lie in expandable segments; unset one of the two"
            )
        os.environ[name] = "0"


class HostBuffer:
    """A zeroed buffer in host memory. If `pinned` and not small, it will be pinned, so that CUDA copies run
    asynchronously at full bandwidth. (torch rounds pinned allocations up to a power of two.) Threads touch its pages
    while its owner does other work, as a new virtual machine may get no more than some 4 GiB a second.

    Attributes:
        tensor: uint8 [size]; not to be read or written before `wait`.
    """

    def __init__(self, size: int, pinned: bool) -> None:
        import numpy
        import torch

        self._memory = numpy.zeros(size, numpy.uint8)  # pages are allocated when first touched
        self.tensor = torch.from_numpy(self._memory)
        self._touching = list[threading.Thread]()
        if pinned and size >= _PINNED_FROM:
            for part in numpy.array_split(self._memory[:: mmap.PAGESIZE], _TOUCHING_THREADS):
                self._touching.append(threading.Thread(target=part.fill, args=(0,), daemon=True))
                self._touching[-1].start()

    def wait(self) -> None:
        """Wait until all pages are allocated, and pin them. `InputError`: the system pins no more memory."""
        import weakref

        import torch

        if not self._touching:
            return
        for thread in self._touching:
            thread.join()
        self._touching = []
        runtime, begin, size = torch.cuda.cudart(), self.tensor.data_ptr(), self.tensor.nbytes
        if int(runtime.cudaHostRegister(begin, size, _REGISTER_PORTABLE)):  # much faster for pages that were touched
            raise InputError(
                f"the system does not pin {size / 2**30:.1f} GiB of the host's memory (ulimit -l); leave "
                "optimizer.offload off, and checkpoint.interval at 0"
            )
        # Tied to the array, which all tensors on it keep alive; a view of another dtype does not keep its base.
        weakref.finalize(self._memory, runtime.cudaHostUnregister, begin).atexit = False


def allocate_host_buffer(size: int, pinned: bool) -> torch.Tensor:
    """The tensor of a `HostBuffer` that is ready; raises as `HostBuffer.wait`."""
    buffer = HostBuffer(size, pinned)
    buffer.wait()
    return buffer.tensor
