"""Keeps captured graphs between processes, in the user's cache folder.

A graph is looked up by what it is (function, statics, inputs, level), and used only if everything that it was made with
is unchanged: the package's sources, torch, the device, the passes, and the constants that its body declares. Otherwise
it is refused, with the differences named, and captured anew; so it is if somebody else could have written the file, or
if the file is truncated or changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ...cache import user_folder
from ..ir.captured import Captured
from .artifact import Unstorable, dumps, loads
from .framed_file import Damaged, pack, unpack

VARIANTS = 4  # files to keep of one graph, by what they were made with
MOST_BYTES = 512 << 20  # limit for the folder
_STALE_S = 3600  # seconds after which an unfinished file is taken to be left by a dead process

Outcome = Literal["loaded", "refused", "absent"]


@dataclass(frozen=True)
class Key:
    """What a graph is, and what it was made with; both by name, as JSON values."""

    name: str
    graph: Mapping[str, Any]
    made_with: Mapping[str, Any]

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"function": self.name, **self.graph}

    @property
    def stem(self) -> str:
        return f"{self.name}-{_digest(self.graph)}-"

    @property
    def file(self) -> str:
        return f"{self.stem}{_digest(self.made_with)}.graph"


@dataclass(frozen=True)
class Lookup:
    """The outcome of a lookup. `file`: the graph's file name, whether found or not. `reasons`: why what was found was
    refused."""

    title: str
    file: str
    outcome: Outcome
    reasons: tuple[str, ...]


class Store:
    """The folder of stored graphs. `lookups`: all lookups so far. `unwritten`: files that could not be written."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or user_folder.cache_folder()) / "graphs"
        self.lookups: list[Lookup] = []
        self.unwritten: set[str] = set()

    def load(self, key: Key, title: str, device: torch.device) -> Captured | None:
        """The graph that was stored under `key`, on `device`, or None."""
        path = self.folder / key.file
        found, reasons = self._read(path, key, device)
        if found is None and not reasons:
            reasons = self._nearest(key)
        outcome: Outcome = "loaded" if found else "refused" if reasons else "absent"
        self.lookups.append(Lookup(title, key.file, outcome, reasons))
        if found is not None:
            with contextlib.suppress(OSError):
                os.utime(path)  # marks it as most recently used
        return found

    def save(self, key: Key, captured: Captured) -> None:
        """Store a graph. If it cannot be serialized, or the folder cannot be written, that is not an error."""
        with contextlib.suppress(Unstorable):
            parts = {"made_with": key.made_with, "key": key.identity}
            described = {name: json.dumps(part).encode() for name, part in parts.items()}
            data = pack({**described, "graph": dumps(captured)})
            if user_folder.write_bytes(self.folder / key.file, data):
                self._evict(key)
            else:
                self.unwritten.add(key.file)

    def size(self, pattern: str = "*") -> int:
        return sum(status.st_size for _, status in self._files(pattern))

    def _read(self, path: Path, key: Key, device: torch.device) -> tuple[Captured | None, tuple[str, ...]]:
        data = user_folder.read_bytes(path)
        if data is None:
            return None, self._foreign(path)
        try:
            sections = unpack(data)
            if differing := _differing(json.loads(sections["made_with"]), key.made_with):
                return None, differing
            if differing := _differing(json.loads(sections["key"]), key.identity):
                return None, tuple(f"{path.name} holds another graph: {field}" for field in differing)
            return loads(sections["graph"], device), ()
        except (Damaged, ValueError, KeyError, TypeError) as error:
            return None, (f"{path.name} is damaged: {error}",)

    def _foreign(self, path: Path) -> tuple[str, ...]:
        """Why an existing file was not read."""
        for place in (path, path.parent):
            with contextlib.suppress(OSError):
                if path.exists() and (why := user_folder.untrusted_reason(place.stat())):
                    return (f"{place} is not trusted: {why}",)
        return ()

    def _nearest(self, key: Key) -> tuple[str, ...]:
        """What differs in the most recent file of this graph that was made with something else."""
        for path, _ in self._files(f"{key.stem}*.graph"):
            with contextlib.suppress(Damaged, ValueError, KeyError, TypeError):
                if data := user_folder.read_bytes(path):
                    return _differing(json.loads(unpack(data)["made_with"]), key.made_with)
        return ()

    def _files(self, pattern: str) -> Iterator[tuple[Path, os.stat_result]]:
        """Files of the folder with their status, most recently used first."""
        for path in user_folder.newest(self.folder, pattern):
            with contextlib.suppress(OSError):
                yield path, path.stat()

    def _evict(self, key: Key) -> None:
        """Delete the least recently used files beyond the limits, and stale unfinished ones."""
        gone = [path for path, _ in list(self._files(f"{key.stem}*.graph"))[VARIANTS:]]
        held = 0
        for path, status in self._files("*"):
            held += status.st_size
            unfinished = path.suffix == ".tmp" and status.st_mtime < time.time() - _STALE_S
            if held > MOST_BYTES or unfinished:
                gone.append(path)
        for path in gone:
            with contextlib.suppress(OSError):
                path.unlink()


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    now = json.loads(json.dumps(now))
    names = sorted(was.keys() | now.keys(), key=lambda name: ("." in name, name))
    pairs = [(name, was.get(name), now.get(name)) for name in names]
    return tuple(f"{name} was {_excerpt(a, b)} and is {_excerpt(b, a)}" for name, a, b in pairs if a != b)


def _excerpt(value: Any, other: Any) -> str:
    """A value as text; of a long one, an excerpt around the first difference from the other."""
    text, differs = repr(value), len(os.path.commonprefix([repr(value), repr(other)]))
    if len(text) <= 40:
        return text
    begin = max(0, min(differs - 10, len(text) - 40))
    end = begin + 40
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
