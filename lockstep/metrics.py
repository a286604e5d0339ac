"""What a run records: JSON lines that survive a kill, and a summary."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError, LockstepError

if TYPE_CHECKING:
    from .types import RolloutGroup

# Every metric by what it is about. `<fn>` stands for a reward function's name.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Reward": ("reward/mean", "reward/std", "rewards/<fn>/mean", "frac_reward_zero_std", "groups_without_reward"),
    "Policy": ("loss", "grad_norm", "entropy", "kl", "clip_ratio", "lr", "updates", "policy_age"),
    "Responses": ("response_length/mean", "response_length/clip_ratio"),
    "Experts": ("moe/load_imbalance", "moe/expert_tokens/min", "moe/expert_tokens/max", "moe/aux_loss"),
    "Parity": (
        *("logprob_diff/max", "parity/tokens_checked", "parity/tokens_different"),
        "parity/tokens_routed_differently",
    ),
    "Time": ("time/step", "time/generate", "time/forward_backward", "time/optim_step", "time/sync"),
    "Performance": ("perf/tokens_per_s_per_gpu", "memory/peak_gib", "padding_waste", "recompiles", "graph_replays"),
}
NAMES: tuple[str, ...] = tuple(name for names in SECTIONS.values() for name in names)

_STEPS_END = 1 << 53  # a step below it is exact as a float too

METRICS_FILE, ROLLOUTS_FILE, SUMMARY_FILE = "metrics.jsonl", "rollouts.jsonl", "summary.json"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the disk refuses inside (no space left, say) into a `LockstepError` naming `path`."""
    try:
        yield
    except Exception as error:
        from safetensors import SafetensorError

        if not isinstance(error, (OSError, SafetensorError)):
            raise
        raise LockstepError(f"could not write {path}: {error}") from error


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as standard JSON. NaN and infinities, which JSON lacks, become "NaN", "Infinity" and "-Infinity"."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return _plain(value.item()) if hasattr(value, "item") else str(value)  # scalars of torch and numpy; paths


class MetricsWriter:
    """Appends JSON objects, one a line, each flushed to the operating system before `write` returns.

    Opened with `start_step=N` (a run that resumes before step N, or 0 for a new one), it first drops the lines of
    steps N and later and a torn last line, atomically, so that the file never holds a step of two histories.
    Raises `InputError` when another line of the file cannot be read.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        if path.exists():
            _keep_before(path, start_step)
        self._path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`; its `step` is what resuming goes by."""
        rest = memoryview((to_json({"step": int(record["step"]), **record}) + "\n").encode())
        with writing(self._path):
            while rest:  # a full disk takes a part of the line before it refuses
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSON-lines file, without a torn last line. Raises `InputError` naming an unreadable one."""
    return (record for _, record in _lines(path))


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    if not path.is_file():
        raise InputError(f"{path} is not a regular file; move it away")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # the process died while writing it
            try:
                record = json.loads(line)
                if type(record["step"]) is not int or not 0 <= record["step"] < _STEPS_END:
                    raise ValueError(f"step is {str(record['step'])[:40]}")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise InputError(
                    f"{path}, line {number}: not a JSON object with a whole number `step` ({error}); delete the line"
                ) from error
            yield line, record


def _keep_before(path: Path, step: int) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    with writing(path):
        with temporary.open("wb") as file:
            for line, record in _lines(path):
                if record["step"] < step:
                    file.write(line)
        _replace(temporary, path)


def _replace(temporary: Path, path: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object to `path`, whole or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    with writing(path):
        temporary.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")
        _replace(temporary, path)


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json` of a run folder."""
    write_json(run_dir / SUMMARY_FILE, summary)


def rollout_records(step: int, groups: list[RolloutGroup]) -> Iterator[dict[str, Any]]:
    """One record a group for `rollouts.jsonl`: the prompt, and each sample with what scoring made of it."""
    for group in groups:
        samples = [
            {
                "text": rollout.completion.text,
                "reward": rollout.reward,
                "rewards": rollout.rewards,
                "advantage": rollout.advantage,
                "tokens": len(rollout.completion.token_ids),
                "token_ids": rollout.completion.token_ids,
                "finish_reason": rollout.completion.finish_reason,
            }
            for rollout in group.rollouts
        ]
        yield {"step": step, "group": group.group, "prompt": group.prompt, "samples": samples}
