"""What a reward function may set of torch for the whole process, and must not set for the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """What was set inside is as before afterwards: the default dtype and device, gradients, autocast, the number of
    threads, deterministic algorithms, float32 precision, oneDNN, and whether denormal numbers are flushed."""
    dtype, device, grad = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    autocast = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    only, warns = torch.are_deterministic_algorithms_enabled(), _warns_only()
    onednn, flushes = torch.backends.mkldnn.enabled, _flushes_denormals()
    try:
        yield
    finally:
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        for kind, enabled in autocast.items():
            torch.set_autocast_enabled(kind, enabled)
        if (torch.are_deterministic_algorithms_enabled(), _warns_only()) != (only, warns):  # it imports compilers
            torch.use_deterministic_algorithms(only, warn_only=warns)
        if torch.backends.mkldnn.enabled != onednn:
            torch.backends.mkldnn.enabled = onednn
        if _flushes_denormals() != flushes:
            torch.set_flush_denormal(flushes)


_warns_only = torch.is_deterministic_algorithms_warn_only_enabled


def _flushes_denormals() -> bool:
    return bool(torch.tensor([2.0**-130], dtype=torch.float32, device="cpu").mul(1).eq(0).all())
