"""Environments of the `verifiers` package (0.4), unchanged: `--task.data verifiers:NAME --task.environment verifiers`.

Its own code plays an episode and asks for turns over HTTP, tokens in and tokens out, as it asks any engine it trains
with (`/inference/v1/generate`). Settings follow the name as KEY=VALUE, the value in JSON: of the taskset, or of the
environment as `env.KEY` (`env.agent.harness.id="bash"`); `size`, the tasks that are read of it; `renderer`, which turns
messages into tokens, where the package does not know the model by its name.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any, ClassVar

from ...errors import InputError, refuse
from ...user_functions import blamed
from ..base import Source, setting
from ..remote import Desk, Remote, TurnRefused

SCHEME, NAME = "verifiers:", "verifiers"
_SIZE = 1000  # tasks of a taskset without an end
_SESSION = "/rollouts/session/v1"  # of the rollout that a request's X-Session-ID names


@dataclass
class _Asked:
    """What follows `verifiers:`."""

    taskset: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    size: int = 0
    renderer: str = ""


def _asked(data: str, label: str) -> _Asked:
    name, *settings = data.removeprefix(SCHEME).split(",")
    asked = _Asked(name)
    for text in settings:
        key, given = setting(text, label, 'KEY=VALUE in JSON, as in game="Wordle-v0"')
        parts = key.split(".")
        if key in ("size", "renderer"):
            setattr(asked, key, given)
            continue
        into = asked.environment if parts[0] == "env" else asked.settings
        for part in parts[parts[0] == "env" : -1]:
            into = into.setdefault(part, {})
            refuse(not isinstance(into, dict), f"{label} has the setting {text!r} beside another value of {part}")
        into[parts[-1]] = given
    if type(asked.size) is not int or asked.size < 0 or not isinstance(asked.renderer, str):
        raise InputError(f'{label}: size must be a whole number, and renderer a name, as in renderer="qwen3"')
    return asked


def _config(asked: _Asked, max_turns: int | None = None) -> Any:
    """The package's configuration of an environment. Its programs run here; those that let the model run code do so
    only where that is asked for, or is the taskset's own way."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, resolve_env_config

    given = json.loads(json.dumps(asked.environment))
    kind = env_config_type(asked.taskset, given.get("id", ""))
    for name, about in kind.model_fields.items():
        if isinstance(about.default, AgentConfig):
            seat = given.setdefault(name, {})
            seat.setdefault("runtime", {"type": "subprocess"})
            seat.setdefault("max_turns", max_turns)
            if about.default.harness is None and default_harness_id(asked.taskset) == "bash":
                seat.setdefault("harness", {"id": "null"})
    return resolve_env_config({**given, "taskset": {"id": asked.taskset, **asked.settings}})


@cache
def _tasks(data: str, label: str) -> list[Any]:
    """Of a taskset, in its own order."""
    asked = _asked(data, label)
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        raise InputError(f"{label} needs a package: pip install 'lockstep-rl[verifiers]' ({error})") from error
    with blamed(f"{label} cannot be loaded:"):  # a taskset raises what it likes
        from verifiers.v1.utils.loaders import load_taskset

        taskset = load_taskset(_config(asked).taskset)
        return list(islice(taskset, asked.size or (None if taskset.bounded else _SIZE)))


class TasksetRows(Source):
    """Rows with `task`, the task's number; `prompt` is for people, as the environment gives the model its own."""

    def __init__(self, data: str, label: str) -> None:
        """Raises `InputError` naming `label` when the package is missing, or knows no such taskset or setting."""
        super().__init__(data, _tasks(data, label))

    def row(self, index: int) -> dict[str, Any]:
        about = self._rows[index].data
        return {
            "prompt": about.prompt if isinstance(about.prompt, str) else about.name or f"task {index}",
            "task": index,
        }


class VerifiersEnvironment(Remote):
    """An episode that the package plays."""

    package: ClassVar[Any]  # its environment
    tasks: ClassVar[list[Any]]
    renderer: ClassVar[str]  # its name; empty: as the package knows the model
    _episode: asyncio.Task[None] | None = None

    @classmethod
    @asynccontextmanager
    async def playing(cls) -> AsyncIterator[None]:
        async with cls.package.serving():
            yield

    async def begin(self) -> None:
        self._episode = asyncio.create_task(self._play())

    async def _play(self) -> None:
        from verifiers.v1.clients import ModelContext, TrainClientConfig

        # One client for all, as the package keeps each that it made: a header says whose turn it is.
        client = TrainClientConfig(
            base_url=self.desk.url + _SESSION,
            api_key_var="LOCKSTEP_API_KEY",
            renderer=_renderer(self.renderer, self.desk.model),
            renderer_model_name=self.desk.model,
        )
        task = self.tasks[self.row["task"]]
        with suppress(TurnRefused):  # the run has left it meanwhile
            try:
                context = ModelContext(self.desk.model, client)
                self._ended(await self.package.run_episode(task, context, on_trace=self._traced))
            except Exception as error:
                self.fail(f"{type(error).__name__}: {error}")

    def _traced(self, trace: Any) -> None:
        self.names.append(trace.id)
        self.desk.rollouts[trace.id] = self

    def _ended(self, episode: Any) -> None:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            self.fail("\n".join(f"{e.traceback or ''}{e.type}: {e.message}" for e in errors) or "the episode failed")
            return
        rewards = {name: r.value for t in episode.traces for name, r in t.rewards.items() if r is not None}
        self.end(rewards or None)

    def _leave(self, why: str) -> None:
        super()._leave(why)
        if self._episode is not None:
            self._episode.cancel()


def _renderer(name: str, model: str) -> dict[str, str]:
    """What turns messages into tokens: where it can, a later turn goes on from the tokens before, thinking included."""
    from renderers.base import MODEL_RENDERER_MAP

    name = name or ("auto" if model in MODEL_RENDERER_MAP else "default")
    return {"name": name} if name == "default" else {"name": name, "thinking_retention": "all"}


def verifiers_environment(data: str | None, max_turns: int, what: str) -> type[VerifiersEnvironment]:
    """The environment of a taskset. Raises `InputError` naming `what` for other data, and for what cannot be played."""
    if data is None or not data.startswith(SCHEME):
        raise InputError(f"{what} plays tasks of that package; name them with --task.data verifiers:NAME")
    label = f"task.data {data}"
    tasks, asked = _tasks(data, label), _asked(data, label)
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import load_environment

    with blamed(f"{label} cannot be played:"):
        config = _config(asked, max_turns)
        if len(seats := agent_config_fields(config)) > 1:
            raise InputError(f"it has {len(seats)} agents ({', '.join(seats)}), and a rollout is one agent's")
        package = load_environment(config)
    fields = {"desk": Desk(), "package": package, "tasks": tasks, "renderer": asked.renderer}
    return type("Verifiers", (VerifiersEnvironment,), fields)
