"""How threads wait and how many there are: chosen before torch is imported, and only where the user did not."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import finished

from lockstep import machine
from lockstep.errors import InputError
from lockstep.machine import MAX_THREADS_WITH_GPU, limit_cpu_threads

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, "PASSIVE 2000"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
        ({"GOMP_SPINCOUNT": "5"}, "None 5"),
        ({"KMP_BLOCKTIME": "0"}, "None None"),
    ],
)
def test_idle_threads_sleep_soon_unless_the_environment_says_how_they_wait(given: dict[str, str], policy: str) -> None:
    program = "import lockstep, os, sys; print(*map(os.environ.get, sys.argv[1:]), 'torch' in sys.modules)"
    inherited = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = finished([sys.executable, "-c", program, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"], env=inherited | given)
    assert done.stdout.split() == [*policy.split(), "False"], done.stderr


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*CHOICES, "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 96)
    before = torch.get_num_threads()
    torch.set_num_threads(96)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("device", "processes", "threads"),
    [("cpu", None, 96), ("cuda", None, MAX_THREADS_WITH_GPU), ("cpu", "4", 24), ("cuda", "4", 8), ("cuda", "32", 3)],
)
def test_processes_share_a_host_and_take_few_threads_beside_a_gpu(
    many_cores: None, monkeypatch: pytest.MonkeyPatch, device: str, processes: str | None, threads: int
) -> None:
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    for _ in range(2):  # another engine in the same process takes as many
        limit_cpu_threads(torch.device(device))
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize("processes", ["x", "", "0", "-1", "1.5"])
def test_a_number_of_processes_that_is_none_is_named(
    many_cores: None, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    with pytest.raises(InputError, match=f"LOCAL_WORLD_SIZE is '{processes}'; it must be how many processes"):
        limit_cpu_threads(torch.device("cpu"))
    assert torch.get_num_threads() == 96


def test_a_number_of_threads_that_was_asked_for_stays(many_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "96")
    limit_cpu_threads(torch.device("cuda"))
    assert torch.get_num_threads() == 96


def test_memory_of_the_host_stays_pinned_as_long_as_a_tensor_lies_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of another dtype is all that its owner may have kept."""
    pinned: set[int] = set()

    def register(address: int, size: int, flags: int) -> int:
        pinned.add(address)
        return 0

    monkeypatch.setattr(machine, "_PINNED_FROM", 4096)
    calls = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.remove)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    first, second = machine.allocate_host_buffer(8192, True).zero_().view(torch.float32).view(2, -1)
    gc.collect()
    assert pinned == {first.data_ptr()}
    del first, second
    gc.collect()
    assert not pinned


def test_threads_take_short_turns_within_a_block() -> None:
    before = sys.getswitchinterval()
    with machine.fast_thread_switching():
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    assert sys.getswitchinterval() == before


def test_a_server_may_have_more_connections_than_a_process_begins_with() -> None:
    program = (
        "import resource; from lockstep.machine import raise_open_files_limit as more; kind = resource.RLIMIT_NOFILE\n"
    )
    program += "hard = resource.getrlimit(kind)[1]; resource.setrlimit(kind, (256, hard)); more()\n"
    program += "print(resource.getrlimit(kind) == (min(hard if hard > 0 else 1 << 16, 1 << 16), hard))"
    done = finished([sys.executable, "-c", program])
    assert done.stdout == "True\n", done.stderr


IMPORTED = """
import gc
from lockstep import machine
seen = []
gc.callbacks.append(lambda phase, info: seen.append(phase))
with machine.pause_gc_for_imports():
    import torch
found = len(seen), gc.isenabled(), gc.get_freeze_count() > 100_000
with machine.pause_gc_for_imports():
    again = gc.isenabled()
gc.disable()
with machine.pause_gc_for_imports():
    pass
print(*found, again, gc.isenabled())
"""


RANK = """
import time
from lockstep.machine import end_with_launcher
end_with_launcher()
print("begun", flush=True)
time.sleep(50)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_process_ends_after_a_launcher_that_was_killed() -> None:
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", LAUNCHER, RANK]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == b"begun\n"
        launcher.kill()
        began = time.monotonic()
        said = launcher.stdout.read().decode()  # until the last process that may write has ended
    assert f"torchrun (process {launcher.pid}) is gone: ending, as by SIGTERM" in said
    assert time.monotonic() - began < 40


def test_the_collector_waits_for_the_first_imports_alone() -> None:
    """Not where torch is there already, and it stays off where the user turned it off."""
    done = finished([sys.executable, "-c", IMPORTED])
    assert done.stdout.split() == ["0", "True", "True", "True", "False"], done.stderr


def test_a_process_may_have_what_its_container_and_its_groups_may(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": "12:cpuset:/x\n4:memory:/job\n0::/slurm/step_0\n",
        "/sys/fs/cgroup/memory.max": "max\n",
        "/sys/fs/cgroup/slurm/memory.max": "7000\n",
        "/sys/fs/cgroup/slurm/step_0/memory.max": "9000\n",
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
    }

    def read(path: Path) -> str:
        try:
            return files[str(path)]
        except KeyError:
            raise FileNotFoundError(path) from None

    monkeypatch.setattr(Path, "read_text", read)
    assert machine.cgroup_memory_limit() == 7000
    files["/sys/fs/cgroup/memory/job/memory.limit_in_bytes"] = "5000\n"
    assert machine.cgroup_memory_limit() == 5000
    files |= {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "6000\n"}  # of a container
    assert machine.cgroup_memory_limit() == 6000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine.cgroup_memory_limit() is None
    files.clear()
    assert machine.cgroup_memory_limit() is None
