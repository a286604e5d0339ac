"""Environments by name: a built-in one, a user's, or one that calls functions as tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..config import TaskConfig
from ..errors import InputError, refuse
from ..user_functions import load_function, load_object
from .adapters.rollout_func import is_rollout_func, rollout_environment
from .adapters.trl import trl_environment
from .adapters.verifiers import NAME as VERIFIERS
from .adapters.verifiers import verifiers_environment
from .environment import Environment, SingleTurn
from .remote import remote_environment
from .sandbox import SandboxLimits, python_tool
from .tasks.calculator import Calculator
from .tools import Tool, tool_environment

ENVIRONMENTS: dict[str, type[Environment]] = {"calculator": Calculator}
TOOLS: dict[str, Callable[[TaskConfig], Tool]] = {
    "python": lambda config: python_tool(SandboxLimits.within(config.environment_timeout), config.allow_unsandboxed)
}


def make_environment(config: TaskConfig) -> type[Environment]:
    """The environment that `task.environment` and `task.tools` specify; without either, `SingleTurn`. `InputError`: it
    cannot be loaded, or is not an environment."""
    tools = [_load_tool(tool, config) for tool in config.tools]
    if config.environment is None:
        return tool_environment(tools, "task.tools") if tools else SingleTurn
    what = f"task.environment {config.environment!r}"
    kind = _load_by_name(config.environment, config, what)
    if isinstance(kind, type) and issubclass(kind, Environment):
        refuse(bool(tools), f"task.tools has no effect beside {what}, which answers turns itself; remove it")
        refuse(kind.step is Environment.step, f"{what} has no method step, which says what follows a turn")
        return kind
    if is_rollout_func(kind):
        refuse(bool(tools), f"task.tools has no effect beside {what}, which plays its own rollouts; remove it")
        return rollout_environment(kind)
    if isinstance(kind, Mapping) or (callable(kind) and (not isinstance(kind, type) or hasattr(kind, "reset"))):
        return trl_environment(kind, tools, what)
    raise InputError(
        f"{what} must be a class, a subclass of lockstep.environments.Environment, a factory of TRL's, whose "
        "objects have a method reset, or a rollout_func of its own, of prompts and trainer"
    )


def _load_by_name(name: str, config: TaskConfig, what: str) -> Any:
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    if name.startswith(("http://", "https://")):
        return remote_environment(name, what)
    if name == VERIFIERS:
        return verifiers_environment(config.data, config.max_turns, what)
    return load_object(name, what, f", or one of {', '.join(ENVIRONMENTS)}, {VERIFIERS}", kind="Class")


def _load_tool(name: str, config: TaskConfig) -> Tool:
    if name in TOOLS:
        return TOOLS[name](config)
    return load_function(name, f"task.tools {name!r}", f", or one of {', '.join(TOOLS)}")
