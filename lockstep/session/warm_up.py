"""Makes graphs before the first step or request, and checks the machine and the graphs against the contract."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..cache import user_folder
from ..errors import LockstepError
from ..graph import PassedChecks, Verdict, Work, build_in_parallel, check_against_eager
from ..graph.check.fingerprints import fingerprint
from ..models import Decoder, ModelConfig
from ..ops.linear import choice as linear_choice
from ..ops.linear.choice import Kind
from ..ops.machine_check import check as machine_check
from ..ops.native import library
from ..types import SamplingParams
from .build import Session, TrainingSession
from .kernel_lists import KEPT_LISTS, remember_kernel_list, step_settings

if TYPE_CHECKING:
    from ..ops.precompile import MissingKernels  # imports Triton, which a CPU does not need

_log = logging.getLogger("lockstep")

_HeadShapes = list[machine_check.HeadShape | machine_check.LatentHeadShape]
_ShapesToCheck = tuple[list[machine_check.Product], _HeadShapes, torch.device, torch.dtype]


class MachineCheck(NamedTuple):
    """`rehearse` launches the check's kernels; `check` returns whether it replaced a kernel that graphs may hold."""

    rehearse: Callable[[], None]
    check: Callable[[], bool]


NO_CHECK = MachineCheck(lambda: None, lambda: False)


def prepare_machine(session: Session) -> None:
    """Replace the kernels that an earlier machine check replaced, so that a model computes as it did in the run that
    made the check. All processes replace what any one of them does."""
    embed = session.policy.model.embed
    machine_check.restore_overrides(embed.device, embed.dtype)
    _share_overrides(session)


def warn_if_library_missing(session: Session) -> None:
    """Warn if the C library is missing: the first process of a machine, which all have the same."""
    embed = session.policy.model.embed
    if session.world.local_rank == 0 and embed.device.type == "cpu" and embed.dtype is torch.float32:
        library.warn_if_missing()


def warm_up(run: TrainingSession) -> None:
    """Make every graph that the steps of a run need, the largest first; graphs made later count as recompiles. Raises
    `LockstepError` if `parity` is strict and this machine cannot keep the contract."""
    warn_if_library_missing(run)
    if not run.runtime.compiles:
        _check_machine(run)
        return
    prepare_machine(run)
    reference = run.trainer.reference
    kernels = run.kernel_list(run.shapes, *step_settings(run.config), reference and reference.model.config)
    parts: Sequence[Callable[[], None]] = partial(_make_trainer_graphs, run), partial(_make_generator_graphs, run)
    if not run.trainer.flat.reads_own:  # weights are gathered between two graphs, by all ranks together
        parts = [partial(_make_all, parts)]
    cases = partial(run.trainer.check_cases, run.shapes, run.sampling, **_batch_options(run))
    run.verdicts = make_ready(
        run,
        parts,
        lambda: [*cases(), *run.engine.check_cases()],
        kernels,
        MachineCheck(partial(_rehearse_check, run), partial(_check_machine, run)),
        spare=run.engine.lend,
    )
    if kernels is not None and kernels != run.preloaded and run.world.is_first:
        remember_kernel_list(run.config, kernels)


def prepare_validation(run: TrainingSession, sampling: SamplingParams) -> None:
    """Make the graphs that complete held-out problems before all others, compiling their kernels in parallel."""
    if not run.runtime.eager:
        if run.policy.model.embed.is_cuda:
            _compile_kernels(run, lambda _: _make_validation_graphs(run, sampling))
        with run.runtime.warm_up.make_graphs():
            _make_validation_graphs(run, sampling)


def make_ready(
    session: Session,
    parts: Sequence[Callable[[], None]],
    trust_cases: Callable[[], Work],
    kernels: Path | None,
    machine: MachineCheck = NO_CHECK,
    spare: Callable[[], Sequence[Tensor]] = tuple,
) -> list[Verdict]:
    """Make graphs and check that they have eager's bits; graphs made later count as recompiles.

    Args:
        parts: each calls some of the functions whose graphs are needed, and is called again if all must be made anew.
            Several processes make the graphs of different parts in parallel.
        trust_cases: launches of the graphs to check, unless `compile.verify` is off.
        kernels: the path of the list of their kernels (`Session.kernel_list`); None if none are compiled.
        machine: the check of this machine, on what was launched.
        spare: memory for the check of graphs (`check_against_eager`).
    """
    runtime, verify = session.runtime, session.config.compile.verify
    make_graphs = partial(_make_all, parts)
    runtime.begin_warm_up(session.world)
    if runtime.eager:
        make_graphs()
        machine.check()
        runtime.end_warm_up()
        return []
    if kernels is None:
        build_in_parallel(runtime, parts)
    elif kernels != session.preloaded:
        _prepare_kernels(session, kernels, parts, machine.rehearse)
    else:
        _note_kernels_loaded(session)
    with runtime.warm_up.make_graphs():
        make_graphs()
    shared = runtime.share_regions()
    if machine.check() or shared:
        for program in runtime.programs:
            program.close()
        runtime.warm_up.kernels_loaded = False  # the replacements are not loaded yet
        with runtime.warm_up.make_graphs():
            make_graphs()
    verdicts = []
    if verify != "off":
        # The keys of passed checks do not cover kernels from outside the package.
        passed = None if linear_choice.registered else PassedChecks()
        verdicts = check_against_eager(runtime, trust_cases(), verify, passed, spare())
    runtime.end_warm_up()
    return verdicts


def _make_all(parts: Sequence[Callable[[], None]]) -> None:
    for make in parts:
        make()


def _make_trainer_graphs(run: TrainingSession) -> None:
    run.trainer.warm_up(run.shapes, run.sampling, **_batch_options(run))


def _make_generator_graphs(run: TrainingSession) -> None:
    local = run.world.generator_mesh.fsdp.max_local_items
    sequences = local(run.config.trainer.prompts_per_step) * run.sampling.n
    run.engine.expect(max(sequences, _validated_sequences(run, run.validation_sampling)))
    run.engine.warm_up(sequences, run.shapes[0].max_len, run.sampling)
    _make_validation_graphs(run, run.validation_sampling)


def _make_validation_graphs(run: TrainingSession, sampling: SamplingParams) -> None:
    run.engine.warm_up(_validated_sequences(run, sampling), run.shapes[0].max_len, sampling)


def _validated_sequences(run: TrainingSession, sampling: SamplingParams) -> int:
    return run.world.generator_mesh.fsdp.max_local_items(run.config.task.validation_prompts) * sampling.n


def _batch_options(run: TrainingSession) -> dict[str, Any]:
    """Arguments that describe the coming batches to the trainer."""
    t, loss, check_parity = run.config.trainer, run.config.loss, run.config.parity != "off"
    skips_groups, has_mini_batches = t.skip_zero_variance and not loss.kl_in_loss, t.num_mini_batches > 1
    # Whether some groups may be compared but not trained on.
    only_checked = skips_groups or loss.mask_truncated_completions or loss.dynamic_sampling or has_mini_batches
    return {
        "check_parity": check_parity,
        "num_iterations": t.num_iterations,
        "num_mini_batches": t.num_mini_batches,
        "with_checks": check_parity and only_checked or has_mini_batches and run.sampling.truncated,
    }


def _prepare_kernels(
    session: Session, path: Path, parts: Sequence[Callable[[], None]], rehearse_check: Callable[[], None]
) -> None:
    """Compile the kernels of all graphs in parallel, or load those that an earlier start compiled."""
    runtime, world = session.runtime, session.world
    runtime.warm_up.kernels_loaded = False
    try:
        listed = world.broadcast_from_first(lambda: user_folder.read(path) or ())
        if all(world.gather(runtime.warm_up.preload(listed))):
            _note_kernels_loaded(session)
            return

        def rehearse(kernels: MissingKernels) -> None:
            divided = build_in_parallel(runtime, parts)  # each rank launches what it makes
            if divided and not any(world.gather(bool(linear_choice.registered))):  # outside kernels are not exchanged
                for listed, used in world.gather(([*kernels.listed], {*linear_choice.requested})):
                    kernels.add(listed)
                    linear_choice.requested.update(used)
            else:
                _make_all(parts)
            fingerprint(session.policy.model.embed.new_zeros(2, dtype=torch.int64))  # a kernel of the check of graphs
            rehearse_check()

        kernels = _compile_kernels(session, rehearse)
        if world.is_first:
            user_folder.write(path, kernels, keep=KEPT_LISTS)
    except Exception as error:
        if world.size > 1:  # the other ranks would wait for this one
            raise
        _log.warning("kernels are compiled one by one, which takes longer (%s: %s)", type(error).__name__, error)


def _compile_kernels(session: Session, launch: Callable[[MissingKernels], None]) -> list[Any]:
    """Compile what `launch` launches or adds to its argument, in each host's first process; the others load it."""
    warm_up, world = session.runtime.warm_up, session.world
    compiles = world.local_rank == 0
    with warm_up.rehearsal(compiles) as kernels:
        launch(kernels)
    world.gather(None)  # wait until they are compiled
    if not compiles:
        warm_up.preload(kernels.listed)
    _note_kernels_loaded(session)
    return [*kernels.listed]


def _note_kernels_loaded(session: Session) -> None:
    """Let graphs be recorded without a launch before, unless a kernel from outside the package may autotune at it."""
    session.runtime.warm_up.kernels_loaded = not linear_choice.registered


def _rehearse_check(run: TrainingSession) -> None:
    if run.config.parity == "off":
        return
    with run.timings.measure("gate"), run.runtime.in_pool():
        machine_check.rehearse(*_shapes_to_check(run))


def _check_machine(run: TrainingSession) -> bool:
    """Check this machine; return whether that replaced a kernel that graphs may hold."""
    parity = run.config.parity
    if parity == "off":
        return False
    before = dict(linear_choice.overrides)
    with run.timings.measure("gate"), run.runtime.in_pool():
        verdict = machine_check.check(*_shapes_to_check(run))
    if not verdict.holds and parity == "strict":
        raise LockstepError(str(verdict))
    if not verdict.holds or verdict.replaced:
        _log.warning("%s", verdict)
    _share_overrides(run)
    return linear_choice.overrides != before


def _share_overrides(run: Session) -> None:
    """Apply every rank's kernel replacements on all ranks, so that they make the same graphs."""
    for of_rank in run.world.gather(dict(linear_choice.overrides)):
        linear_choice.overrides.update(of_rank)


def _shapes_to_check(run: TrainingSession) -> _ShapesToCheck:
    """The shapes to check. On a GPU these are the products that were computed, and latent attention is not checked. On
    a CPU it is one row of each product, whose bits any number of rows must reproduce."""
    c, embed = run.policy.model.config, run.policy.model.embed
    if embed.is_cuda:
        return machine_check.computed_products(), [] if c.mla else [_head_shape(c)], embed.device, embed.dtype
    # Either role's model may be a tensor-parallel part, with fewer columns.
    of_both_roles = {*products(run.trainer.programs.model), *products(run.policy.model)}
    return sorted(of_both_roles), [_head_shape(c)], embed.device, embed.dtype


def products(model: Decoder) -> list[machine_check.Product]:
    """One row of each of the model's products; those of heads and routers are computed in float32."""
    found = set()
    for path, parameter in model.named_parameters():
        name = path.rpartition(".")[2]
        if parameter.dim() > 1 and name != "kv_up":  # kv_up is two products per head, added below
            kind: Kind = "linear_fp32" if name in ("embed", "lm_head", "router", "value_head") else "linear"
            found.add(machine_check.Product(kind, 1, *parameter.shape[-2:]))
    if (m := model.config.mla) is not None:
        found |= {machine_check.Product("linear", 1, *size) for size in ((m.kv_rank, m.nope_dim), (m.v_dim, m.kv_rank))}
    return sorted(found)


def _head_shape(c: ModelConfig) -> machine_check.HeadShape | machine_check.LatentHeadShape:
    if c.mla is None:
        return machine_check.HeadShape(
            c.num_heads, c.num_kv_heads, c.head_dim, any(c.windows) or not c.supports_flex_attention
        )
    return machine_check.LatentHeadShape(c.num_heads, c.mla.kv_rank, c.mla.rope_dim)
