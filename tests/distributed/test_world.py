"""Joining, leaving and waiting, as far as one process can show it."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sharing import on_shared_gpus

from lockstep import machine
from lockstep.cache import fingerprint
from lockstep.config import ParallelConfig, RunConfig
from lockstep.distributed import ONE_PROCESS, World, join, torch_private, watchdog
from lockstep.distributed.push import memory
from lockstep.environments.remote import TurnRefused
from lockstep.errors import FieldError, InputError, LockstepError, PeerLost, PromptTooLong
from lockstep.session import processes


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # nothing that is set here reaches other tests
    started = "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
    for name in (*started, "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_LAUNCH_ORDER_IMPLICIT"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_needs_nothing() -> None:
    assert join(ParallelConfig(), "cpu") is ONE_PROCESS is join(ParallelConfig(fsdp=1), "cpu")
    assert (
        ONE_PROCESS.gather(3) == [3]
        and ONE_PROCESS.gather_results(lambda: 4) == [4]
        and ONE_PROCESS.broadcast_from_first(lambda: 5) == 5
    )
    ONE_PROCESS.require_same("this", lambda: {"a": 1})
    ONE_PROCESS.close()


def test_the_number_of_processes_must_be_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"parallel\.fsdp is 2, and there is one process; start it with torchrun"):
        join(ParallelConfig(fsdp=2), "cpu")
    for name, value in {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=r"parallel\.fsdp is 3, and there are 4 processes"):
        join(ParallelConfig(fsdp=3), "cpu")


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="WORLD_SIZE is set and RANK is ''"):
        machine.torchrun_launch()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(InputError, match="RANK is 'one'"):
        machine.torchrun_launch()
    for rank, local_rank, size in (("2", "0", "2"), ("0", "2", "2"), ("0", "0", "0")):
        for name, value in {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=f"RANK is {rank} and LOCAL_RANK {local_rank}, of a WORLD_SIZE of"):
            machine.torchrun_launch()


def test_where_processes_cannot_meet_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def set_up(rank: int, host: str, port: object) -> None:
        given = {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": host, "MASTER_PORT": port}
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))

    for host, port in (("", 1), ("localhost", ""), ("localhost", "abc"), ("localhost", 1 << 16)):
        set_up(0, host, port)
        with pytest.raises(InputError, match=f"MASTER_ADDR is '{host}' and MASTER_PORT '{port}'; torchrun sets them"):
            join(ParallelConfig(timeout=5.0), "cpu")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        set_up(0, "localhost", port)
        with pytest.raises(InputError, match=f"port {port} of this host is taken, .* by MASTER_PORT"):
            join(ParallelConfig(timeout=5.0), "cpu")

    def looks(timeout: object) -> None:
        threading.Event().wait(0.2)
        raise PeerLost("nobody")

    def leave(code: int) -> None:
        assert code == 1

    monkeypatch.setattr(sys.modules["lockstep.distributed.join"], "_store", looks)
    monkeypatch.setattr(watchdog, "GRACE", 0.0)
    monkeypatch.setattr(os, "_exit", leave)
    set_up(1, "no.host", 29500)
    with pytest.raises(PeerLost, match="nobody"):
        join(ParallelConfig(timeout=0.01), "cpu")
    assert "joining the other processes at no.host:29500 (MASTER_ADDR, MASTER_PORT) did not" in capsys.readouterr().err


def test_ranks_of_another_installation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another state of the package would add its gradients to those of this one."""

    class Two(World):
        def gather_results(self, make, what=""):  # what rank 1 has: the same, of a package with another source file
            here = make()
            with monkeypatch.context() as patch:
                patch.setattr(fingerprint, "sources", lambda: "others")
                return [here, make()]

        def report_on_first(self, error):
            return error

        def close(self, failed: bool = False) -> None:
            pass

    monkeypatch.setattr(processes, "join", lambda *_: Two(0, 2, 30.0))
    with (
        pytest.raises(InputError, match="the hash of lockstep's source files is 'others' on rank 1 and "),
        processes.join_processes(RunConfig(device="cpu")),
    ):
        pass


@pytest.mark.parametrize(
    "error",
    [
        FieldError("messages[0]", "messages[0] is empty"),
        PromptTooLong(9, 8),
        TurnRefused("late", "is late"),
        PeerLost("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_reach_other_ranks_as_what_they_are(error: LockstepError) -> None:
    error.reported = True
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error) and str(there) == str(error) and vars(there) == vars(error)


def test_ranks_that_share_gpus_have_one_each_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, gpus, own in ((None, 1, "000"), (None, 2, "010"), ("4,6", 2, "464")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        shared = on_shared_gpus(3, gpus)
        for rank in range(3):
            for name, value in ({"WORLD_SIZE": "3", "RANK": str(rank), "LOCAL_RANK": str(rank)} | shared).items():
                monkeypatch.setenv(name, value)
            machine.restrict_to_local_gpu()
            assert os.environ["CUDA_VISIBLE_DEVICES"] == own[rank]


@pytest.mark.parametrize(
    ("given", "local_rank", "expected"), [(None, 1, "1"), ("4,6", 1, "6"), ("4,6", 0, "4"), ("4", 1, ""), ("", 0, "")]
)
def test_a_process_sees_its_gpu_alone(monkeypatch: pytest.MonkeyPatch, given, local_rank, expected) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": str(local_rank)}.items():
        monkeypatch.setenv(name, value)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    for _ in range(2):  # a script that joins the others again asks again
        machine.restrict_to_local_gpu()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_expandable_segments_and_registered_buffers_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NVLS_ENABLE", "NCCL_GRAPH_REGISTER", "NCCL_LOCAL_REGISTER"):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    monkeypatch.setenv("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "1")
    machine.prepare_nccl()  # no expandable segments
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(InputError, match="TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK is 1 and PYTORCH_CUDA_ALLOC"):
        machine.prepare_nccl()
    monkeypatch.setenv("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "0")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    machine.prepare_nccl()
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"


@pytest.mark.parametrize(
    ("settings", "told"), [({}, None), ({"tp": 4}, None), ({"tp": 2}, "1"), ({"batch_shards": 8, "cell": 2}, "1")]
)
def test_nccl_is_told_to_keep_the_order_of_several_axes(monkeypatch: pytest.MonkeyPatch, settings, told) -> None:
    """Their collectives travel at once (`test_collectives_of_several_axes_travel_at_once`), before any is made."""

    def begin(timeout: object) -> None:
        raise PeerLost("the first look for the others")

    monkeypatch.setattr(sys.modules["lockstep.distributed.join"], "_store", begin)
    for name, value in {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PeerLost, match="the first look"):
        join(ParallelConfig(timeout=60.0, **settings), "cuda")
    assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == told


@pytest.mark.parametrize("failed", [False, True])
def test_after_a_failure_memory_that_waits_for_the_device_is_not_given_back(
    monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """A kernel on it may wait for a rank that is lost, and torch ends a process that gives back a failed device's."""
    forgotten: list[str] = []
    monkeypatch.setattr(torch_private, "forget_group", forgotten.append)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setitem(memory._BY_GROUP, "@generator_tp", SimpleNamespace(late=0))
    world = World(0, 2, 30.0, on_gpu=True)
    world._bound["@generator_tp"] = SimpleNamespace()  # type: ignore[assignment]
    world.close(failed=failed)
    assert forgotten == ["@generator_tp"] and ("@generator_tp" in memory._BY_GROUP) == failed


def test_ranks_that_share_products_train_on_the_same_shards() -> None:
    assert [list(World(size=4, tp=2).ranks_of_shard(shard)) for shard in range(3)] == [[0, 1], [2, 3], [0, 1]]


def test_the_first_of_those_that_generate_together_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    tellers: list[int] = []
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, rank, group: tellers.append(rank))
    for rank in range(4):
        World(rank, 4, generator_tp=2, generator_group=SimpleNamespace()).broadcast_in_group("what")  # type: ignore[arg-type]
    assert tellers == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("hosts", "fault", "told"),
    [
        (["a", "a"], None, ""),
        (["a", "b"], None, "they are of several hosts"),
        (["a", "a"], "CUDA driver error: peer access is not supported", "peer access is not supported"),
    ],
)
def test_ranks_push_words_only_where_all_reach_one_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hosts: list[str], fault: str | None, told: str
) -> None:
    """The other rank finds what this one does."""
    shared: list[str] = []
    reaching: tuple[list[str], str | None] = (hosts, fault)

    def share(name: str, *_: object) -> None:
        fault = reaching[1]
        if fault:
            raise RuntimeError(f"{fault}\nmore of it")
        shared.append(name)

    rooms = sys.modules["lockstep.distributed.join"]
    monkeypatch.setattr(rooms, "share_memory", share)
    monkeypatch.setattr(rooms, "forget_memory", lambda name: shared.clear())
    monkeypatch.setattr(rooms, "allocate_slots", lambda *_: torch.zeros(1))
    for made in ("_bind", "_create_groups"):
        monkeypatch.setattr(rooms, made, lambda *_: None)
    monkeypatch.setattr(World, "gather", lambda _, x: reaching[0] if x == rooms.platform.node() else [x, x])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    world = rooms.join_generator_groups(World(0, 2, 30.0, on_gpu=True, pushes=True), 2)
    assert world.generator_mesh.tp.pushes == (not told) == bool(shared)
    assert ("NCCL moves their words" in caplog.text and told in caplog.text) == bool(told)
    reaching = ["a", "a"], None  # as fewer ranks together may
    assert rooms.join_generator_groups(world, 2).generator_mesh.tp.pushes and shared


def test_what_another_rank_alone_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "gather_results", lambda self, make, what="": [make(), {"a": 1, "b": 2}])
    with pytest.raises(InputError, match=r"the files: b is 2 on rank 1 and 'missing' on rank 0"):
        World(0, 2).require_same("the files", lambda: {"a": 1})


def test_torchs_errors_about_peers_are_told_apart() -> None:
    world = World(0, 2, timeout=30.0)
    lost = r"rank 0 of 2: another process .* within 30 s \(parallel.timeout\): .*gloo"
    with pytest.raises(PeerLost, match=lost), world.detect_lost_peers():
        raise RuntimeError("[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:21")
    with pytest.raises(PeerLost, match="pair closure"), world.detect_lost_peers():
        raise RuntimeError("Application timeout caused pair closure")
    with pytest.raises(RuntimeError, match="shape"), world.detect_lost_peers():
        raise RuntimeError("shape '[3]' is invalid")
    with pytest.raises(RuntimeError, match="out of memory"), world.detect_lost_peers():  # which the plan answers
        raise dist.DistBackendError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'")
    with pytest.raises(RuntimeError, match="gloo"), ONE_PROCESS.detect_lost_peers():
        raise RuntimeError("gloo")


def test_the_rank_whose_words_did_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world, none = World(4, 8, timeout=30.0), torch.empty(0)
    shared = [
        memory.SharedMemory(1, 2, 0, none, none, torch.zeros(1).long(), members=pair) for pair in ((1, 5), (4, 6))
    ]
    monkeypatch.setattr(memory, "_BY_GROUP", dict(zip(("@tp", "@generator_tp"), shared, strict=True)))
    assert memory.late_words() is None
    shared[1].late.fill_(1291 * 2 + 1)
    assert memory.late_words() == (6, "@generator_tp", 1291)
    told = r"^rank 4 of 8: words that rank 6 pushes did not come within 30 s \(parallel.timeout\): CUDA error"
    with pytest.raises(PeerLost, match=told), world.detect_lost_peers():
        raise RuntimeError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize("error", [PeerLost("rank 1 is gone"), RuntimeError("gloo: Timed out waiting 30000ms")])
def test_that_another_rank_is_lost_is_not_shared_with_it(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(World, "gather", lambda self, value: pytest.fail("waits for the lost rank once more"))
    with pytest.raises(type(error), match=str(error)):
        World(0, 2, timeout=30.0).gather_results(fail)


def test_a_wait_that_nothing_ends_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    over = threading.Event()
    monkeypatch.setattr(World, "_give_up", lambda self, doing, seconds: (ended.append(doing), over.set()))
    monkeypatch.setattr("lockstep.distributed.watchdog.GRACE", 0.02)
    with World(0, 2).deadline("the step"):
        assert over.wait(60) and ended == ["the step"]
    with World(0, 2, timeout=60.0).deadline("another"), ONE_PROCESS.deadline("none"):
        pass
    assert ended == ["the step"]


def test_a_wait_that_is_over_leaves_no_thread_that_holds_the_world() -> None:
    before, world = set(threading.enumerate()), World(0, 2, timeout=60.0)
    for wait in (world.deadline, world.rolling_deadline):
        with wait("a step"):
            assert set(threading.enumerate()) - before
        assert not set(threading.enumerate()) - before


def test_launches_that_follow_one_another_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    over = threading.Event()
    monkeypatch.setattr(World, "_give_up", lambda self, doing, seconds: (ended.append(doing), over.set()))
    monkeypatch.setattr("lockstep.distributed.watchdog.GRACE", 0.2)
    now = [0.0]
    monkeypatch.setattr("lockstep.distributed.watchdog.time", SimpleNamespace(monotonic=lambda: now[0]))
    with World(0, 2).rolling_deadline("a launch") as launched:
        for _ in range(8):
            launched()
            now[0] += 0.15
            assert not over.wait(0.04)
        now[0] += 0.15
        assert over.wait(60) and ended[0] == "a launch"
    with ONE_PROCESS.rolling_deadline("none") as launched:
        launched()


def test_a_deadline_is_for_what_was_launched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: waited.append(True))
    on_cpus, on_gpus = World(0, 2, timeout=60.0), World(0, 2, timeout=60.0, on_gpu=True)
    with pytest.raises(ValueError, match="fails"), on_gpus.deadline("a step"):
        raise ValueError("fails")
    with on_cpus.deadline("a step"):
        pass
    assert not waited
    with on_gpus.deadline("a step"):
        pass
    assert waited == [True]
