"""What graphs and checks of them depend on besides a run's configuration: this package, torch, and the machine."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from .driver import driver_version

PACKAGE = Path(__file__).parent.parent
_SUFFIXES = (".py", ".c", ".h", ".json")


@cache
def origin() -> dict[str, str]:
    """By name: a hash of every source file of the package, versions, and the device's kind."""
    gpu = torch.cuda.is_available()
    return {
        "sources": _sources(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": str(torch.version.cuda),
        "driver": driver_version() if gpu else "none",
        "device": torch.cuda.get_device_name() if gpu else torch.backends.cpu.get_cpu_capability(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if gpu else "none",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _sources() -> str:
    found = hashlib.sha256()
    for path in sorted(p for p in PACKAGE.rglob("*") if p.suffix in _SUFFIXES):
        found.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
