"""Reads the files that tracing imports into memory, as importing them one after another takes seconds where no process
has read them before. Names private packages of torch 2.11 to 2.13."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

# What `import_tracer` and the first trace import, subpackages included.
_TORCH = ("_dynamo", "_export", "_functorch", "_inductor", "_numpy", "distributed", "export", "fx", "onnx")
_PACKAGES = ("mpmath", "networkx", "sympy", *(f"torch.{name}" for name in _TORCH))
_READERS = 16  # threads, which mostly wait for the disk


def read_tracer_ahead() -> None:
    """Begin to read the files that tracing imports, on threads of their own. Errors are left to the import."""
    Thread(target=_read_all, daemon=True).start()


def _read_all() -> None:
    found: SimpleQueue[tuple[Path, list[str]] | None] = SimpleQueue()
    for _ in range(_READERS):  # no pool's threads, for which a process that ends would wait
        Thread(target=_read_found, args=(found,), daemon=True).start()
    try:
        for item in tracer_sources():
            found.put(item)
    finally:
        for _ in range(_READERS):
            found.put(None)


def _read_found(found: SimpleQueue[tuple[Path, list[str]] | None]) -> None:
    while (item := found.get()) is not None:
        _read(*item)


def tracer_sources() -> Iterator[tuple[Path, list[str]]]:
    """Folders of the packages that tracing imports, and the Python files in each."""
    for package in _PACKAGES:
        with suppress(ImportError, ValueError):  # it is missing, or something else has its name
            spec = find_spec(package)
            for root in (spec and spec.submodule_search_locations) or ():
                for folder, subfolders, files in os.walk(root):
                    subfolders[:] = [name for name in subfolders if name not in ("__pycache__", "tests")]
                    yield Path(folder), [name for name in files if name.endswith(".py")]


def _read(folder: Path, sources: list[str]) -> None:
    """Read what importing these files would: the times of the sources, and the bytecode or, without it, the source."""
    for name in sources:
        source = os.path.join(folder, name)
        with suppress(OSError):
            os.stat(source)
            bytecode = cache_from_source(source)
            with open(bytecode if os.path.exists(bytecode) else source, "rb", buffering=0) as file:
                file.read()
