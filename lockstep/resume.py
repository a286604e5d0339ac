"""Going on with a run: from a whole checkpoint only, and only as the run that it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import checkpoint, config_file
from .config import RunConfig
from .errors import InputError
from .metrics import METRICS_FILE, read_lines, to_json

CHECKPOINTS, FINAL_MODEL = "checkpoints", "model"
_DATA_FIELDS = ("task.data", "task.validation_data", "attention_mask")


def inputs(config: RunConfig) -> dict[str, Any]:
    """What makes a run the run it is, for a checkpoint's state: `config`, and the size and SHA-256 of its data and its
    attention mask's file.

    What is no local file or folder (a hub id, a module) is recorded by its name alone.
    """
    settings = json.loads(to_json(config_file.flat(config)))
    paths = {name: settings[name] for name in _DATA_FIELDS}
    paths["attention_mask"] = (settings["attention_mask"] or "").rpartition(":")[0] or None
    return {"config": settings, "data": {name: _fingerprint(path) for name, path in paths.items()}}


def data(config: RunConfig) -> dict[str, str]:
    """The files among a run's `inputs` in words, which are the same for the same bytes."""
    return {name: _words(fingerprint) for name, fingerprint in inputs(config)["data"].items()}


def find(run_dir: Path, now: Mapping[str, Any]) -> checkpoint.LoadedCheckpoint | None:
    """The newest whole checkpoint in `run_dir`; None when the run has no step yet. Writes nothing.

    Raises `InputError` when a run that has steps has no whole checkpoint, and when `now` (see `inputs`) is not what
    the checkpoint was made with.
    """
    metrics = run_dir / METRICS_FILE
    done = sum(1 for _ in read_lines(metrics)) if metrics.exists() else 0
    loaded = checkpoint.latest(run_dir / CHECKPOINTS)
    if loaded is not None:
        _require_same(run_dir, loaded, now)
    elif done or (run_dir / FINAL_MODEL).exists():
        raise InputError(
            f"--resume {run_dir}: the run has {done} steps and no whole checkpoint to go on from; begin again with "
            f"--config {run_dir / 'config.yaml'} and --checkpoint.interval N, in a new folder"
        )
    return loaded


def _require_same(run_dir: Path, loaded: checkpoint.LoadedCheckpoint, now: Mapping[str, Any]) -> None:
    then = loaded.state.get("inputs")
    if then is None:
        raise InputError(f"{loaded.path} does not say what it was made with; an earlier version of lockstep wrote it")
    old, new = then["config"], now["config"]
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if before != after and not (name == "steps" and after > before):
            rule = "it may only be raised" if name == "steps" else "only --steps may change"
            raise InputError(
                f"--resume {run_dir}: {name} was {before!r} when {loaded.path.name} was saved and is {after!r} in "
                f"config.yaml; {rule}"
            )
    for name in _DATA_FIELDS:
        before, after = then["data"].get(name), now["data"][name]
        if before != after:
            raise InputError(
                f"--resume {run_dir}: {name} {new[name]} was {_words(before)} when {loaded.path.name} was saved and is "
                f"{_words(after)}; put it back (relative paths start where the command runs), or begin a new run"
            )


def _words(fingerprint: Mapping[str, Any] | None) -> str:
    if fingerprint is None:
        return "no file or folder"
    return f"{fingerprint['size']:,} bytes with SHA-256 {fingerprint['sha256'][:12]}..."


def _fingerprint(data: str | None) -> dict[str, Any] | None:
    """Bytes and SHA-256 of a file, or of the files of a folder in the order of their names."""
    path = Path(data or "").expanduser()
    if data is None or not path.exists():
        return None
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if _is_data(file))
    whole = hashlib.sha256()
    try:
        for file in files:
            with file.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").digest()
            whole.update(f"{file.relative_to(path)}\0".encode() + digest)
        return {"size": sum(file.stat().st_size for file in files), "sha256": whole.hexdigest()}
    except OSError as error:
        raise InputError(f"{data} cannot be read: {error}") from error


def _is_data(file: Path) -> bool:
    """Not what `datasets` keeps beside the rows for itself, nor hidden files."""
    return file.is_file() and not file.name.startswith((".", "cache-"))
