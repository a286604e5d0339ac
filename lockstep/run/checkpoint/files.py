"""Checkpoint folders, written atomically.

`checkpoints/step_N/` holds `state.json`, tensors as `NAME-00001.safetensors`, ..., and `manifest.json`: each file's
size and SHA-256; no pickles or other executable data. A checkpoint is written to a hidden folder beside its place,
every file fsynced, the manifest last, then renamed; a process killed at any instant leaves earlier ones untouched.

Each of several ranks writes its part, under names with its number, and then a list of its files, which the first rank
waits for. Any number of ranks can read it, each the ranges that it needs (`slices`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...cache.file_hashes import hash_files
from ...cache.tensor_file import Entry, TensorFile, split_by_size
from ...json_file import read_json
from ..metrics import name_read_errors
from .retention import prune, retire, steps

_FORMAT = 1
_SHARD_BYTES = 1 << 30
_STATE, _MANIFEST, _SUFFIX = "state.json", "manifest.json", ".safetensors"
_FILE_LIST = ".written-{}.json"  # a rank's list of its files; deleted when the checkpoint is complete
_WRITERS = 4  # threads

_log = logging.getLogger("lockstep.run.checkpoint")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint whose files have been verified. Tensors are read lazily."""

    path: Path
    step: int
    state: dict[str, Any]
    files: tuple[str, ...]

    def identity(self) -> str:
        """Equal where two processes see the same files: a hash of their sizes and of the manifest, which has their
        digests. Raises `InputError` if one is not there."""
        with name_read_errors(self.path):
            sizes = [(self.path / file).stat().st_size for file in self.files]
            return hashlib.sha256(repr(sizes).encode() + (self.path / _MANIFEST).read_bytes()).hexdigest()

    def slices(self, name: str) -> dict[str, TensorInFile]:
        """The tensors that were saved under `name`, by key. Raises `InputError` if a file cannot be opened: a run
        that goes on may have deleted the checkpoint."""
        from safetensors import safe_open

        found: dict[str, TensorInFile] = {}
        for file in self.files:
            if file.endswith(_SUFFIX) and file.rsplit("-", 1)[0] == name:
                with name_read_errors(self.path):
                    opened = safe_open(self.path / file, framework="pt", device="cpu").__enter__()
                found |= {key: TensorInFile(opened, key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
        return found

    def parts(self, name: str) -> list[dict[str, TensorInFile]]:
        """Each rank's own tensors of `name`, without the replicated ones, by rank; all of them if one process saved."""
        ranks = {found[1] for file in self.files if (found := re.fullmatch(rf"{name}\.(\d+)-\d+{_SUFFIX}", file))}
        return [self.slices(part_name(name, rank)) for rank in range(len(ranks))] or [self.slices(name)]

    def by_rank(self, name: str) -> dict[str, Tensor | list[TensorInFile]]:
        """The tensors of `name`. A sharded one is a list of all ranks' parts, which are read as they are copied."""
        parts, alike = self.parts(name), self.slices(name)
        found: dict[str, Tensor | list[TensorInFile]] = {key: [part[key] for part in parts] for key in parts[0]}
        return {key: tensor[:] for key, tensor in alike.items() if key not in found} | found


def part_name(name: str, rank: int) -> str:
    return f"{name}.{rank}"


class TensorInFile:
    """A tensor in a safetensors file; slices are read on demand."""

    def __init__(self, opened: Any, key: str) -> None:
        self._rows = opened.get_slice(key)
        self.shape: list[int] = self._rows.get_shape()

    def __getitem__(self, part: slice) -> Tensor:
        return self._rows[part]


def create_temporary(folder: Path, step: int) -> Path:
    """A new hidden folder beside the checkpoint's place."""
    temporary = folder.absolute() / f".tmp-step_{step}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def write_part(temporary: Path, rank: int, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write a rank's tensors to the disk, and then the list of its files with their sizes and digests."""
    files = {}
    for stem, given in tensors.items():
        sizes = ((key, tensor.nbytes) for key, tensor in given.items())
        for index, keys in enumerate(split_by_size(sizes, _SHARD_BYTES), start=1):
            files[f"{stem}-{index:05d}{_SUFFIX}"] = {key: given[key] for key in keys}
    with ThreadPoolExecutor(_WRITERS) as pool:
        written = list(pool.map(lambda item: _write_file(temporary / item[0], item[1]), files.items()))
    partial = temporary / f".{_FILE_LIST.format(rank)}"
    _write_text(partial, as_json(dict(zip(files, written, strict=True))))
    partial.rename(temporary / _FILE_LIST.format(rank))


def read_file_list(temporary: Path, rank: int) -> dict[str, Any] | None:
    path = temporary / _FILE_LIST.format(rank)
    return read_json(path) if path.exists() else None


def complete(target: Path, temporary: Path, state: str, lists: list[dict[str, Any]], keep_last: int) -> None:
    """Write the state and the manifest of all ranks' files, rename the folder to its place, and delete old ones."""
    for rank in range(len(lists)):
        (temporary / _FILE_LIST.format(rank)).unlink()
    _write_text(temporary / _STATE, state)
    files = hash_files(temporary, [_STATE]) | {name: entry for of_rank in lists for name, entry in of_rank.items()}
    for name in files:  # raises if a file is missing: another machine may have written to a folder of the same name
        (temporary / name).stat()
    step = int(target.name.removeprefix("step_"))
    manifest = _with_digest({"format": _FORMAT, "step": step, "files": dict(sorted(files.items()))})
    _write_text(temporary / _MANIFEST, as_json(manifest))
    _fsync(temporary)
    if target.exists():  # usually a damaged checkpoint of the same step
        retire(target)
    os.rename(temporary, target)
    _fsync(target.parent)
    prune(target.parent, step, keep_last)


def latest(folder: Path, most: int | None = None) -> LoadedCheckpoint | None:
    """The newest checkpoint in `folder`, of at most `most` steps, whose every file is as it was written, or None.
    Damaged ones are skipped with a warning that gives the reason."""
    for step in reversed([step for step in steps(folder) if most is None or step <= most]):
        path = folder / f"step_{step}"
        try:
            return _load_verified(path, step)
        except _Damaged as error:
            _log.warning("skipped damaged checkpoint %s: %s", path, error)
    return None


class _Damaged(Exception):
    """Why a checkpoint is not as it was written."""


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    file = TensorFile(path, {key: Entry.of(tensor) for key, tensor in tensors.items()})
    digest = hashlib.sha256(file.header)
    file.create()
    with file.open() as opened:
        for name in file.names:
            opened.write(name, 0, tensors[name].flatten(), also=digest.update)
        opened.flush()
    return {"size": file.size, "sha256": digest.hexdigest()}


def as_json(value: dict[str, Any]) -> str:
    """`value` as JSON text. Raises `ValueError` for NaN and infinities."""
    return json.dumps(value, allow_nan=False, indent=1) + "\n"


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _fsync(path)


def _with_digest(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with its own digest, so that damage to the manifest is detected too."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return body | {"sha256": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()}


def _load_verified(path: Path, step: int) -> LoadedCheckpoint:
    try:
        manifest = read_json(path / _MANIFEST)
        if manifest != _with_digest(manifest):
            raise _Damaged(f"{_MANIFEST} does not have its own digest")
        if (manifest["format"], manifest["step"]) != (_FORMAT, step):
            raise _Damaged(f"{_MANIFEST} is for format {manifest['format']}, step {manifest['step']}")
        files = manifest["files"]
        for name, entry in files.items():  # sizes first, which are cheap to check
            size = (path / name).stat().st_size
            if size != entry["size"]:
                raise _Damaged(f"{name} has {size} bytes; {entry['size']} were written")
        for name, found in hash_files(path, list(files)).items():
            if found != files[name]:
                raise _Damaged(f"{name} does not have the SHA-256 it was written with")
        state = read_json(path / _STATE)
    except FileNotFoundError as error:
        raise _Damaged(f"{Path(error.filename).name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from error
    return LoadedCheckpoint(path=path, step=step, state=state, files=tuple(files))


def _fsync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
