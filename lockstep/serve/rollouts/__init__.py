"""The server of a run or evaluation, whose rollouts are played over HTTP, each with its own base URL."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...environments.remote import RemoteEnvironment
from ...errors import InputError
from ...session.build import TrainingSession
from ...session.evaluation import EvaluationContext


def serve_rollouts(run: TrainingSession | EvaluationContext) -> AbstractContextManager[Any]:
    """A context in which the rollouts of a run with a `RemoteEnvironment` are served; with any other environment it
    does nothing. `InputError`: the extra `serve` is not installed, or the address cannot be listened on."""
    if not issubclass(run.environment, RemoteEnvironment):
        return nullcontext()
    try:
        from .server import RolloutServer
    except ImportError as error:
        what = f"task.environment {run.config.task.environment}"
        raise InputError(f"{what} needs packages: pip install 'lockstep-rl[serve]' ({error})") from error
    return RolloutServer(run, run.environment)
