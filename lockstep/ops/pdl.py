"""Programmatic dependent launch (PDL): a kernel starts while the previous one on the stream ends (Hopper and later).

A kernel launched this way waits for the previous kernel to complete before it first accesses memory that another kernel
may have written (`hopper_async` reads weights sooner, and says when it may). Every such kernel waits, so all earlier
ones are complete too, and it may let its own dependents start at once: they wait in turn. Short kernels do; matrix
products do where the table of measurements says that it pays.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = (9, 0)


@triton.jit
def release_and_wait(PDL: tl.constexpr, LATE: tl.constexpr = False):
    """With PDL, release the dependents, then wait for the previous kernel; if LATE, the other way round."""
    if PDL:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()
        if LATE:
            gdc_launch_dependents()


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Of the GPU; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def is_supported(x: Tensor) -> bool:
    """Whether kernels on the device of `x` are launched with PDL."""
    return _capability(x.device) >= HOPPER


def has_wgmma(x: Tensor) -> bool:
    """Whether the device of `x` is a Hopper GPU, whose successors have other matrix instructions."""
    return _capability(x.device)[0] == HOPPER[0]


def options(x: Tensor, **others: int) -> dict[str, Any]:
    """Launch options of a forward kernel with a `PDL` constant on the device of `x`, and `others`. Multiplications and
    additions are fused only where `tl.fma` says so."""
    pdl = {"PDL": True, "launch_pdl": True} if is_supported(x) else {"PDL": False}
    return {**pdl, "enable_fp_fusion": False, **others}
