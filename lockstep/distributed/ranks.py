"""The processes of a run and their host-side communication. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import gc
import pickle
import platform
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ..errors import InputError, LockstepError, PeerLost, is_out_of_memory
from . import torch_private
from .mesh import ONE_RANK, Axis, Mesh
from .push.memory import forget_memory, late_words
from .watchdog import WatchedProcess

T = TypeVar("T")
_SAME_PROGRAM = "every process must run the same program on the same inputs"


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True)
class World(WatchedProcess):
    """The processes that train one model together, seen from one of them; a process by itself is rank 0 of 1. All ranks
    make the same calls in the same order. When one is gone, or late by more than the timeout, the others raise
    `PeerLost`.

    Attributes:
        tp: the trainer's tensor-parallel size, of neighbouring ranks; it divides `size`.
        generator_tp: the generator's tensor-parallel size, of neighbouring ranks; it divides `size`.
        pushes: whether the generator's ranks should store into one another's memory if they can (`Axis.pushes`).
        push_unavailable: whether they turned out to be unable to.
        ranks_per_cell: see `Mesh`.
        local_rank: the rank among the processes of this host.
        generator_group: the host-side (gloo) group of the ranks that generate together; None if it generates alone.
    """

    tp: int = 1
    generator_tp: int = 1
    pushes: bool = False
    push_unavailable: bool = False
    ranks_per_cell: int = 1
    local_rank: int = 0
    generator_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    _bound: dict[str, dist.ProcessGroup] = field(default_factory=dict, repr=False, compare=False)  # by name
    _open: weakref.WeakSet[Closable] = field(default_factory=weakref.WeakSet, repr=False, compare=False)

    @cached_property
    def mesh(self) -> Mesh:
        """The trainer's mesh, with this process's place in it."""
        shards, tp = self.size // self.tp, Axis("tp", self.tp, self.rank % self.tp)
        return Mesh(fsdp=Axis("fsdp", shards, self.rank // self.tp), tp=tp, ranks_per_cell=self.ranks_per_cell)

    @cached_property
    def generator_mesh(self) -> Mesh:
        """The generator's mesh: prompts are dealt along `fsdp` to groups of ranks, and the ranks of a group share a
        model along `tp`."""
        ranks, (group, place) = self.generator_tp, divmod(self.rank, self.generator_tp)
        together = Axis("generator_tp", ranks, place, self.pushes and not self.push_unavailable)
        return Mesh(fsdp=Axis("fsdp", self.size // ranks, group), tp=together)

    @cached_property
    def replicas(self) -> Axis:
        """Ranks that hold the same part of the generator's model and have a group for collectives: the trainer's
        `fsdp` axis where `generator_tp` divides `tp`, else this rank alone."""
        return self.mesh.fsdp if self.tp % self.generator_tp == 0 else ONE_RANK.fsdp

    @cached_property
    def leads_group(self) -> bool:
        """Whether this rank is the first of those that generate together, or generates alone."""
        return self.generator_mesh.tp.rank == 0

    @property
    def _group_leader(self) -> int:
        """The first of the ranks that generate together with this one."""
        return self.rank - self.generator_mesh.tp.rank

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes along which graphs of either role have collectives."""
        axes, generator_tp = self.mesh.collective_axes, self.generator_mesh.tp
        return (*axes, generator_tp) if generator_tp.size > 1 else axes

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.axes}

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes the run's files."""
        return self.rank == 0

    def gather(self, value: T, what: str = "a value") -> list[T]:
        """Every rank's value, in rank order, on every rank; values are pickled. `LockstepError` on all ranks if one of
        them gathers something else than `what`: it runs another part of the program."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        with self.detect_lost_peers():
            dist.all_gather_object(gathered, (what, value))
        names = [name for name, _ in gathered]
        if rank := _first_unlike(names):
            raise self.report_on_first(
                LockstepError(f"rank {rank} exchanges {names[rank]} while rank 0 exchanges {names[0]}; {_SAME_PROGRAM}")
            )
        return [found for _, found in gathered]

    def gather_results(
        self, make: Callable[[], T], outline: Callable[[T], T] = lambda value: value, what: str = "what a call returned"
    ) -> list[T]:
        """What `make` returns on each rank, in rank order, on every rank; other ranks receive `outline` of the value
        instead. An exception on any rank is raised on all, and names the rank unless all ranks failed. `what`: as in
        `gather`."""
        if self.size == 1:
            return [make()]
        value, error = _try_call(make)
        outlined = None if value is None else outline(value)
        outcomes = self.gather((outlined, _picklable(error), platform.node()), what)
        failed = [(rank, found, host) for rank, (_, found, host) in enumerate(outcomes) if found is not None]
        if failed:
            rank, found, host = failed[0]
            raised = error if rank == self.rank and error is not None else found
            if isinstance(raised, LockstepError) and len(failed) < self.size:
                raised.args = (f"{raised} (on rank {rank}, {host})",)
            raise self.report_on_first(raised)
        results: list[Any] = [found for found, *_ in outcomes]
        results[self.rank] = value
        return results

    def report_on_first(self, error: Exception) -> Exception:
        """`error`, which every rank raises, marked so that rank 0 alone reports it."""
        return _report_on(error, self.rank == 0)

    def run_on_all(self, make: Callable[[], T]) -> T:
        """What `make` returns on this rank. An exception on any rank is raised on all."""
        here: list[T] = []
        self.gather_results(lambda: here.append(make()))
        return here[0]

    def broadcast_from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns or raises on rank 0, on every rank; the other ranks do not call it."""
        if self.size == 1:
            return make()
        value, error = _try_call(make) if self.is_first else (None, None)
        box: list[Any] = [(value, _picklable(error))]
        with self.detect_lost_peers():
            dist.broadcast_object_list(box, 0)
        if not self.is_first:
            value, error = box[0]
        if error is not None:
            raise self.report_on_first(error)
        return value  # type: ignore[return-value]

    def transfer(
        self, out: Mapping[int, bytearray], sizes: Mapping[int, int], tag: int = 0
    ) -> Callable[[], dict[int, memoryview]]:
        """Start sending `out`, bytes by receiving rank, and receiving `sizes`, byte counts by sending rank. Returns a
        function that waits for both and returns what came, by rank. Concurrent transfers need different tags."""
        came = {rank: bytearray(size) for rank, size in sizes.items()}
        with self.detect_lost_peers():
            works: list[Any] = [dist.irecv(_as_tensor(data), rank, tag=tag) for rank, data in came.items() if data]
            works += [dist.isend(_as_tensor(data), rank, tag=tag) for rank, data in out.items() if data]

        def wait() -> dict[int, memoryview]:
            with self.detect_lost_peers():
                for work in works:
                    work.wait()
            return {rank: memoryview(data) for rank, data in came.items()}

        return wait

    def ranks_of_shard(self, shard: int) -> range:
        """The ranks that train on a shard of a step."""
        first = shard % self.mesh.fsdp.size * self.tp
        return range(first, first + self.tp)

    def broadcast_serialized(
        self, make: Callable[[], T], dumps: Callable[[T], bytes], loads: Callable[[bytes], T]
    ) -> T:
        """What `make` returns or raises on rank 0; other ranks get it through `dumps` and `loads`."""
        if self.size == 1:
            return make()
        here: list[T] = []

        def packed() -> bytes:
            here.append(make())
            return dumps(here[0])

        data = self.broadcast_from_first(packed)
        return here[0] if here else loads(data)

    def broadcast_in_group(self, value: T | None = None) -> T:
        """The `value` that the first of the ranks that generate together passes, on each of them."""
        box: list[Any] = [value]
        if self.generator_group is not None:
            with self.detect_lost_peers():
                dist.broadcast_object_list(box, self._group_leader, self.generator_group)
        return box[0]

    def require_same_in_group(self, what: str, value: object) -> None:
        """Check that the ranks that generate together have equal values; else raise `LockstepError` on each of them."""
        if self.generator_group is None:
            return
        values: list[Any] = [None] * self.generator_tp
        with self.detect_lost_peers():
            dist.all_gather_object(values, value, self.generator_group)
        for place, other in enumerate(values):
            if other != values[0]:
                error = LockstepError(
                    f"ranks {self._group_leader + place} and {self._group_leader} generate together "
                    f"(parallel.generator_tp {self.generator_tp}), and {what} is not the same on both: the run cannot "
                    "go on, as their words belong to different samples"
                )
                raise _report_on(error, self.leads_group)

    def require_same(self, what: str, describe: Callable[[], dict[str, Any]]) -> None:
        """Check that all ranks agree on every value that `describe` returns; else raise `InputError`, which names the
        value, on every rank. An exception of `describe` on any rank is raised on all."""
        if self.size == 1:
            return
        all_described = self.gather_results(describe, what=what)
        names = dict.fromkeys(name for one in all_described for name in one)
        for name in names:
            values = [one.get(name, "missing") for one in all_described]
            if rank := _first_unlike(values):
                on_ranks = f"{values[rank]!r} on rank {rank} and {values[0]!r} on rank 0"
                raise self.report_on_first(InputError(f"{what}: {name} is {on_ranks}; {_SAME_PROGRAM}"))

    @contextlib.contextmanager
    def detect_lost_peers(self) -> Iterator[None]:
        """A context that turns torch's errors about lost or late ranks into `PeerLost`."""
        try:
            yield
        except RuntimeError as error:
            late = late_words()
            lost = torch_private.is_peer_failure(error) or late is not None
            if self.size == 1 or isinstance(error, LockstepError) or is_out_of_memory(error) or not lost:
                raise
            said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            said = said.partition(" This is typically caused by")[0]
            what = "another process of the run is gone, or" if late is None else f"words that rank {late.rank} pushes"
            within = f"within {self.timeout:g} s (parallel.timeout)"
            raise PeerLost(f"rank {self.rank} of {self.size}: {what} did not come {within}: {said}") from error

    def close_on_leave(self, holder: Closable) -> None:
        """Register `holder`, which captured collectives, to be closed before this process leaves, if it still exists.

        A process group cannot be destroyed while a CUDA graph holds its collectives: NCCL waits for the graph.
        """
        if self.size > 1:
            self._open.add(holder)

    def close(self, failed: bool = False) -> None:
        """Leave together, after closing every graph with collectives. With `failed`, do not wait for other ranks."""
        if self.size == 1:
            gc.collect()  # models, caches and graphs are in reference cycles, which would keep their memory
            return
        if failed and self.on_gpu:  # anything more would wait for kernels that wait for a lost rank
            self._unbind_all(memory=False)
            return
        with self.detect_lost_peers(), self.deadline("leaving together"):
            if not failed:
                dist.barrier()
            gc.collect()  # graphs of a discarded runtime may still be alive in reference cycles
            for holder in list(self._open):
                holder.close()
            self._unbind_all()
            dist.destroy_process_group()

    def bind_group(self, axis: Axis, group: dist.ProcessGroup) -> None:
        """Make `group` the one that collectives along `axis` find in graphs."""
        torch_private.name_group(axis.group, group)
        self._bound[axis.group] = group

    def _unbind(self, name: str, memory: bool = True) -> dist.ProcessGroup:
        """Undo `bind_group` and return the group. With `memory`, free its shared memory, which waits for the device."""
        if memory:
            forget_memory(name)
        torch_private.forget_group(name)
        return self._bound.pop(name)

    def destroy_generator_groups(self) -> None:
        """Destroy the groups of the ranks that generate together. Each of them calls this, after closing all graphs
        with collectives of the group, for which NCCL would wait."""
        name = self.generator_mesh.tp.group
        if name in self._bound:
            dist.destroy_process_group(self._unbind(name))
        if self.generator_group is not None:
            dist.destroy_process_group(self.generator_group)

    def _unbind_all(self, memory: bool = True) -> None:
        for name in list(self._bound):
            self._unbind(name, memory)


ONE_PROCESS = World()


def _first_unlike(values: Sequence[Any]) -> int:
    """The first rank whose value is not rank 0's; 0 if there is none."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), 0)


def _report_on(error: Exception, this_rank: bool) -> Exception:
    """`error`, marked as already reported unless this rank is the one that reports it."""
    error.reported = not this_rank  # type: ignore[attr-defined]
    return error


def _as_tensor(data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def _try_call(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What `make` returns, or the exception that it raises. The loss of another rank is raised here instead, since the
    outcome could not be exchanged."""
    try:
        return make(), None
    except Exception as error:
        if isinstance(error, PeerLost) or torch_private.is_peer_failure(error):
            raise
        return None, error


def _picklable(error: Exception | None) -> Exception | None:
    """The exception if it can be pickled, else a `LockstepError` with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return LockstepError(f"{type(error).__name__}: {error}")
    return error
