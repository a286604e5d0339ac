"""`lockstep replay`: samples a recorded trajectory of a run again, alone, and compares it bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...config import ParallelConfig, RunConfig, yaml_file
from ...errors import refuse
from ...rl.loop import Loop
from ...rl.resample import resample_trajectory
from ...rl.sft_warmup import sft_warmup
from ...serve.rollouts import serve_rollouts
from ...session.build import TrainingSession, resolve
from ...session.signals import raise_on_signals, reraise_received
from ...session.warm_up import warm_up
from ...types import TRAIN_DOMAIN, SampleIdentity
from .. import checkpoint
from .. import resume as resuming
from ..recorder import Recorder
from ..resume import CHECKPOINTS, LAYOUT_FIELDS
from .record import first_difference, given_tokens, learning_rates, parse_trajectory, recorded_sample, sampled_turns

Note = Callable[[str], None]


@dataclass(frozen=True)
class ReplayResult:
    """What was compared, and the first difference in words, empty if there is none. `logprobs_compared`: whether the
    record has a digest of the log-probabilities."""

    trajectory: str
    turns: int
    tokens: int
    steps_redone: int
    logprobs_compared: bool
    difference: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": not self.difference}

    def render(self) -> str:
        turns = f"{self.turns} turn{'s' * (self.turns != 1)}"
        what = f"trajectory {self.trajectory}: {turns}, {self.tokens} sampled tokens"
        if self.difference:
            return f"{what}: DIFFERENT: {self.difference}"
        compared = "tokens and log-probabilities" if self.logprobs_compared else "tokens"
        return f"{what}: bitwise identical ({compared})"


@raise_on_signals()
def replay(run_dir: Path, trajectory: str, call_tools: bool = False, note: Note = lambda text: None) -> ReplayResult:
    """Sample trajectory STEP/GROUP/SAMPLE of `rollouts.jsonl` again with the weights of that step, taken from a
    checkpoint or remade by training from an earlier one or from the beginning. With `call_tools` the environment is
    called again; otherwise its recorded answers are used. `note` receives progress messages. Raises `InputError` if
    there is no such trajectory or the run cannot be continued as it was. Writes nothing."""
    step, group, sample = parse_trajectory(trajectory)
    record, recorded = recorded_sample(run_dir, step, group, sample)
    config = resolve(_on_one_process(yaml_file.load_run(run_dir)))
    refuse(
        call_tools and config.loss.dynamic_sampling,
        "--call-tools needs to know the data row, which loss.dynamic_sampling does not record; leave it out",
    )
    loop, redone = _loop_at_step(config, run_dir, step, note)
    identity = SampleIdentity(config.seed, TRAIN_DOMAIN, step, group, sample)
    given = None if call_tools else given_tokens(loop, record, recorded)
    with serve_rollouts(loop.run):
        found = resample_trajectory(loop, identity, given, sampled_turns(recorded))
    return ReplayResult(
        trajectory,
        len(found.turns),
        len(found.token_ids),
        redone,
        "logprobs_digest" in recorded,
        first_difference(recorded, found),
    )


def _on_one_process(config: RunConfig) -> RunConfig:
    """`config` with the layout of one process. Raises `InputError` for a layout that has other bits than that."""
    tp = config.parallel.tp
    refuse(tp > 1, f"the run has parallel.tp {tp}: one process, which samples a trajectory again, has other bits")
    layout = {path.removeprefix("parallel.") for path in LAYOUT_FIELDS}
    alone = {name: value for name, value in vars(ParallelConfig()).items() if name in layout}
    return replace(config, parallel=replace(config.parallel, **alone))


def _loop_at_step(config: RunConfig, run_dir: Path, step: int, note: Note) -> tuple[Loop, int]:
    """A loop with the weights that `step` sampled with, and the number of steps that were redone to get them."""
    recorder, loaded = Recorder(config, run_dir), checkpoint.latest(run_dir / CHECKPOINTS, step)
    if loaded is not None:
        resuming.require_same(run_dir, loaded, recorder.inputs)
    loop, start = Loop(config, TrainingSession(config)), 0
    if loaded is not None:
        start = recorder.restore(loop, loaded)
    elif config.trainer.warmup_steps:
        note("no checkpoint is that old: supervised steps are done again")
        sft_warmup(loop, note)
    warm_up(loop.run)
    rates = learning_rates(run_dir)
    with serve_rollouts(loop.run):
        for redone in range(start, step):
            reraise_received()
            note(f"step {redone + 1} is done again, of {step} before the trajectory's")
            loop.step(redone, rates.get(redone))
    return loop, step - start
