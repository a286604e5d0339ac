"""Environments found by name: a ready one, or a class of a user's own."""

from __future__ import annotations

from ..config import TaskConfig
from ..errors import InputError
from ..user_functions import load_function
from .environment import Environment, SingleTurn
from .tasks.calculator import Calculator

ENVIRONMENTS: dict[str, type[Environment]] = {"calculator": Calculator}


def make_environment(config: TaskConfig) -> type[Environment]:
    """What `task.environment` names; without one, what a prompt is completed once in.

    Raises `InputError` when it cannot be loaded or is no `Environment`.
    """
    if config.environment is None:
        return SingleTurn
    if config.environment in ENVIRONMENTS:
        return ENVIRONMENTS[config.environment]
    what = f"task.environment {config.environment!r}"
    kind = load_function(config.environment, what, f", or one of {', '.join(ENVIRONMENTS)}", kind="Class")
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise InputError(f"{what} must be a class, a subclass of lockstep.environments.Environment")
    return kind
