"""Which ways to capture, run and record graphs go together."""

from __future__ import annotations

from dataclasses import replace

from ..errors import InputError
from .fields import CompileConfig

# The CUDA graph modes that work under (capture, backend), or why nothing does; docs/compile.md shows this table.
CUDAGRAPH_MODES: dict[tuple[str, str], tuple[str, ...] | str] = {
    ("none", "none"): ("none",),
    ("none", "eager"): "it has no graph to run; set compile.capture to step, or compile.backend to none",
    ("step", "none"): "nothing would run the captured graphs; set compile.backend to eager, or compile.capture to none",
    ("step", "eager"): ("none", "piecewise", "full", "full_and_piecewise"),
}


def resolve_compile(c: CompileConfig, on_gpu: bool) -> CompileConfig:
    """`c` with what was left to the device filled in; `InputError` for a combination that cannot work."""
    capture = c.capture or ("step" if on_gpu and c.backend != "none" else "none")
    mode = c.cudagraph_mode or ("full" if on_gpu and capture != "none" else "none")
    c = replace(c, capture=capture, cudagraph_mode=mode)
    _check_compile(c, capture)
    return c


def _check_compile(c: CompileConfig, capture: str) -> None:
    backend = ("none" if c.capture == "none" else "eager") if c.backend == "auto" else c.backend
    modes = CUDAGRAPH_MODES[capture, backend]
    if isinstance(modes, str):
        raise InputError(f"compile.backend is {backend} with compile.capture {c.capture}: {modes}")
    if c.cudagraph_mode not in modes:
        raise InputError(
            f"compile.cudagraph_mode is {c.cudagraph_mode}: CUDA graphs are recorded from captured graphs; set "
            f"compile.capture to step, or use {' or '.join(modes)}"
        )
    if c.capture == "none" and replace(c, backend="auto") != CompileConfig("none", "none"):
        raise InputError(
            "compile: canonicalize, recompute, activation_memory_gib, verify, reshard_after_forward, "
            "bucket_collectives and reorder_collectives act on captured graphs; set compile.capture to step"
        )
