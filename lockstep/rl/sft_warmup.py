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

_NOTE_INTERVAL = 25  # steps between messages about the loss
_LOSS_WINDOW = 10  # steps whose mean loss is compared with `trainer.warmup_loss`


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
        prepare_validation(loop.run, loop.run.selection_sampling)
    for step in range(t.warmup_steps):
        reraise_received()
        losses.append(loop.warmup_step(step).loss)
        done = step + 1
        seconds_left = (time.monotonic() - began) / done * (t.warmup_steps - done)
        progress = f"step {done} of at most {t.warmup_steps}, loss {losses[-1]:.3f}"
        loop.run.timings.report_progress(f"{progress}, at most {timedelta(seconds=round(seconds_left))} to go")
        if done % _NOTE_INTERVAL == 0:
            note(f"warm-up step {done}: loss {losses[-1]:.3f}")
        if t.warmup_reward and done % t.warmup_interval == 0:
            with loop.run.timings.measure("validation"):
                metrics = validation[str(done)] = loop.validate(selection=True)
            note(f"warm-up step {done}: " + ", ".join(f"{k.split('/', 1)[1]} {v:.3f}" for k, v in metrics.items()))
            if metrics["validation/reward/mean"] >= t.warmup_reward:
                break
        if done >= _LOSS_WINDOW and mean(losses[-_LOSS_WINDOW:]) < t.warmup_loss:
            break
    loop.run.trainer.optimizer.reset()
    summary: dict[str, Any] = {"steps": len(losses), "loss_first": losses[0], "loss_last": losses[-1]}
    if validation:
        summary["validation"] = validation
    return summary
