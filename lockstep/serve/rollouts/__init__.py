"""The server of a run, or of an evaluation: others play its rollouts over HTTP, each at an address of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...environments.remote import Remote
from ...errors import InputError
from ...session.build import TrainingSession
from ...session.evaluation import Played


def serving(run: TrainingSession | Played) -> AbstractContextManager[Any]:
    """Within it the rollouts of a run whose environment is played elsewhere can be; without any it does nothing.
    `InputError`: the extra `serve` is not installed, or it cannot listen at the address."""
    if not issubclass(run.environment, Remote):
        return nullcontext()
    try:
        from .server import RolloutServer
    except ImportError as error:
        what = f"task.environment {run.config.task.environment}"
        raise InputError(f"{what} needs packages: pip install 'lockstep-rl[serve]' ({error})") from error
    return RolloutServer(run, run.environment)
