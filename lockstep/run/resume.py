"""Resuming a run: only from a complete checkpoint, and only as the same run.

What a checkpoint of an earlier version does not record cannot be compared; `remarks` reports that.
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

from ..cache.file_hashes import hash_files
from ..config import LEGACY_CONFIG, CheckpointConfig, MetricsConfig, RunConfig, yaml_file
from ..errors import InputError, refuse
from ..json_file import to_json
from ..models import EXTRA_TEMPLATES, describe_folder
from ..session.build import resolve, resolve_device
from ..session.golden import GRADIENT_NORM
from ..user_functions import one_line, source_file
from . import checkpoint
from .metrics import METRICS_FILE, ROLLOUTS_FILE, read_lines, read_records

SUMMARIZED_METRICS = "time/generate", "time/forward_backward", "time/sync", "reward/mean"  # in every step's metrics
_SUMMARIZED_IF_THERE = "time/optim_step", "updates"
CHECKPOINTS, FINAL_MODEL, MODELS = "checkpoints", "model", "models"
# The layout of processes; a run may be resumed with any other.
LAYOUT_FIELDS = tuple(f"parallel.{name}" for name in ("fsdp", "tp", "zero_stage", "generator_tp", "symmetric_memory"))
# Settings that no bit of a step depends on.
CHANGEABLE = {*LAYOUT_FIELDS, "recipe", "steps", "parallel.timeout", "task.max_environment_failures"}
CHANGEABLE |= {f"checkpoint.{name}" for name in vars(CheckpointConfig())}
CHANGEABLE |= {f"metrics.{name}" for name in vars(MetricsConfig())}
WHAT_MAY_CHANGE = (
    "only --steps, --checkpoint.*, --metrics.*, --parallel.timeout, --task.max-environment-failures and the layout of "
    "processes may change"
)
_FUNCTION_FIELDS = ("attention_mask", "loss.loss_type", "task.environment")  # values such as path.py:name
_TOOLS = "task.tools "
_DATA_FIELDS = ("task.data", "task.validation_data", *_FUNCTION_FIELDS)
_NO_FILE = "no file or folder"
_MODEL_FIELDS = {"model": "model", "teacher": "loss.teacher"}  # name in `inputs`, and the field that names the folder


def identify_inputs(config: RunConfig) -> dict[str, Any]:
    """What identifies a run, for a checkpoint's state: `config`, and size and SHA-256 of its data, its Python files
    (attention mask, loss, environment, tools) and every file of its model's and teacher's folders. For data that is not
    a local file or folder (a hub id) only the name is recorded; for a model from the hub, the revision."""
    settings = _settings(config)
    folders = {name: settings[field] for name, field in _MODEL_FIELDS.items()}
    models = {name: None if folder is None else describe_folder(folder) for name, folder in folders.items()}
    return {"config": settings, "data": _fingerprint_data(settings), **models}


def describe_data(config: RunConfig) -> dict[str, str]:
    """The data and Python files among a run's `inputs`, and of reward functions, in words equal for equal bytes."""
    settings = _settings(config)
    rewards = {f"task.reward {name}": _fingerprint(source_file(name)) for name in settings["task.reward"]}
    found = _fingerprint_data(settings) | rewards
    return {name: _describe_fingerprint(fingerprint) for name, fingerprint in found.items()}


def describe_evaluated(config: RunConfig) -> dict[str, Any]:
    """What is the same in all processes of an evaluation: the settings, and the bytes of data and Python files. Names
    of data files may differ, as those of rows in memory do."""
    settings, files = _settings(config), describe_data(config)
    for name in ("task.data", "task.validation_data"):
        if files[name] != _NO_FILE:
            del settings[name]
    return settings | {f"the file of {name}": what for name, what in files.items()}


def _settings(config: RunConfig) -> dict[str, Any]:
    return json.loads(to_json(yaml_file.flatten(config)))


def _fingerprint_data(settings: Mapping[str, Any]) -> dict[str, Any]:
    paths = {name: settings[name] for name in _DATA_FIELDS}
    paths |= {name: source_file(settings[name] or "") for name in _FUNCTION_FIELDS}
    paths |= {f"{_TOOLS}{tool}": source_file(tool) for tool in settings["task.tools"]}
    return {name: _fingerprint(path) for name, path in paths.items()}


def find_checkpoint(run_dir: Path, now: Mapping[str, Any]) -> checkpoint.LoadedCheckpoint | None:
    """The newest complete checkpoint in `run_dir`; None if the run has no step yet. Writes nothing. Raises `InputError`
    if a run with steps has no complete checkpoint, if `now` (see `identify_inputs`) differs from what it was made with,
    or if a line of metrics, or the step of one of rollouts, cannot be read."""
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
    """What to tell a user who resumes from this checkpoint: what it does not record, and steps without metrics."""
    name, config = loaded.path.name, loaded.state["inputs"]["config"]
    found = []
    if config["model"] is not None and loaded.state["inputs"].get("model") is None:
        found.append(f"{name} does not record the files of model {config['model']}: they were not compared")
    for record, field in _MODEL_FIELDS.items():
        folder = Path(os.path.expanduser(config.get(field) or "")) / EXTRA_TEMPLATES
        if _leaves_out_templates(loaded.state["inputs"].get(record)) and folder.is_dir():
            found.append(f"{name} does not record {folder}: its files were not compared")
    if "words" not in loaded.state["numerics"]:
        found.append(f"{name} does not record words of its arithmetic: versions and names were compared")
    found += [f"since {name} was saved, {sentence}" for sentence in describe_redefinitions(loaded.state)]
    if new := sorted(_settings(RunConfig()).keys() - config.keys()):
        found.append(f"{name} does not know {', '.join(new)}: they are what they were without a setting")
    metrics = run_dir / METRICS_FILE
    recorded = {step for _, step in read_lines(metrics)} if metrics.exists() else set()
    if missing := [step for step in range(loaded.step) if step not in recorded]:
        found.append(
            f"{metrics} lacks {len(missing)} of the {loaded.step} steps before {name}, the first of them step "
            f"{missing[0]}: curves and means leave them out"
        )
    return found


def describe_other_numerics(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How the arithmetic differs from what it was, in sentences; none if the run continues with the same bits. Equal
    golden words mean equal arithmetic, whatever computes them; but since they come from few threads and small tensors,
    whatever else determines an order of summation must be equal too. Without words, everything recorded must be."""
    then, now = ({"tp": 1, **found} for found in (then, now))  # earlier versions did not record it
    if "words" not in then:
        return [_describe_change(name, then, now) for name in then if name in now and then[name] != now[name]]
    names = ["dtype", "threads", "tp"] + ["device"] * (now["operators"] == "cuda")
    changed = [_describe_change(name, then, now) for name in names if then[name] != now[name]]
    both = [name for name in now["words"] if name in then["words"]]  # earlier versions recorded fewer
    words = [name for name in both if then["words"][name] != now["words"][name]]
    if words:
        facts = [name for name in now if name not in ("words", *names) and then.get(name) != now[name]]
        why = "; ".join(_describe_change(name, then, now) for name in facts) or "the versions are the same"
        changed.append(
            f"{', '.join(words)} of fixed numbers {'has' if len(words) == 1 else 'have'} other words ({why})"
        )
    return changed


def describe_redefinitions(state: Mapping[str, Any]) -> list[str]:
    """What this version computes differently by definition from the one that wrote a checkpoint with this state."""
    then, config, found = state["numerics"], state["inputs"]["config"], list[str]()
    if GRADIENT_NORM not in then.get("words", ()):
        found.append(
            "the gradient norm became the root of an exact sum: its last bits may differ, and where it clips, the "
            "weights'"
        )
    if config.get("optimizer.router_bias_rate") and "balanced_by" not in then:  # loads were counted differently
        found.append("experts became balanced by all tokens of the sequences trained on: biases may move otherwise")
    if "packing" not in state and config.get("trainer.mode") == "packed":
        found.append(
            "micro-batches became fewer where groups may be split between them: a step of several may add its "
            "gradients in another order"
            + (", and balances experts over other micro-batches" if config.get("loss.router_aux_loss_coef") else "")
        )
    return found


def _describe_change(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{name} was {then.get(name)!r} and is {now[name]!r}"


def require_same(run_dir: Path, loaded: checkpoint.LoadedCheckpoint, now: Mapping[str, Any]) -> None:
    """Raise `InputError` if the inputs `now` (see `identify_inputs`) differ from those the checkpoint was made with."""
    then = loaded.state.get("inputs")
    if then is None:
        raise InputError(f"{loaded.path} does not say what it was made with; an earlier version of lockstep wrote it")
    rows = {
        f"task.{name}": yaml_file.path_of_rows(run_dir, name, then["config"].get(f"task.{name}"))
        for name in yaml_file.ROWS_FIELDS
    }
    _require_same_config(run_dir, loaded, then["config"] | rows, now["config"])
    pairs = dict[str, tuple[Any, Any]]()
    for name, found in now["data"].items():
        before, is_function = then["data"].get(name), name in _FUNCTION_FIELDS or name.startswith(_TOOLS)
        if before is not None or not is_function:  # earlier versions recorded no modules
            pairs[f"{name} {now['config'][name]}" if name in _DATA_FIELDS else name] = before, found
    for name, field in _MODEL_FIELDS.items():
        if then.get(name) is not None and then[name] != now[name]:
            pairs |= _model_files(f"{field} {now['config'][field]}", then[name], now[name])
    for what, (before, after) in pairs.items():
        if before != after:
            was, now_is = _describe_fingerprint(before), _describe_fingerprint(after)
            raise InputError(
                f"--resume {run_dir}: {what} was {was} when {loaded.path.name} was saved and is {now_is}; put it back "
                "(relative paths start where the command runs), or begin a new run"
            )


def _require_records(run_dir: Path, steps: int) -> None:
    """Check that steps before the checkpoint have the finite numbers that the summary is computed from."""
    if (run_dir / ROLLOUTS_FILE).exists():
        for _ in read_lines(run_dir / ROLLOUTS_FILE):
            pass
    if not (metrics := run_dir / METRICS_FILE).exists():
        return
    for number, record in enumerate(read_records(metrics), start=1):
        there = [name for name in _SUMMARIZED_IF_THERE if name in record]
        for field in (*SUMMARIZED_METRICS, *there) if record["step"] < steps else ():
            value: Any = record.get(field)
            if type(value) not in (int, float) or not abs(value) < sys.float_info.max:
                raise InputError(
                    f"{metrics}, line {number}: {field} is {one_line(value, repr)}, not a number; delete the line, "
                    "which then counts as lost"
                )


def require_unchanged_config(run_dir: Path, old: RunConfig, config: RunConfig, ranks: int) -> None:
    """Raise `InputError` if a run that is resumed on `ranks` processes has a different configuration than before."""
    of_batches = {k: v for k, v in vars(old.parallel).items() if f"parallel.{k}" not in LAYOUT_FIELDS}
    layout = replace(config.parallel, **of_batches)  # any layout, as long as the batches are the same
    before, now = resolve(replace(old, parallel=layout), ranks), resolve(config, ranks)
    was = yaml_file.flatten(before)
    for name, value in yaml_file.flatten(now).items():
        refuse(
            name not in CHANGEABLE and value != was[name],
            f"--resume {run_dir}: {name} is {was[name]!r} there and {value!r} here; {WHAT_MAY_CHANGE}",
        )


def _require_same_config(
    run_dir: Path, loaded: checkpoint.LoadedCheckpoint, old: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
    earlier, steps = _settings(LEGACY_CONFIG), new["steps"]
    if old.get("device") != new["device"]:
        made_on = "cuda" if loaded.state["numerics"]["operators"] == "cuda" else "cpu"
        if resolve_device(new["device"]).type == made_on:
            old = {**old, "device": new["device"]}  # the same device, once as `auto`
    if steps < loaded.step:
        raise InputError(
            f"--resume {run_dir}: steps is {steps}, and {loaded.path.name} has done {loaded.step}; give as many or "
            f"more, or begin again in a new folder: --config {run_dir / 'config.yaml'} --steps {steps}"
        )
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, earlier.get(name)), new.get(name)
        if before != after and name not in CHANGEABLE:
            raise InputError(
                f"--resume {run_dir}: {name} was {before!r} when {loaded.path.name} was saved and is {after!r} in "
                f"config.yaml; {WHAT_MAY_CHANGE}"
            )


def _model_files(what: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each file of the model folder, or the hub's revision, then and now."""
    if "files" not in then or "files" not in now:
        return {what: (then, now)}
    names = sorted(then["files"].keys() | now["files"].keys())
    if _leaves_out_templates(then):
        names = [name for name in names if not name.startswith(f"{EXTRA_TEMPLATES}/")]
    return {f"{what}: {name}": (then["files"].get(name), now["files"].get(name)) for name in names}


def _leaves_out_templates(then: Mapping[str, Any] | None) -> bool:
    """Whether a model folder was recorded by a version that did not include additional chat templates."""
    if then is None or "files" not in then:
        return False
    return EXTRA_TEMPLATES not in then and not any(name.startswith(f"{EXTRA_TEMPLATES}/") for name in then["files"])


def _describe_fingerprint(fingerprint: Mapping[str, Any] | None) -> str:
    if fingerprint is None:
        return _NO_FILE
    if "revision" in fingerprint:
        return f"the hub's revision {fingerprint['revision']}"
    if "files" in fingerprint:
        return f"a folder of {len(fingerprint['files'])} files"
    return f"{fingerprint['size']:,} bytes with SHA-256 {fingerprint['sha256'][:12]}..."


def _fingerprint(data: str | None) -> dict[str, Any] | None:
    """Size and SHA-256 of a file, or of a folder's files in the order of their names."""
    path = Path(os.path.expanduser(data or ""))
    if data is None or not path.exists():
        return None
    # without hidden files and what `datasets` keeps beside rows, and Python beside a package's modules
    beside = (f for f in path.rglob("*") if f.is_file() and not f.name.startswith((".", "cache-")))
    files = [path] if path.is_file() else sorted(f for f in beside if f.parent.name != "__pycache__")
    try:
        found = hash_files(path, [str(file.relative_to(path)) for file in files])
    except OSError as error:
        raise InputError(f"{data} cannot be read: {error}") from error
    whole = b"".join(f"{name}\0".encode() + bytes.fromhex(file["sha256"]) for name, file in found.items())
    return {"size": sum(file["size"] for file in found.values()), "sha256": hashlib.sha256(whole).hexdigest()}
