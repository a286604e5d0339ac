"""Trackers: a run's metrics in TensorBoard, Weights & Biases or trackio as well, or given to a function of the user's.
Nothing phones home unless asked to.

A tracker that fails during a run is dropped with a warning; the run continues, and `metrics.jsonl` has everything.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import MetricsConfig
from ..errors import InputError, LockstepError
from ..user_functions import failing_line, load_function, one_line
from .metrics import METRICS_FILE

_log = logging.getLogger("lockstep")


class Trackers:
    """All trackers that `metrics.trackers` names."""

    def __init__(self, config: MetricsConfig, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """Open them for the run in `run_dir`, whose configuration is `settings` (flat, dotted names). Raises
        `InputError` if a package or function is missing, or a package cannot start."""
        require_trackers(config.trackers)
        self._open: dict[str, Any] = {}
        try:
            for name in config.trackers:
                if name in _PACKAGES:
                    self._open[name] = _PACKAGES[name](config.project, run_dir, settings)
                else:
                    self._open[name] = UserTracker(name)
        except BaseException:
            self.close()
            raise

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the metrics of a step that are numbers to each tracker."""
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        self._for_each(lambda tracker: tracker.log(step, numbers))

    def close(self) -> None:
        self._for_each(lambda tracker: tracker.close())
        self._open.clear()

    def _for_each(self, action: Callable[[Any], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                action(tracker)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a full disk, a lost server or a cancelled task there must not end the run
                del self._open[name]
                said = str(error)
                if isinstance(tracker, UserTracker):
                    said = f"{type(error).__name__}: {one_line(error)}{failing_line(error)}"
                _log.warning("metrics.trackers: %s failed and is off from here on: %s", name, said)


def require_trackers(names: tuple[str, ...]) -> None:
    """Raise `InputError` for the first of `names` whose package is missing, with the extra to install, or whose
    function cannot be used."""
    for name in names:
        if name not in _PACKAGES:
            UserTracker(name)
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: a folder of that name, such as W&B's own output
            raise InputError(
                f"metrics.trackers names {name}, which is not installed; pip install 'lockstep-rl[{name}]', "
                "or leave it out"
            )


class UserTracker:
    """A function of the user's that is called with each step's number and metrics. If it is an object with `close`,
    that is called at the end. Raises `InputError` if there is none of that name, or it does not take these two."""

    def __init__(self, name: str) -> None:
        self._function = load_function(name, f"metrics.trackers {name!r}")
        if inspect.isclass(self._function):
            raise InputError(f"metrics.trackers {name!r} is a class; name a function, or an object of that class")
        if any(map(inspect.iscoroutinefunction, (self._function, type(self._function).__call__))):
            raise InputError(f"metrics.trackers {name!r} is async, and nothing would await it; make it a plain def")
        try:
            inspect.signature(self._function).bind(0, {})
        except TypeError as error:
            raise InputError(f"metrics.trackers {name!r} is called with (step, metrics): {error}") from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._function(step, dict(metrics))

    def close(self) -> None:
        if close := getattr(self._function, "close", None):
            close()


class TensorBoard:
    """Event files in the run folder's `tensorboard/`. The first step logged purges a killed run's steps from it on."""

    def __init__(self, project: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._folder = run_dir / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _TrackerRun:
    """A run of a package with Weights & Biases' interface."""

    _run: Any

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class WandB(_TrackerRun):
    """A Weights & Biases run named after the run folder, where its id is kept so that resuming continues it."""

    def __init__(self, project: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """Raises `InputError` if it cannot start, for example without a login."""
        import wandb

        id_file = run_dir / "wandb" / "run-id"
        try:
            run_id = id_file.read_text().strip() if id_file.exists() else uuid.uuid4().hex[:8]
            self._run = wandb.init(
                project=project,
                name=run_dir.resolve().name,
                id=run_id,
                resume="allow",
                dir=str(run_dir),
                config=dict(settings),
                settings=wandb.Settings(console="off"),
            )
        except Exception as error:  # the package raises many types: no key, no network, refused by the server
            raise InputError(
                f"metrics.trackers: wandb cannot start: {error}; log in with `wandb login`, or set WANDB_MODE=offline"
            ) from error
        try:
            id_file.parent.mkdir(exist_ok=True)
            id_file.write_text(run_id + "\n")
        except OSError as error:
            raise LockstepError(f"could not write {id_file}: {error}") from error


class Trackio(_TrackerRun):
    """A trackio run named after the run folder. Resuming continues the latest run of that name."""

    def __init__(self, project: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """Raises `InputError` if it cannot start."""
        import trackio

        resume = "allow" if (run_dir / METRICS_FILE).exists() else "never"
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        try:
            self._run = trackio.init(project, run_dir.resolve().name, config=dict(settings), resume=resume, **quiet)
        except Exception as error:
            raise InputError(f"metrics.trackers: trackio cannot start: {error}") from error


_PACKAGES = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
