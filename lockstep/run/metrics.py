"""The files of a run's records: JSON lines that survive a kill, and JSON files that are replaced atomically."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, LockstepError, refuse
from ..json_file import to_json

if TYPE_CHECKING:
    from ..config import RunConfig
    from ..types import RolloutGroup, Trajectory

_STEPS_END = 1 << 53  # smaller steps are exact as floats too
_WRITTEN = re.compile(rb'\{"step": (\d{1,15})[,}]')  # how `MetricsWriter` begins a line

METRICS_FILE, ROLLOUTS_FILE, SUMMARY_FILE = "metrics.jsonl", "rollouts.jsonl", "summary.json"
EXCLUSION_FLAGS = "replaced", "without_reward"  # fields that mark a group's record as not trained on
WAITS_FILE = "waits.jsonl"  # apart from the rollouts, whose file is reproducible bit for bit


def format_number(value: float | None) -> str:
    """Four significant digits, or all digits of a whole number with separators; a dash for None."""
    if value is None or isinstance(value, int):
        return "-" if value is None else f"{value:,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def success_metric(names: Iterable[str], config: RunConfig | None) -> str:
    """The validation metric that measures success: the mean of the first reward; or of the total reward if there are
    none, or an environment has several, of which none is known to be decisive."""
    named = [name for name in names if name.startswith("validation/rewards/") and name.endswith("/mean")]
    played = config is not None and config.task.environment is not None
    return "validation/reward/mean" if not named or (played and len(named) > 1) else named[0]


@contextmanager
def name_write_errors(path: Path | str) -> Iterator[None]:
    """A context that turns an `OSError` (no space left, say) into a `LockstepError` naming `path`."""
    try:
        yield
    except OSError as error:
        raise LockstepError(f"could not write {path}: {error}") from error


@contextmanager
def name_read_errors(path: Path) -> Iterator[None]:
    """A context that turns an `OSError` into an `InputError` naming `path`."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A context with a temporary path to write, of this process alone, which then replaces `path` atomically. Raises
    `LockstepError`."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    with name_write_errors(path):
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_all(file: io.RawIOBase, data: bytes) -> None:
    """Write all of `data`; a single `write` may be partial, as on a disk that is getting full."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Appends JSON objects, one per line, each flushed to the operating system before `write` returns. First it
    atomically drops the lines of steps from `start_step` on and a torn last line. Raises `InputError` if another line's
    step cannot be read."""

    def __init__(self, path: Path, start_step: int = 0) -> None:
        if path.exists():
            with atomic_write(path) as temporary, temporary.open("wb") as file:
                file.writelines(line for line, step in read_lines(path) if step < start_step)
        self._path = path
        with name_write_errors(path):
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        with name_write_errors(self._path):
            write_all(self._file, (to_json({"step": int(record["step"]), **record}) + "\n").encode())

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def add_to_step(path: Path, step: int, more: Mapping[str, Any]) -> None:
    """Atomically add `more` to the records of `step`, and drop those of later steps."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        for line, record in _parse_lines(path):
            if record["step"] <= step:
                file.write(line if record["step"] < step else (to_json({**record, **more}) + "\n").encode())


def read_records(path: Path, step: int | None = None) -> Iterator[dict[str, Any]]:
    """The records of a JSON-lines file, or those of one step, without a torn last line. Raises `InputError` naming an
    unreadable line, or the file if it cannot be read."""
    return (record for _, record in _parse_lines(path, step))


def read_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """The lines of a JSON-lines file, each with its step, without a torn last line. A file of rollouts may be large, so
    lines as `MetricsWriter` writes them are not decoded. Raises `InputError` as `read_records`, for a step."""
    return ((line, step) for _, line, step in _numbered_lines(path))


def line_step(line: bytes) -> int | None:
    """The step of a whole line that `MetricsWriter` wrote; None for any other line."""
    found = _WRITTEN.match(line) if line.endswith(b"}\n") else None
    return found and int(found[1])


def _parse_lines(path: Path, step: int | None = None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for number, line, of in _numbered_lines(path):
        if step in (None, of):
            yield line, _parse_record(line, f"{path}, line {number}")


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """The lines, each with its number, from 1, and its step."""
    refuse(not path.is_file(), f"{path} is not a regular file; move it away")
    with name_read_errors(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # the process died while writing it
            step = line_step(line)
            yield number, line, _parse_record(line, f"{path}, line {number}")["step"] if step is None else step


def _parse_record(line: bytes, named: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if type(record["step"]) is not int or not 0 <= record["step"] < _STEPS_END:
            raise ValueError(f"step is {str(record['step'])[:40]}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{named}: not a JSON object with a whole number `step` ({error}); delete the line") from error
    return record


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")


def rollout_records(step: int, groups: list[RolloutGroup]) -> Iterator[dict[str, Any]]:
    """One record per group for `rollouts.jsonl`: the prompt, and each sample with its rewards, advantage and a digest
    of its log-probabilities' bits. A group that was not trained on says why: dynamic sampling `replaced` it, or it is
    `without_reward`, and samples without a reward have null."""
    for group in groups:
        samples = [
            {
                "sample": rollout.identity.sample,
                "text": rollout.text,
                "reward": rollout.reward if _has_reward(group, rollout) else None,
                "rewards": rollout.rewards,
                "advantage": None if group.without_reward else rollout.advantage,
                "tokens": len(rollout.token_ids),
                "token_ids": rollout.token_ids,
                "finish_reason": rollout.finish_reason,
                "segments": _segment_records(rollout, group.prompt_ids),
                "logprobs_digest": logprobs_digest(rollout),
                **({"extra": rollout.extra} if rollout.extra else {}),
                **({"environment": rollout.environment} if rollout.environment else {}),
            }
            for rollout in group.rollouts
        ]
        left_out = {name: True for name in EXCLUSION_FLAGS if getattr(group, name)}
        prompt = {"prompt": group.prompt, "prompt_token_ids": group.prompt_ids}
        yield {"step": step, "group": group.group, **left_out, **prompt, "samples": samples}


def _has_reward(group: RolloutGroup, rollout: Trajectory) -> bool:
    return not group.without_reward or any(value is not None for value in rollout.rewards.values())


def wait_records(step: int, groups: list[RolloutGroup]) -> Iterator[dict[str, Any]]:
    """One record per group for `waits.jsonl`: the seconds that each sample's environment took to answer each turn."""
    for group in groups:
        waits = [(r.identity.sample, [round(turn.wait_s, 6) for turn in r.turns]) for r in group.rollouts]
        samples = [{"sample": sample, "wait_s": seconds} for sample, seconds in waits]
        yield {"step": step, "group": group.group, "samples": samples}


def logprobs_digest(rollout: Trajectory) -> str:
    """A digest (16 hexadecimal digits) of the bits of both log-probabilities of the sampled tokens."""
    words = array("f", rollout.logprobs) + array("f", rollout.model_logprobs)
    return hashlib.blake2b(words, digest_size=8).hexdigest()


def _segment_records(rollout: Trajectory, group_prompt: list[int]) -> list[dict[str, Any]]:
    """The segments in order, each with its kind and number of tokens. If there is more than a prompt and its completion
    (which are in the record anyway), those after the prompt also have their text, given ones their tokens, and sampled
    ones their rewards. `anew` marks one that begins a branch. A prompt has text and tokens if it is not the group's."""
    found: list[dict[str, Any]] = []
    for segment in rollout.segments:
        found.append({"kind": "sampled" if segment.sampled else "given", "tokens": len(segment.token_ids)})
        if segment is rollout.prompt and segment.token_ids != group_prompt:
            found[-1] |= {"text": segment.text, "token_ids": segment.token_ids}
        if len(rollout.segments) > 2 and segment is not rollout.prompt:
            found[-1] |= {"text": segment.text} | ({} if segment.sampled else {"token_ids": segment.token_ids})
            found[-1] |= {"rewards": dict(segment.rewards)} if segment.rewards else {}
            found[-1] |= {"anew": True} if segment.begins_branch else {}
    return found
