"""Environments for TRL's `environment_factory` (TRL 1.16, experimental there): no base class, `reset(**row)` once per
trajectory, all other public methods as tools, and `get_reward()` if the environment computes a reward.

Instances are reused: they are reset for each trajectory, and made only if none is free.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ...errors import InputError, refuse
from ..calls import run_coroutine
from ..environment import End
from ..tools import Tool, ToolEnvironment, as_chat, tool_schema

Factory = Callable[[], Any]


class TrlEnvironment(ToolEnvironment):
    """Plays an instance that one of `factories` made; if there are several, the row's column `environment` names it."""

    begin_alike: ClassVar[bool] = False  # `reset` may be random
    factories: ClassVar[Mapping[str | None, Factory]]
    schemas_of: ClassVar[Mapping[str | None, Sequence[Mapping[str, Any]]]]
    free: ClassVar[Mapping[str | None, deque[Any]]]  # instances that are not in use

    def __init__(self) -> None:
        super().__init__()
        self.instance: Any = None
        self._name: str | None = None
        self._has_ended = False

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self.schemas_of[self._name]

    @classmethod
    def toolsets(cls) -> Sequence[Sequence[Mapping[str, Any]]]:
        return list(cls.schemas_of.values())

    @classmethod
    def begins_with_rows(cls) -> bool:
        return True  # what `reset` returns is added to it

    @property
    def exposed(self) -> Any:
        return self.instance

    def callables(self) -> dict[str, Tool]:
        return super().callables() | dict(_methods(self.instance))

    def start(self, row: dict[str, Any], seed: int) -> Any:
        if None not in self.factories:
            self._name = row.get("environment")
            row = {name: value for name, value in row.items() if name != "environment"}
            if self._name not in self.factories:
                names = ", ".join(map(str, self.factories))
                raise InputError(f"the row's environment is {self._name!r}; it must be one of {names}")
        self.variant = self._name or ""
        try:
            self.instance = self.free[self._name].popleft()
        except IndexError:
            self.instance = self.factories[self._name]()
        observation = self.instance.reset(**row)
        messages = as_chat(row["prompt"])
        if observation is None:
            return messages
        if not isinstance(observation, str):
            raise InputError(f"reset returned {type(observation).__name__}; it must be text or None")
        return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + observation}]

    def make_end(self) -> End:
        end = super().make_end()
        if hasattr(type(self.instance), "get_reward"):
            reward = self.instance.get_reward()
            reward = run_coroutine(reward) if inspect.iscoroutine(reward) else reward
            if reward is not None:  # None: it does not apply
                end = End({type(self.instance).__name__: reward}, functions=True, completion=self.completion)
        self._has_ended = True
        return end

    def close(self) -> None:
        if self._has_ended:  # otherwise a call may still hang in it
            self.free[self._name].append(self.instance)


def _methods(instance: Any) -> list[tuple[str, Tool]]:
    """The tools among an instance's methods. They are looked up in the class, to evaluate no properties."""
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    own = [name for name in names if not name.startswith("_") and name not in ("reset", "get_reward")]
    return [(name, getattr(instance, name)) for name in own]


def trl_environment(factory: Any, tools: Sequence[Tool], what: str) -> type[TrlEnvironment]:
    """An environment that plays instances made by `factory`, or by a dict of factories, with `tools` as additional
    tools. Each factory is called once here, to describe its tools. `InputError` names `what`, which is invalid."""
    factories = dict(factory) if isinstance(factory, Mapping) else {None: factory}
    refuse(not factories, f"{what} is an empty dict; it must have a factory for each environment that rows name")
    standalone = [tool_schema(tool, what) for tool in tools]
    schemas_of, free = {}, {}
    for name, make in factories.items():
        try:
            instance = make()
        except Exception as error:
            raise InputError(f"{what}: making one raised {type(error).__name__}: {error}") from error
        if not callable(getattr(type(instance), "reset", None)):
            raise InputError(
                f"{what} must be a subclass of lockstep.environments.Environment, or make objects with a method reset, "
                "as TRL's environment_factory does"
            )
        schemas_of[name] = [*standalone, *(tool_schema(tool, what) for _, tool in _methods(instance))]
        free[name] = deque([instance])
    fields = {"factories": factories, "schemas_of": schemas_of, "free": free, "functions": tuple(tools)}
    return type("Trl", (TrlEnvironment,), fields)
