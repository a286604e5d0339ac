"""Programmatic dependent launch: a kernel's start overlaps with the end of the one before it on the stream (Hopper on).

A kernel that is launched so waits before its first access to memory that another may have written, until the one
before it is complete (`hopper_async` reads weights sooner, and says when it may). Every such kernel waits, so those
before that one are complete too, and it may let its own dependents start at once: they wait for it in turn. Short
kernels do; matrix products do where the table says that it pays.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton without it
    gdc_wait = gdc_launch_dependents = None

HOPPER = (9, 0)


@triton.jit
def begin(PDL: tl.constexpr):
    """Release the dependents, then wait for the kernel before, if it is launched so."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Of the GPU; (0, 0) where nothing can be launched so."""
    usable = gdc_wait is not None and device.type == "cuda"
    return torch.cuda.get_device_capability(device) if usable else (0, 0)


def supported(x: Tensor) -> bool:
    """Whether kernels on the device of `x` are launched so."""
    return _capability(x.device) >= HOPPER


def has_wgmma(x: Tensor) -> bool:
    """Whether the device of `x` is a Hopper GPU, whose successors have other matrix instructions."""
    return _capability(x.device)[0] == HOPPER[0]


def options(x: Tensor, **others: int) -> dict[str, Any]:
    """Launch options of a forward kernel, which has a `PDL` constant, on the device of `x`; and others. Multiplications
    and additions are fused only where `tl.fma` says so."""
    if supported(x):
        return {"PDL": True, "launch_pdl": True, "enable_fp_fusion": False, **others}
    return {"PDL": False, "enable_fp_fusion": False, **others}
