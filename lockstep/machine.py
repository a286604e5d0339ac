"""What a run runs on: versions and hardware, and what `torchrun`, CUDA and NCCL are told through the environment.

How threads wait is chosen there too, before torch is imported, how many there are, and how long one holds up another.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from . import __version__
from .errors import InputError

if TYPE_CHECKING:
    import torch

ADDRESSES = 1 << 30  # bytes, of which what is imported takes most
_CGROUPS = "/sys/fs/cgroup"
FILES = 1 << 16  # that a process of a server has open at most
LONG = 10.0  # seconds after which what is being done is said
_own: tuple[int, str] | None = None  # this process's number on its machine, and the GPU that it has
_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "datasets")


def describe(device: torch.device) -> dict[str, str]:
    """Name to version or description; packages that are not installed are left out."""
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


def server_key() -> str | None:
    """The key that a server asks its clients for; a command line would show it to others on the machine."""
    return os.environ.get("LOCKSTEP_API_KEY")


_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
THREADS_BESIDE_A_GPU = 8


SWITCH = 0.0005  # seconds that a thread keeps the interpreter which another asks for
SPINS = "2000"  # about a tenth of a millisecond: the time from one operator to the next


def wait_asleep() -> None:
    """Let OpenMP's idle threads sleep soon, unless the environment says how they wait; comes before torch is imported.

    They spin by default: with a core taken by anything else, each operator waits for a thread that waits for the core.
    Asleep at once, they are woken at nearly every operator of a small model, which takes as long as the operator. GNU's
    OpenMP, which torch has on Linux, spins for a count and then sleeps.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPINS}


def bound_threads(device: torch.device) -> None:
    """Leave torch no more CPU threads than help, unless the environment says how many: a process with a GPU takes 8 at
    most, and the processes of one host share its cores equally. `InputError` as `processes_here`."""
    import torch

    if any(name in os.environ for name in _THREADS):
        return
    limit = max((os.cpu_count() or 1) // processes_here(), 1)
    if device.type == "cuda":
        limit = min(limit, THREADS_BESIDE_A_GPU)
    torch.set_num_threads(min(torch.get_num_threads(), limit))


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Within it a thread that asks for the interpreter has it after half a millisecond, where another would keep it for
    five: what launches work on a device asks several times a launch, beside threads of a server or of tools."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Within it Python's collector leaves alone what there was before: a look at all of it, as it takes now and then,
    holds every thread up for a tenth of a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def first_imports() -> Iterator[None]:
    """Within it, unless torch is there already, Python's collector waits: what is imported lives as long as the
    process, and looking at it again and again takes 0.2 to 0.3 s of a start. Later it leaves all of it alone."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def addresses() -> int | None:
    """Bytes that this process may address (`ulimit -v`); None: without a limit."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def memory_of_group() -> int | None:
    """Bytes that the processes of this one's container, or of its group there (cgroups), may have together; None:
    without a limit."""
    from pathlib import Path

    found = list[int]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            root, name = Path(_CGROUPS), "memory.max"
            if kinds:
                root, name = root / "memory", "memory.limit_in_bytes"
            folder = root / path.lstrip("/")
            for own in (folder, *folder.parents) if kinds in ("", "memory") else ():
                if own.is_relative_to(root):  # of a container this is its own
                    with contextlib.suppress(OSError, ValueError):  # "max"
                        found.append(int((own / name).read_text()))
    return min(found, default=None)


def require_addresses() -> None:
    """`InputError` where the process may address less than what it imports takes: libraries then fail to load, or end
    it with no word of why."""
    limit = addresses()
    if limit is not None and limit < ADDRESSES:
        raise InputError(
            f"this process may address {limit / 2**30:.2f} GiB of memory (ulimit -v); torch alone takes most of 1: "
            "raise the limit, or ulimit -v unlimited"
        )


def thread_limits() -> str:
    """The limits by which no further thread or process starts, and what would be right."""
    import resource

    threads, limit = resource.getrlimit(resource.RLIMIT_NPROC)[0], addresses()
    count = "any number of" if threads == resource.RLIM_INFINITY else f"{threads:,}"
    memory = "any memory" if limit is None else f"{limit / 2**30:.2f} GiB"
    return (
        f"this user may have {count} processes and threads (ulimit -u), this process may address {memory} (ulimit -v), "
        "of which each thread takes a stack: raise the limit that is used up, or the container's own (pids.max)"
    )


def open_files() -> int:
    """That this process may have (`ulimit -n`)."""
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def many_connections() -> None:
    """Let the process have as many files open as it may, each connection being one: most systems begin at 1024."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if 0 <= soft < most:  # not `RLIM_INFINITY`
        with contextlib.suppress(ValueError, OSError):  # a system may have a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Launch(NamedTuple):
    """This process among those that `torchrun` started: its rank, its number on this machine, how many there are."""

    rank: int = 0
    local_rank: int = 0
    processes: int = 1


def several_processes() -> bool:
    """Whether `torchrun` started this process with others."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def by_torchrun() -> bool:
    """Whether `torchrun` watches over this process, and reports its failure too."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def torchrun_follows() -> str:
    """What is to be said below a message, where `torchrun` will have one of its own."""
    return "\n(what torchrun says of it follows, with a traceback of its own)" if by_torchrun() else ""


def launched() -> Launch:
    """What `torchrun` says; rank 0 of 1 without it. `InputError`: a part is missing, no number, or out of range."""
    if not several_processes():
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


def processes_here() -> int:
    """How many of them this machine has. `InputError`: `LOCAL_WORLD_SIZE` is no number."""
    count = os.environ.get("LOCAL_WORLD_SIZE", str(launched().processes))
    if not count.isdecimal() or int(count) < 1:
        raise InputError(
            f"LOCAL_WORLD_SIZE is {count!r}; it must be how many processes this machine has, as torchrun says"
        )
    return int(count)


@contextlib.contextmanager
def told(doing: str) -> Iterator[None]:
    """Where that takes long the first process says so."""
    said = f"still {doing}, {LONG:.0f} s"
    timer = threading.Timer(LONG, print, (said,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if launched().rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def own_gpu() -> None:
    """Let a process of several see its GPU alone, so that it is `cuda:0` in every process and every graph; before
    anything asks CUDA how many there are. Asking again changes nothing."""
    global _own
    launch, given = launched(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if launch.processes == 1 or (launch.local_rank, given) == _own:
        return
    visible = [str(i) for i in range(launch.local_rank + 1)] if given is None else given.split(",")
    own = visible[launch.local_rank] if launch.local_rank < len(visible) else ""
    os.environ["CUDA_VISIBLE_DEVICES"] = own
    _own = launch.local_rank, own


def prepare_nccl(communicators: int = 1) -> None:
    """Set what NCCL needs where CUDA graphs hold collectives; comes before a process group is made.

    Of a graph with collectives of several `communicators` some travel at the same time: a layer's weights while the one
    before shares its products. Left to itself each device picks which of two kernels it starts first, and where others
    pick otherwise all wait for one another. NCCL (2.26 on) starts them in the order in which the host launched or
    recorded them, which is the graph's and so one on all ranks; neither waits for the other's end, where CUDA has
    events for it (12.3 on, in recordings with a driver of 12.9 on). It reads this once a process.

    NVLink multicast is off unless it was set, and buffers are not registered while graphs are recorded: under
    expandable segments that faults. Symmetric memory of several processes is of several GPUs, each of which its process
    knows as the first (`own_gpu`); it has no multicast address either, which is never used.

    Raises:
        InputError: both are asked for.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if communicators > 1:
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    said = {name: os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")}
    allocator = [n for n, text in said.items() if "expandable_segments:true" in text.lower().replace(" ", "")]
    if not allocator:
        return
    for name in ("NCCL_GRAPH_REGISTER", "NCCL_LOCAL_REGISTER", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"):
        if os.environ.get(name, "0").lower() not in ("0", "false", "n", "no"):
            raise InputError(
                f"{name} is {os.environ[name]} and {allocator[0]} has expandable_segments: buffers registered with "
                "NCCL while a CUDA graph is recorded must not lie in expandable segments; unset one of the two"
            )
        os.environ[name] = "0"


_PAGES_FROM = 64 << 20  # bytes that have pages of their own
_REGISTER_PORTABLE = 1


def host_buffer(size: int, pinned: bool) -> torch.Tensor:
    """So many zeros of the host's memory, uint8; pinned where CUDA is to copy to it and from it at the rate of the bus
    and beside its other work, unless there are few. (torch rounds up what it pins itself to a power of two.)
    `InputError`: the system pins no more memory."""
    import weakref
    from concurrent.futures import ThreadPoolExecutor

    import numpy
    import torch

    memory = numpy.zeros(size, numpy.uint8)  # of which the system makes pages as they are touched
    buffer = torch.from_numpy(memory)
    if pinned and size >= _PAGES_FROM:
        with ThreadPoolExecutor(8) as pool:  # pages that are there are pinned much faster
            list(pool.map(torch.Tensor.zero_, buffer.chunk(8)))
        runtime, begin = torch.cuda.cudart(), buffer.data_ptr()
        if int(runtime.cudaHostRegister(begin, size, _REGISTER_PORTABLE)):
            raise InputError(
                f"the system does not pin {size / 2**30:.1f} GiB of the host's memory (ulimit -l); leave "
                "optimizer.offload off, and checkpoint.interval at 0"
            )
        # With the last tensor of any kind that lies in it: a view of another dtype does not keep the tensor it is of.
        weakref.finalize(memory, runtime.cudaHostUnregister, begin).atexit = False
    return buffer
