"""Section `compile`: which ways to capture, run and record graphs go together."""

from dataclasses import dataclass, fields, replace
from typing import Literal

from ...errors import InputError
from .section import Section, at_least, refuse

_ALL_MODES = ("none", "piecewise", "full", "full_and_piecewise")
_NO_GRAPH = "it has no graph to run; set compile.capture to step, or compile.backend to none"
_NO_BACKEND = "nothing would run what is captured; set compile.backend to eager, or compile.capture to none"

# The CUDA graph modes that work under (capture, backend), or why nothing does; docs/compile.md shows this table.
CUDAGRAPH_MODES: dict[tuple[str, str], tuple[str, ...] | str] = {
    ("none", "none"): ("none",),
    ("none", "eager"): _NO_GRAPH,
    ("none", "inductor"): _NO_GRAPH,
    ("step", "none"): _NO_BACKEND,
    ("step", "eager"): _ALL_MODES,
    ("step", "inductor"): _ALL_MODES,
    ("joint", "none"): _NO_BACKEND,
    ("joint", "eager"): _ALL_MODES,
    ("joint", "inductor"): _ALL_MODES,
    ("layer", "none"): _NO_BACKEND,
    ("layer", "eager"): ("none",),
    ("layer", "inductor"): ("none",),
}
GRAPHS = ("step", "joint")  # what captures whole functions, for passes to act on


@dataclass(frozen=True)
class CompileConfig(Section):
    """Captured graphs, in both roles. They compute the same bits as without; only backend inductor changes some."""

    capture: Literal["none", "step", "joint", "layer"] | None = None
    """step: trace forward_backward, optim_step and decode into graphs. joint: the same, with forward and backward pass
    cut by the min-cut partitioner. layer: compile the model's layers one by one. none: call the model. Left out: step
    on a GPU, none on a CPU."""
    cudagraph_mode: Literal["none", "piecewise", "full", "full_and_piecewise"] | None = None
    """Record captured graphs as CUDA graphs and replay them (GPU only). full: each whole. piecewise: in pieces around
    attention, which runs between them. full_and_piecewise: whole for the shapes of the warm-up, in pieces for others.
    Left out: full on a GPU where anything is captured."""
    canonicalize: bool = True
    """Drop what nothing depends on from captured graphs."""
    recompute: tuple[str, ...] = ()
    """What the backward pass computes again instead of keeping: `full`, module paths such as `layers.*`, or operators
    such as `silu_mul`."""
    activation_memory_gib: float = at_least(0, default=0.0)
    """Memory that the forward pass may keep for the backward pass: as many layers as it takes are computed again; 0 is
    no limit."""
    verify: Literal["strict", "warn", "off"] = "strict"
    """Before the first step every graph must give eager's bits, as captured and as replayed. strict: a difference ends
    the run. warn: the function runs one level further down: in pieces, without a CUDA graph, eagerly. off: no check."""
    backend: Literal["auto", "none", "eager", "inductor"] = "auto"
    """What runs captured graphs. eager: their operators, as captured. inductor: the regions that `inductor` chooses are
    compiled. none: nothing, the model is called. auto: eager where anything is captured."""
    inductor: tuple[str, ...] = ("backward",)
    """What backend inductor compiles: `backward` (the backward pass), module paths such as `layers.*` (their forward
    pass, where the generator and the trainer share it), or `all`."""
    dump: str | None = None
    """Folder to write every captured graph to, with what each pass changed."""
    reshard_after_forward: bool = True
    """Several processes: gather weights again in the backward pass instead of keeping them."""
    bucket_collectives: bool = True
    """Several processes: gather a layer's weights, and exchange its gradients, in one collective each."""
    reorder_collectives: bool = True
    """Several processes: start a layer's collectives one layer before their results are needed."""

    def check(self) -> None:
        refuse("" in self.recompute, "compile.recompute holds an empty pattern; name a module, an operator or full")


def resolve_compile(c: CompileConfig, on_gpu: bool) -> CompileConfig:
    """`c` with what was left to the device filled in; `InputError` for a combination that cannot work."""
    capture = c.capture or ("step" if on_gpu and c.backend != "none" else "none")
    mode = c.cudagraph_mode or ("full" if on_gpu and capture in GRAPHS else "none")
    c = replace(c, capture=capture, cudagraph_mode=mode)
    _check_modes(c)
    _check_passes(c)
    return c


def _check_modes(c: CompileConfig) -> None:
    assert c.capture is not None
    backend = ("none" if c.capture == "none" else "eager") if c.backend == "auto" else c.backend
    modes = CUDAGRAPH_MODES[c.capture, backend]
    if isinstance(modes, str):
        raise InputError(f"compile.backend is {backend} with compile.capture {c.capture}: {modes}")
    if c.cudagraph_mode not in modes:
        raise InputError(
            f"compile.cudagraph_mode is {c.cudagraph_mode}: CUDA graphs are recorded from captured graphs; set "
            f"compile.capture to step or joint, or use {' or '.join(modes)}"
        )


def _check_passes(c: CompileConfig) -> None:
    """Refuse options of passes that will not run."""
    default = CompileConfig()
    if c.inductor != default.inductor and not (c.backend == "inductor" and c.capture in GRAPHS):
        raise InputError(
            "compile.inductor chooses regions of captured graphs; set compile.backend to inductor and compile.capture "
            "to step or joint"
        )
    if c.backend == "inductor" and (not c.inductor or "" in c.inductor):
        raise InputError(
            f"compile.inductor is {list(c.inductor)}; name what to compile: backward, all, or modules such as layers.*"
        )
    same = replace(c, capture=None, cudagraph_mode=None, backend="auto", inductor=default.inductor)
    if c.capture not in GRAPHS and same != default:
        raise InputError(
            "compile: canonicalize, recompute, activation_memory_gib, verify, dump, reshard_after_forward, "
            "bucket_collectives and reorder_collectives act on captured graphs; set compile.capture to step or joint"
        )


def of_generation(c: CompileConfig) -> CompileConfig:
    """`c` without what acts on the trainer's graphs alone: backward passes, and regions that both roles share."""
    default = CompileConfig()
    kept = "cudagraph_mode", "canonicalize", "verify", "dump"
    backend = c.backend if c.capture == "layer" or c.backend != "inductor" else "auto"
    capture = "step" if c.capture == "joint" else c.capture
    return replace(default, capture=capture, backend=backend, **{name: getattr(c, name) for name in kept})


def check_generation(c: CompileConfig) -> None:
    """Raise `InputError` naming what would have no effect, or no counterpart, where nothing is trained."""
    does = of_generation(c)
    for item in fields(c):
        if getattr(does, item.name) != getattr(c, item.name):
            raise InputError(
                f"compile.{item.name} is {getattr(c, item.name)}: it is for the trainer's graphs, and there is no "
                "trainer here; remove it"
            )
