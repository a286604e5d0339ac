"""The one fingerprint of all that is kept between processes: this package, torch, and the machine."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
from functools import cache
from importlib import metadata

import torch

from . import loaded_code

_SETTINGS = (  # of the environment, by which libraries choose how they add, and Triton what it compiles
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT"),
    *("CUBLASLT_WORKSPACE_SIZE", "TRITON_DEFAULT_FP_FUSION", "TRITON_FORCE_DISABLE_FP_FUSION", "TRITON_F32_DEFAULT"),
    *("PTXAS_OPTIONS", "TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH", "TRITON_OVERRIDE_ARCH", "TRITON_KERNEL_OVERRIDE"),
    *("DISABLE_PTXAS_OPT", "DISABLE_LLVM_OPT", "DISABLE_MMA_V3"),
)
_log = logging.getLogger("lockstep.cache")


def key(*about: object, device: str = "cuda") -> str:
    """A name for what depends on `about`, each told by its `repr`, and on `origin(device)`: 32 hexadecimal digits.
    Nothing has it that was kept, or will be found, where `changed`."""
    of_files = [os.urandom(16)] if changed() else []
    return digest(*about, sorted(origin(device).items()), *of_files)


@cache
def changed() -> bool:
    """Whether the package that runs is not that of its files (`loaded_code.difference`), said once. What is kept for
    another start, or was, is then not this package's. Asked once until `look_again`."""
    if found := loaded_code.difference():
        _log.warning("%s: nothing that other starts kept is used, and nothing is kept", found)
    return found is not None


def look_again() -> None:
    """Ask again of the files and of the package's code: when what will be kept is about to be made."""
    changed.cache_clear()


def digest(*about: object) -> str:
    """A hash of values, each told by its `repr`: 32 hexadecimal digits."""
    return hashlib.sha256("\n".join(map(repr, about)).encode()).hexdigest()[:32]


def origin(device: str = "cuda") -> dict[str, str]:
    """By name: a hash of every source file of the package, versions, settings, and the device's kind. A GPU that there
    is none of stands for the CPU, and a CPU does not wake a GPU."""
    gpu = device == "cuda" and torch.cuda.is_available()
    return {
        "sources": sources(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": str(torch.version.cuda),
        "driver": _driver() if gpu else "none",
        "device": torch.cuda.get_device_name() if gpu else torch.backends.cpu.get_cpu_capability(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if gpu else "none",
        "settings": " ".join(f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ),
    }


@cache
def sources() -> str:
    """A hash of every source file of the package: Python, C, and tables."""
    found = hashlib.sha256()
    for path in loaded_code.files():
        found.update(str(path.relative_to(loaded_code.PACKAGE)).encode() + b"\0" + path.read_bytes())
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
