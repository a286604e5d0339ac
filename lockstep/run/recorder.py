"""Writes what a run leaves in its folder: metrics, timeline, checkpoints, summary, report. Restores checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from .. import __version__
from ..config import RunConfig, yaml_file
from ..distributed import ONE_PROCESS, World
from ..errors import InputError, LockstepError, NonFiniteError, ParityError
from ..machine import describe
from ..rl.loop import Loop
from ..rl.sft_warmup import sft_warmup
from ..session import golden
from ..session.build import resolve_device, save_policy
from ..session.certificate import Certificate
from ..session.memory import MemoryPlan, has_room_for_copy, measure_memory
from ..session.warm_up import warm_up
from ..timings import Span, Timings
from . import checkpoint, closing_lines
from . import resume as resuming
from .display import Display
from .metrics import (
    METRICS_FILE,
    ROLLOUTS_FILE,
    SUMMARY_FILE,
    WAITS_FILE,
    MetricsWriter,
    add_to_step,
    atomic_write,
    name_write_errors,
    read_records,
    rollout_records,
    wait_records,
    write_json,
)
from .report import write_report
from .resume import CHECKPOINTS, FINAL_MODEL, MODELS
from .timeline import TIMELINE_FILE, Timeline
from .trackers import Trackers

PARITY_FILE, FAILURE_FILE = "parity.json", "failure.json"
ENVIRONMENT_ERRORS = "environment_errors.txt"

# The timeline's counters, and the metrics they show.
_COUNTERS = {"reward": "reward/mean", "tokens/s": "perf/tokens_per_s_per_gpu", "memory GiB": "memory/peak_gib"}

_MAX_REASONS = 3  # reasons shown, at most, for not using stored graphs

_log = logging.getLogger("lockstep")


class Recorder(AbstractContextManager["Recorder"]):
    """The run folder of one training run: metrics, rollouts, checkpoints, summary, report. Only the first rank writes
    it, except checkpoints and models; the others only keep the summary."""

    # CPU seconds of importing, counted for the process's first run; of this thread only, since NumPy's threads spin
    _imports: ClassVar[float] = time.thread_time()

    def __init__(self, config: RunConfig, run_dir: Path, world: World = ONE_PROCESS) -> None:
        self.config, self.world = config, world
        self.run_dir = run_dir
        self._shown_dir = closing_lines.relative_to_cwd(run_dir)
        imports, Recorder._imports = Recorder._imports, 0.0
        self.began = time.perf_counter() - imports
        self._earlier_seconds = 0.0  # seconds of the earlier processes of a resumed run
        self._numerics: dict[str, Any] | None = None
        self._steps_without_metrics = 0  # steps of earlier processes without metrics
        self.validations: dict[str, dict[str, float]] = {}
        self.summary: dict[str, Any] = {"recipe": config.recipe, "seed": config.seed, "version": __version__}
        self.summary |= dict.fromkeys(("startup_s", "generator_s", "trainer_s", "sync_s", "total_s"), 0.0)
        self.imports_s = imports
        self._open_files = ExitStack()  # closes the files and trackers below
        self._timeline: Timeline | None = None
        self._step_files: dict[str, MetricsWriter] = {}  # the files that get lines in every step, by name
        self._trackers: Trackers | None = None
        self._loop: Loop | None = None
        self._saver: checkpoint.Saver | None = None
        self._saved: int | None = None  # steps done by the latest checkpoint
        self._rewards: list[float] = []
        self._updates = 0
        self._prompt: Any = None  # the prompt of the latest step's first group
        self.memory_plan = ""  # the memory plan as a table, once it is made

    @cached_property
    def inputs(self) -> dict[str, Any]:
        return resuming.identify_inputs(self.config)

    def has_begun(self) -> bool:
        """Whether the run was built and, if resumed, its checkpoint accepted."""
        return self._loop is not None

    def record_memory_plan(self, plan: MemoryPlan, display: Display) -> None:
        """Record the memory plan; show what is trained and, on a GPU, the plan."""
        self.memory_plan, self.summary["memory"] = plan.table(), plan.to_dict()
        display.note(plan.title)
        if resolve_device(self.config.device).type == "cuda":
            display.note(f"memory of a GPU, as planned:\n{self.memory_plan}")

    def record_start(self, loop: Loop) -> None:
        """After the run is built: record the configuration, the machine and the start-up time; open the trackers."""
        self.summary["environment"] = describe(loop.device)
        if self.world.size > 1:
            self.summary["environment"]["processes"] = str(self.world.size)
        self._loop, timings = loop, loop.run.timings
        if self.world.is_first:
            with name_write_errors(self.run_dir):
                self.run_dir.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.run_dir / "config.yaml") as temporary:
                yaml_file.save(self.config, temporary)
            if self.config.checkpoint.interval:
                with timings.measure("inputs"):
                    self.inputs  # noqa: B018 (hash the model's files soon after they were read)
            with timings.measure("trackers"):
                self._trackers = Trackers(self.config.metrics, self.run_dir, yaml_file.flatten(self.config))
                self._open_files.callback(self._trackers.close)
        imports = Span("import", self.began, self.imports_s)
        self._add_startup_time(self.began, {imports.name: imports.seconds} | timings.seconds)
        if self.world.is_first:
            self._timeline = Timeline(self.run_dir / TIMELINE_FILE, f"lockstep {self.run_dir.name}", self.began)
            self._open_files.callback(self._timeline.close)
        self.write_timeline([imports])

    def warm_up_graphs(self, loop: Loop, display: Display) -> None:
        """Make the graphs of all steps; record where the start-up time went."""
        began, runtime, timings = time.perf_counter(), loop.run.runtime, loop.run.timings
        before = dict(timings.seconds)
        making = Timings(observer=display).measure("graphs") if runtime.compiles else nullcontext()  # only for display
        with self.world.deadline("making and checking graphs", timeouts=10), making:
            warm_up(loop.run)
        loop.run.complete_state()
        if runtime.compiles:
            graphs = sum(len(function.graphs) for function in runtime.programs)
            made = f"layers: {runtime.captures} variants compiled"
            if graphs:
                made = f"graphs: {graphs} made from {runtime.captures} traces and {runtime.loaded} stored graphs"
            display.note(f"{made} in {time.perf_counter() - began:.1f} s")
            self.summary["compile"] = report = loop.run.compile_report()
            if reasons := report["refused"]:
                more = f" and {len(reasons) - _MAX_REASONS} more" if len(reasons) > _MAX_REASONS else ""
                display.note(f"graphs: stored ones were not used: {'; '.join(reasons[:_MAX_REASONS])}{more}")
        self._add_startup_time(began, {name: s - before.get(name, 0.0) for name, s in timings.seconds.items()})
        self.write_timeline()

    def _add_startup_time(self, began: float, phases: dict[str, float]) -> None:
        """Add the time since `began` to start-up, by phase; what no phase accounts for is `other`."""
        total = time.perf_counter() - began
        self.summary["startup_s"] += total
        for phase, seconds in (phases | {"other": total - sum(phases.values())}).items():
            if seconds > 0:
                name = f"startup/{phase}"
                self.summary[name] = self.summary.get(name, 0.0) + seconds

    def write_timeline(self, spans: Sequence[Span] = (), metrics: Mapping[str, Any] | None = None) -> None:
        """Put `spans`, all spans measured since they were taken, and the counters among `metrics` on the timeline."""
        assert self._loop is not None
        taken = [*spans, *self._loop.run.timings.take_spans()]
        counters = {name: metrics[metric] for name, metric in _COUNTERS.items()} if metrics else {}
        if self._timeline is not None:
            self._timeline.write(taken, counters)

    def open_step_files(self, start: int) -> None:
        """Open the files that get lines in every step. Lines of step `start` and later are dropped: they are redone."""
        self.write_timeline()
        if not self.world.is_first:
            return
        for name in (METRICS_FILE, ROLLOUTS_FILE, *[WAITS_FILE] * (self.config.task.turns > 1)):
            self._step_files[name] = self._open_files.enter_context(MetricsWriter(self.run_dir / name, start))
        for record in read_records(self.run_dir / METRICS_FILE):
            self._add_to_summary(record)
        self._steps_without_metrics = start - len(self._rewards)
        self._updates += max(0, self._steps_without_metrics)  # which may have made some

    def restore(self, loop: Loop, loaded: checkpoint.LoadedCheckpoint, other_numerics: bool | None = None) -> int:
        """Restore the run's state from `loaded`; return the number of steps done. `other_numerics`: accept different
        arithmetic, and note it in the certificate; None where a user cannot ask for that."""
        try:
            others = resuming.describe_other_numerics(loaded.state["numerics"], self._current_numerics(loop))
            changed = list(dict.fromkeys(sentence for of_rank in self.world.gather(others) for sentence in of_rank))
            if changed and not other_numerics:
                verb = "go on" if other_numerics is None else "resume"
                add = ", or continue with other bits: add --resume-with-other-numerics" * (other_numerics is not None)
                raise InputError(
                    f"cannot {verb} with the same bits: since {loaded.path.name} was saved, {'; '.join(changed)}. "
                    f"{verb.capitalize()} where the run began (OMP_NUM_THREADS sets the threads){add}"
                )
            with loop.run.timings.measure("restore"), self.world.deadline("restoring a checkpoint"):
                loop.run.trainer.load_state(loaded.by_rank("trainer"), loaded.state["trainer"])
            loop.certificate = Certificate(**loaded.state["certificate"])
            if changed := changed + resuming.describe_redefinitions(loaded.state):
                resumed = loop.certificate.settings.setdefault("resumed_with_other_numerics", [])
                resumed.append({"steps_done": loaded.step, "changed": changed})
            loop.idle_steps, self._saved = loaded.state["idle_steps"], loaded.step
            prompts = self.config.trainer.prompts_per_step
            loop.prompts_used = loaded.state.get("prompts_used", loaded.step * prompts)
            self.validations = loaded.state["validations"]
            self._earlier_seconds = loaded.state["seconds"]["total_s"]
            self.summary |= loaded.state["seconds"]
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(
                f"{loaded.path} does not fit this run ({reason}); was the model folder or lockstep changed since?"
            ) from error
        if loaded.state["warmup"] is not None:
            self.summary["warmup"] = loaded.state["warmup"]
        if loaded.state.get("parallel") is not None:
            self.summary.setdefault("parallel", loaded.state["parallel"])
        self.summary["resumed_from_step"] = loaded.step
        return loaded.step

    def checkpoint(self, loop: Loop, step: int, last: bool = False) -> None:
        """Begin to save when `checkpoint.interval` says so and after the `last` step; otherwise raise the error of a
        checkpoint that could not be written. Export the model when `checkpoint.export_interval` says so."""
        c = self.config.checkpoint
        if step and c.export_interval and step % c.export_interval == 0:
            self.save_model(loop, f"{MODELS}/step_{step}")
        due = c.interval > 0 and (last or step % c.interval == 0 or step == self.config.steps)
        if due:
            self._save(loop, step)
        elif self._saver is not None:
            self._saver.raise_if_failed()

    def checkpoint_before(self, loop: Loop, step: int) -> None:
        """Save the state before `step`, counted from 0, which was abandoned, unless it is saved already."""
        if self._saved != step:
            self._save(loop, step)

    def wait_for_checkpoint(self, loop: Loop) -> None:
        if self._saver is not None:
            with loop.run.timings.measure("checkpoint"), self.world.deadline("writing a checkpoint", timeouts=10):
                self._saver.wait()

    def _save(self, loop: Loop, step: int) -> None:
        with loop.run.timings.measure("checkpoint"), self.world.deadline("writing a checkpoint", timeouts=10):
            if self._saver is None:
                folder, keep_last = self.run_dir / CHECKPOINTS, self.config.checkpoint.keep_last
                self._saver = checkpoint.Saver(folder, keep_last, self.world, self._is_folder_shared())
                self._saver.copies = all(self.world.gather(has_room_for_copy(loop.run.plan, loop.device)))
            tensors, counters = self._tensors(loop)
            self._saver.save(step, tensors, self._state(loop, counters) if self.world.is_first else {})
            self._saved = step

    def _tensors(self, loop: Loop) -> tuple[dict[str, dict[str, Tensor]], dict[str, int]]:
        """The tensors this rank writes, by file, and the numbers. The first writes all if not all see the folder."""
        trainer, world = loop.run.trainer, self.world
        if world.size == 1 or not self._is_folder_shared():
            tensors, counters = trainer.state()
            return ({"trainer": tensors} if world.is_first else {}), counters
        own, alike, numbers = trainer.local_state()
        parts = {checkpoint.part_name("trainer", world.rank): own}
        return parts | ({"trainer": alike} if world.is_first else {}), numbers

    def _state(self, loop: Loop, counters: dict[str, int]) -> dict[str, Any]:
        return {
            "trainer": counters,
            "certificate": vars(loop.certificate),
            "idle_steps": loop.idle_steps,
            "prompts_used": loop.prompts_used,
            "validations": self.validations,
            "warmup": self.summary.get("warmup"),
            "parallel": self.summary.get("parallel"),
            "numerics": self._current_numerics(loop),
            "packing": "fewest rows",
            "inputs": self.inputs,
            "seconds": {name: s for name, s in self.summary.items() if name.startswith(("startup", "warmup_s"))}
            | {"total_s": self._total_seconds()},
        }

    def _current_numerics(self, loop: Loop) -> dict[str, Any]:
        """What the run's bits depend on besides its configuration: names, versions, and golden words."""
        if self._numerics is None:
            with loop.run.timings.measure("golden_words"):
                model = loop.run.policy.model
                found = golden.identify_arithmetic(model.embed.device, model.embed.dtype, model.config)
            self._numerics = loop.run.trainer.numerics() | found
        return self._numerics

    def write_certificate(self, loop: Loop) -> None:
        if self.world.is_first:
            write_json(self.run_dir / PARITY_FILE, loop.certificate.to_dict())

    def save_model(self, loop: Loop, name: str = FINAL_MODEL) -> None:
        run, shared = loop.run, self._is_folder_shared()
        folder = self.world.broadcast_from_first(lambda: self.run_dir / name)
        held = run.trainer.ranges_to_write() if shared else run.trainer.gather_ranges_on_first()
        if shared or self.world.is_first:
            deadline = self.world.deadline("exporting the model", timeouts=10)
            with run.timings.measure("save_model"), name_write_errors(folder), deadline:
                save_policy(run.policy, folder, held, self.world if shared else ONE_PROCESS)
        self.write_timeline()

    def _is_folder_shared(self) -> bool:
        return all(self.world.gather(self.world.broadcast_from_first(lambda: self.run_dir).is_dir()))

    def run_sft_warmup(self, loop: Loop, display: Display) -> None:
        steps = self.config.trainer.warmup_steps
        if not steps:
            return
        began = time.perf_counter()
        display.note(f"warm-up: at most {steps} supervised steps on worked examples")
        with loop.run.timings.measure("warmup"):
            self.summary["warmup"] = done = sft_warmup(loop, display.note)
        self.summary["warmup_s"] = seconds = time.perf_counter() - began
        losses = f"loss {done['loss_first']:.3f} to {done['loss_last']:.3f}"
        display.note(f"warm-up: {losses} in {done['steps']} steps, {seconds:.1f} s")

    def validate(self, loop: Loop, display: Display, step: int) -> dict[str, float]:
        with loop.run.timings.measure("validation"):
            metrics = loop.validate()
        self._write_environment_errors()
        if metrics:
            self.validations[str(step)] = metrics
            values = {name: f"{v:.3f}" if isinstance(v, float) else str(v) for name, v in metrics.items()}
            shown = ", ".join(f"{name.removeprefix('validation/')} {text}" for name, text in values.items())
            display.note(f"validation after {step} step{'s' * (step != 1)}: {shown}")
        return metrics

    def validate_later(self, loop: Loop, display: Display, step: int) -> None:
        """Validate after the latest step, recorded without, and add to its metrics; before `open_step_files`."""
        found, path = self.validate(loop, display, step), self.run_dir / METRICS_FILE
        if found and self.world.is_first and path.exists():
            add_to_step(path, step - 1, found)

    def record_step(self, step: int, metrics: dict[str, Any], groups: list) -> None:
        self._add_to_summary(metrics)
        if not self.world.is_first:
            return
        assert self._trackers is not None
        self._write_environment_errors()
        self._prompt = groups[0].prompt
        self._step_files[METRICS_FILE].write({"step": step, **metrics})
        self._trackers.log(step, metrics)
        for name, records in ((ROLLOUTS_FILE, rollout_records), (WAITS_FILE, wait_records)):
            if self.config.metrics.rollouts and name in self._step_files:
                for record in records(step, groups):
                    self._step_files[name].write(record)

    def _write_environment_errors(self) -> None:
        if self._loop is None or not self.world.is_first:
            return
        path = self.run_dir / ENVIRONMENT_ERRORS
        if tracebacks := self._loop.failures.take_messages():
            with name_write_errors(path), path.open("a", encoding="utf-8", errors="replace") as file:
                file.writelines(f"{traceback}\n\n" for traceback in tracebacks)

    def _add_to_summary(self, metrics: dict[str, Any]) -> None:
        """Add a step to the summary; the earlier steps of a resumed run come from its metrics file."""
        self.summary["generator_s"] += metrics["time/generate"]
        self.summary["trainer_s"] += metrics["time/forward_backward"] + metrics.get("time/optim_step", 0.0)
        self.summary["sync_s"] += metrics["time/sync"]
        self._rewards.append(metrics["reward/mean"])
        self._updates += metrics.get("updates", 1)  # early versions did not record it

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Whatever ended the run, write a summary, a report, and the evidence of a failed check."""
        if self._saver is not None:
            self._saver.close(error)
        try:
            with self._open_files:
                self._finish(error)
        except (LockstepError, OSError) as write_error:
            if error is None:
                raise
            _log.warning("%s", write_error)  # not raised: `error` is what ended the run

    def _finish(self, error: BaseException | None) -> None:
        if not self.world.is_first:
            return
        self._write_environment_errors()
        self._write_evidence(error)
        self._complete_summary()
        write_json(self.run_dir / SUMMARY_FILE, self.summary)
        with name_write_errors(self.run_dir / "report.html"):
            write_report(self.run_dir)

    def _write_evidence(self, error: BaseException | None) -> None:
        """Write the values of a failed check; say in the message of `error` which files explain it."""
        if isinstance(error, LockstepError) and (self.run_dir / ENVIRONMENT_ERRORS).exists():
            error.args = (f"{error}; tracebacks are in {self.run_dir / ENVIRONMENT_ERRORS}",)
        if isinstance(error, (NonFiniteError, ParityError)) and self._loop is not None:
            write_json(self.run_dir / FAILURE_FILE, {"error": str(error)} | self._loop.evidence())
            error.args = (f"{error}; its values and rollouts are in {self.run_dir / FAILURE_FILE}",)
        if error is None:  # what an earlier check found no longer applies
            (self.run_dir / FAILURE_FILE).unlink(missing_ok=True)

    def _complete_summary(self) -> None:
        ends = {"first": self._rewards[:10], "last": self._rewards[-10:]}
        self.summary |= {f"reward_{name}_10": sum(r) / len(r) for name, r in ends.items() if r}
        self.summary |= {"steps_done": self._steps_without_metrics + len(self._rewards), "validation": self.validations}
        of_steps = self.validations, self._rewards, self._updates
        self.summary |= {
            "learned": closing_lines.describe_learning(self.config, *of_steps, warmed_up="warmup" in self.summary),
            "parity": self._loop.certificate.to_dict() if self._loop else {},
            "next": closing_lines.next_command(self.config, self._shown_dir, self._prompt),
        }
        if self._loop is not None:
            run = self._loop.run
            with suppress(RuntimeError):  # the device may have failed
                self.summary["memory"]["used_gib"] = measure_memory(run.trainer, run.engine.cache, run.runtime)
        self.summary["total_s"] = self._total_seconds()

    def _total_seconds(self) -> float:
        """Seconds of the whole run so far: of this process, and of the earlier ones that it resumed from."""
        return self._earlier_seconds + time.perf_counter() - self.began
