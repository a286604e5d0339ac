"""Saving while the run continues: a step waits until its state is copied to host memory, and a thread writes the copy.
The buffer for the copy is reused, so there is one save at a time."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...distributed import World
from ...errors import PeerLost
from ...machine import host_buffer
from ..metrics import writing
from . import files

_LOOK = 0.02  # seconds between polls for the other ranks' lists
_LEAVE = 20.0  # seconds that one of several processes waits when it must end; launchers kill after 30
_ALIGNED = 64  # bytes
_COPIERS, _PART = 8, 1 << 24  # threads that copy tensors already on the host, and elements per copy

_log = logging.getLogger("lockstep.run.checkpoint")

Tensors = Mapping[str, Mapping[str, Tensor]]


class Saver:
    """Saves the checkpoints of a run in `folder`. Every rank makes the same calls, and each call raises on all ranks
    what writing raised on any: `LockstepError` for a disk error. Earlier checkpoints are then untouched. `shared`: all
    ranks see the folder; else only the first writes."""

    copies = True  # whether every rank has memory for a copy; else a save waits until it is written

    def __init__(self, folder: Path, keep_last: int, world: World, shared: bool) -> None:
        self._folder, self.keep_last, self.world = folder, keep_last, world
        self.writers = world.size if shared else 1
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._writing: _Writing | None = None

    def save(self, step: int, tensors: Tensors, state: dict[str, Any]) -> None:
        """Copy this rank's part of a checkpoint and begin to write it; waits for the previous one first. `tensors`, on
        any device, are by the name of their file, which differs between ranks, and then by key. `state`, of which only
        the first rank's is written, must survive JSON unchanged: string keys, no tuples, no NaN."""
        self.wait()
        target = self._folder / f"step_{step}"

        def begin() -> tuple[Path, str]:
            with writing(f"checkpoint {target}"):
                return files.begun(self._folder, step), files.as_json(state)

        temporary, words = self.world.broadcast_from_first(begin)
        self._writing = _Writing(self, target, temporary, self._copied(tensors) if self.copies else tensors, words)
        self._writing.start()
        if not self.copies:
            self.wait()

    def look(self) -> None:
        """Raise the error of the checkpoint that is being written, if there is one."""
        if self._writing is not None and all(self._all(self._writing.ended)):
            self._writing = None

    def wait(self) -> None:
        if self._writing is not None:
            self._all(self._writing.wait_for_own)  # so that a rank that failed raises; the first would wait for it
            self._all(self._writing.wait)
            self._writing = None

    def leave(self, error: BaseException | None) -> None:
        """After `error` on this rank, which makes no further calls: give the checkpoint being written the remaining
        time. If it fails, its files are removed, since the run's last files may need the disk space."""
        if (writing := self._writing) is not None and error is not None:
            if isinstance(error, PeerLost):
                writing.give_up()
            writing.join(None if self.world.size == 1 else _LEAVE)
            try:
                if writing.ended():
                    writing.discard()
            except Exception as refused:
                _log.warning("%s", refused)  # not raised: `error` is what ended the run
                writing.discard()

    def _copied(self, tensors: Tensors) -> Tensors:
        """Copies of the tensors in the host buffer (pinned if any tensor is on a GPU), valid until the next call. Waits
        for all launched work and for the copies."""
        every = [tensor for group in tensors.values() for tensor in group.values()]
        sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in every]
        on_gpu = any(tensor.is_cuda for tensor in every)
        if self._buffer.numel() < sum(sizes):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating a new one
            self._buffer = host_buffer(sum(sizes), on_gpu)
        rooms = iter(self._buffer[: sum(sizes)].split(sizes) if sizes else ())
        copies = {
            name: {
                key: next(rooms)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for key, tensor in group.items()
            }
            for name, group in tensors.items()
        }
        there = [copy for group in copies.values() for copy in group.values()]
        for copy, tensor in zip(there, every, strict=True):
            if tensor.is_cuda:
                copy.copy_(tensor.detach(), non_blocking=True)
        with ThreadPoolExecutor(_COPIERS) as pool:
            list(pool.map(lambda pair: pair[0].copy_(pair[1]), _host_parts(there, every)))
        if on_gpu:
            torch.cuda.synchronize()
        return copies

    def _all(self, call: Any) -> list[Any]:
        try:
            return self.world.gather_results(call)
        except BaseException as error:
            if self._writing is not None and not isinstance(error, KeyboardInterrupt):
                self._writing.discard()
                self._writing = None
            raise


class _Writing(threading.Thread):
    """Writes a rank's part of a checkpoint; on the first rank, then waits for all parts and completes it."""

    def __init__(self, saver: Saver, target: Path, temporary: Path, tensors: Tensors, state: str) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._saver, self._target, self._temporary, self._tensors, self._state = (
            saver,
            target,
            temporary,
            tensors,
            state,
        )
        self._own, self._over = threading.Event(), threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        saver, rank = self._saver, self._saver.world.rank
        try:
            with writing(f"checkpoint {self._target}"):
                if rank < saver.writers:
                    files.write_part(self._temporary, rank, self._tensors)
                self._own.set()
                if rank == 0 and (lists := self._lists()):
                    files.finish(self._target, self._temporary, self._state, lists, saver.keep_last)
        except Exception as error:
            self._error = error
        finally:
            self._own.set()

    def _lists(self) -> list[dict[str, Any]]:
        """The lists of all ranks' files, once all exist; empty if the wait is given up."""
        found = list[dict[str, Any]]()
        while len(found) < self._saver.writers:
            if (one := files.list_of(self._temporary, len(found))) is not None:
                found.append(one)
            elif self._over.wait(_LOOK):
                return []
        return found

    def ended(self) -> bool:
        alive = self.is_alive()
        if self._error is not None:
            raise self._error
        return not alive

    def wait_for_own(self) -> None:
        """Wait until this rank has written its files; raise the error if it failed."""
        self._own.wait()
        self.ended()

    def wait(self) -> None:
        """Wait until the thread has ended; raise the error if it failed."""
        self.join()
        self.ended()

    def give_up(self) -> None:
        """Stop waiting for other ranks."""
        self._over.set()

    def discard(self) -> None:
        self.give_up()
        self.join()
        if self._saver.world.is_first:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _host_parts(copies: Sequence[Tensor], tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of copy and tensor for the tensors on the host, in parts for several threads."""
    for copy, tensor in zip(copies, tensors, strict=True):
        if not tensor.is_cuda:
            yield from zip(copy.flatten().split(_PART), tensor.detach().flatten().split(_PART), strict=True)
