"""The one fingerprint of all that is kept between processes: this package, torch, and the machine."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent.parent
_SUFFIXES = (".py", ".c", ".h", ".json")


def key(*about: object, device: str = "cuda") -> str:
    """A name for what depends on `about`, each told by its `repr`, and on `origin(device)`: 32 hexadecimal digits."""
    return digest(*about, sorted(origin(device).items()))


def digest(*about: object) -> str:
    """A hash of values, each told by its `repr`: 32 hexadecimal digits."""
    return hashlib.sha256("\n".join(map(repr, about)).encode()).hexdigest()[:32]


def origin(device: str = "cuda") -> dict[str, str]:
    """By name: a hash of every source file of the package, versions, and the device's kind. A GPU that there is none of
    stands for the CPU, and a CPU does not wake a GPU."""
    gpu = device == "cuda" and torch.cuda.is_available()
    return {
        "sources": sources(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": str(torch.version.cuda),
        "driver": _driver() if gpu else "none",
        "device": torch.cuda.get_device_name() if gpu else torch.backends.cpu.get_cpu_capability(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if gpu else "none",
    }


@cache
def sources() -> str:
    """A hash of every source file of the package: Python, C, and tables."""
    found = hashlib.sha256()
    for path in sorted(p for p in PACKAGE.rglob("*") if p.suffix in _SUFFIXES):
        found.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


@cache
def version(distribution: str) -> str:
    """That of an installed distribution, or "none"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def _driver() -> str:
    """The GPU driver's version, by NVML; empty when that is not there."""
    found = ctypes.create_string_buffer(96)
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        nvml.nvmlInit_v2()
        nvml.nvmlSystemGetDriverVersion(found, ctypes.c_uint(len(found)))
        nvml.nvmlShutdown()
    return found.value.decode()
