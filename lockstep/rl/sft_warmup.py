"""Supervised warm-up on worked examples, before reinforcement learning, until the model solves some problems."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from statistics import mean
from typing import Any

from ..session.signals import reraise_received
from ..session.warm_up import prepare_validation
from .loop import Loop

_SHOWN = 25  # steps between messages about the loss
_RECENT = 10  # steps whose mean loss is compared with `trainer.warmup_loss`
REWARD = "validation/reward/mean"


def sft_warmup(loop: Loop, note: Callable[[str], None]) -> dict[str, Any]:
    """Run up to `trainer.warmup_steps` supervised steps, until the loss falls below `trainer.warmup_loss` or the reward
    on the task's selection problems, which validation does not report, reaches `trainer.warmup_reward`.

    Returns for the summary: `steps`, `loss_first`, `loss_last`, and with `trainer.warmup_reward` also `validation`, the
    metrics of the selection problems by number of steps.
    """
    t = loop.config.trainer
    began, losses = time.monotonic(), list[float]()
    validation: dict[str, dict[str, float]] = {}
    if t.warmup_reward:
        prepare_validation(loop.run)
    while len(losses) < t.warmup_steps and not (len(losses) >= _RECENT and mean(losses[-_RECENT:]) < t.warmup_loss):
        reraise_received()
        losses.append(loop.warmup_step(len(losses)).loss)
        done = len(losses)
        left = (time.monotonic() - began) / done * (t.warmup_steps - done)
        told = f"step {done} of at most {t.warmup_steps}, loss {losses[-1]:.3f}"
        loop.run.timings.report_progress(f"{told}, at most {timedelta(seconds=round(left))} to go")
        if done % _SHOWN == 0:
            note(f"warm-up step {done}: loss {losses[-1]:.3f}")
        if t.warmup_reward and done % t.warmup_interval == 0:
            with loop.run.timings.measure("validation"):
                found = validation[str(done)] = loop.validate(selection=True)
            note(f"warm-up step {done}: " + ", ".join(f"{k.split('/', 1)[1]} {v:.3f}" for k, v in found.items()))
            if found[REWARD] >= t.warmup_reward:
                break
    loop.run.trainer.optimizer.reset()
    measures: dict[str, Any] = {"steps": len(losses), "loss_first": losses[0], "loss_last": losses[-1]}
    return measures | ({"validation": validation} if validation else {})
