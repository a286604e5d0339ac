"""Section `compile`: ways to capture, run and record graphs, and their valid combinations."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from ...errors import InputError, refuse
from .section import Section, at_least


class Plugin(NamedTuple):
    """A capture, a backend or a recording; `CompileConfig` takes the names in the tables below.

    Attributes:
        hook: what `graph` uses, or its "module:name", which is imported when chosen; empty for nothing. For a capture
            it is a function like `graph.capture` or, if not `graphs`, one that makes `Runtime.layers`; for a backend, a
            `graph.Backend`; for a recording, the operators (`namespace.name`) that run between the pieces.
        graphs: whether it makes graphs of whole functions, for passes and CUDA graphs.
        ranks: whether it works with several processes.
        by_sizes: whether what it makes depends on the traced sizes, so that it is stored for these only.
        whole: for a recording, whether graphs are not split and take all their memory from the recordings' pool.
    """

    hook: Any = ""
    graphs: bool = True
    ranks: bool = True
    by_sizes: bool = False
    whole: bool = False

    @property
    def shipped(self) -> bool:
        """Whether it is part of this package, whose sources are in the keys of stored graphs."""
        return isinstance(self.hook, str) and self.hook.partition(".")[0] in ("", "lockstep")


CAPTURES = {
    "none": Plugin(graphs=False),
    "step": Plugin("lockstep.graph.capture.step:capture"),
    "joint": Plugin("lockstep.graph.capture.joint:capture_joint", ranks=False, by_sizes=True),
    "layer": Plugin("lockstep.graph.capture.layers:layer_compiler", graphs=False, ranks=False),
}
BACKENDS = {
    "none": Plugin(),
    "eager": Plugin("lockstep.graph.passes.backend:Backend"),
    "inductor": Plugin("lockstep.graph.passes.inductor:Inductor", by_sizes=True),
}
RECORDINGS = {
    "none": Plugin(),
    "piecewise": Plugin("lockstep.graph.launch.piecewise:ATTENTION", ranks=False),
    "full": Plugin(whole=True),
}
FULL, ELEMENTWISE, LOGITS = "full", "elementwise", "logits"  # values of `recompute`
# In their default order.
PASSES = ("canonicalize", "recompute", "fit", "keep_logits", "reshard", "bucket", "reorder", "fuse")


def recordings(mode: str) -> tuple[str, str]:
    """The recordings for the warm-up's shapes and for other shapes; they differ only in a mode `..._and_...`."""
    first, _, later = mode.partition("_and_")
    return first, later or first


def cudagraph_modes(capture: str, backend: str) -> tuple[str, ...] | str:
    """The CUDA graph modes that work with these two, or why none does; docs/compile.md shows them all."""
    captures, runs_graphs = bool(CAPTURES[capture].hook), bool(BACKENDS[backend].hook)
    if captures and not runs_graphs:
        return "nothing would run what is captured; set compile.backend to eager, or compile.capture to none"
    if runs_graphs and not captures:
        return "it has no graph to run; set compile.capture to step, or compile.backend to none"
    return (*RECORDINGS, "full_and_piecewise") if CAPTURES[capture].graphs else ("none",)


@dataclass(frozen=True)
class CompileConfig(Section):
    """Captured graphs, in both roles. They compute the same bits as eager; only backend inductor may change some."""

    tables = {"capture": CAPTURES, "backend": BACKENDS, "cudagraph_mode": RECORDINGS}

    capture: Literal["none", "step", "joint", "layer"] | None = None
    """step: trace forward_backward, optim_step and decode into graphs. joint: the same, with forward and backward pass
    split by the min-cut partitioner. layer: compile the model's layers one by one. none: call the model. Left out: step
    on a GPU, none on a CPU."""
    cudagraph_mode: Literal["none", "piecewise", "full", "full_and_piecewise"] | None = None
    """Record captured graphs as CUDA graphs and replay them (GPU only). full: each as a whole. piecewise: in pieces
    around attention, which runs between them. full_and_piecewise: whole for the warm-up's shapes, in pieces for others.
    Left out: full on a GPU if anything is captured."""
    canonicalize: bool = True
    """Remove dead code and aliases from captured graphs."""
    recompute: tuple[str, ...] = ()
    """What the backward pass recomputes instead of keeping it: `full`, `elementwise` (norms, rotations, gated
    activations), `logits` (the LM head's product), module paths such as `layers.*`, operators such as `silu_mul`."""
    activation_memory_gib: float = at_least(0, default=0.0)
    """Memory for activations kept for the backward pass. To fit, logits and elementwise results, then as many layers as
    necessary, are recomputed; 0 is no limit."""
    verify: Literal["strict", "warn", "off"] = "strict"
    """Before the first step, check that every graph gives eager's bits when launched. strict: a difference ends the
    run. warn: the function falls back one level: to pieces, to no CUDA graph, to eager. off: no check."""
    backend: Literal["auto", "none", "eager", "inductor"] = "auto"
    """What runs captured graphs. eager: their operators, as captured. inductor: compile the regions that `inductor`
    chooses. none: nothing, the model is called. auto: eager if anything is captured."""
    inductor: tuple[str, ...] = ("backward",)
    """What backend inductor compiles: `backward` (the backward pass), module paths such as `layers.*` (their forward
    pass, which generator and trainer share), or `all`."""
    passes: tuple[str, ...] = ()
    """Passes in order: names of shipped ones, `default` for all of these, and your own functions as module:function or
    path.py:function. Left out: default."""
    dump: str | None = None
    """Folder to write every captured graph to, with the changes of each pass."""
    reshard_after_forward: bool = True
    """Several processes: all-gather weights again in the backward pass instead of keeping them."""
    bucket_collectives: bool = True
    """Several processes: gather a layer's weights in one collective, and exchange its gradients in another."""
    reorder_collectives: bool = True
    """Several processes: start a layer's collectives one layer before their results are needed."""

    def check(self) -> None:
        refuse(self.dump == "", "compile.dump is empty; name a folder, or leave it out")
        refuse("" in self.recompute, "compile.recompute holds an empty pattern; name a module, an operator or full")
        for i, name in enumerate(self.pass_names):
            refuse(
                name not in PASSES and ":" not in name,
                f"compile.passes has no {name!r}; use default, some of {', '.join(PASSES)}, or a function as "
                "module:function or path.py:function",
            )
            refuse(name in self.pass_names[:i], f"compile.passes has {name!r} twice; name it once")
        for name, field in (("recompute", "recompute"), ("fit", "activation_memory_gib")):
            missing = bool(getattr(self, field)) and name not in self.pass_names
            refuse(missing, f"compile.{field} is set, and compile.passes leaves {name} out; add it, or default")

    @property
    def keeps_logits(self) -> bool:
        """Whether the backward pass of a captured graph reads the logits of the forward pass."""
        recomputed = self.activation_memory_gib > 0 or FULL in self.recompute or LOGITS in self.recompute
        return "keep_logits" in self.pass_names and not recomputed

    @property
    def recompute_patterns(self) -> tuple[str, ...]:
        """`recompute` without the logits, which an operator recomputes by itself."""
        return tuple(pattern for pattern in self.recompute if pattern != LOGITS)

    @property
    def pass_names(self) -> tuple[str, ...]:
        """`passes` with `default` expanded."""
        names: list[str] = []
        for name in self.passes or ("default",):
            names += PASSES if name == "default" else [name]
        return tuple(names)

    @property
    def plugins(self) -> tuple[Plugin, Plugin]:
        """The capture and the backend of a resolved configuration."""
        return CAPTURES[self.capture or "none"], BACKENDS[self.backend_name]

    @property
    def backend_name(self) -> str:
        if self.backend != "auto":
            return self.backend
        return "eager" if CAPTURES[self.capture or "none"].hook else "none"


def resolve_compile(c: CompileConfig, on_gpu: bool) -> CompileConfig:
    """`c` with the settings that depend on the device filled in. Raises `InputError` for an invalid combination."""
    capture = c.capture or ("step" if on_gpu and c.backend != "none" else "none")
    _check_known("capture", capture, CAPTURES)
    mode = c.cudagraph_mode or ("full" if on_gpu and CAPTURES[capture].graphs else "none")
    c = replace(c, capture=capture, cudagraph_mode=mode)
    _check_known("backend", c.backend_name, BACKENDS)
    for recording in recordings(mode):
        _check_known("cudagraph_mode", recording, RECORDINGS)
    modes = cudagraph_modes(capture, c.backend_name)
    refuse(isinstance(modes, str), f"compile.backend is {c.backend_name} with compile.capture {capture}: {modes}")
    refuse(
        mode != "none" and modes == ("none",),
        f"compile.cudagraph_mode is {mode}: CUDA graphs are recorded from captured graphs; set compile.capture to step "
        "or joint, or use none",
    )
    _check_passes(c)
    return c


def _check_known(name: str, value: str, known: Iterable[str]) -> None:
    refuse(value not in known, f"compile.{name} is {value!r}; it must be one of {', '.join(known)}")


def _check_passes(c: CompileConfig) -> None:
    """Raise `InputError` for options of passes that will not run."""
    default, captures_graphs = CompileConfig(), c.plugins[0].graphs
    if c.inductor != default.inductor and not (c.backend == "inductor" and captures_graphs):
        raise InputError(
            "compile.inductor chooses regions of captured graphs; set compile.backend to inductor and compile.capture "
            "to step or joint"
        )
    if c.backend == "inductor" and (not c.inductor or "" in c.inductor):
        raise InputError(
            f"compile.inductor is {list(c.inductor)}; name what to compile: backward, all, or modules such as layers.*"
        )
    options = replace(c, capture=None, cudagraph_mode=None, backend="auto", inductor=default.inductor)
    if not captures_graphs and options != default:
        raise InputError(
            "compile: canonicalize, recompute, activation_memory_gib, verify, passes, dump, reshard_after_forward, "
            "bucket_collectives and reorder_collectives act on captured graphs; set compile.capture to step or joint"
        )


GENERATION_FIELDS = "capture", "cudagraph_mode", "canonicalize", "verify", "passes", "dump", "backend"


def without_trainer_settings(c: CompileConfig) -> CompileConfig:
    """`c` without what matters only with a trainer: the backward pass, and regions that both roles share."""
    kept = {name: getattr(c, name) for name in GENERATION_FIELDS}
    if c.backend == "inductor" and c.capture != "layer":
        kept["backend"] = "auto"
    if c.capture == "joint":
        kept["capture"] = "step"
    return CompileConfig(**kept)


def check_generation(c: CompileConfig) -> None:
    """Raise `InputError` naming the first setting that has no effect, or no counterpart, without a trainer."""
    effective = without_trainer_settings(c)
    for item in fields(c):
        if getattr(effective, item.name) != getattr(c, item.name):
            raise InputError(
                f"compile.{item.name} is {getattr(c, item.name)}: it is for the trainer's graphs, and there is no "
                "trainer here; remove it"
            )
