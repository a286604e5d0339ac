"""`lockstep replay`: a trajectory of a run's record, sampled again alone, and compared bit by bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config import EARLIER, RunConfig, yaml_file
from ..errors import InputError, refuse
from ..rl.loop import Loop
from ..rl.sample_again import sample_again
from ..rl.sft_warmup import sft_warmup
from ..session.build import build, resolve
from ..session.signals import ended_by_signals, raise_received
from ..session.warm_up import warm_up
from ..types import TRAIN_DOMAIN, SampleIdentity, Trajectory
from . import checkpoint
from . import resume as resuming
from .metrics import ROLLOUTS_FILE, logprobs_digest, read_lines
from .recorder import Recorder
from .resume import CHECKPOINTS

Note = Callable[[str], None]


@dataclass(frozen=True)
class Replayed:
    """What was compared, and the first difference in words, if there is one.

    Attributes:
        steps_redone: that were trained again to have the weights.
        logprobs_compared: whether the record tells of the log-probabilities' bits.
    """

    trajectory: str
    turns: int
    tokens: int
    steps_redone: int
    logprobs_compared: bool
    difference: str

    def to_dict(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {**asdict(self), "identical": not self.difference}

    def render(self) -> str:
        """As the command prints it."""
        what = f"trajectory {self.trajectory}: {self.turns} turns, {self.tokens} sampled tokens"
        if self.difference:
            return f"{what}: DIFFERENT: {self.difference}"
        compared = "tokens and log-probabilities" if self.logprobs_compared else "tokens"
        return f"{what}: bitwise identical ({compared})"


@ended_by_signals()
def replay(run_dir: Path, trajectory: str, call_tools: bool = False, note: Note = lambda text: None) -> Replayed:
    """Sample STEP/GROUP/SAMPLE of `rollouts.jsonl` again, with the weights of that step: those of a checkpoint, or what
    training from an earlier one, or from the beginning, makes of it.

    Args:
        call_tools: ask the environment again; otherwise what it gave is given as recorded.
        note: is told what is done.

    Raises:
        InputError: there is no such trajectory, or the run cannot be gone on with as it was. Nothing is written.
    """
    step, group, sample = _numbers(trajectory)
    record, recorded = _record(run_dir, step, group, sample)
    config = resolve(yaml_file.load(run_dir / "config.yaml", begin=EARLIER))
    refuse(
        call_tools and config.loss.dynamic_sampling,
        "--call-tools needs to know the data row, which loss.dynamic_sampling does not record; leave it out",
    )
    loop, redone = _with_weights(config, run_dir, step, note)
    identity = SampleIdentity(config.seed, TRAIN_DOMAIN, step, group, sample)
    found = sample_again(loop, identity, None if call_tools else _given(loop, record, recorded))
    return Replayed(
        trajectory,
        len(found.turns),
        len(found.token_ids),
        redone,
        "logprobs_digest" in recorded,
        _difference(recorded, found),
    )


def _numbers(trajectory: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"(\d{1,12})/(\d{1,12})/(\d{1,12})", trajectory)
    if found is None:
        raise InputError(
            f"--trajectory is {trajectory!r}; it must be STEP/GROUP/SAMPLE with the numbers of rollouts.jsonl: 0/0/0 "
            "is the first sample"
        )
    return int(found[1]), int(found[2]), int(found[3])


def _record(run_dir: Path, step: int, group: int, sample: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The group's record and the sample's in it."""
    refuse(not (run_dir / "config.yaml").is_file(), f"{run_dir} is not a run folder (it has no config.yaml)")
    path = run_dir / ROLLOUTS_FILE
    refuse(not path.is_file(), f"{run_dir} has no {ROLLOUTS_FILE}: the run was told not to record rollouts")
    lines = (line for line in read_lines(path) if line["step"] == step)
    record = next((line for line in lines if line.get("group") == group), None)
    for place, found in enumerate(record.get("samples", []) if record is not None else []):
        if record is not None and found.get("sample", place) == sample:  # one that failed is not there
            return record, found
    raise InputError(f"{path} has no trajectory {step}/{group}/{sample}")


def _with_weights(config: RunConfig, run_dir: Path, step: int, note: Note) -> tuple[Loop, int]:
    """A loop with the weights that `step` sampled with, and the steps that were done again for that."""
    recorder, loaded = Recorder(config, run_dir), checkpoint.latest(run_dir / CHECKPOINTS, step)
    if loaded is not None:
        resuming.require_same(run_dir, loaded, recorder.inputs)
    loop, start = Loop(config, build(config)), 0
    if loaded is not None:
        start = recorder.restore(loop, loaded)
    elif config.trainer.warmup_steps:
        note("no checkpoint is that old: supervised steps are done again")
        sft_warmup(loop, note)
    warm_up(loop.run)
    for redone in range(start, step):
        raise_received()
        note(f"step {redone + 1} is done again, of {step} before the trajectory's")
        loop.step(redone)
    return loop, step - start


def _given(loop: Loop, record: dict[str, Any], recorded: dict[str, Any]) -> list[list[int]]:
    """The tokens of the prompt and of what was given after it; of older runs the prompt is encoded again."""
    first, *rest = recorded["segments"]
    prompt = first.get("token_ids") or record.get("prompt_token_ids") or loop.run.policy.encode(record["prompt"])
    return [prompt, *(segment["token_ids"] for segment in rest if segment["kind"] == "given")]


def _difference(recorded: dict[str, Any], found: Trajectory) -> str:
    """The first token that is another, in words; without one, whether log-probabilities are."""
    tokens, turn = list(recorded["token_ids"]), 0
    before = []  # kind, tokens
    for segment in recorded["segments"][1:]:
        sampled = segment["kind"] == "sampled"
        count = segment["tokens"]
        before.append((sampled, tokens[:count] if sampled else segment["token_ids"]))
        tokens = tokens[count:] if sampled else tokens
    now = [(segment.sampled, segment.token_ids) for segment in found.segments[1:]]
    for (sampled, then), (_, again) in zip(before, now, strict=False):
        turn += sampled
        if then != again:
            at = next(
                (i for i, (a, b) in enumerate(zip(then, again, strict=False)) if a != b), min(len(then), len(again))
            )
            what = f"turn {turn}" if sampled else f"what was given after turn {turn}"
            shown = [ids[at] if at < len(ids) else "none" for ids in (then, again)]
            return f"{what}, token {at + 1}: {shown[0]} is recorded, {shown[1]} came now"
    if len(before) != len(now):
        return f"{len(before)} segments after the prompt are recorded, {len(now)} came now"
    digest = recorded.get("logprobs_digest", logprobs_digest(found))
    return "" if digest == logprobs_digest(found) else "the tokens are the same, and log-probabilities differ"
