"""Going on with a run: from a whole checkpoint only, and only as the run that it was.

What a checkpoint of an earlier version does not record cannot be compared; `remarks` says what that is.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..cache.file_hashes import fingerprints
from ..config import EARLIER, CheckpointConfig, MetricsConfig, RunConfig, yaml_file
from ..errors import InputError, refuse
from ..json_file import to_json
from ..models import TEMPLATES, describe_folder
from ..session.build import resolve, resolve_device
from ..session.golden import GRADIENT_NORM
from ..user_functions import one_line
from . import checkpoint
from .metrics import METRICS_FILE, ROLLOUTS_FILE, read_lines

SUMMARIZED = "time/generate", "time/forward_backward", "time/sync", "reward/mean"  # every step's metrics have them
CHECKPOINTS, FINAL_MODEL, MODELS = "checkpoints", "model", "models"
# How processes lie, which any others go on for.
LAYOUT = tuple(f"parallel.{name}" for name in ("fsdp", "tp", "zero_stage", "generator_tp", "symmetric_memory"))
# What no bit of a step depends on.
FREE = {*LAYOUT, "recipe", "steps", "parallel.timeout", *(f"checkpoint.{name}" for name in vars(CheckpointConfig()))}
FREE |= {f"metrics.{name}" for name in vars(MetricsConfig())}
ONLY = "only --steps, --checkpoint, --metrics and how processes lie may change"
_NAMED = ("attention_mask", "loss.loss_type", "task.environment")  # path.py:name
_DATA_FIELDS = ("task.data", "task.validation_data", *_NAMED)
_MODELS = {"model": "model", "teacher": "loss.teacher"}  # what records a folder's files, and the field that names it


def inputs(config: RunConfig) -> dict[str, Any]:
    """What makes a run the run it is, for a checkpoint's state: `config`; the size and SHA-256 of its data and its
    attention mask's file; and of every file of its `model` folder and its teacher's. Of data that is no local file or
    folder (a hub id, a module) its name alone is recorded, of a hub's model the revision."""
    settings = _settings(config)
    folders = {name: settings[field] for name, field in _MODELS.items()}
    models = {name: None if folder is None else describe_folder(folder) for name, folder in folders.items()}
    return {"config": settings, "data": _data(settings), **models}


def data(config: RunConfig) -> dict[str, str]:
    """The files among a run's `inputs` in words, which are the same for the same bytes."""
    return {name: _words(fingerprint) for name, fingerprint in _data(_settings(config)).items()}


def _settings(config: RunConfig) -> dict[str, Any]:
    return json.loads(to_json(yaml_file.flat(config)))


def _data(settings: Mapping[str, Any]) -> dict[str, Any]:
    paths = {name: settings[name] for name in _DATA_FIELDS}
    for name in _NAMED:
        paths[name] = (settings[name] or "").rpartition(":")[0] or None
    paths |= {f"task.tools {tool}": tool.rpartition(":")[0] or None for tool in settings["task.tools"]}
    return {name: _fingerprint(path) for name, path in paths.items()}


def find(run_dir: Path, now: Mapping[str, Any]) -> checkpoint.LoadedCheckpoint | None:
    """The newest whole checkpoint in `run_dir`; None when the run has no step yet. Writes nothing. Raises `InputError`
    when a run that has steps has no whole checkpoint, when `now` (see `inputs`) is not what it was made with, and when
    a line of metrics or rollouts cannot be read."""
    metrics = run_dir / METRICS_FILE
    done = sum(1 for _ in read_lines(metrics)) if metrics.exists() else 0
    loaded = checkpoint.latest(run_dir / CHECKPOINTS)
    if loaded is not None:
        require_same(run_dir, loaded, now)
        _require_records(run_dir, loaded.step)
    elif done or (run_dir / FINAL_MODEL).exists():
        raise InputError(
            f"--resume {run_dir}: the run has {done} steps and no whole checkpoint to go on from; begin again with "
            f"--config {run_dir / 'config.yaml'} and --checkpoint.interval N, in a new folder"
        )
    return loaded


def remarks(run_dir: Path, loaded: checkpoint.LoadedCheckpoint) -> list[str]:
    """What whoever goes on from this checkpoint should know: what it does not record, and steps without metrics."""
    name, config = loaded.path.name, loaded.state["inputs"]["config"]
    found = []
    if config["model"] is not None and loaded.state["inputs"].get("model") is None:
        found.append(f"{name} does not record the files of model {config['model']}: they were not compared")
    for record, field in _MODELS.items():
        folder = Path(os.path.expanduser(config.get(field) or "")) / TEMPLATES
        if _leaves_out_templates(loaded.state["inputs"].get(record)) and folder.is_dir():
            found.append(f"{name} does not record {folder}: its files were not compared")
    if "words" not in loaded.state["numerics"]:
        found.append(f"{name} does not record words of its arithmetic: versions and names were compared")
    found += [f"since {name} was saved, {sentence}" for sentence in redefined(loaded.state)]
    if new := sorted(_settings(RunConfig()).keys() - config.keys()):
        found.append(f"{name} does not know {', '.join(new)}: they are what they were without a setting")
    metrics = run_dir / METRICS_FILE
    recorded = {record["step"] for record in read_lines(metrics)} if metrics.exists() else set()
    if missing := [step for step in range(loaded.step) if step not in recorded]:
        found.append(
            f"{metrics} lacks {len(missing)} of the {loaded.step} steps before {name}, the first of them step "
            f"{missing[0]}: curves and means leave them out"
        )
    return found


def other_numerics(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of the arithmetic is not as it was, as sentences; none where a run goes on with the same bits. Equal words
    are equal arithmetic, whatever computes them; as they come from few threads and small tensors, what else chooses an
    order of additions must be equal too. Without words, all that was recorded must."""
    then, now = ({"tp": 1, **found} for found in (then, now))  # as in earlier versions
    if "words" not in then:
        return [_was(name, then, now) for name in then if name in now and then[name] != now[name]]
    names = ["dtype", "threads", "tp"] + ["device"] * (now["operators"] == "cuda")
    changed = [_was(name, then, now) for name in names if then[name] != now[name]]
    both = [name for name in now["words"] if name in then["words"]]  # earlier versions wrote fewer
    words = [name for name in both if then["words"][name] != now["words"][name]]
    if words:
        facts = [name for name in now if name not in ("words", *names) and then.get(name) != now[name]]
        why = "; ".join(_was(name, then, now) for name in facts) or "the versions are the same"
        changed.append(
            f"{', '.join(words)} of fixed numbers {'has' if len(words) == 1 else 'have'} other words ({why})"
        )
    return changed


def redefined(state: Mapping[str, Any]) -> list[str]:
    """What this version computes otherwise than that which wrote a checkpoint with this state."""
    then, config, found = state["numerics"], state["inputs"]["config"], list[str]()
    if GRADIENT_NORM not in then.get("words", ()):
        found.append(
            "the gradient norm became the root of an exact sum: its last bits may differ, and where it clips, the "
            "weights'"
        )
    if config.get("optimizer.router_bias_rate") and "balanced_by" not in then:  # by other loads
        found.append("experts became balanced by all tokens of the sequences trained on: biases may move otherwise")
    if "packing" not in state and config.get("trainer.mode") == "packed":
        found.append(
            "micro-batches became fewer where groups may be split between them: a step of several may add its "
            "gradients in another order"
            + (", and balances experts over other micro-batches" if config.get("loss.router_aux_loss_coef") else "")
        )
    return found


def _was(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{name} was {then.get(name)!r} and is {now[name]!r}"


def require_same(run_dir: Path, loaded: checkpoint.LoadedCheckpoint, now: Mapping[str, Any]) -> None:
    """Raise `InputError` when what the run is given `now` (see `inputs`) is not what the checkpoint was made with."""
    then = loaded.state.get("inputs")
    if then is None:
        raise InputError(f"{loaded.path} does not say what it was made with; an earlier version of lockstep wrote it")
    _require_same_config(run_dir, loaded, then["config"], now["config"])
    pairs = {f"{name} {now['config'][name]}": (then["data"].get(name), now["data"][name]) for name in _DATA_FIELDS}
    pairs |= {name: (then["data"].get(name), found) for name, found in now["data"].items() if name not in _DATA_FIELDS}
    for name, field in _MODELS.items():
        if then.get(name) is not None and then[name] != now[name]:
            pairs |= _model_files(f"{field} {now['config'][field]}", then[name], now[name])
    for what, (before, after) in pairs.items():
        if before != after:
            raise InputError(
                f"--resume {run_dir}: {what} was {_words(before)} when {loaded.path.name} was saved and is "
                f"{_words(after)}; put it back (relative paths start where the command runs), or begin a new run"
            )


def _require_records(run_dir: Path, steps: int) -> None:
    """The lines of steps before the checkpoint have what the summary is made from, finite numbers."""
    if (run_dir / ROLLOUTS_FILE).exists():
        for _ in read_lines(run_dir / ROLLOUTS_FILE):
            pass
    if not (metrics := run_dir / METRICS_FILE).exists():
        return
    for number, record in enumerate(read_lines(metrics), start=1):
        for field in SUMMARIZED if record["step"] < steps else ():
            value: Any = record.get(field)
            if type(value) not in (int, float) or not abs(value) < sys.float_info.max:
                raise InputError(
                    f"{metrics}, line {number}: {field} is {one_line(value, repr)}, not a number; delete the line, "
                    "which then counts as lost"
                )


def require_unchanged(run_dir: Path, old: RunConfig, config: RunConfig, ranks: int) -> None:
    """`InputError` where a run that is gone on with, on so many processes, has another configuration than it had."""
    of_batches = {k: v for k, v in vars(old.parallel).items() if f"parallel.{k}" not in LAYOUT}
    layout = replace(config.parallel, **of_batches)  # any, of the same batches
    before, now = resolve(replace(old, parallel=layout), ranks), resolve(config, ranks)
    was = yaml_file.flat(before)
    for name, value in yaml_file.flat(now).items():
        refuse(
            name not in FREE and value != was[name],
            f"--resume {run_dir}: {name} is {was[name]!r} there and {value!r} here; {ONLY}",
        )


def _require_same_config(
    run_dir: Path, loaded: checkpoint.LoadedCheckpoint, old: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
    earlier, steps = _settings(EARLIER), new["steps"]
    if old.get("device") != new["device"]:
        made_on = "cuda" if loaded.state["numerics"]["operators"] == "cuda" else "cpu"
        if resolve_device(new["device"]).type == made_on:
            old = {**old, "device": new["device"]}  # one of the two is `auto`
    if steps < loaded.step:
        raise InputError(
            f"--resume {run_dir}: steps is {steps}, and {loaded.path.name} has done {loaded.step}; give as many or "
            f"more, or begin again in a new folder: --config {run_dir / 'config.yaml'} --steps {steps}"
        )
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, earlier.get(name)), new.get(name)
        if before != after and name not in FREE:
            raise InputError(
                f"--resume {run_dir}: {name} was {before!r} when {loaded.path.name} was saved and is {after!r} in "
                f"config.yaml; {ONLY}"
            )


def _model_files(what: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each file of the model folder, or the hub's revision, as it was and as it is."""
    if "files" not in then or "files" not in now:
        return {what: (then, now)}
    names = sorted(then["files"].keys() | now["files"].keys())
    if _leaves_out_templates(then):
        names = [name for name in names if not name.startswith(f"{TEMPLATES}/")]
    return {f"{what}: {name}": (then["files"].get(name), now["files"].get(name)) for name in names}


def _leaves_out_templates(then: Mapping[str, Any] | None) -> bool:
    """Whether a model folder was recorded before its further chat templates were part of it."""
    if then is None or "files" not in then:
        return False
    return TEMPLATES not in then and not any(name.startswith(f"{TEMPLATES}/") for name in then["files"])


def _words(fingerprint: Mapping[str, Any] | None) -> str:
    if fingerprint is None:
        return "no file or folder"
    if "revision" in fingerprint:
        return f"the hub's revision {fingerprint['revision']}"
    if "files" in fingerprint:
        return f"a folder of {len(fingerprint['files'])} files"
    return f"{fingerprint['size']:,} bytes with SHA-256 {fingerprint['sha256'][:12]}..."


def _fingerprint(data: str | None) -> dict[str, Any] | None:
    """Bytes and SHA-256 of a file, or of the files of a folder in the order of their names."""
    path = Path(os.path.expanduser(data or ""))
    if data is None or not path.exists():
        return None
    # not what `datasets` keeps beside the rows for itself, nor hidden files
    beside = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith((".", "cache-")))
    files = [path] if path.is_file() else sorted(beside)
    try:
        found = fingerprints(path, [str(file.relative_to(path)) for file in files])
    except OSError as error:
        raise InputError(f"{data} cannot be read: {error}") from error
    whole = b"".join(f"{name}\0".encode() + bytes.fromhex(file["sha256"]) for name, file in found.items())
    return {"size": sum(file["size"] for file in found.values()), "sha256": hashlib.sha256(whole).hexdigest()}
