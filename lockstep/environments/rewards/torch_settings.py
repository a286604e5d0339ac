"""Process-wide settings of torch and floating-point arithmetic, which reward functions must not change for the run."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch


def _flushes_denormals() -> bool:
    return bool(torch.tensor([2.0**-130], dtype=torch.float32, device="cpu").mul(1).eq(0).all())


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _allow_split_products(allow: bool) -> None:
    """Set both halves of the setting, reductions in bfloat16 and split-K; the attribute reads only the former."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (allow, allow)


_libc = ctypes.CDLL(None)  # whose rounding mode libraries of interval arithmetic change

# How to read and write each setting.
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
    (_determinism, lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1])),  # imports compilers
    (lambda: torch.backends.mkldnn.enabled, lambda enabled: setattr(torch.backends.mkldnn, "enabled", enabled)),
    (_flushes_denormals, torch.set_flush_denormal),
    (torch.backends.cuda.preferred_blas_library, torch.backends.cuda.preferred_blas_library),
    (lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction, _allow_split_products),
    (_libc.fegetround, _libc.fesetround),
]


@contextlib.contextmanager
def preserve() -> Iterator[None]:
    """Restore all settings at the end of the context."""
    before, grad = [read() for read, _ in _SETTINGS], torch.is_grad_enabled()
    try:
        with torch.inference_mode(torch.is_inference_mode_enabled()), torch.set_grad_enabled(grad):
            yield
    finally:
        for (read, write), value in zip(_SETTINGS, before, strict=True):
            if read() != value:
                write(value)
