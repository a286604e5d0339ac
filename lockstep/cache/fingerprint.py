"""The fingerprint that everything kept between processes depends on: this package, torch, and the machine."""

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

_SETTINGS = (  # environment variables that affect the order of sums in libraries, or the code that Triton compiles
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT"),
    *("CUBLASLT_WORKSPACE_SIZE", "TRITON_DEFAULT_FP_FUSION", "TRITON_FORCE_DISABLE_FP_FUSION", "TRITON_F32_DEFAULT"),
    *("PTXAS_OPTIONS", "TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH", "TRITON_OVERRIDE_ARCH", "TRITON_KERNEL_OVERRIDE"),
    *("DISABLE_PTXAS_OPT", "DISABLE_LLVM_OPT", "DISABLE_MMA_V3"),
)
_log = logging.getLogger("lockstep.cache")


def key(*about: object, device: str = "cuda") -> str:
    """A key, 32 hexadecimal digits, for what depends on `about` (values by their `repr`) and on `origin(device)`. If
    `is_modified`, the key is random, so nothing is found under it now or later."""
    of_files = [os.urandom(16)] if is_modified() else []
    return digest(*about, sorted(origin(device).items()), *of_files)


@cache
def is_modified() -> bool:
    """Whether the running package differs from its files (`loaded_code.find_difference`), logged once. Then the
    fingerprint does not describe it, so no cache may be read or written. The answer is cached until `recheck_code`."""
    if found := loaded_code.find_difference():
        _log.warning("%s: nothing that other starts kept is used, and nothing is kept", found)
    return found is not None


def recheck_code() -> None:
    """Let `is_modified` check files and code again, before something is made that will be kept."""
    is_modified.cache_clear()


def digest(*about: object) -> str:
    """A hash of values by their `repr`: 32 hexadecimal digits."""
    return hashlib.sha256("\n".join(map(repr, about)).encode()).hexdigest()[:32]


def origin(device: str = "cuda") -> dict[str, str]:
    """By name: a hash of the package's source files, versions, settings, and the kind of device. "cuda" means the CPU
    if there is no GPU; for "cpu" CUDA is not initialized."""
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
    """A hash of the package's source files (`loaded_code.files`)."""
    found = hashlib.sha256()
    for path in loaded_code.files():
        found.update(str(path.relative_to(loaded_code.PACKAGE)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


@cache
def version(distribution: str) -> str:
    """The version of an installed distribution, or "none"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def _driver() -> str:
    """The GPU driver's version from NVML; empty if that is missing."""
    found = ctypes.create_string_buffer(96)
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        nvml.nvmlInit_v2()
        nvml.nvmlSystemGetDriverVersion(found, ctypes.c_uint(len(found)))
        nvml.nvmlShutdown()
    return found.value.decode()
