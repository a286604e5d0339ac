"""The record of one trajectory of a run, and its first difference from another."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ...errors import InputError, refuse
from ...rl.loop import Loop
from ...types import Trajectory
from ..metrics import METRICS_FILE, ROLLOUTS_FILE, logprobs_digest, read_records


def parse_trajectory(trajectory: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"([0-9]{1,12})/([0-9]{1,12})/([0-9]{1,12})", trajectory)
    if found is None:
        raise InputError(
            f"--trajectory is {trajectory!r}; it must be STEP/GROUP/SAMPLE with the numbers of rollouts.jsonl: 0/0/0 "
            "is the first sample"
        )
    return int(found[1]), int(found[2]), int(found[3])


def recorded_sample(run_dir: Path, step: int, group: int, sample: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The group's record and the sample's record in it. Raises `InputError` if there is none or it is damaged."""
    refuse(not (run_dir / "config.yaml").is_file(), f"{run_dir} is not a run folder (it has no config.yaml)")
    path = run_dir / ROLLOUTS_FILE
    refuse(not path.is_file(), f"{run_dir} has no {ROLLOUTS_FILE}: no step was done, or none was to be recorded")
    groups = (record for record in read_records(path, step) if record.get("group") == group)
    for record in groups:  # failed samples may be in a second record
        samples = record.get("samples", [])
        for place, found in enumerate(samples if isinstance(samples, list) else [samples]):
            if not isinstance(found, dict) or found.get("sample", place) == sample:
                refuse(not _is_complete(found), f"{path}: what it has of trajectory {step}/{group}/{sample} is damaged")
                return record, found
    raise InputError(f"{path} has no trajectory {step}/{group}/{sample}")


def learning_rates(run_dir: Path) -> dict[int, float]:
    """The learning rates of the recorded steps. A schedule gives others once the run has more steps."""
    path = run_dir / METRICS_FILE
    found = {record["step"]: record.get("lr") for record in (read_records(path) if path.exists() else ())}
    return {step: lr for step, lr in found.items() if isinstance(lr, float)}


def _is_complete(recorded: Any) -> bool:
    """Whether a sample's record has everything that the comparison needs."""
    try:
        prompt, *rest = recorded["segments"]
        sampled = [token for turn in sampled_turns(recorded) for token in turn]
        given = [*prompt.get("token_ids", ())]
        for segment in rest:
            if segment["kind"] == "given":
                given += segment["token_ids"]
        return bool(sampled) and prompt["kind"] == "given" and all(type(token) is int for token in sampled + given)
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
        return False


def given_tokens(loop: Loop, record: dict[str, Any], recorded: dict[str, Any]) -> list[tuple[list[int], bool]]:
    """The tokens of the prompt and of each later given segment, each with whether it began a branch. Older runs did not
    record the prompt's tokens, so it is encoded again."""
    first, *rest = recorded["segments"]
    prompt = first.get("token_ids") or record.get("prompt_token_ids") or loop.run.policy.encode(record["prompt"])
    later = [segment for segment in rest if segment["kind"] == "given"]
    return [(prompt, False), *((segment["token_ids"], bool(segment.get("anew"))) for segment in later)]


def sampled_turns(recorded: dict[str, Any]) -> list[list[int]]:
    counts = [segment["tokens"] for segment in recorded["segments"] if segment["kind"] == "sampled"]
    tokens = iter(recorded["token_ids"])
    return [[next(tokens) for _ in range(count)] for count in counts]


def first_difference(recorded: dict[str, Any], found: Trajectory) -> str:
    """The first difference in tokens, in words; if there is none, whether log-probabilities differ."""
    before, now = recorded["segments"][1:], found.segments[1:]
    turns, turn = sampled_turns(recorded), 0
    for segment, again in zip(before, now, strict=False):
        if segment["kind"] == "sampled":
            token_ids, turn = turns[turn], turn + 1
            what = f"turn {turn}"
        else:
            token_ids, what = segment["token_ids"], f"what was given after turn {turn}"
        for at, (then, came) in enumerate(zip_longest(token_ids, again.token_ids, fillvalue="none"), start=1):
            if then != came:
                return f"{what}, token {at}: {then} is recorded, {came} came now"
    if len(before) != len(now):
        return f"{len(before)} segments after the prompt are recorded, {len(now)} came now"
    digest = recorded.get("logprobs_digest", logprobs_digest(found))
    return "" if digest == logprobs_digest(found) else "the tokens are the same, and log-probabilities differ"
