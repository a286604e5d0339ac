"""`lockstep eval`: measures a model on a task, with a server for environments that connect over HTTP."""

from __future__ import annotations

from typing import IO, Any

from ..config import RunConfig
from ..serve.rollouts import serve_rollouts
from ..session.evaluation import EvaluationSettings, run_evaluation
from .resume import describe_evaluated


def evaluate(config: RunConfig, progress: IO[str] | None = None, **settings: Any) -> dict[str, Any]:
    """`lockstep.evaluate` (`api.evaluate`) with the fields of `EvaluationSettings`, without what is given in memory."""
    return run_evaluation(config, EvaluationSettings(**settings), serve_rollouts, describe_evaluated, progress)
