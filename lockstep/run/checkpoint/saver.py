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
from ...machine import allocate_host_buffer
from ..metrics import name_write_errors
from . import files

_POLL_S = 0.02  # seconds between polls for the other ranks' lists
_CLOSE_TIMEOUT_S = 20.0  # seconds that one of several processes waits when it must end; launchers kill after 30
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
        self._writer: _WriterThread | None = None

    def save(self, step: int, tensors: Tensors, state: dict[str, Any]) -> None:
        """Copy this rank's part of a checkpoint and begin to write it; waits for the previous one first. `tensors`, on
        any device, are by the name of their file, which differs between ranks, and then by key. `state`, of which only
        the first rank's is written, must survive JSON unchanged: string keys, no tuples, no NaN."""
        self.wait()
        target = self._folder / f"step_{step}"

        def begin() -> tuple[Path, str]:
            with name_write_errors(f"checkpoint {target}"):
                return files.create_temporary(self._folder, step), files.as_json(state)

        temporary, words = self.world.broadcast_from_first(begin)
        self._writer = _WriterThread(
            self, target, temporary, self._copy_to_host(tensors) if self.copies else tensors, words
        )
        self._writer.start()
        if not self.copies:
            self.wait()

    def raise_if_failed(self) -> None:
        """Raise the error of the checkpoint that is being written, if there is one."""
        if self._writer is not None and all(self._on_all_ranks(self._writer.has_ended)):
            self._writer = None

    def wait(self) -> None:
        if self._writer is not None:
            # First, so that a rank that failed raises: the first would wait for its list.
            self._on_all_ranks(self._writer.wait_for_own)
            self._on_all_ranks(self._writer.wait)
            self._writer = None

    def close(self, error: BaseException | None) -> None:
        """After `error` on this rank, which makes no further calls: give the checkpoint being written the remaining
        time. If it fails, its files are removed, since the run's last files may need the disk space."""
        writer = self._writer
        if writer is None or error is None:
            return
        if isinstance(error, PeerLost):
            writer.stop_waiting()
        writer.join(None if self.world.size == 1 else _CLOSE_TIMEOUT_S)
        try:
            if writer.has_ended():
                writer.discard()
        except Exception as write_error:
            _log.warning("%s", write_error)  # not raised: `error` is what ended the run
            writer.discard()

    def _copy_to_host(self, tensors: Tensors) -> Tensors:
        """Copies of the tensors in the host buffer (pinned if any tensor is on a GPU), valid until the next call. Waits
        for all launched work and for the copies."""
        sources = [tensor for group in tensors.values() for tensor in group.values()]
        sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in sources]
        on_gpu = any(tensor.is_cuda for tensor in sources)
        if self._buffer.numel() < sum(sizes):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating a new one
            self._buffer = allocate_host_buffer(sum(sizes), on_gpu)
        copies, begin = [], 0
        for tensor, size in zip(sources, sizes, strict=True):
            copies.append(self._buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            begin += size
            if tensor.is_cuda:
                copies[-1].copy_(tensor.detach(), non_blocking=True)
        with ThreadPoolExecutor(_COPIERS) as pool:
            list(pool.map(lambda pair: pair[0].copy_(pair[1]), _host_parts(copies, sources)))
        if on_gpu:
            torch.cuda.synchronize()
        remaining = iter(copies)
        return {name: {key: next(remaining) for key in group} for name, group in tensors.items()}

    def _on_all_ranks(self, call: Any) -> list[Any]:
        try:
            return self.world.gather_results(call)
        except BaseException as error:
            if self._writer is not None and not isinstance(error, KeyboardInterrupt):
                self._writer.discard()
                self._writer = None
            raise


class _WriterThread(threading.Thread):
    """Writes a rank's part of a checkpoint; on the first rank, then waits for all parts and completes it."""

    def __init__(self, saver: Saver, target: Path, temporary: Path, tensors: Tensors, state: str) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._saver, self._target, self._temporary = saver, target, temporary
        self._tensors, self._state = tensors, state
        self._own_written, self._stopped = threading.Event(), threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        saver, rank = self._saver, self._saver.world.rank
        try:
            with name_write_errors(f"checkpoint {self._target}"):
                if rank < saver.writers:
                    files.write_part(self._temporary, rank, self._tensors)
                self._own_written.set()
                if rank == 0 and (lists := self._wait_for_lists()):
                    files.complete(self._target, self._temporary, self._state, lists, saver.keep_last)
        except Exception as error:
            self._error = error
        finally:
            self._own_written.set()

    def _wait_for_lists(self) -> list[dict[str, Any]]:
        """The lists of all ranks' files, once all exist; empty if the wait is given up."""
        found = list[dict[str, Any]]()
        while len(found) < self._saver.writers:
            if (one := files.read_file_list(self._temporary, len(found))) is not None:
                found.append(one)
            elif self._stopped.wait(_POLL_S):
                return []
        return found

    def has_ended(self) -> bool:
        alive = self.is_alive()
        if self._error is not None:
            raise self._error
        return not alive

    def wait_for_own(self) -> None:
        """Wait until this rank has written its files; raise the error if it failed."""
        self._own_written.wait()
        self.has_ended()

    def wait(self) -> None:
        """Wait until the thread has ended; raise the error if it failed."""
        self.join()
        self.has_ended()

    def stop_waiting(self) -> None:
        """Stop waiting for other ranks."""
        self._stopped.set()

    def discard(self) -> None:
        self.stop_waiting()
        self.join()
        if self._saver.world.is_first:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _host_parts(copies: Sequence[Tensor], tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of copy and tensor for the tensors on the host, in parts for several threads."""
    for copy, tensor in zip(copies, tensors, strict=True):
        if not tensor.is_cuda:
            yield from zip(copy.flatten().split(_PART), tensor.detach().flatten().split(_PART), strict=True)
