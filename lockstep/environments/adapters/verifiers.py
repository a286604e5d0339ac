"""Environments of the `verifiers` package (0.4), unchanged: `--task.data verifiers:NAME --task.environment verifiers`.

The package plays an episode and asks for turns over HTTP, tokens in and tokens out, as from any engine that it trains
with (`/inference/v1/generate`). Settings follow the name as KEY=VALUE, with the value in JSON: those of the taskset; as
`env.KEY` those of the environment (`env.agent.harness.id="bash"`); `size`, the number of tasks to read; and `renderer`,
which turns messages into tokens, if the package does not know the model by its name.
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
from ...user_functions import as_input_error
from ..base import RowSource, parse_setting
from ..remote import RemoteEnvironment, RolloutRegistry, TurnRefused

SCHEME, NAME = "verifiers:", "verifiers"
_SIZE = 1000  # tasks to read of an infinite taskset
_SESSION = "/rollouts/session/v1"  # for requests that name their rollout by the header X-Session-ID


@dataclass
class _TasksetSpec:
    """The parsed text after `verifiers:`."""

    taskset: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    size: int = 0
    renderer: str = ""


def _parse_spec(data: str, label: str) -> _TasksetSpec:
    name, *settings = data.removeprefix(SCHEME).split(",")
    spec = _TasksetSpec(name)
    for text in settings:
        key, given = parse_setting(text, label, 'KEY=VALUE in JSON, as in game="Wordle-v0"')
        if key in ("size", "renderer"):
            setattr(spec, key, given)
            continue
        settings_of = spec.environment if key.startswith("env.") else spec.settings
        *parents, leaf = key.removeprefix("env.").split(".")
        for parent in parents:
            settings_of = settings_of.setdefault(parent, {})
            is_value = not isinstance(settings_of, dict)
            refuse(is_value, f"{label} has the setting {text!r} beside another value of {parent}")
        settings_of[leaf] = given
    if type(spec.size) is not int or spec.size < 0 or not isinstance(spec.renderer, str):
        raise InputError(f'{label}: size must be a whole number, and renderer a name, as in renderer="qwen3"')
    return spec


def _config(spec: _TasksetSpec, max_turns: int | None = None) -> Any:
    """The package's configuration of an environment. Programs run as subprocesses on this machine. A harness that lets
    the model run code is used only if it is asked for, or the taskset brings it."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, resolve_env_config

    given = json.loads(json.dumps(spec.environment))
    kind = env_config_type(spec.taskset, given.get("id", ""))
    for name, about in kind.model_fields.items():
        if isinstance(about.default, AgentConfig):
            seat = given.setdefault(name, {})
            seat.setdefault("runtime", {"type": "subprocess"})
            seat.setdefault("max_turns", max_turns)
            if about.default.harness is None and default_harness_id(spec.taskset) == "bash":
                seat.setdefault("harness", {"id": "null"})
    return resolve_env_config({**given, "taskset": {"id": spec.taskset, **spec.settings}})


@cache
def _tasks(data: str, label: str) -> list[Any]:
    """The tasks of a taskset, in its order."""
    spec = _parse_spec(data, label)
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        raise InputError(f"{label} needs a package: pip install 'lockstep-rl[verifiers]' ({error})") from error
    with as_input_error(f"{label} cannot be loaded:"):  # a taskset may raise anything
        from verifiers.v1.utils.loaders import load_taskset

        taskset = load_taskset(_config(spec).taskset)
        return list(islice(taskset, spec.size or (None if taskset.bounded else _SIZE)))


class TasksetRows(RowSource):
    """Rows with `task`, the task's number, and `prompt`, which is for people: the environment makes the model's."""

    def __init__(self, data: str, label: str) -> None:
        """Raises `InputError` naming `label` if the package is missing, or does not know the taskset or a setting."""
        super().__init__(data, _tasks(data, label))

    def row(self, index: int) -> dict[str, Any]:
        about = self._rows[index].data
        return {
            "prompt": about.prompt if isinstance(about.prompt, str) else about.name or f"task {index}",
            "task": index,
        }


class VerifiersEnvironment(RemoteEnvironment):
    """An episode that the package plays."""

    package: ClassVar[Any]  # the package's environment
    tasks: ClassVar[list[Any]]
    renderer: ClassVar[str]  # its name; empty: the package's choice for the model
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

        # Equal for all rollouts, as the package keeps every client that it makes; a header names the rollout.
        client = TrainClientConfig(
            base_url=self.registry.url + _SESSION,
            api_key_var="LOCKSTEP_API_KEY",
            renderer=_renderer(self.renderer, self.registry.model),
            renderer_model_name=self.registry.model,
        )
        task = self.tasks[self.row["task"]]
        with suppress(TurnRefused):  # the run has dropped the rollout meanwhile
            try:
                context = ModelContext(self.registry.model, client)
                self._report_episode(await self.package.run_episode(task, context, on_trace=self._register_trace))
            except Exception as error:
                self.fail(f"{type(error).__name__}: {error}")

    def _register_trace(self, trace: Any) -> None:
        self.names.append(trace.id)
        self.registry.rollouts[trace.id] = self

    def _report_episode(self, episode: Any) -> None:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            self.fail("\n".join(f"{e.traceback or ''}{e.type}: {e.message}" for e in errors) or "the episode failed")
            return
        rewards = {name: r.value for t in episode.traces for name, r in t.rewards.items() if r is not None}
        self.end(rewards or None)

    def _withdraw(self, why: str) -> None:
        super()._withdraw(why)
        if self._episode is not None:
            self._episode.cancel()


def _renderer(name: str, model: str) -> dict[str, str]:
    """What turns messages into tokens: if possible, such that later turns continue the tokens, thinking included."""
    from renderers.base import MODEL_RENDERER_MAP

    name = name or ("auto" if model in MODEL_RENDERER_MAP else "default")
    return {"name": name} if name == "default" else {"name": name, "thinking_retention": "all"}


def verifiers_environment(data: str | None, max_turns: int, what: str) -> type[VerifiersEnvironment]:
    """The environment of a taskset. Raises `InputError` naming `what` for other data, or if it cannot be played."""
    if data is None or not data.startswith(SCHEME):
        raise InputError(f"{what} plays tasks of that package; name them with --task.data verifiers:NAME")
    label = f"task.data {data}"
    tasks, spec = _tasks(data, label), _parse_spec(data, label)
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import load_environment

    with as_input_error(f"{label} cannot be played:"):
        config = _config(spec, max_turns)
        if len(seats := agent_config_fields(config)) > 1:
            raise InputError(f"it has {len(seats)} agents ({', '.join(seats)}), and a rollout is one agent's")
        package = load_environment(config)
    fields = {"registry": RolloutRegistry(), "package": package, "tasks": tasks, "renderer": spec.renderer}
    return type("Verifiers", (VerifiersEnvironment,), fields)
