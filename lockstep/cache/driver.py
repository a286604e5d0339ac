"""The GPU driver's version, on which what is kept between processes depends."""

from __future__ import annotations

import contextlib
import ctypes
import functools


@functools.cache
def driver_version() -> str:
    """The driver's version, by NVML; empty when that is not there."""
    version = ctypes.create_string_buffer(96)
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        nvml.nvmlInit_v2()
        nvml.nvmlSystemGetDriverVersion(version, ctypes.c_uint(len(version)))
        nvml.nvmlShutdown()
    return version.value.decode()
