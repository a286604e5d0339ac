"""Training in a run folder, from the first step or from where a run stopped."""

from __future__ import annotations

import contextlib
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig, idle_update_message, idle_warmup_message, reference_message
from ..distributed import ONE_PROCESS, World
from ..errors import InputError, LockstepError
from ..machine import freeze_gc
from ..rl.loop import Loop
from ..serve.rollouts import serve_rollouts
from ..session.build import ReadTask, TrainingSession, resolve, task_reader
from ..session.degree import choose_generator_tp
from ..session.memory import explain_out_of_memory
from ..session.signals import EndRequest, EndRequested, SignalDelay, reraise_received
from . import resume as resuming
from .checkpoint import LoadedCheckpoint
from .closing_lines import describe_interrupted_run
from .crash import CRASH_FILE, crash_note
from .display import PHASE_NAMES, Display
from .faults import FaultReporter, report_faults_once
from .recorder import Recorder
from .timeline import is_recorded
from .trackers import require_trackers

_STEP_REDONE = "step {} is not saved, but done again when resumed: the signal may have reached what its rewards start"


def train(
    config: RunConfig, run_dir: Path, resume: bool, world: World = ONE_PROCESS, other_numerics: bool = False
) -> dict[str, Any]:
    """Run `config` in `run_dir`, or `resume` from its last complete checkpoint (with different arithmetic only if
    `other_numerics`). Returns the summary that is written there. Every rank of `world` calls this, and the first
    writes. Raises `InputError` if the run cannot be resumed as it was, with nothing in its folder changed, and
    `LockstepError` if it fails; what it wrote until then stays, with a report."""
    config = world.run_on_all(lambda: _resolve(config, world))
    world.require_same("the processes of this run", lambda: resuming.describe_data(config))
    read = task_reader(config)
    config, world, choice = choose_generator_tp(config, world, read)
    run_dir = run_dir.absolute()  # rewards may change the working directory
    recorder = Recorder(config, run_dir, world)
    if choice is not None:
        recorder.summary["parallel"] = choice.to_dict()
    loaded = _find_checkpoint(recorder) if resume else None
    display = Display(config.steps, config.metrics.progress, shown=world.is_first)
    note = crash_note(run_dir, recorder.has_begun) if world.is_first else contextlib.nullcontext()
    named = explain_out_of_memory(lambda: recorder.memory_plan, world)
    with torch.inference_mode(False), note, report_faults_once(run_dir, world) as faults, display, named:
        grace = config.checkpoint.grace if config.checkpoint.interval else 0.0
        saves = f"the run saves the last whole step and ends, in {grace:g} s or unsaved; again: at once"
        report_exit = partial(_report_signal_exit, run_dir, world, faults)
        delay = SignalDelay(grace, lambda name: display.note(f"{name}: {saves}"), faults, report_exit)
        if resume and loaded is None:
            display.note("no step was done yet; starting over")
        return _train(recorder, read, loaded, other_numerics, display, delay)


def _find_checkpoint(recorder: Recorder) -> LoadedCheckpoint | None:
    """The checkpoint that the first process found and verified, which all read and must see alike."""
    world, run_dir = recorder.world, recorder.run_dir
    loaded = world.broadcast_from_first(lambda: resuming.find_checkpoint(run_dir, recorder.inputs))
    if loaded is not None:
        world.require_same("the processes of this run", lambda: {f"the hash of {loaded.path}": loaded.identity()})
    return loaded


def _train(
    recorder: Recorder,
    read: ReadTask,
    loaded: LoadedCheckpoint | None,
    other_numerics: bool,
    display: Display,
    delay: SignalDelay,
) -> dict[str, Any]:
    config, run_dir, world = recorder.config, recorder.run_dir, recorder.world
    display.note_startup(PHASE_NAMES["import"], recorder.imports_s)
    of_warmup = () if loaded else (idle_warmup_message(config, world.size), reference_message(config))
    for message in (idle_update_message(config, world.size), *of_warmup):
        if message is not None:
            display.note(message)
    session = TrainingSession(config, world, display, partial(recorder.record_memory_plan, display=display), read)
    loop = Loop(config, session)
    start = recorder.restore(loop, loaded, other_numerics) if loaded else None
    recorder.record_start(loop)
    with contextlib.ExitStack() as served, recorder, world.detect_lost_peers():
        served.enter_context(serve_rollouts(session))  # may take a while to end, so it ends after the recorder
        if loaded:
            display.note(f"resumed from {loaded.path.name}")
            for remark in resuming.remarks(run_dir, loaded):
                display.note(remark)
        if start is None:
            recorder.run_sft_warmup(loop, display)
        recorder.warm_up_graphs(loop, display)
        if start is None:
            start = 0
            recorder.validate(loop, display, 0)
            recorder.checkpoint(loop, 0)
            recorder.wait_for_checkpoint(loop)  # so that a run with steps can always be resumed
        if _is_validation_due(config, start) and str(start) not in recorder.validations:
            recorder.validate_later(loop, display, start)  # the run was asked to end before it, or `steps` has changed
        recorder.open_step_files(start)
        _run_steps(recorder, loop, display, start, delay)
        recorder.save_model(loop)
        recorder.wait_for_checkpoint(loop)
    if loop.run.runtime.compiles:
        recorder.summary["compile"] = loop.run.compile_report()
        loop.run.runtime.close()
    return world.broadcast_from_first(lambda: recorder.summary)


def _run_steps(recorder: Recorder, loop: Loop, display: Display, start: int, delay: SignalDelay) -> None:
    """Do all steps from `start` on, or until the run is asked to end. A step whose rewards were given by then is
    finished and saved; any other is abandoned, and the state before it is saved."""
    config, world = recorder.config, recorder.world

    def agreed_ending() -> EndRequest:
        return max(world.gather(delay.poll())) if delay.seconds else EndRequest()

    def end_if(ending: EndRequest) -> None:
        if ending.number:
            recorder.wait_for_checkpoint(loop)
            delay.end(ending.number)

    with freeze_gc(), delay:
        loop.run.delay = delay if delay.seconds else None
        for step in range(start, config.steps):
            reraise_received()
            try:
                metrics, groups = loop.step(step)
                ending = loop.ending
                if _is_validation_due(config, step + 1) and not ending.number:
                    found = recorder.validate(loop, display, step + 1)
                    if found and (ending := agreed_ending()).number:
                        recorder.validations.pop(str(step + 1))  # the signal may have reached its rewards too
                    else:
                        metrics |= found
            except EndRequested as given_up:
                if not given_up.ending.may_affect_rewards:
                    recorder.checkpoint_before(loop, step)
                end_if(given_up.ending)
            except LockstepError as error:
                if type(error) in (InputError, LockstepError) and delay.number:
                    display.note(f"{_STEP_REDONE.format(step + 1)}: {error}")
                    delay.end(delay.number)
                raise
            finally:
                recorder.write_certificate(loop)
            if ending.number and ending.may_affect_rewards:
                display.note(_STEP_REDONE.format(step + 1))
                end_if(ending)
            with loop.run.timings.measure("log"):
                recorder.record_step(step, metrics, groups + loop.excluded_groups)
                display.update(step, metrics)
            recorder.checkpoint(loop, step + 1, last=ending.number > 0)
            if is_recorded(step + 1):
                recorder.write_timeline(loop.spans, metrics)
            end_if(ending)
        end_if(agreed_ending())


def _is_validation_due(config: RunConfig, steps: int) -> bool:
    """Whether a validation is due after so many steps."""
    every = config.task.validation_interval
    return steps == config.steps or (every > 0 and steps % every == 0)


def _report_signal_exit(run_dir: Path, world: World, faults: FaultReporter, number: int) -> None:
    """Clean up and report when a signal ends the process and its main thread does not return to do so."""
    faults.record_signal_exit(number)
    faults.remove_empty_files()
    if world.is_first:
        (run_dir / CRASH_FILE).unlink(missing_ok=True)
        said = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        print(f"lockstep: {said}\n{describe_interrupted_run(run_dir, world.size)}", end="", file=sys.stderr, flush=True)


def _resolve(config: RunConfig, world: World) -> RunConfig:
    """`config`, resolved for this machine and the processes, after checking that its trackers can be used."""
    require_trackers(config.metrics.trackers)
    return resolve(config, world.size)
